"""A download is whole and verified or leaves everything as it was."""

import bz2
import hashlib
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_server import DataServer, Reply
from tiny_download import CONTENT, ENTRY, FILE, OTHER, PACKED, PATH, UNKNOWN, holds

from fedlightning.datasets import (
    CATALOGUE,
    DamagedFileError,
    DataFile,
    fetch_dataset,
    load_table,
    locate,
    verify_dataset,
)
from fedlightning.datasets.fetch import download_file


def flipped(packed: bytes) -> bytes:
    """Return a copy with one byte in the middle changed."""
    middle = len(packed) // 2
    return packed[:middle] + bytes([packed[middle] ^ 0xFF]) + packed[middle + 1 :]


FAILURES: dict[str, tuple[Reply, type[Exception], str]] = {
    "truncated": (
        Reply(PACKED[:-20], length=len(PACKED)),
        OSError,
        rf"{len(PACKED) - 20:,} of {len(PACKED):,} bytes",
    ),
    "empty": (Reply(b"", length=10), OSError, "0 of 10 bytes"),
    "not found": (Reply(status=404), OSError, "answered 404 Not Found"),
    "server error": (Reply(status=503), OSError, "answered 503"),
    "no answer": (Reply(stalls=True), OSError, r"timed out, nothing came for 0\.2 s"),
    "other content": (Reply(bz2.compress(OTHER)), DamagedFileError, r"tiny: sha256 is .*, expected"),
    "corrupt": (Reply(flipped(PACKED)), DamagedFileError, "tiny: cannot be decompressed"),
    "cut stream": (Reply(PACKED[:-20]), DamagedFileError, "tiny: cannot be decompressed"),
    "cut stream, length not told": (
        Reply(PACKED[:-20], tells_length=False),
        DamagedFileError,
        "decompressed",
    ),
}


@pytest.mark.parametrize("tells_length", [True, False])
def test_download_stores_the_verified_file(server: DataServer, cache: Path, tells_length: bool) -> None:
    """The file arrives under its name as it was sent, and nothing else stays in the cache."""
    server.replies[PATH] = Reply(PACKED, tells_length=tells_length)
    path = download_file(FILE, ENTRY)
    assert path == cache / "tiny.bz2"
    assert holds(cache) == {"tiny.bz2": PACKED}
    assert server.requests == [PATH]


@pytest.mark.parametrize("present", [False, True], ids=["empty cache", "file present"])
@pytest.mark.parametrize("failure", FAILURES)
def test_failed_download_leaves_the_cache_as_it_was(
    server: DataServer, cache: Path, failure: str, present: bool
) -> None:
    """Whatever goes wrong, no part stays behind, an older copy survives, and the error says what to do."""
    before = {"tiny.bz2": b"an older copy"} if present else {}
    cache.mkdir()
    for name, content in before.items():
        (cache / name).write_bytes(content)
    reply, kind, message = FAILURES[failure]
    server.replies[PATH] = reply
    with pytest.raises(kind, match=message) as caught:
        download_file(FILE, ENTRY, timeout=0.2 if reply.stalls else 30)
    assert holds(cache) == before
    assert f"put tiny (plain, .xz, .bz2 or .gz) into {cache}" in str(caught.value)
    assert f"{server.url}regression/tiny.bz2" in str(caught.value)


def test_refused_connection_is_reported(server: DataServer, cache: Path) -> None:
    """A server that is not there is named with its address."""
    # Port 1 of this machine is privileged and unused.
    with pytest.raises(OSError, match=r"tiny: fetching http://127\.0\.0\.1:1/regression/tiny\.bz2 failed"):
        download_file(FILE, ENTRY, base_url="http://127.0.0.1:1")
    assert holds(cache) == {}


def test_interruption_leaves_nothing(server: DataServer, cache: Path) -> None:
    """Ctrl-C in the middle of a download leaves no part behind."""
    server.replies[PATH] = Reply(PACKED)

    def interrupt(name: str, done: int, total: int | None) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download_file(FILE, ENTRY, progress=interrupt)
    assert holds(cache) == {}


