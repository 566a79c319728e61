"""Serve MLflow's pages on a store, for as long as somebody looks at them."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn
from urllib.parse import unquote

from fedlightning.tracking import TrackingStore, default_database

HOST = "127.0.0.1"
_START_SECONDS = 300.0
_STOP_SECONDS = 10.0
_LAST_BYTES = 4000
_EXIT_HUNG_UP = 129


def find_store(root: Path, tracking_uri: str | None = None) -> TrackingStore:
    """Open the store to look at, which must be there already.

    Raises:
        FileNotFoundError: Nothing has been recorded below the root yet.
        ValueError: The store is a server, which has pages of its own.
    """
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if uri and uri.startswith(("http://", "https://")):
        raise ValueError(f"the store {uri} is a server with pages of its own; open that address in a browser")
    database = _sqlite_file(uri) if uri else default_database(root)
    if database is not None and not database.exists():
        raise FileNotFoundError(
            f"nothing is recorded in {database} yet; run `python -m fedlightning.tune --study a9a_5` first, "
            "or give the --root or the --tracking-uri of what you ran"
        )
    return TrackingStore.open(root, tracking_uri)


def _sqlite_file(uri: str) -> Path | None:
    """Return the file of a SQLite store; None for other databases, which tell themselves that they are not there."""
    scheme, _, place = uri.partition(":///")
    return Path(unquote(place.partition("?")[0])) if scheme.startswith("sqlite") else None


def serve(store: TrackingStore, *, port: int, on_start: Callable[[str], None], verbose: bool = False) -> None:
    """Run MLflow's server for this machine's browsers until Ctrl-C.

    Args:
        store: The store to show.
        port: Port to listen on; other machines do not reach it.
        on_start: Called with the address as soon as the pages can be read.
        verbose: Let MLflow write its own messages.

    Raises:
        OSError: The port cannot be used.
        RuntimeError: The server ended by itself; its last messages are in the text.
    """
    _check_port(port)
    with tempfile.TemporaryFile() as messages, _hang_up_ends():
        server: subprocess.Popen[bytes] | None = None
        try:
            with _held_back():
                server = _start(store, port, None if verbose else messages)
            if _answers(server, port):
                on_start(f"http://{HOST}:{port}")
                server.wait()
        except KeyboardInterrupt:
            return
        finally:
            if server is not None:
                _stop(server)
        raise RuntimeError(f"MLflow's server ended with status {server.returncode}{_last(messages)}")


def _check_port(port: int) -> None:
    with closing(socket.socket()) as probe:
        # As servers do: a port whose last connection ended a moment ago is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            # Its own kind tells nothing more: a taken port and a forbidden one have the same way out.
            raise OSError(f"port {port} cannot be used ({error.strerror}); give another one with --port") from error


def _start(store: TrackingStore, port: int, messages: IO[bytes] | None) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", store.uri, "--no-serve-artifacts"]
    if store.artifact_location is not None:
        command += ["--default-artifact-root", store.artifact_location]
    if messages is not None:
        command += ["--uvicorn-opts", "--log-level warning"]
    # Without this MLflow starts further processes for jobs that nothing here has.
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    # A process group of its own: MLflow's command starts the server as a child, and both are ended together.
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages, env=environment, process_group=0
    )


def _answers(server: "subprocess.Popen[bytes]", port: int) -> bool:
    """Wait for the server's first answer; False if it ended instead."""
    deadline = time.monotonic() + _START_SECONDS
    while server.poll() is None:
        if _is_healthy(port):
            return True
        if time.monotonic() > deadline:
            raise RuntimeError(f"MLflow's server did not answer within {_START_SECONDS:.0f} s; -v shows what it says")
        time.sleep(0.1)
    return False


def _is_healthy(port: int) -> bool:
    with closing(http.client.HTTPConnection(HOST, port, timeout=5)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False


def _stop(server: "subprocess.Popen[bytes]") -> None:
    if server.poll() is None:
        _signal_group(server, signal.SIGTERM)
        # A second Ctrl-C is from somebody who does not want to wait.
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            server.wait(_STOP_SECONDS)
    _signal_group(server, signal.SIGKILL)
    server.wait()


def _signal_group(server: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(server.pid, number)


def _last(messages: IO[bytes]) -> str:
    size = messages.seek(0, os.SEEK_END)
    messages.seek(max(0, size - _LAST_BYTES))
    text = messages.read().decode(errors="replace").strip()
    return f":\n{text}" if text else ""


@contextmanager
def _held_back() -> Iterator[None]:
    """Let signals wait that end this process: between a child's start and its entry in our books it would stay."""
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    # What is ignored stays so, as after nohup.
    handlers = {number: handler for number, handler in before.items() if callable(handler)}
    for caught in handlers:
        signal.signal(caught, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for caught, handler in handlers.items():
            signal.signal(caught, handler)
    for number in came:
        signal.raise_signal(number)


@contextmanager
def _hang_up_ends() -> Iterator[None]:
    """Leave in good order when the terminal is closed, which by default would leave the server behind."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(_EXIT_HUNG_UP)

    before = signal.signal(signal.SIGHUP, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
