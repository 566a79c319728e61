"""Tell whether the process that started something still lives, by a lock that the system releases at its death."""

import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout


class Owner:
    """Hold a lock file for as long as this process works on something.

    Args:
        folder: Where owners of the same store keep their lock files.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = uuid.uuid4().hex
        self._path = _lock_path(folder, self.name)
        self._lock = FileLock(self._path)

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
        self._path.unlink(missing_ok=True)


def is_alive(folder: Path, owner: str) -> bool:
    """Return whether the owner's process still holds its lock; what a dead one left is removed."""
    path = _lock_path(folder, owner)
    if not path.exists():
        return False
    probe = FileLock(path)
    try:
        probe.acquire(timeout=0)
    except Timeout:
        return True
    # Removed before it is released: a process that takes this very lock now would hold a file that nobody finds.
    path.unlink(missing_ok=True)
    probe.release()
    return False


def _lock_path(folder: Path, owner: str) -> Path:
    return folder / f"{owner}.lock"
