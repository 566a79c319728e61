"""Make something that several processes may want at once, one process at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

CREATION_SECONDS = 120.0
"""How long one process may take to make a database before the others give up."""


@contextmanager
def creation_lock(path: Path, *, what: str, way_out: str) -> Iterator[None]:
    """Hold the lock under which a database may be created; two processes creating one break each other.

    Args:
        path: The lock's file; its folder is made if it is not there. Who holds the lock already may take it again.
        what: What the folder is to the user, in an error.
        way_out: What to do if it cannot be written, in an error.

    Raises:
        OSError: The folder cannot be written, or another process holds the lock for too long.
    """
    # One object per path, so that a second request in this process does not wait for the first.
    lock = FileLock(path.absolute(), timeout=CREATION_SECONDS, is_singleton=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise OSError(
            f"another process has held {lock.lock_file} for {CREATION_SECONDS:.0f} s; end it, or try again"
        ) from error
    except OSError as error:
        raise OSError(f"cannot write the {what} {path.parent}: {error.strerror or error}; {way_out}") from error
    try:
        yield
    finally:
        lock.release()
