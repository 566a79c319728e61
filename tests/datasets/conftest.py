"""A cache of its own for every test, and a real HTTP server to download from."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from data_server import DataServer

from fedlightning.datasets import transfer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point the cache at a folder of the test, and take the user's data folder out of the search."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDLIGHTNING_CACHE_DIR", str(folder))
    monkeypatch.delenv("FEDLIGHTNING_DATA_DIR", raising=False)
    monkeypatch.delenv("FEDLIGHTNING_DATA_URL", raising=False)
    return folder


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[DataServer]:
    """Serve replies on a free port of this machine."""
    released = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reply = data.next_reply(self.path)
            if reply.stalls:
                released.wait()
                return
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            if reply.tells_length:
                self.send_header("Content-Length", str(len(reply.body) if reply.length is None else reply.length))
            self.end_headers()
            half = len(reply.body) // 2
            self.wfile.write(reply.body[:half])
            while reply.hold and not (reply.hold.wait(0.01) or released.is_set()):
                pass
            if reply.resets:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                return
            # Whoever asked may be dead by now.
            with suppress(ConnectionError):
                self.wfile.write(reply.body[half:])

        def log_message(self, format: str, *args: object) -> None:
            """Keep quiet."""

    monkeypatch.setattr(transfer, "_PAUSES", (0.0, 0.0))
    # A proxy of the environment would be asked even for this machine.
    monkeypatch.setenv("no_proxy", "*")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        data = DataServer(url=f"http://127.0.0.1:{httpd.server_address[1]}/")
        monkeypatch.setenv("FEDLIGHTNING_DATA_URL", data.url)
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield data
        released.set()
        httpd.shutdown()
        thread.join()
