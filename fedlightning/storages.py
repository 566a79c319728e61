"""Open the store that holds studies: a database below a root, or wherever a URL says."""

import re
import sqlite3
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import optuna
from filelock import FileLock
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from fedlightning.locks import creation_lock
from fedlightning.tracking import sqlite_uri

KINDS = (
    "sqlite:///FILE, postgresql+psycopg2://USER:PASSWORD@HOST/DATABASE, journal://FILE or FILE.log, grpc://HOST:PORT"
)
"""How addresses of stores look."""

_ANSWER_SECONDS = 10
_JOURNALS = (".log", ".journal")
_NETWORKED = ("postgresql", "mysql", "mariadb")
_DRIVERS = {"psycopg2": "psycopg2-binary", "MySQLdb": "mysqlclient"}
"""Modules whose package is called otherwise."""


def storage_file(root: Path) -> Path:
    """Return where studies are stored below a root."""
    return root / "mlruns" / "optuna.db"


def shown(root: Path, url: str | None) -> str:
    """Return a store's address as a person may see it: without its password."""
    return str(storage_file(root)) if url is None else without_password(url)


def without_password(url: str) -> str:
    """Return a URL whose password is hidden, before the host and among the options."""
    hidden = re.sub(r"(?<=://)([^/@:]*):(.*)@", r"\1:***@", url)
    return re.sub(r"(?i)((?:password|passwd|pwd|sslpassword)=)[^&]*", r"\1***", hidden)


def file_of(root: Path, url: str | None) -> Path | None:
    """Return the file that holds a store; None where a server does."""
    if url is None:
        return storage_file(root)
    journal = _journal_file(url)
    if journal is not None:
        return journal
    if url.startswith("sqlite"):
        database = _database_url(url).database
        return Path(database) if database else None
    return None


