"""A folder of trees that outlives the process: what one process grew or was given, the next one finds."""

import logging
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from filelock import FileLock

from fedlightning.datasets.locate import cache_dir
from fedlightning.federation.memory import machine_memory

logger = logging.getLogger(__name__)

_PART = ".part"
_OWN = re.compile(r"[0-9a-f]{64}\.[a-z]+|[0-9a-f]{32}\.part")
"""Names of files that a cache writes; all others in its folder are somebody else's."""


class FolderCache:
    """Keep named bytes in a folder, bounded in size; the least recently used go first.

    Several processes share it: a file is either whole or not there, and who makes something that others may be
    making, too, holds its lock. Everything in it can be made again; the folder may be deleted at any time.
    A name is a sha256 and a kind, ``<64 hex digits>.<kind>``; files with other names are left alone.

    Args:
        folder: Created at first use.
        capacity: Bytes to keep.
    """

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder = folder
        self.capacity = capacity

    def read(self, name: str) -> bytes | None:
        """Return what is kept under a name, or None."""
        path = self.folder / name
        try:
            data = path.read_bytes()
        except OSError:
            return None
        # Who may only read finds things all the same.
        with suppress(OSError):
            os.utime(path)
        return data

    def keep(self, name: str, data: bytes) -> None:
        """Keep bytes under a name; a folder that cannot be written keeps nothing, which costs time only."""
        part = self.folder / f"{uuid.uuid4().hex}{_PART}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data)
            part.replace(self.folder / name)
        except OSError as error:
            logger.warning("cannot keep trees in %s (%s); they are made again when needed", self.folder, error)
            with suppress(OSError):
                part.unlink(missing_ok=True)
        self._evict()

    def forget(self, name: str) -> None:
        """Remove what is kept under a name."""
        with suppress(OSError):
            (self.folder / name).unlink(missing_ok=True)

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold the lock of a name, waiting for whoever has it."""
        # A lock's file stays where it is, so a few locks are shared by all names.
        held = FileLock(self.folder / "locks" / f"{sha256(name.encode()).hexdigest()[:2]}.lock")
        # Where nothing can be locked everybody makes things for itself, which costs time only.
        with suppress(OSError, NotImplementedError):
            Path(held.lock_file).parent.mkdir(parents=True, exist_ok=True)
            held.acquire()
        try:
            yield
        finally:
            held.release()

    def _evict(self) -> None:
        entries = []
        with suppress(OSError), os.scandir(self.folder) as files:
            for file in files:
                with suppress(OSError):
                    if _OWN.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                        status = file.stat(follow_symlinks=False)
                        entries.append((status.st_mtime_ns, file.name, status.st_size))
        excess = sum(size for _, _, size in entries) - self.capacity
        evicted = 0
        for _, name, size in sorted(entries):
            if excess <= 0:
                break
            self.forget(name)
            excess -= size
            evicted += 1
        if evicted:
            logger.info("%s is full (%d bytes allowed): removed the %d oldest", self.folder, self.capacity, evicted)


def trees_folder() -> Path:
    """Return where this user's clients keep trees: below FEDLIGHTNING_CACHE_DIR, else the user's cache."""
    return cache_dir() / "trees"


def folder_capacity() -> int:
    """Return how many bytes a cache folder may take: as many as a quarter of the machine's memory."""
    return machine_memory() // 4
