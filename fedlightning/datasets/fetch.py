"""Download data files so that a file is either whole and verified or not there."""

import codecs
import logging
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from fedlightning.datasets.catalogue import DataFile, DatasetEntry, find_dataset
from fedlightning.datasets.content import Content, DamagedFileError, expected_digest, record_path
from fedlightning.datasets.locate import FileSource, cache_dir, file_url, locate_dataset
from fedlightning.datasets.readers import read_file
from fedlightning.datasets.transfer import Progress, TransferError, transfer

_PAGES = frozenset({"text/html", "application/xhtml+xml"})

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileVerdict:
    """What checking one file of a data set found."""

    source: FileSource
    status: Literal["ok", "damaged", "missing"]
    detail: str

    @property
    def ok(self) -> bool:
        """Whether the file is there and its content is right."""
        return self.status == "ok"


def verify_dataset(name: str, data_dir: Path | None = None) -> tuple[FileVerdict, ...]:
    """Check the content of each stored file of a data set; nothing is downloaded, changed or removed."""
    entry = find_dataset(name)
    return tuple(_verify(source, entry) for source in locate_dataset(entry, data_dir).files)


def fetch_dataset(
    name: str,
    data_dir: Path | None = None,
    progress: Progress | None = None,
    *,
    base_url: str | None = None,
    timeout: float = 30.0,
) -> tuple[FileSource, ...]:
    """Verify the stored files of a data set, download the missing ones, and return where all of them are.

    A damaged file of the cache is downloaded again; one of the user's own is an error and stays.
    """
    entry = find_dataset(name)
    fetched = []
    for source in locate_dataset(entry, data_dir).files:
        verdict = _verify(source, entry)
        if verdict.ok:
            fetched.append(source)
            continue
        if source.origin in ("data_dir", "bundled"):
            raise DamagedFileError(f"{verdict.detail}; {way_out(source)}")
        path = download_file(source.file, entry, progress=progress, base_url=base_url, timeout=timeout)
        if source.path not in (None, path):
            # Stored under another ending, the damaged copy would still be found first.
            source.path.unlink(missing_ok=True)
        fetched.append(FileSource(source.file, "cache", path, file_url(source.file, base_url)))
    return tuple(fetched)


def download_file(
    file: DataFile,
    entry: DatasetEntry,
    *,
    progress: Progress | None = None,
    base_url: str | None = None,
    timeout: float = 30.0,
) -> Path:
    """Download one file into the cache, verify it and only then give it its name there.

    A failure leaves the cache as it was. While another process downloads the same file, this one waits
    and uses what comes, or takes over from a process that died. A file without a published digest is
    parsed once to count its rows and features, and its sha256 is recorded beside it and required of
    every later copy.
    """
    url = file_url(file, base_url)
    path = cache_dir() / url.rsplit("/", 1)[-1]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _only_download(file.name, path.parent):
            if not (path.is_file() and _verify(FileSource(file, "cache", path, url), entry).ok):
                _download(url, path, file, entry, progress=progress, timeout=timeout)
    except TransferError:
        raise
    except OSError as error:
        raise OSError(
            f"{file.name}: cannot be written to {path} ({error.strerror or error}); nothing was kept; "
            "make room there or allow writing, or set FEDLIGHTNING_CACHE_DIR to another folder"
        ) from error
    return path


def way_out(source: FileSource) -> str:
    """Say what to do about a damaged file that is not in the cache."""
    if source.origin == "bundled":
        return f"{source.path} belongs to the package, install fedlightning again"
    return f"replace or remove {source.path}, it is your own and was left as it is"


@contextmanager
def _only_download(name: str, folder: Path) -> Iterator[None]:
    """Hold the lock under which a file is downloaded; the system releases it if this process dies."""
    # The empty lock file stays: if it were removed, the next process could lock another one of its name.
    lock = FileLock(folder / f".{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("%s: another process is downloading it to %s; waiting for that one", name, folder)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _download(
    url: str, path: Path, file: DataFile, entry: DatasetEntry, *, progress: Progress | None, timeout: float
) -> None:
    # Always the same name, so that what a killed process left is written over.
    part = _part(path)
    manual = (
        f"nothing was kept; try again, or put {file.name} (plain, .xz, .bz2 or .gz) into {path.parent} "
        "or into a data folder (FEDLIGHTNING_DATA_DIR)"
    )
    try:
        try:
            answer = transfer(url, part, name=file.name, progress=progress, timeout=timeout)
        except TransferError as error:
            raise TransferError(f"{file.name}: {error}; {manual}", may_pass=error.may_pass) from error
        came = f"from {url}" if answer.url == url else f"from {url}, which led to {answer.url}"
        try:
            sha256 = _check(part, file, entry, path.parent)
        except ValueError as error:
            if answer.content_type in _PAGES or _is_markup(part):
                raise DamagedFileError(
                    f"{file.name}: a web page came instead of the file, {came}; "
                    f"a proxy or a sign-in page may be in the way, open that address in a browser; {manual}"
                ) from error
            raise DamagedFileError(f"{error}; it came {came}; {manual}") from error
        if sha256 is None:
            os.replace(part, path)
        else:
            _install_with_record(part, path, record_path(path.parent, file), f"{sha256}  {file.name}\n")
    finally:
        part.unlink(missing_ok=True)


def _part(path: Path) -> Path:
    """Return the name of a file that is not complete yet."""
    # The ending stays last: it tells how to decompress.
    return path.with_name(f".part.{path.name}")


def _is_markup(path: Path) -> bool:
    """Return whether a file begins as HTML and XML do; some proxies send a page packed and unasked."""
    with path.open("rb") as stream:
        head = stream.read(1024)
    if head.startswith(b"\x1f\x8b"):
        with suppress(zlib.error):
            head = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(head)
    return head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"<")


def _check(path: Path, file: DataFile, entry: DatasetEntry, folder: Path) -> str | None:
    """Check a file's content; return its sha256 if only rows and features could be compared."""
    digest = expected_digest(file, folder)
    if digest is None:
        read_file(path, file, entry)
    with Content(path, name=file.name, digest=digest) as content:
        found = content.check()
    return found if digest is None else None


def _install_with_record(part: Path, path: Path, record: Path, text: str) -> None:
    """Give a file its name together with the record of its sha256: both, or on a failure neither."""
    draft = _part(record)
    try:
        draft.write_text(text, encoding="ascii")
        os.replace(draft, record)
        try:
            os.replace(part, path)
        except BaseException:
            record.unlink()
            raise
    finally:
        draft.unlink(missing_ok=True)


def _verify(source: FileSource, entry: DatasetEntry) -> FileVerdict:
    if source.path is None:
        return FileVerdict(source, "missing", f"{source.file.name}: not stored, would come from {source.url}")
    try:
        sha256 = _check(source.path, source.file, entry, source.path.parent)
    except (ValueError, OSError) as error:
        return FileVerdict(source, "damaged", str(error))
    algorithm = "md5" if source.file.md5 else "sha256"
    how = f"{algorithm} as expected" if sha256 is None else f"rows and features as expected, sha256 {sha256}"
    return FileVerdict(source, "ok", f"{source.file.name}: {how}")
