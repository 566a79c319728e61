"""Tests for stores of studies: databases, journals and proxies by their URL, and what is said of those that fail."""

import glob
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from fedlightning.config import definition
from fedlightning.config.study_files import study_from_document
from fedlightning.search import StudySearch, find_search
from fedlightning.storages import file_of, open_storage, shown, storage_file, without_password

SPACE = {"n_estimators_client": 5, "num_iterations": 5, "num_rounds": 2, "CNN.lr": {"low": 0.1, "high": 1.0}}


def search_in(root: Path, url: str | None) -> StudySearch:
    """Open a small study in a store."""
    document: dict[str, Any] = {"dataset": "a9a", "client_num": 5, "trials": 3, "pruner": "none", "space": SPACE}
    search = StudySearch("s", study_from_document(document, source="test"), root, open_storage(root, url))
    search.open()
    return search


def is_a_store(root: Path, url: str | None) -> None:
    """Two processes' views of a store hold the same trials, and its study is found again as it was begun."""
    one, other = search_in(root, url), search_in(root, url)
    with_owner = {"owner": "nobody"}
    one.run(lambda p: p.clients.CNN.lr, total=2, **with_owner)
    other.run(lambda p: p.clients.CNN.lr, total=3, **with_owner)
    again = find_search("s", root, url)
    assert [trial.state for trial in again.trials()] == ["complete"] * 3
    assert again.trials() == one.trials()
    assert definition(again.config) == definition(one.config)
    with pytest.raises(LookupError, match=r"no study 't' in .*; stored: s; begin it with"):
        find_search("t", root, url)


@pytest.mark.parametrize(
    "url", ["sqlite:///{folder}/a.db", "journal://{folder}/a", "{folder}/a.log", "{folder}/a b.journal"]
)
def test_files(tmp_path: Path, url: str) -> None:
    """A database file and a journal are stores, and lie where the URL says; nothing else is made there."""
    folder = tmp_path / "shared"
    folder.mkdir()
    address = url.format(folder=folder)
    file = file_of(tmp_path, address)
    assert file is not None
    with pytest.raises(LookupError, match="stored: none"):
        find_search("s", tmp_path / "root", address)
    assert list(folder.iterdir()) == []
    is_a_store(tmp_path / "root", address)
    assert file.is_file()
    assert file.parent == folder
    assert not storage_file(tmp_path / "root").exists()


