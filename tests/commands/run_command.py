"""Run commands as a user does: as processes of their own, with signals and terminals where a test needs them."""

import importlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE = 240
"""Seconds after which a command counts as hung; no test measures how quick one is."""


@dataclass(frozen=True)
class Finished:
    """What a command left: its exit status and what it wrote."""

    status: int
    out: str
    err: str

    def json_lines(self) -> list[dict[str, Any]]:
        """Return the objects on stdout; fails if anything else is there."""
        return [json.loads(line) for line in self.out.splitlines()]


def command_environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Return this process's environment without what would change a command's behaviour; None removes a variable.

    The test's own cache folder stays.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name == "FEDLIGHTNING_CACHE_DIR" or not name.startswith(("FEDLIGHTNING_", "MLFLOW_", "OPTUNA_"))
    }
    for name, value in (changes or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def command_line(command: str, *arguments: object) -> list[str]:
    """Return the words that start a command, such as ``command_line("tune", "--study", "a9a_5")``."""
    return [sys.executable, "-m", f"fedlightning.{command}", *map(str, arguments)]


def run_command(
    command: str,
    *arguments: object,
    cwd: Path,
    env: Mapping[str, str | None] | None = None,
    patience: float = PATIENCE,
) -> Finished:
    """Run ``python -m fedlightning.<command>`` to its end, in the folder ``cwd``."""
    done = subprocess.run(
        command_line(command, *arguments),
        cwd=cwd,
        env=command_environment(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="backslashreplace",
        timeout=patience,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


@contextmanager
def started_command(
    command: str, *arguments: object, cwd: Path, env: Mapping[str, str | None] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a command at the head of a process group of its own, as a shell does; whatever is left of it is killed.

    stdout and stderr come as lines from ``process.stdout``.
    """
    process = subprocess.Popen(
        command_line(command, *arguments),
        cwd=cwd,
        env=command_environment({"PYTHONUNBUFFERED": "1", **(env or {})}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="backslashreplace",
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill_group(process)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def read_until(process: "subprocess.Popen[str]", text: str) -> str:
    """Return what a started command writes up to the first line that holds ``text``; fails at the end of its output."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return "".join(seen)
    raise AssertionError(f"{text!r} did not come; the command wrote:\n{''.join(seen)}")


def press_ctrl_c(process: "subprocess.Popen[str]") -> None:
    """Interrupt a started command as a terminal does: the whole process group hears it."""
    os.killpg(process.pid, signal.SIGINT)


def kill_group(process: "subprocess.Popen[str]") -> None:
    """Kill all processes of a started command that are left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def rest_of(process: "subprocess.Popen[str]") -> Finished:
    """Wait for the end of a started command; everything it still wrote is in ``out``."""
    out, _ = process.communicate(timeout=PATIENCE)
    return Finished(process.returncode, out, "")


@contextmanager
def one_core() -> Iterator[None]:
    """Leave this process one core: clients are then called in it, and no process of their own is started."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def call_command(command: str, *arguments: object, cwd: Path, env: Mapping[str, str | None] | None = None) -> Finished:
    """Call a command's ``main`` in this process, where everything is imported already.

    What it does to signals, loggers, warnings and the environment is undone.
    """
    main = importlib.import_module(f"fedlightning.{command}").main
    handler, environment = signal.getsignal(signal.SIGTERM), dict(os.environ)
    loggers = [logging.getLogger(name) for name in (None, *logging.root.manager.loggerDict)]
    levels = [logger.level for logger in loggers]
    handlers = logging.root.handlers[:]
    out, err = io.StringIO(), io.StringIO()
    for name in set(os.environ) - set(command_environment(env)):
        del os.environ[name]
    os.environ.update(command_environment(env))
    try:
        with one_core(), chdir(cwd), warnings.catch_warnings(), redirect_stdout(out), redirect_stderr(err):
            try:
                status = main([str(argument) for argument in arguments])
            except SystemExit as stop:
                status = stop.code
    finally:
        os.environ.clear()
        os.environ.update(environment)
        signal.signal(signal.SIGTERM, handler)
        logging.root.handlers[:] = handlers
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    return Finished(status, out.getvalue(), err.getvalue())
