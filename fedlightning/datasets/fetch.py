"""Download data files so that a file is either whole and verified or not there."""

import http.client
import os
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedlightning.datasets.catalogue import DataFile, DatasetEntry, find_dataset
from fedlightning.datasets.content import Content, DamagedFileError, expected_digest, record_path
from fedlightning.datasets.locate import FileSource, cache_dir, file_url, locate_dataset
from fedlightning.datasets.readers import read_file

Progress = Callable[[str, int, int | None], None]
"""Called as `progress(name, done_bytes, total_bytes)`; the total is None if the server does not tell it."""

_CHUNK = 1 << 18


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

    A failure leaves the cache as it was. A file without a published digest is parsed once to count its
    rows and features, and its sha256 is recorded beside it and required of every later copy.
    """
    url = file_url(file, base_url)
    folder = cache_dir()
    stored_name = url.rsplit("/", 1)[-1]
    # The ending stays last: it tells how to decompress.
    part = folder / f".{uuid.uuid4().hex}.part.{stored_name}"
    manual = (
        f"nothing was kept; try again, or put {file.name} (plain, .xz, .bz2 or .gz) into {folder} "
        "or into a data folder (FEDLIGHTNING_DATA_DIR)"
    )
    folder.mkdir(parents=True, exist_ok=True)
    try:
        try:
            _download(url, part, name=file.name, progress=progress, timeout=timeout)
        except urllib.error.HTTPError as error:
            error.close()
            raise OSError(f"{file.name}: {url} answered {error.code} {error.reason}; {manual}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            raise OSError(f"{file.name}: fetching {url} failed ({reason}); {manual}") from error
        try:
            sha256 = _check(part, file, entry, folder)
        except ValueError as error:
            raise DamagedFileError(f"{error}; it came from {url}; {manual}") from error
        path = folder / stored_name
        if sha256 is None:
            os.replace(part, path)
        else:
            _install_with_record(part, path, record_path(folder, file), f"{sha256}  {file.name}\n")
    finally:
        part.unlink(missing_ok=True)
    return path


def way_out(source: FileSource) -> str:
    """Say what to do about a damaged file that is not in the cache."""
    if source.origin == "bundled":
        return f"{source.path} belongs to the package, install fedlightning again"
    return f"replace or remove {source.path}, it is your own and was left as it is"


def _download(url: str, part: Path, *, name: str, progress: Progress | None, timeout: float) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "fedlightning"})
    with urllib.request.urlopen(request, timeout=timeout) as response, part.open("xb") as target:
        length = response.headers.get("Content-Length")
        total = int(length) if length and length.isdecimal() else None
        done = 0
        if progress is not None:
            progress(name, done, total)
        while chunk := response.read(_CHUNK):
            target.write(chunk)
            done += len(chunk)
            if progress is not None:
                progress(name, done, total)
        # http.client takes a connection that closes early for the end of the body.
        if total is not None and done != total:
            raise OSError(f"{done} of {total} bytes arrived")
        target.flush()
        os.fsync(target.fileno())


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
    draft = record.with_name(f".{uuid.uuid4().hex}.part.{record.name}")
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
