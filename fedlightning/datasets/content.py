"""The uncompressed content of a data file, digested while it is read."""

import bz2
import gzip
import hashlib
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import BinaryIO, Literal, Self, cast

from fedlightning.datasets.catalogue import DataFile

_CHUNK = 1 << 18
_OPENERS: Mapping[str, Callable[[Path], object]] = MappingProxyType(
    {".xz": lzma.open, ".bz2": bz2.open, ".gz": gzip.open}
)
STORED_ENDINGS = ("", *_OPENERS)
"""Endings under which a data file may be stored: as it is, or compressed."""


class DamagedFileError(ValueError):
    """A data file's content is not what the catalogue or the record beside it says."""


@dataclass(frozen=True)
class Digest:
    """What a file's uncompressed content has to add up to."""

    algorithm: Literal["sha256", "md5"]
    value: str
    record: Path | None = None
    """The file it was recorded in at the first fetch; None if it is published."""


def record_path(folder: Path, file: DataFile) -> Path:
    """Return where the sha256 of a file without a published digest is recorded."""
    return folder / f"{file.name}.sha256"


def expected_digest(file: DataFile, folder: Path) -> Digest | None:
    """Return the published digest of a file, else the one recorded in the folder it lies in, else None."""
    if file.sha256 is not None:
        return Digest("sha256", file.sha256)
    if file.md5 is not None:
        return Digest("md5", file.md5)
    record = record_path(folder, file)
    if not record.is_file():
        return None
    words = record.read_text(encoding="ascii", errors="replace").split()
    if not words or len(words[0]) != 64 or set(words[0]) - set("0123456789abcdef"):
        raise ValueError(f"{record}: no sha256 in it; remove it to accept {file.name} as it is")
    return Digest("sha256", words[0], record)


class Content:
    """Reads one data file in bounded memory, as bytes or line by line, and digests what passes."""

    def __init__(self, path: Path, *, name: str, digest: Digest | None) -> None:
        self.name = name
        self.lines = 0
        """Lines handed out so far, so that an error can say where it happened."""
        self._digest = digest
        algorithm = "sha256" if digest is None else digest.algorithm
        # MD5 only guards against a damaged copy here.
        self._hash = hashlib.new(algorithm, usedforsecurity=False)
        opener = _OPENERS.get(path.suffix)
        self._stream = path.open("rb") if opener is None else cast(BinaryIO, opener(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def read(self, size: int = _CHUNK) -> bytes:
        """Return up to so many bytes, empty at the end."""
        with self._damage_named():
            chunk = self._stream.read(size)
        self._hash.update(chunk)
        return chunk

    def __iter__(self) -> Iterator[bytes]:
        with self._damage_named():
            for line in self._stream:
                self.lines += 1
                self._hash.update(line)
                yield line

    def check(self) -> str:
        """Read the rest, compare the digest where there is one to compare with, and return it."""
        while self.read():
            pass
        found = self._hash.hexdigest()
        expected = self._digest
        if expected is not None and found != expected.value:
            recorded = ""
            if expected.record is not None:
                recorded = f" (recorded in {expected.record}; remove that record to accept another content)"
            raise DamagedFileError(
                f"{self.name}: {expected.algorithm} is {found[:12]}..., expected {expected.value[:12]}...{recorded}"
            )
        return found

    @contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            # bz2 and gzip report damage as an OSError without a number; one with a number is the disk's.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise DamagedFileError(f"{self.name}: cannot be decompressed ({error})") from error
