"""A download survives servers, proxies and networks that misbehave, or says what was wrong."""

import bz2
import gzip
import threading
from pathlib import Path

import pytest
from data_server import DataServer, Reply
from tiny_download import ENTRY, FILE, PACKED, PATH, UNKNOWN, holds

from fedlightning.datasets import DamagedFileError, DataFile
from fedlightning.datasets.fetch import download_file

TROUBLES = {
    "overloaded": (Reply(status=503), "answered 503 Service Unavailable"),
    "too many requests": (Reply(status=429), "answered 429 Too Many Requests"),
    "ends early": (Reply(PACKED[:-20], length=len(PACKED)), f"{len(PACKED) - 20:,} of {len(PACKED):,} bytes arrived"),
    "reset": (Reply(PACKED, resets=True), "Connection reset by peer"),
    "no answer": (Reply(stalls=True), "timed out, nothing came for "),
    "stops in the middle": (Reply(PACKED, hold=threading.Event()), "timed out, nothing came for "),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_that_passes_is_waited_out(
    server: DataServer, cache: Path, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    """After two failures the third attempt brings the whole file, and each failure was told."""
    reply, told = TROUBLES[trouble]
    server.replies[PATH] = [reply, reply, Reply(PACKED)]
    assert download_file(FILE, ENTRY, timeout=1).read_bytes() == PACKED
    assert holds(cache) == {"tiny.bz2": PACKED}
    assert server.requests == [PATH] * 3
    assert [told in message and message.endswith("; trying again in 0 s") for message in caplog.messages] == [True] * 2


@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_that_stays_is_told(server: DataServer, cache: Path, trouble: str) -> None:
    """Three attempts are made; then the error says what happened, and nothing was kept."""
    server.replies[PATH], told = TROUBLES[trouble]
    with pytest.raises(OSError, match=told):
        download_file(FILE, ENTRY, timeout=0.3)
    assert holds(cache) == {}
    assert server.requests == [PATH] * 3


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_refusals_are_final(server: DataServer, status: int) -> None:
    """Nobody is asked again for what is not there or not allowed."""
    server.replies[PATH] = Reply(status=status)
    with pytest.raises(OSError, match=f"answered {status}"):
        download_file(FILE, ENTRY)
    assert server.requests == [PATH]


PLAIN = DataFile("tiny", "regression/tiny", rows=500)
PAGE = b"\n<!DOCTYPE html><html><body>Please sign in</body></html>"
HTML = {"Content-Type": "text/html; charset=utf-8"}
PAGES = {
    "page": Reply(PAGE, headers=HTML),
    "without a type": Reply(b"\xef\xbb\xbf" + PAGE),
    "packed": Reply(gzip.compress(PAGE), headers={**HTML, "Content-Encoding": "gzip"}),
    "packed, without a type": Reply(gzip.compress(PAGE), headers={"Content-Encoding": "gzip"}),
    "otherwise packed": Reply(b"\x1b\x03", headers={**HTML, "Content-Encoding": "br"}),
    "cut": Reply(gzip.compress(PAGE)[:-12], headers=HTML),
    "empty": Reply(b"", headers=HTML),
    "without a length": Reply(PAGE, headers=HTML, tells_length=False),
}


@pytest.mark.parametrize("file", [FILE, UNKNOWN, PLAIN], ids=["published", "recorded", "plain"])
@pytest.mark.parametrize("page", PAGES)
def test_a_web_page_is_called_so(server: DataServer, cache: Path, page: str, file: DataFile) -> None:
    """With a known digest or none, packed or not: a page is named with its address, and nothing of it is kept."""
    server.replies[f"/{file.url_path}"] = PAGES[page]
    with pytest.raises(DamagedFileError) as caught:
        download_file(file, ENTRY)
    message = str(caught.value)
    assert message.startswith(f"tiny: a web page came instead of the file, from {server.url}{file.url_path}; a proxy ")
    assert "nothing was kept; try again, or put tiny (plain" in message
    assert holds(cache) == {}
    assert len(server.requests) == 1


def test_a_sign_in_page_behind_a_redirect_is_named(server: DataServer, cache: Path) -> None:
    """A captive portal is told with both addresses: the one asked, and the one that answered."""
    portal = f"{server.url}portal?from=libsvm"
    server.replies[PATH] = Reply(status=302, headers={"Location": portal})
    server.replies["/portal?from=libsvm"] = Reply(PAGE, headers=HTML)
    with pytest.raises(DamagedFileError) as caught:
        download_file(FILE, ENTRY)
    assert f"web page came instead of the file, from {server.url}regression/tiny.bz2, which led to {portal};" in str(
        caught.value
    )
    assert holds(cache) == {}


def test_the_file_itself_may_be_called_a_page(server: DataServer) -> None:
    """The content decides: a server with a wrong idea of types, or a mirror behind a redirect, is good enough."""
    server.replies[PATH] = Reply(status=301, headers={"Location": f"{server.url}mirror"})
    server.replies["/mirror"] = Reply(PACKED, headers=HTML)
    assert download_file(FILE, ENTRY).read_bytes() == PACKED


def test_another_content_is_not_called_a_page(server: DataServer) -> None:
    """Damage keeps its own message."""
    server.replies[PATH] = Reply(bz2.compress(b"<html>" * 10))
    with pytest.raises(DamagedFileError, match=r"tiny: sha256 is .*, expected .*; it came from http"):
        download_file(FILE, ENTRY)


def test_the_proxy_of_the_environment_is_asked(
    server: DataServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With http_proxy set the request goes there, with the whole address of the file."""
    monkeypatch.delenv("no_proxy")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", server.url)
    server.replies["http://data.invalid/regression/tiny.bz2"] = Reply(PACKED)
    download_file(FILE, ENTRY, base_url="http://data.invalid")
    assert holds(cache) == {"tiny.bz2": PACKED}