def open_storage(root: Path, url: str | None = None) -> BaseStorage:
    """Open the store of studies, creating it on first use, one process at a time.

    Args:
        root: Folder below which the default store lies, and the lock under which any store is created.
        url: Another store: a database that SQLAlchemy knows, a journal file, or an Optuna gRPC proxy.

    Raises:
        OSError: The folder or the store cannot be written, or does not answer.
        ValueError: The URL is none, or there is something else in the store's place.
        ImportError: The database's driver is not installed.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    opening: Callable[[], BaseStorage]
    # What the URL says is looked at first: a wrong one leaves nothing behind.
    if url is None:
        path = storage_file(root).absolute()
        opening = partial(_open_file, make_url(sqlite_uri(path)), path, "choose another --root")
    elif (journal := _journal_file(url)) is not None:
        opening = partial(_open_journal, journal, url)
    elif url.startswith("grpc:"):
        opening = partial(_open_proxy, url, *_host_and_port(url))
    elif (database := _database_url(url)).get_backend_name() == "sqlite":
        opening = partial(_open_file, database, _sqlite_file(database), "choose another --storage")
    else:
        opening = partial(_open_database, database)
    lock = storage_file(root).absolute().with_name(".optuna.lock")
    with creation_lock(lock, what="folder", way_out="choose another --root"):
        return opening()


class _FileLock(JournalFileOpenLock):
    """A journal's lock that the system releases when its holder dies; Optuna's own would block others for 30 s."""

    def __init__(self, journal: Path) -> None:
        self._lock = FileLock(journal.with_name(f".{journal.name}.flock"))

    def acquire(self) -> bool:
        self._lock.acquire(poll_interval=0.002)
        return True

    def release(self) -> None:
        self._lock.release()


def _open_journal(path: Path, url: str) -> BaseStorage:
    way_out = f"choose another --storage ({KINDS})"
    try:
        return JournalStorage(JournalFileBackend(str(path), lock_obj=_FileLock(path)))
    except OSError as error:
        raise OSError(
            f"storage {url}: cannot write the journal {path}: {error.strerror or error}; {way_out}"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"storage {url}: {path} is no journal of studies ({error}); {way_out}") from error


def _host_and_port(url: str) -> tuple[str, int]:
    try:
        host, port = urlsplit(url).hostname, urlsplit(url).port
    except ValueError:
        host = port = None
    if not host or not port:
        raise ValueError(f"storage {without_password(url)} names no host and port; write grpc://HOST:PORT")
    return host, port


def _open_proxy(url: str, host: str, port: int) -> BaseStorage:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        proxy = GrpcStorageProxy(host=host, port=port)
    try:
        proxy.wait_server_ready(timeout=_ANSWER_SECONDS)
    except ConnectionError as error:
        raise OSError(
            f"storage {url} did not answer within {_ANSWER_SECONDS} s; start optuna.storages.run_grpc_proxy_server "
            "there, or choose another --storage"
        ) from error
    return proxy


def _open_file(url: URL, path: Path, way_out: str) -> BaseStorage:
    _check_database(path, way_out)
    return _open_database(url)


def _open_database(url: URL) -> BaseStorage:
    backend = url.get_backend_name()
    if backend == "sqlite":
        options: dict[str, object] = {"connect_args": {"timeout": 60}}
    else:
        options = {"pool_pre_ping": True}
        if backend in _NETWORKED:
            options["connect_args"] = {"connect_timeout": _ANSWER_SECONDS}
    address = url.render_as_string(hide_password=True)
    for attempt in (1, 2, 3):
        try:
            return RDBStorage(url.render_as_string(hide_password=False), engine_kwargs=options)
        except ImportError as error:
            missing = _missing_module(error)
            raise ImportError(
                f"storage {address}: its driver {missing} is not installed; "
                f"run `pip install {_DRIVERS.get(missing, missing)}`, or choose another --storage"
            ) from error
        except ArgumentError as error:
            raise _bad_url(address, error) from error
        except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
            # A process on another machine may make the tables at this very moment; then they are there the next time.
            if attempt < 3 and _says_exists(error):
                time.sleep(1)
                continue
            raise OSError(
                f"storage {address} cannot be opened: {_reason(error, url.password)}; "
                "start it, mend the address, or choose another --storage"
            ) from error
        except RuntimeError as error:
            # How Optuna says that another version of it made the tables.
            raise ValueError(f"storage {address}: {_reason(error, url.password)}") from error
    raise AssertionError("unreachable")


def _database_url(url: str) -> URL:
    try:
        made = make_url(url)
        made.get_dialect()
    except ArgumentError as error:  # also where SQLAlchemy knows no such kind
        raise _bad_url(without_password(url), error) from error
    except ImportError as error:
        missing = _missing_module(error)
        raise ImportError(
            f"storage {without_password(url)}: its driver {missing} is not installed; run `pip install {missing}`, "
            "or choose another --storage"
        ) from error
    except ValueError as error:  # a port that is no number
        raise _bad_url(without_password(url), error) from error
    return made


def _bad_url(address: str, error: Exception) -> ValueError:
    reason = str(error).splitlines()[0] if "Could not parse" not in str(error) else "it is no URL"
    return ValueError(f"storage {address!r} is no address of a store ({reason}); write {KINDS}")


def _sqlite_file(url: URL) -> Path:
    if not url.database or url.database == ":memory:":
        raise ValueError(
            f"storage {url.render_as_string()} lies in memory, where no second worker and no later call finds it; "
            "write sqlite:///FILE"
        )
    return Path(url.database)


def _journal_file(url: str) -> Path | None:
    if url.startswith("journal://"):
        path = Path(url.removeprefix("journal://"))
        if not path.name:
            raise ValueError(f"storage {url} names no file; write journal://FILE")
        return path
    return Path(url) if "://" not in url and url.endswith(_JOURNALS) else None


def _missing_module(error: ImportError) -> str:
    """Return the module that was not found; Optuna says so in words of its own and keeps the cause."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            return cause.name
        cause = cause.__cause__ or cause.__context__
    return str(error)


def _says_exists(error: Exception) -> bool:
    return isinstance(error, DBAPIError) and ("exists" in str(error) or "UNIQUE" in str(error).upper())


def _reason(error: Exception, password: object) -> str:
    """Return the first line of what the database said, without a statement and without the password."""
    said = getattr(error, "orig", None) or getattr(error.__cause__, "orig", None) or error
    line = next(iter(str(said).strip().splitlines()), type(error).__name__)
    return line.replace(str(password), "***") if password else line


def _check_database(path: Path, way_out: str) -> None:
    """Fail with the file's name and a way out, where Optuna would show SQLAlchemy's statement."""
    try:
        with closing(sqlite3.connect(path, timeout=60)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.rollback()
    except sqlite3.OperationalError as error:
        raise OSError(f"cannot write the database of studies {path}: {error}; {way_out}") from error
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} is no database of studies ({error}); move it away and run again") from error
