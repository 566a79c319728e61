"""Tests of the folder that outlives a process: whole files or none, a bounded size, and nobody else's files."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedlightning.federation.cache import FolderCache, folder_capacity, trees_folder
from fedlightning.federation.memory import machine_memory

NAMES = [f"{number:064x}.ensemble" for number in range(6)]


def age(folder: Path, *names: str) -> None:
    """Make the files old, the first the oldest."""
    for seconds, name in enumerate(names, 1000):
        os.utime(folder / name, (seconds, seconds))


def test_what_one_process_keeps_the_next_one_finds(tmp_path: Path) -> None:
    """Bytes are found again by their name, by whoever has the folder, and the last that were kept win."""
    folder = tmp_path / "not" / "there yet"
    cache = FolderCache(folder, 100)
    assert cache.read(NAMES[0]) is None
    cache.keep(NAMES[0], b"first")
    cache.keep(NAMES[0], b"second")
    cache.keep(NAMES[1], b"")
    other = FolderCache(folder, 100)
    assert (other.read(NAMES[0]), other.read(NAMES[1]), other.read(NAMES[2])) == (b"second", b"", None)
    other.forget(NAMES[0])
    other.forget(NAMES[2])
    assert cache.read(NAMES[0]) is None
    assert {path.name for path in folder.iterdir()} == {NAMES[1]}


def test_the_least_recently_used_go_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder never holds more than its capacity; what was read of late stays, and removing is said."""
    cache = FolderCache(tmp_path, 30)
    for name in NAMES[:3]:
        cache.keep(name, bytes(10))
    age(tmp_path, *NAMES[:3])
    assert cache.read(NAMES[0]) is not None
    with caplog.at_level(logging.INFO, "fedlightning"):
        cache.keep(NAMES[3], bytes(10))
        assert {path.name for path in tmp_path.iterdir()} == {NAMES[0], NAMES[2], NAMES[3]}
        age(tmp_path, NAMES[2], NAMES[0], NAMES[3])
        cache.keep(NAMES[4], bytes(15))
    assert {path.name for path in tmp_path.iterdir()} == {NAMES[3], NAMES[4]}
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "removed the 1 oldest",
        "removed the 2 oldest",
    ]


def test_what_is_larger_than_the_folder_may_be_is_not_kept(tmp_path: Path) -> None:
    """A single file above the capacity is removed again."""
    cache = FolderCache(tmp_path, 30)
    cache.keep(NAMES[0], bytes(31))
    assert list(tmp_path.iterdir()) == []


def test_other_peoples_files_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    """A folder that holds something else loses none of it, however full it is."""
    others = [tmp_path / name for name in ("notes.txt", "a9a", "x" * 64 + ".ensemble", ".hidden")]
    for other in others:
        other.write_bytes(bytes(1000))
        os.utime(other, (1, 1))
    (tmp_path / NAMES[5]).mkdir()
    cache = FolderCache(tmp_path, 30)
    with cache.lock(NAMES[0]):
        cache.keep(NAMES[0], bytes(30))
    cache.keep(NAMES[1], bytes(30))
    assert all(other.stat().st_size == 1000 for other in others)
    assert (cache.read(NAMES[1]), cache.read(NAMES[5])) == (bytes(30), None)
    assert (tmp_path / "locks").is_dir()


def test_what_a_killed_process_left_half_written_goes_too(tmp_path: Path) -> None:
    """A half-written file is never read, and counts among the oldest."""
    left = tmp_path / f"{'0' * 32}.part"
    left.write_bytes(bytes(25))
    os.utime(left, (1, 1))
    cache = FolderCache(tmp_path, 30)
    cache.keep(NAMES[0], bytes(10))
    assert [path.name for path in tmp_path.iterdir()] == [NAMES[0]]


WRITER = """
import sys
from pathlib import Path
from fedlightning.federation.cache import FolderCache
cache = FolderCache(Path(sys.argv[1]), 2**30)
for number in range(150):
    cache.keep(sys.argv[2], bytes([number]) * 2**18)
"""


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    """Whoever reads while another process writes the same name gets all bytes of one writing."""
    cache = FolderCache(tmp_path, 2**30)
    seen = set()
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), NAMES[0]]) as writer:
        while writer.poll() is None:
            data = cache.read(NAMES[0])
            if data is not None:
                assert data == data[:1] * 2**18
                seen.add(data[0])
    assert writer.returncode == 0
    assert len(seen) > 1
    assert [path.name for path in tmp_path.iterdir()] == [NAMES[0]]


def test_a_folder_that_cannot_be_written_only_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where a folder cannot be made nothing is kept, everything works, and a warning says where and why."""
    (tmp_path / "file").touch()
    cache = FolderCache(tmp_path / "file" / "trees", 100)
    cache.keep(NAMES[0], b"data")
    assert cache.read(NAMES[0]) is None
    cache.forget(NAMES[0])
    with cache.lock(NAMES[0]), cache.lock(NAMES[0]):
        pass
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"cannot keep trees in {cache.folder} (" in record.getMessage()
    assert "Not a directory" in record.getMessage()


def test_a_folder_that_may_only_be_read_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be marked as used is found all the same."""
    FolderCache(tmp_path, 100).keep(NAMES[0], b"data")

    def refuse(path: Path) -> None:
        raise PermissionError(path)

    # The superuser, as whom tests may run, is refused nothing.
    monkeypatch.setattr(os, "utime", refuse)
    assert FolderCache(tmp_path, 100).read(NAMES[0]) == b"data"


def test_a_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    """The error in a lock stays what it is, and the next one gets the lock."""
    cache = FolderCache(tmp_path, 100)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), cache.lock(NAMES[0]):
            raise ZeroDivisionError


def test_the_folder_is_the_users_and_a_quarter_of_the_memory(cache_dir: Path) -> None:
    """Unless a node says otherwise trees lie in the user's cache, as many as a quarter of the memory holds."""
    assert trees_folder() == cache_dir / "trees"
    assert folder_capacity() == machine_memory() // 4
