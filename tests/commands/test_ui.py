"""MLflow's pages on what was recorded: they come up, show it to this machine only, and leave nothing running."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from run_command import PATIENCE, Finished, press_ctrl_c, read_until, rest_of, started_command

from fedlightning.tracking import TrackingStore, default_database, sqlite_uri

Call = Callable[..., Finished]

MARK = "STARTED_BY_TEST"
"""A variable of the environment by which all processes of one start are told from others."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, with a blank in its name, in which one run with a file was recorded."""
    folder = tmp_path_factory.mktemp("a project")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        with TrackingStore.open(folder).start_run("vines", "first", kind="run", params={"depth": 3}) as run:
            run.log_metrics({"loss": 0.25})
            run.log_text("depth: 3\n", "config.yaml")
    return folder


@pytest.fixture
def port() -> int:
    """A port that nobody uses."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started_ui(root: Path, port: int, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Start the command; whatever comes of it, none of its processes is left afterwards."""
    mark = uuid.uuid4().hex
    with started_command("ui", "--port", port, *arguments, cwd=root, env={MARK: mark}) as process:
        try:
            yield process
        finally:
            # The server has a group of its own and outlives its parent in a test that fails.
            for pid in processes():
                with suppress(OSError):
                    if f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                        os.kill(pid, signal.SIGKILL)


