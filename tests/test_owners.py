"""Tests for owners: whoever holds its lock lives, and the system releases the lock of a process that died."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedlightning.owners import Owner, is_alive

_WORK = """
import sys
from pathlib import Path
from fedlightning.owners import Owner

with Owner(Path(sys.argv[1])) as owner:
    print(owner.name, flush=True)
    sys.stdin.read()
"""


@contextmanager
def working_process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a process that owns something until its input ends, and return it with the owner's name."""
    with subprocess.Popen(
        [sys.executable, "-c", _WORK, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def files(folder: Path) -> list[str]:
    """Return what lies in the folder of owners."""
    return sorted(path.name for path in folder.iterdir())


def test_another_process_is_alive_until_it_is_killed(tmp_path: Path) -> None:
    """SIGKILL leaves no time to clean up; the lock is released nevertheless, and its file goes when somebody asks."""
    with working_process(tmp_path) as (process, name):
        assert is_alive(tmp_path, name)
        assert is_alive(tmp_path, name)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert files(tmp_path) == [f"{name}.lock"]
        assert not is_alive(tmp_path, name)
        assert files(tmp_path) == []
        assert not is_alive(tmp_path, name)


def test_another_process_is_gone_when_it_ends(tmp_path: Path) -> None:
    """A process that ends properly takes its file with it."""
    with working_process(tmp_path) as (process, name):
        assert is_alive(tmp_path, name)
        process.communicate()
        assert process.returncode == 0
        assert files(tmp_path) == []
        assert not is_alive(tmp_path, name)


def test_asking_does_not_free_a_living_process(tmp_path: Path) -> None:
    """Two processes and this one live side by side, and the death of one is not that of the others."""
    with (
        Owner(tmp_path) as own,
        working_process(tmp_path) as (first, first_name),
        working_process(tmp_path) as (_, second_name),
    ):
        assert all(is_alive(tmp_path, name) for name in (own.name, first_name, second_name))
        first.kill()
        first.wait()
        assert is_alive(tmp_path, second_name)
        assert is_alive(tmp_path, own.name)
        assert not is_alive(tmp_path, first_name)


def test_the_same_thread_sees_itself_alive(tmp_path: Path) -> None:
    """Within one thread an owner lives inside its block and not before or after."""
    owner = Owner(tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    assert not is_alive(folder, owner.name)
    with owner as entered:
        assert entered is owner
        assert is_alive(folder, owner.name)
    assert not is_alive(folder, owner.name)
    assert files(folder) == []


def test_threads_of_one_process_see_each_other(tmp_path: Path) -> None:
    """An owner in another thread of this process is alive as long as it works, and gone afterwards."""
    started, go_on = threading.Event(), threading.Event()
    names: list[str] = []
    seen: list[bool] = []

    def work() -> None:
        with Owner(tmp_path) as owner:
            names.append(owner.name)
            seen.append(is_alive(tmp_path, ours.name))
            started.set()
            go_on.wait()

    with Owner(tmp_path) as ours:
        thread = threading.Thread(target=work)
        thread.start()
        started.wait()
        try:
            assert is_alive(tmp_path, names[0])
            assert is_alive(tmp_path, ours.name)
        finally:
            go_on.set()
            thread.join()
        assert not is_alive(tmp_path, names[0])
        assert is_alive(tmp_path, ours.name)
    assert seen == [True]


def test_an_error_ends_an_owner(tmp_path: Path) -> None:
    """Work that fails is over, and its error is the caller's."""
    with pytest.raises(ZeroDivisionError), Owner(tmp_path) as owner:
        raise ZeroDivisionError
    assert not is_alive(tmp_path, owner.name)
    assert files(tmp_path) == []


def test_owners_have_different_names(tmp_path: Path) -> None:
    """Two owners of the same folder never share a lock."""
    assert len({Owner(tmp_path).name for _ in range(50)}) == 50


@pytest.mark.parametrize("name", ["", "nobody"])
def test_who_never_was_is_not_alive(tmp_path: Path, name: str) -> None:
    """A name without a lock file is of nobody alive, in a folder that is not there either."""
    assert not is_alive(tmp_path, name)
    assert not is_alive(tmp_path / "nowhere", name)
    assert files(tmp_path) == []


def test_what_a_dead_one_left_is_removed_under_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file goes before the lock is free: who took the lock in between would hold a file that nobody finds."""
    left = tmp_path / "dead.lock"
    left.touch()
    free = []
    unlink = Path.unlink

    def probe(self: Path, missing_ok: bool = False) -> None:
        descriptor = os.open(self, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free.append(self.name)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", probe)
    assert not is_alive(tmp_path, "dead")
    assert not left.exists()
    assert free == []
