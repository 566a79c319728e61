"""A SuperLink and its SuperNodes as processes of their own, on this machine's loopback."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from run_command import PATIENCE, command_environment

CONNECTION = "test"
"""Name of the connection to the SuperLink in Flower's configuration."""


@dataclass(frozen=True)
class RunningSuperLink:
    """Where a SuperLink was started, and what a command needs in its environment to find it."""

    folder: Path
    """The server's folder: its mlruns/ and studies/."""
    env: dict[str, str]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running_superlink(folder: Path, node_configs: Sequence[str]) -> Iterator[RunningSuperLink]:
    """Start a SuperLink in ``folder/server`` and a SuperNode per configuration, each in a folder of its own."""
    home, server, port = folder / "flower", folder / "server", free_port()
    home.mkdir(parents=True)
    server.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n'
        f'[superlink.{CONNECTION}]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    env = {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # How soon a process is started for a message; the default is a second.
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    }
    with ExitStack() as stack:

        def start(program: str, *words: str, cwd: Path) -> None:
            log = stack.enter_context((cwd / "log.txt").open("w"))
            process = subprocess.Popen(
                [str(Path(sys.executable).with_name(program)), "--insecure", *words],
                cwd=cwd,
                env=command_environment({**env, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(_end, process)

        start(
            "flower-superlink",
            *("--host", "127.0.0.1", "--port", str(port), "--disable-runtime-dependency-installation"),
            cwd=server,
        )
        _wait_for(port)
        for number, config in enumerate(node_configs):
            node = folder / f"node{number}"
            node.mkdir()
            start(
                "flower-supernode",
                *("--superlink", f"127.0.0.1:{port}", "--port", str(free_port())),
                *("--node-config", f"{config} cache-dir='{node / 'cache'}'"),
                cwd=node,
            )
        yield RunningSuperLink(server, env)


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            assert time.monotonic() < deadline, "the SuperLink does not answer"
            time.sleep(0.1)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a server and the processes that it started."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