@contextmanager
def pages(root: Path, port: int, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Start the command and wait until it says where the pages are."""
    with started_ui(root, port, *arguments) as process:
        read_until(process, f"http://127.0.0.1:{port}")
        yield process


def processes() -> dict[int, int]:
    """Return all processes that run, each with its parent; what has ended and is not yet taken note of is left out."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            pid, _, fields = stat.read_text(errors="replace").partition(" (")
            state, parent = fields.rpartition(") ")[2].split()[:2]
            if state != "Z":
                found[int(pid)] = int(parent)
    return found


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have started."""
    parents = processes()
    found = [pid]
    for above in found:
        found += [child for child, parent in parents.items() if parent == above]
    return found[1:]


def gone(pids: list[int]) -> bool:
    """Wait for processes to end; False if one does not."""
    deadline = time.monotonic() + 60
    while not processes().keys().isdisjoint(pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def ask(port: int, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    """Return status and text of the server's answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection.request(method, path, content, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_pages_show_what_was_recorded(root: Path, port: int, call: Call) -> None:
    """Page, experiments, runs and files are there, for this machine only, without telemetry, until Ctrl-C."""
    before = sorted(path.name for path in root.rglob("*"))
    with pages(root, port) as process:
        server = descendants(process.pid)
        assert len(server) == 2  # MLflow's command and one worker
        status, page = ask(port, "/")
        assert (status, "<title>MLflow</title>" in page) == (200, True)
        found = json.loads(ask(port, "/api/2.0/mlflow/experiments/search", {"max_results": 9})[1])["experiments"]
        (experiment,) = [entry for entry in found if entry["name"] == "vines"]
        query = {"experiment_ids": [experiment["experiment_id"]]}
        (run,) = json.loads(ask(port, "/api/2.0/mlflow/runs/search", query)[1])["runs"]
        assert run["data"]["params"] == [{"key": "depth", "value": "3"}]
        assert [(metric["key"], metric["value"]) for metric in run["data"]["metrics"]] == [("loss", 0.25)]
        file = f"/get-artifact?path=config.yaml&run_uuid={run['info']['run_id']}"
        assert ask(port, file) == (200, "depth: 3\n")
        assert ask(port, "/api/2.0/mlflow/experiments/search", {"max_results": 9}, Host="example.org")[0] == 403
        assert json.loads(ask(port, "/ajax-api/3.0/mlflow/ui-telemetry")[1])["disable_ui_telemetry"] is True
        assert listening_addresses(port) == {"127.0.0.1"}

        taken = call("ui", "--root", root, "--port", port)
        assert taken.status == 1
        assert f"port {port} cannot be used (Address already in use); give another one with --port" in taken.err

        press_ctrl_c(process)
        assert rest_of(process) == Finished(0, "", "")
        assert gone(server)
    assert sorted(path.name for path in root.rglob("*")) == before


def listening_addresses(port: int) -> set[str]:
    """Return the addresses of this machine at which somebody listens on a port."""
    table = Path("/proc/net/tcp").read_text().splitlines()[1:] + Path("/proc/net/tcp6").read_text().splitlines()[1:]
    listening = [line.split() for line in table]
    hexadecimal = {
        fields[1].split(":")[0]
        for fields in listening
        if fields[3] == "0A" and int(fields[1].split(":")[1], 16) == port
    }
    return {socket.inet_ntoa(bytes.fromhex(text)[::-1]) if len(text) == 8 else text for text in hexadecimal}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_told_end_takes_the_server_along(root: Path, port: int, number: signal.Signals, status: int) -> None:
    """A process manager's request and a closed terminal end the server too."""
    with pages(root, port, "-q") as process:
        server = descendants(process.pid)
        process.send_signal(number)
        assert rest_of(process).status == status
        assert gone(server)


@pytest.mark.slow
def test_ctrl_c_during_the_start_leaves_nothing(root: Path, port: int) -> None:
    """Who changes their mind before the address is printed is rid of the server as well."""
    with started_ui(root, port, "-q") as process:
        deadline = time.monotonic() + PATIENCE
        while not (server := descendants(process.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        press_ctrl_c(process)
        assert rest_of(process) == Finished(0, "", "")
        assert gone(server)


@pytest.mark.slow
def test_a_server_that_dies_is_an_error(root: Path, port: int) -> None:
    """Its end is told with a status and its last words, and its worker does not live on."""
    with pages(root, port) as process:
        server = descendants(process.pid)
        os.kill(server[0], signal.SIGKILL)
        done = rest_of(process)
        assert done.status == 1
        assert "ERROR: MLflow's server ended with status -9" in done.out
        assert gone(server)


@pytest.mark.slow
def test_verbose_shows_mlflows_messages(root: Path, port: int) -> None:
    """What MLflow says is hidden unless somebody asks; the store may be named by its address."""
    with started_ui(root, port, "-v", "--tracking-uri", sqlite_uri(default_database(root))) as process:
        said = read_until(process, f"MLflow's pages: http://127.0.0.1:{port}")
        assert "[MLflow] Security middleware enabled" in said
        assert ask(port, "/health") == (200, "OK")
        press_ctrl_c(process)
        assert "Uvicorn running on" in said + rest_of(process).out


def test_without_a_store_the_way_out_is_told(call: Call) -> None:
    """Nothing is started or made where nothing was recorded, by root or by address."""
    done = call("ui", "--root", "elsewhere")
    assert (done.status, done.out) == (2, "")
    assert re.search(
        r"nothing is recorded in /.*/elsewhere/mlruns/mlflow.db yet; run `python -m fedlightning.tune", done.err
    )
    named = call("ui", "--tracking-uri", "sqlite:///none%20such.db")
    assert named.status == 2
    assert "nothing is recorded in none such.db yet" in named.err
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "https://mlflow.example.org/x"])
def test_a_server_has_its_own_pages(call: Call, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a tracking server the answer is its address, whichever way it was named."""
    done = call("ui", "--tracking-uri", uri)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert done == call("ui")
    assert (done.status, done.out) == (2, "")
    assert f"the store {uri} is a server with pages of its own; open that address in a browser" in done.err


def test_a_damaged_store_is_an_error(call: Call) -> None:
    """Something else in the database's place is named before a server is started on it."""
    database = default_database(Path())
    database.parent.mkdir()
    database.write_bytes(b"no database" * 100)
    done = call("ui")
    assert done.status == 2
    assert f"{database} is no tracking database" in done.err


@pytest.mark.parametrize(
    ("given", "said"),
    [("0", "0 is not at least 1"), ("65536", "65536 is not at most 65535"), ("x", "'x' is not a whole number")],
)
def test_a_port_is_checked(call: Call, capsys: pytest.CaptureFixture[str], given: str, said: str) -> None:
    """What cannot be a port is refused at once."""
    with pytest.raises(SystemExit) as stopped:
        call("ui", "--port", given)
    assert stopped.value.code == 2
    assert f"argument --port: {said}" in capsys.readouterr().err