def test_grpc_proxy(tmp_path: Path) -> None:
    """An Optuna proxy is a store; one that is gone is named, with what to do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = (
        "import sys, optuna\nfrom optuna.storages.journal import JournalFileBackend\n"
        "store = optuna.storages.JournalStorage(JournalFileBackend(sys.argv[1]))\n"
        "optuna.storages.run_grpc_proxy_server(store, host='127.0.0.1', port=int(sys.argv[2]))"
    )
    words = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "j.log"), str(port)]
    server = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        is_a_store(tmp_path, f"grpc://127.0.0.1:{port}")
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PostgreSQL server of this test's own, by the URL of its database."""
    pytest.importorskip("psycopg2", reason="psycopg2 is not installed")
    found = shutil.which("pg_ctl") or next(iter(sorted(glob.glob("/usr/lib/postgresql/*/bin/pg_ctl"))[::-1]), None)
    if found is None:
        pytest.skip("no PostgreSQL here: neither pg_ctl in PATH nor /usr/lib/postgresql")
    as_user: dict[str, Any] = {}
    folder = tmp_path_factory.mktemp("postgres")
    if os.geteuid() == 0:
        # Its server refuses to run as the administrator.
        pwd = pytest.importorskip("pwd")
        try:
            account = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
        folder = Path("/tmp") / f"{folder.parent.name}-{os.getpid()}-postgres"
        folder.mkdir()
        os.chown(folder, account.pw_uid, account.pw_gid)
        as_user = {"user": account.pw_uid, "group": account.pw_gid, "cwd": folder}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    programs, data = Path(found).parent, folder / "data"

    def call(program: str, *words: object) -> None:
        log = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([programs / program, *map(str, words)], check=True, timeout=60, **log, **as_user)

    call("initdb", "-D", data, "-A", "trust", "-U", "fed")
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    call("pg_ctl", "-D", data, "-o", options, "-l", folder / "log", "-w", "start")
    try:
        yield f"postgresql+psycopg2://fed:secret@127.0.0.1:{port}/postgres"
    finally:
        call("pg_ctl", "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_postgres(tmp_path: Path, postgres: str) -> None:
    """A database server is a store; a database that it does not have is named, without the password."""
    is_a_store(tmp_path, postgres)
    with pytest.raises(
        OSError, match=r"storage postgresql\+psycopg2://fed:\*\*\*@127.* \"nowhere\" does not exist"
    ) as no:
        open_storage(tmp_path, postgres.replace("/postgres", "/nowhere"))
    assert "secret" not in str(no.value)


@pytest.mark.parametrize(
    ("url", "kind", "said"),
    [
        ("studies", ValueError, "storage 'studies' is no address of a store (it is no URL); write sqlite:///FILE"),
        ("nosql://u:secret@h/d", ValueError, "storage 'nosql://u:***@h/d' is no address of a store (Can't load plugin"),
        ("postgresql+psycopg2://u:secret@h:x/d", ValueError, "storage 'postgresql+psycopg2://u:***@h:x/d' is no"),
        ("mysql+mysqldb://u:secret@h/d", ImportError, "its driver MySQLdb is not installed; run `pip install mysqlcl"),
        ("grpc://u:secret@host", ValueError, "storage grpc://u:***@host names no host and port; write grpc://HOST"),
        ("journal://", ValueError, "storage journal:// names no file"),
        ("sqlite://", ValueError, "storage sqlite:// lies in memory"),
        ("sqlite:////nowhere/at all.db", OSError, "cannot write the database of studies /nowhere/at all.db: unable to"),
        ("/nowhere/x.log", OSError, "cannot write the journal /nowhere/x.log: No such file or directory; choose"),
    ],
)
def test_addresses_that_lead_nowhere(tmp_path: Path, url: str, kind: type[Exception], said: str) -> None:
    """Each says its URL without the password, what is wrong, and what to write instead, in one line."""
    with pytest.raises(kind) as error:
        open_storage(tmp_path, url)
    text = str(error.value)
    assert said in text
    assert "secret" not in text
    assert "\n" not in text


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    """A database server that does not answer is named with its address, and its reason is the driver's first line."""
    pytest.importorskip("psycopg2", reason="psycopg2 is not installed")
    with pytest.raises(
        OSError, match=r"storage postgresql\+psycopg2://u:\*\*\*@127\.0\.0\.1:9/d cannot be opened: "
    ) as no:
        open_storage(tmp_path, "postgresql+psycopg2://u:secret@127.0.0.1:9/d")
    assert "secret" not in str(no.value)
    assert "choose another --storage" in str(no.value)


def test_what_is_no_journal(tmp_path: Path) -> None:
    """A file of something else is not added to."""
    file = tmp_path / "x.log"
    file.write_text("starting up\nready\n")
    with pytest.raises(ValueError, match=r"x\.log is no journal of studies"):
        open_storage(tmp_path, str(file))
    assert file.read_text() == "starting up\nready\n"


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("postgresql://u:p@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u:a@b:c@h/d", "postgresql://u:***@h/d"),
        ("postgresql://h/d?user=u&password=p&x=1", "postgresql://h/d?user=u&password=***&x=1"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
    ],
)
def test_passwords_are_hidden(url: str, seen: str) -> None:
    """Whatever is printed of a URL has no password."""
    assert without_password(url) == seen == shown(Path(), url)


def test_a_journal_is_not_blocked_by_a_dead_writer(tmp_path: Path) -> None:
    """A process that dies while it holds a journal's lock keeps nobody from writing."""
    url = f"journal://{tmp_path / 'j.log'}"
    search_in(tmp_path, url)
    code = (
        "import sys, os; from pathlib import Path; from fedlightning.storages import _FileLock\n"
        "lock = _FileLock(Path(sys.argv[1])); lock.acquire(); print('held', flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "j.log")], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("held\n", -9)
    writer = threading.Thread(target=lambda: search_in(tmp_path, url).set_attribute("x", 1), daemon=True)
    writer.start()
    writer.join(20)
    assert not writer.is_alive()


def test_optuna_alone_reads_a_journal(tmp_path: Path) -> None:
    """A journal is Optuna's own format: its tools open it without this package."""
    search_in(tmp_path, str(tmp_path / "j.log")).run(lambda p: 1.0, total=1, owner="o")
    plain = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "j.log")))
    assert len(optuna.load_study(study_name="s", storage=plain).trials) == 1