@pytest.mark.parametrize("file", [FILE, UNKNOWN], ids=["published", "recorded"])
def test_name_that_cannot_be_taken_leaves_nothing(server: DataServer, cache: Path, file: DataFile) -> None:
    """If the last step fails, neither the part nor a record stays behind."""
    (cache / "tiny.bz2").mkdir(parents=True)
    server.replies[PATH] = Reply(PACKED)
    with pytest.raises(OSError, match=r"tiny\.bz2"):
        download_file(file, ENTRY)
    assert holds(cache) == {}


@pytest.mark.parametrize("tells_length", [True, False])
def test_progress_counts_the_bytes(server: DataServer, tells_length: bool) -> None:
    """Progress runs from nothing to the whole file, with the total if the server tells it."""
    body = lzma.compress(np.random.default_rng(0).bytes(1 << 20))
    file = DataFile("noise", "regression/noise.xz", rows=1, md5=hashlib.md5(lzma.decompress(body)).hexdigest())
    server.replies["/regression/noise.xz"] = Reply(body, tells_length=tells_length)
    seen: list[tuple[str, int, int | None]] = []
    download_file(file, ENTRY, progress=lambda name, done, total: seen.append((name, done, total)))
    done = [bytes_done for _, bytes_done, _ in seen]
    assert {name for name, _, _ in seen} == {"noise"}
    assert {total for _, _, total in seen} == {len(body) if tells_length else None}
    assert done[0] == 0
    assert done[-1] == len(body)
    assert len(done) > 3
    assert done == sorted(done)


def test_md5_is_checked_where_it_is_all_there_is(server: DataServer, cache: Path) -> None:
    """A file with a published MD5 passes with it and is refused without."""
    good = DataFile("tiny", "regression/tiny.bz2", rows=500, md5=hashlib.md5(CONTENT).hexdigest())
    bad = DataFile("tiny", "regression/tiny.bz2", rows=500, md5="0" * 32)
    server.replies[PATH] = Reply(PACKED)
    with pytest.raises(DamagedFileError, match=r"tiny: md5 is .*, expected 000000000000\.\.\."):
        download_file(bad, ENTRY)
    assert holds(cache) == {}
    assert download_file(good, ENTRY).read_bytes() == PACKED


class TestFileWithoutPublishedDigest:
    """A file that nobody published a digest of is trusted at the first fetch, by rows and features."""

    def test_sha256_is_recorded_and_required_from_then_on(self, server: DataServer, cache: Path) -> None:
        """The first copy's sha256 lies beside it, and another content is refused afterwards."""
        server.replies[PATH] = Reply(PACKED)
        download_file(UNKNOWN, ENTRY)
        first = {"tiny.bz2": PACKED, "tiny.sha256": f"{FILE.sha256}  tiny\n".encode()}
        assert holds(cache) == first
        (cache / "tiny.bz2").unlink()
        server.replies[PATH] = Reply(bz2.compress(OTHER))
        with pytest.raises(DamagedFileError, match=r"recorded in .*tiny\.sha256"):
            download_file(UNKNOWN, ENTRY)
        assert set(holds(cache)) == {"tiny.sha256"}
        server.replies[PATH] = Reply(PACKED)
        download_file(UNKNOWN, ENTRY)
        assert holds(cache) == first

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (CONTENT + b"1 1:1 2:1\n", "501 rows, expected 500"),
            (CONTENT.replace(b"2:", b"3:"), "feature index is 3, allowed: 1 to 2"),
            (CONTENT.replace(b" 2:-0.5", b""), "1 features, expected 2"),
            (b"<html>", "not in LIBSVM format"),
        ],
    )
    def test_other_rows_or_features_are_refused(
        self, server: DataServer, cache: Path, content: bytes, message: str
    ) -> None:
        """A first copy of another shape is not stored and not recorded."""
        server.replies[PATH] = Reply(bz2.compress(content))
        with pytest.raises(DamagedFileError, match=message):
            download_file(UNKNOWN, ENTRY)
        assert holds(cache) == {}

    def test_unreadable_record_is_named(self, server: DataServer, cache: Path) -> None:
        """A record that holds no sha256 is an error, not a file without a record."""
        cache.mkdir()
        (cache / "tiny.sha256").write_text("nonsense\n")
        server.replies[PATH] = Reply(PACKED)
        with pytest.raises(DamagedFileError, match=r"tiny\.sha256: no sha256 in it; remove it"):
            download_file(UNKNOWN, ENTRY)
        assert set(holds(cache)) == {"tiny.sha256"}


