"""Processes that are killed while they download, and processes that want the same file."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import tiny_download
from data_server import DataServer, Reply
from tiny_download import ENTRY, FILE, PACKED, PATH, holds

from fedlightning.datasets.fetch import download_file

Start = Callable[[], "subprocess.Popen[str]"]
WAITING = "tiny: another process is downloading it to"
PART = ".part.tiny.bz2"
HALF = PACKED[: len(PACKED) // 2]


@contextmanager
def downloading() -> Iterator["subprocess.Popen[str]"]:
    """Start a process that downloads the tiny file; it is killed in the end if it still runs."""
    with subprocess.Popen([sys.executable, tiny_download.__file__], stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a downloading process."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(downloading())


def wait_until(reached: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    """Wait for something that a living process brings about."""
    while not reached():
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.01)


def hold_back(server: DataServer) -> threading.Event:
    """Let the first request come to its middle, until the returned event; serve later ones at once."""
    event = threading.Event()
    server.replies[PATH] = [Reply(PACKED, hold=event), Reply(PACKED)]
    return event


def in_the_middle(server: DataServer, start: Start) -> "subprocess.Popen[str]":
    """Return a process that has opened its part and waits for the rest."""
    process = start()
    wait_until(lambda: bool(server.requests) and PART in os.listdir(os.environ["FEDLIGHTNING_CACHE_DIR"]), process)
    return process


def test_a_killed_download_is_started_again(server: DataServer, cache: Path, start: Start) -> None:
    """What a killed process left is used up by the next download, and any number of kills leave one part."""
    hold_back(server)
    replies = server.replies[PATH]
    assert isinstance(replies, list)
    replies.insert(0, replies[0])
    for _ in range(2):
        server.requests.clear()
        process = in_the_middle(server, start)
        process.kill()
        process.wait()
        assert set(holds(cache)) == {PART}
    assert download_file(FILE, ENTRY) == cache / "tiny.bz2"
    assert holds(cache) == {"tiny.bz2": PACKED}


def test_what_dead_processes_left_goes_even_if_the_next_attempt_fails(server: DataServer, cache: Path) -> None:
    """A failed download cleans up after its predecessors, too."""
    cache.mkdir()
    (cache / PART).write_bytes(HALF)
    with pytest.raises(OSError, match="answered 404"):
        download_file(FILE, ENTRY)
    assert holds(cache) == {}


def test_two_processes_download_once(server: DataServer, cache: Path, start: Start) -> None:
    """The second one says that it waits, leaves the first one's part alone, and uses the first one's file."""
    go_on = hold_back(server)
    first = in_the_middle(server, start)
    second = start()
    assert second.stderr is not None
    assert second.stderr.readline() == f"{WAITING} {cache}; waiting for that one\n"
    assert PART in holds(cache)
    go_on.set()
    assert [process.communicate(timeout=60)[1] for process in (first, second)] == ["", ""]
    assert [first.returncode, second.returncode] == [0, 0]
    assert holds(cache) == {"tiny.bz2": PACKED}
    assert server.requests == [PATH]


def test_the_second_takes_over_from_a_killed_first(server: DataServer, cache: Path, start: Start) -> None:
    """A death releases the lock, and who waited downloads the file."""
    hold_back(server)
    first = in_the_middle(server, start)
    second = start()
    assert second.stderr is not None
    assert second.stderr.readline().startswith(WAITING)
    first.kill()
    assert second.communicate(timeout=60)[1] == ""
    assert second.returncode == 0
    assert holds(cache) == {"tiny.bz2": PACKED}
    assert server.requests == [PATH] * 2


def test_who_waits_does_not_trust_a_damaged_file(server: DataServer, cache: Path) -> None:
    """A file of the right name counts only if its content is right."""
    cache.mkdir()
    (cache / "tiny.bz2").write_bytes(HALF)
    server.replies[PATH] = Reply(PACKED)
    download_file(FILE, ENTRY)
    download_file(FILE, ENTRY)
    assert holds(cache) == {"tiny.bz2": PACKED}
    assert server.requests == [PATH]
