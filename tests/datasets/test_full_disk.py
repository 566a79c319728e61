"""A disk that is full, or a folder that cannot be written to, costs nothing that was there before."""

import lzma
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from data_server import DataServer, Reply
from tiny_download import ENTRY, FILE, PACKED, PATH, UNKNOWN, holds

from fedlightning.datasets import DataFile
from fedlightning.datasets.fetch import download_file

NOISE = lzma.compress(np.random.default_rng(0).bytes(400_000))
LARGE = DataFile("noise", "regression/noise.xz", rows=1, sha256="0" * 64)


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put the cache on a file system of 200 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", folder], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted: {done.stderr.strip()}")
    monkeypatch.setenv("FEDLIGHTNING_CACHE_DIR", str(folder))
    yield folder
    subprocess.run(["umount", folder], check=True)


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Let this process write no file beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("tells_length", [True, False])
def test_a_full_disk_is_told(server: DataServer, small_disk: Path, tells_length: bool) -> None:
    """The error names file, folder, size where it is known and the way out; the older files stay, no part does."""
    (small_disk / "noise.xz").write_bytes(b"an older copy")
    (small_disk / "other").write_bytes(bytes(20_000))
    before = holds(small_disk)
    server.replies["/regression/noise.xz"] = Reply(NOISE, tells_length=tells_length)
    progress: list[int] = []
    with pytest.raises(OSError, match="noise: cannot be written") as caught:
        download_file(LARGE, ENTRY, progress=lambda name, done, total: progress.append(done))
    # A size that is known is compared with the room before the disk is filled up.
    assert (progress == []) is tells_length
    size = f"; the file has {len(NOISE):,} bytes" if tells_length else ""
    assert str(caught.value) == (
        f"noise: cannot be written to {small_disk / 'noise.xz'} (No space left on device{size}); nothing was kept; "
        "make room there or allow writing, or set FEDLIGHTNING_CACHE_DIR to another folder"
    )
    assert holds(small_disk) == before
    assert len(server.requests) == 1


def test_the_disk_can_be_used_after_room_was_made(server: DataServer, small_disk: Path) -> None:
    """A full disk leaves nothing that stands in the way."""
    (small_disk / "hog").write_bytes(bytes(4096 * 50))
    server.replies[PATH] = Reply(PACKED)
    with pytest.raises(OSError, match="No space left on device"):
        download_file(FILE, ENTRY)
    (small_disk / "hog").unlink()
    assert download_file(FILE, ENTRY).read_bytes() == PACKED


@pytest.mark.parametrize("tells_length", [True, False])
def test_a_limit_is_told_as_a_full_disk_is(server: DataServer, cache: Path, tells_length: bool) -> None:
    """A file that may not become so large is an error of writing, not of the network: nobody is asked again."""
    server.replies[PATH] = Reply(PACKED, tells_length=tells_length)
    with (
        files_up_to(len(PACKED) // 2),
        pytest.raises(OSError, match=r"tiny: .* \(File too large.*FEDLIGHTNING_CACHE_DIR"),
    ):
        download_file(FILE, ENTRY)
    assert holds(cache) == {}
    assert server.requests == [PATH]


def test_no_file_without_its_record(server: DataServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the sha256 cannot be recorded, the file is not stored either."""
    server.replies[PATH] = Reply(PACKED)
    (cache / ".part.tiny.sha256").mkdir(parents=True)
    with pytest.raises(OSError, match=r"tiny: cannot be written to .*FEDLIGHTNING_CACHE_DIR"):
        download_file(UNKNOWN, ENTRY)
    assert holds(cache) == {}


def test_a_cache_that_is_no_folder_is_told(server: DataServer, cache: Path) -> None:
    """The folder that cannot be made is named before anything is asked from a server."""
    cache.write_text("a file")
    with pytest.raises(OSError, match=f"tiny: cannot be written to {cache}/tiny.bz2 .*FEDLIGHTNING_CACHE_DIR"):
        download_file(FILE, ENTRY)
    assert server.requests == []