@pytest.fixture
def unbundled(server: DataServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], bytes]:
    """Take the bundled a9a out of the search and put its content on the server instead."""
    originals = {
        file.name: lzma.decompress((locate.BUNDLED / f"{file.name}.xz").read_bytes()) for file in CATALOGUE["a9a"].files
    }
    for name, content in originals.items():
        server.replies[f"/binary/{name}"] = Reply(content)
    monkeypatch.setattr(locate, "BUNDLED", tmp_path / "no bundle")
    return originals.__getitem__


def test_data_set_is_fetched_once(server: DataServer, cache: Path, unbundled) -> None:
    """A fetch downloads what is missing, a second one and a load download nothing."""
    assert [verdict.status for verdict in verify_dataset("a9a")] == ["missing", "missing"]
    fetched = fetch_dataset("a9a")
    assert [source.path for source in fetched] == [cache / "a9a", cache / "a9a.t"]
    assert fetch_dataset("a9a") == fetched
    assert load_table("a9a").x.shape == (48_842, 123)
    assert server.requests == ["/binary/a9a", "/binary/a9a.t"]
    assert [verdict.status for verdict in verify_dataset("a9a")] == ["ok", "ok"]


def test_load_fetches_what_is_nowhere(server: DataServer, cache: Path, unbundled) -> None:
    """Loading a data set that is not stored downloads it first."""
    assert len(load_table("a9a")) == 48_842
    assert set(holds(cache)) == {"a9a", "a9a.t"}


def test_damaged_file_of_the_cache_is_removed_and_fetched_again(server: DataServer, cache: Path, unbundled) -> None:
    """A load removes a damaged cached file and says so, and the next one fetches it."""
    cache.mkdir()
    (cache / "a9a").write_bytes(unbundled("a9a"))
    (cache / "a9a.t").write_bytes(unbundled("a9a.t").replace(b"123:1", b"122:1").replace(b"1:1", b"2:1", 1))
    assert [verdict.status for verdict in verify_dataset("a9a")] == ["ok", "damaged"]
    expected = r"a9a\.t: sha256 is .*, expected 1f448a153f03\.\.\.; the file was removed, run again to fetch it"
    with pytest.raises(DamagedFileError, match=expected):
        load_table("a9a")
    assert set(holds(cache)) == {"a9a"}
    assert len(load_table("a9a")) == 48_842
    assert server.requests == ["/binary/a9a.t"]


def test_fetch_replaces_a_damaged_file_of_the_cache(server: DataServer, cache: Path, unbundled) -> None:
    """A fetch repairs the cache, also when the damaged copy has another ending; a failed one keeps it."""
    cache.mkdir()
    (cache / "a9a.gz").write_bytes(b"damaged")
    good = server.replies.pop("/binary/a9a")
    with pytest.raises(OSError, match=r"a9a: .* answered 404"):
        fetch_dataset("a9a")
    assert holds(cache) == {"a9a.gz": b"damaged"}
    server.replies["/binary/a9a"] = good
    fetch_dataset("a9a")
    assert set(holds(cache)) == {"a9a", "a9a.t"}


def test_the_users_own_file_is_never_removed(server: DataServer, tmp_path: Path) -> None:
    """A wrong file in a data folder is named and left alone, and nothing is fetched over it."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "a9a").write_bytes(b"+1 1:1 \n")
    for act in (lambda: load_table("a9a", data_dir=own), lambda: fetch_dataset("a9a", own)):
        with pytest.raises(DamagedFileError, match=rf"a9a: sha256 is .*; replace or remove {own / 'a9a'}, it is"):
            act()
    verdict = verify_dataset("a9a", own)[0]
    assert (verdict.status, verdict.source.path) == ("damaged", own / "a9a")
    assert holds(own) == {"a9a": b"+1 1:1 \n"}
    assert server.requests == []


def test_data_sets_without_files_need_no_fetch(server: DataServer) -> None:
    """scikit-learn's data sets have nothing to fetch or to verify."""
    assert fetch_dataset("wine") == verify_dataset("wine") == ()
    assert server.requests == []
