"""Hand a command to a SuperLink with Flower's own command line, follow it, and tell how it ended."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlightning import __version__

_POLL_SECONDS = 1.0
# Flower tells a run's end some moments after the last line of its log.
_END_SECONDS = 60.0

_APP = """\
[project]
name = "fedlightning-run"
version = "{version}"
description = "A command for the fedlightning that the SuperLink and its nodes have installed."
license = "Apache-2.0"

[tool.flwr.app]
publisher = "fedlightning"

[tool.flwr.app.components]
serverapp = "fedlightning.server_app:app"
clientapp = "fedlightning.federation.client_app:app"

[tool.flwr.app.config]
command = {command}
"""


@dataclass(frozen=True)
class Outcome:
    """How a run on a SuperLink ended."""

    run_id: str
    status: str
    """Flower's word, such as ``finished:completed``."""
    details: str

    @property
    def completed(self) -> bool:
        """Whether the run did what it was asked for."""
        return self.status == "finished:completed"


def submit(command: str, superlink: str | None) -> str:
    """Start a run and return its id; no code travels, the command's words do.

    Args:
        command: What would follow ``python -m fedlightning``.
        superlink: Name of a connection in Flower's configuration; its default one if None.

    Raises:
        RuntimeError: Flower's command line failed; its own words are part of the message.
    """
    with tempfile.TemporaryDirectory(prefix="fedlightning-") as folder:
        # A JSON string of ASCII is a TOML string.
        text = _APP.format(version=__version__, command=json.dumps(command))
        (Path(folder) / "pyproject.toml").write_text(text, encoding="utf-8")
        return str(_flower("run", folder, *_named(superlink))["run-id"])


def follow(run_id: str, superlink: str | None) -> None:
    """Show a run's log on this process's standard output until it ends; Ctrl-C stops the run."""
    # In a group of its own, so that Ctrl-C reaches only this process, which stops the run in its turn.
    with subprocess.Popen(
        [*_FLOWER, "log", run_id, *_named(superlink)], env=_environment(), start_new_session=True
    ) as log:
        try:
            log.wait()
        except BaseException:
            log.send_signal(signal.SIGTERM)
            stop(run_id, superlink)
            raise


def stop(run_id: str, superlink: str | None) -> None:
    """Stop a run."""
    _flower("stop", run_id, *_named(superlink))


def outcome(run_id: str, superlink: str | None) -> Outcome:
    """Wait until a run has ended, and return how.

    Raises:
        RuntimeError: The SuperLink does not answer, or does not tell the end of a run whose log has ended.
    """
    deadline = time.monotonic() + _END_SECONDS
    while True:
        (run,) = _flower("ls", *_named(superlink), "--run-id", run_id)["runs"]
        found = Outcome(run_id, run["status"], run["status-details"])
        if found.status.startswith("finished"):
            return found
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"run {run_id} is {found.status} though its log has ended; look at it: flwr ls --run-id {run_id}"
            )
        time.sleep(_POLL_SECONDS)


_FLOWER = (sys.executable, "-m", "flwr.cli.app")


def _named(superlink: str | None) -> tuple[str, ...]:
    return () if superlink is None else (superlink,)


def _environment() -> dict[str, str]:
    # Without a terminal's width Flower cuts its lines at 80 columns.
    return {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": os.environ.get("COLUMNS", "200")}


def _flower(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [*_FLOWER, *words, "--format", "json"], capture_output=True, text=True, check=False, env=_environment()
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = {}
    if done.returncode or not answer.get("success"):
        said = answer.get("error-message") or done.stderr.strip() or done.stdout.strip()
        raise RuntimeError(f"flwr {words[0]} failed: {said or f'exit status {done.returncode}'}")
    return dict(answer)
