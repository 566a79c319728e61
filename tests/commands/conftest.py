"""Call commands in the tests' own process, where what they do can be looked at and libraries are loaded once."""

import importlib
import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run_command import Finished

from fedlightning import cli


@pytest.fixture
def call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., Finished]]:
    """Return a function that calls a command by its name and arguments, in an empty folder with an empty cache."""
    for name in os.environ:
        if name.startswith(("FEDLIGHTNING_", "MLFLOW_", "OPTUNA_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FEDLIGHTNING_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(command: str, *arguments: object) -> Finished:
        capsys.readouterr()
        status = importlib.import_module(f"fedlightning.{command}").main([str(argument) for argument in arguments])
        return Finished(status, *capsys.readouterr())

    # A command sets up its process; the next test shall find it as it was.
    for name in cli._QUIET_ENVIRONMENT:
        monkeypatch.setenv(name, os.environ.get(name, "true"))
    handlers, on_terminate = logging.root.handlers[:], signal.getsignal(signal.SIGTERM)
    loggers = [logging.getLogger(name) for name in (None, *logging.root.manager.loggerDict)]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        yield run
    logging.root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    signal.signal(signal.SIGTERM, on_terminate)
