"""Tests for what all commands share: arguments, messages, exit statuses, and how a terminal is treated."""

import argparse
import io
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlightning import __version__, cli
from fedlightning.__main__ import COMMANDS

HEAVY = ("flwr", "lightning", "matplotlib", "mlflow", "numpy", "optuna", "plotly", "pydantic", "sklearn", "torch")


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a command does to its process: signals, loggers, warnings, environment."""
    handler = signal.getsignal(signal.SIGTERM)
    loggers = [logging.getLogger(name) for name in (None, *logging.root.manager.loggerDict)]
    levels = [logger.level for logger in loggers]
    handlers = logging.root.handlers[:]
    for name in cli._QUIET_ENVIRONMENT:
        monkeypatch.setenv(name, os.environ.get(name, ""))
    with warnings.catch_warnings():
        yield
    signal.signal(signal.SIGTERM, handler)
    logging.root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def command(main: Callable[[argparse.Namespace], None], *arguments: str, when_stopped: str = "") -> int:
    """Run a command of the tests' own."""
    made = cli.parser("try", "Try.", ["--root x"])
    cli.add_training_arguments(made)
    return cli.run(main, made, arguments, when_stopped=when_stopped)


def raising(error: BaseException) -> Callable[[argparse.Namespace], None]:
    """Return a command that fails."""

    def main(arguments: argparse.Namespace) -> None:
        raise error

    return main


def script(text: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command of the tests' own in a process of its own."""
    head = "import sys\nfrom fedlightning import cli\nmade = cli.parser('try', 'Try.', [])\n"
    return subprocess.run(
        [sys.executable, "-c", head + text, *arguments],
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        check=False,
        timeout=60,
        **options,
    )


# -- help -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_fits_a_screen_and_loads_nothing_heavy(name: str) -> None:
    """Every command's help has at most 45 lines of 110 columns, shows how to call it, and comes at once."""
    text = (
        f"import sys\nfrom fedlightning.{name} import build_parser\nprint(build_parser().format_help())\n"
        f"print([module for module in {HEAVY!r} if module in sys.modules], file=sys.stderr)"
    )
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, encoding="utf-8", env=environment)
    assert done.stderr.strip() == "[]"
    lines = done.stdout.rstrip().splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 110
    examples = lines[lines.index("examples:") + 1 :]
    assert examples
    assert all(line.startswith(f"  python -m fedlightning.{name}") for line in examples)


@pytest.mark.parametrize(
    ("argv0", "called"),
    [
        ("/x/fedlightning/tune.py", "python -m fedlightning.ui"),
        ("/x/fedlightning/__main__.py", "python -m fedlightning ui"),
        ("/x/bin/fedlightning", "fedlightning ui"),
        ("-c", "python -m fedlightning.ui"),
    ],
)
def test_commands_are_named_as_they_were_called(monkeypatch: pytest.MonkeyPatch, argv0: str, called: str) -> None:
    """What a command tells people to type next is spelled the way they came."""
    monkeypatch.setattr(sys, "argv", [argv0])
    assert cli.program("ui") == called


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
def test_command_lines_can_be_copied(name: str) -> None:
    """A command line for a root of any name is one that a shell reads as it was meant."""
    root = Path(name)
    words = shlex.split(cli.rooted("run", root, "--clients", name))
    place = [] if root == Path() else ["--root", str(root)]
    assert words == [*cli.program("run").split(), "--clients", name, *place]


def test_this_folder_is_not_mentioned() -> None:
    """Who works in the project's folder is not told to name it."""
    assert cli.rooted("ui", Path()) == cli.program("ui")
    assert cli.rooted("ui", Path("./")) == cli.program("ui")


# -- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nope"], "unrecognized arguments: --nope"),
        (["--ver"], "unrecognized arguments: --ver"),
        (["--seed", "x"], "argument --seed: 'x' is not a whole number"),
        (["--seed", "-1"], "argument --seed: -1 is not in 0..4294967295"),
        (["--seed", "4294967296"], "argument --seed: 4294967296 is not in 0..4294967295"),
        (["--seed"], "argument --seed: expected one argument"),
        (["--accelerator", "tpu"], "argument --accelerator: invalid choice: 'tpu' (choose from 'cpu', 'auto')"),
    ],
)
def test_wrong_arguments_end_in_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    """A wrong argument is one line that says where to look, and exit status 2; abbreviations are not guessed."""
    with pytest.raises(SystemExit) as stop:
        command(raising(AssertionError()), *arguments)
    assert stop.value.code == cli.EXIT_USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"ERROR: {said}; see {cli.program('try')} --help\n"


def test_overrides_stand_anywhere() -> None:
    """Settings may stand before, between and after the options."""
    seen = []
    assert command(seen.append, "a=1", "--seed", "3", "b.c=2", "-q", "d=3") == 0
    assert seen[0].overrides == ["a=1", "b.c=2", "d=3"]
    assert (seen[0].seed, seen[0].quiet, seen[0].root) == (3, True, Path())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The version is told without doing anything."""
    with pytest.raises(SystemExit) as stop:
        command(raising(AssertionError()), "--version")
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"fedlightning {__version__}\n"


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "", "one", "1e3"])
def test_counts_are_whole_and_positive(text: str) -> None:
    """A count below one, or one that is not whole, is refused with the text that was given."""
    with pytest.raises(argparse.ArgumentTypeError, match=text or "''"):
        cli.positive_int(text)
    assert cli.positive_int("12") == 12


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "-inf", "", "soon"])
def test_durations_are_finite_and_positive(text: str) -> None:
    """A duration that never ends, or is over before it begins, is refused with the text that was given."""
    with pytest.raises(argparse.ArgumentTypeError, match=text or "''"):
        cli.positive_float(text)
    assert cli.positive_float("0.5") == 0.5


# -- how a command ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError("xgb.max_depth is 0"), 2, "xgb.max_depth is 0"),
        (LookupError("unknown study 'x'; known: y"), 2, "unknown study 'x'; known: y"),
        (KeyError("no 'x'"), 2, "no 'x'"),
        (FileNotFoundError("x is missing"), 2, "x is missing"),
        (RuntimeError("client 3 failed"), 1, "client 3 failed"),
        (PermissionError("cannot write x"), 1, "cannot write x"),
        (ImportError("no module"), 1, "no module"),
        (OSError(), 1, "OSError"),
    ],
)
def test_errors_become_messages(capsys: pytest.CaptureFixture[str], error: Exception, status: int, said: str) -> None:
    """What was given wrong ends with status 2, what failed on the way with 1; one line on stderr, no traceback."""
    assert command(raising(error)) == status
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"ERROR: {said}\n")


def test_verbose_errors_have_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """With -v the traceback comes before the message."""
    assert command(raising(ValueError("bad")), "-v") == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last)")
    assert err.endswith("ERROR: bad\n")


def test_our_own_mistakes_are_not_hidden() -> None:
    """An error that no user can cause comes through with its traceback."""
    with pytest.raises(ZeroDivisionError):
        command(raising(ZeroDivisionError()))


def test_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends with status 130 and a line on what becomes of the work."""
    assert command(raising(KeyboardInterrupt()), when_stopped="nothing is lost") == 130
    assert capsys.readouterr().err == "ERROR: interrupted; nothing is lost\n"


def test_terminated() -> None:
    """SIGTERM unwinds like Ctrl-C, so that everything is closed on the way, and ends with status 143."""
    text = """
import os, signal
def main(arguments):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        print("the signal should have ended this")
    finally:
        print("unwound")
sys.exit(cli.run(main, made, [], when_stopped="nothing is lost"))
"""
    done = script(text)
    assert (done.returncode, done.stdout, done.stderr) == (143, "unwound\n", "ERROR: terminated; nothing is lost\n")


def test_a_reader_that_has_seen_enough() -> None:
    """Output that nobody reads any more (`| head -1`) ends the command quietly."""
    text = "main = lambda arguments: [cli.print_json(i) for i in range(100_000)]\nsys.exit(cli.run(main, made, []))"
    head = "import sys\nfrom fedlightning import cli\nmade = cli.parser('try', 'Try.', [])\n"
    with subprocess.Popen(
        [sys.executable, "-c", head + text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == cli.EXIT_FAILED


# -- what it writes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "levels"),
    [((), "WE"), (("-q",), "E"), (("-v",), "IWE"), (("-vv",), "DIWE"), (("-v", "-v"), "DIWE"), (("-q", "-v"), "E")],
)
def test_how_much_is_said(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], levels: str) -> None:
    """Warnings and errors by default; -q only errors, -v also what happens, -vv everything."""

    def main(parsed: argparse.Namespace) -> None:
        logger = logging.getLogger("fedlightning.federation")
        for level in ("debug", "info", "warning", "error"):
            getattr(logger, level)("it happened")

    assert command(main, *arguments) == 0
    lines = capsys.readouterr().err.splitlines()
    assert "".join(line[0] for line in lines) == levels
    assert all("it happened" in line for line in lines)


@pytest.mark.parametrize("verbose", [False, True])
def test_libraries_are_quiet_unless_asked(verbose: bool) -> None:
    """Other libraries' remarks and warnings are not ours to show; with -v they are."""
    text = """
import logging, warnings
def main(arguments):
    logging.getLogger("mlflow.store").warning("a remark")
    warnings.warn("a warning")
sys.exit(cli.run(main, made, sys.argv[1:]))
"""
    done = script(text, *(["-v"] if verbose else []))
    assert done.returncode == 0
    assert ("a remark" in done.stderr, "a warning" in done.stderr) == (verbose, verbose)
    assert verbose or done.stderr == ""


def test_nobody_is_told_what_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Usage reports of the libraries are off, but a user who wants them is heard."""
    for name in cli._QUIET_ENVIRONMENT:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    assert command(lambda arguments: None) == 0
    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "1"
    assert os.environ["DO_NOT_TRACK"] == "true"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_messages_go_to_the_present_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message goes to what stderr is when it is said: a live line stands there meanwhile."""
    cli.configure(verbose=0, quiet=False)
    instead = io.StringIO()
    monkeypatch.setattr(sys, "stderr", instead)
    cli.logger.warning("above the line")
    assert instead.getvalue() == "WARNING: above the line\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_character_set_will_do(encoding: str) -> None:
    """A name that the terminal's character set lacks is written with escapes, not lost to an error."""
    text = "sys.exit(cli.run(lambda arguments: print('Köln 東京'), made, []))"
    done = script(text, env={**os.environ, "PYTHONIOENCODING": encoding})
    assert (done.returncode, done.stderr) == (0, "")
    written = done.stdout.encode("utf-8", "surrogateescape").decode(encoding)
    assert written == "Köln 東京\n".encode(encoding, "backslashreplace").decode(encoding)


def test_json_is_one_line_that_every_reader_understands(capsys: pytest.CaptureFixture[str]) -> None:
    """An object is one line of plain ASCII; a number that JSON has no word for is an error, not a line."""
    cli.print_json({"name": "Köln\n", "value": 0.1, "none": None})
    out = capsys.readouterr().out
    assert out.isascii()
    assert out.count("\n") == 1
    assert json.loads(out) == {"name": "Köln\n", "value": 0.1, "none": None}
    with pytest.raises(ValueError, match="JSON"):
        cli.print_json({"value": float("nan")})


def test_seconds_count_from_the_start_of_the_process() -> None:
    """What ran before the first import of ours is counted too, and an hour-old machine is not."""
    done = script("print(cli.seconds_since_start())", env={**os.environ, "PYTHONSTARTUP": ""})
    early = subprocess.run(
        [
            sys.executable,
            "-c",
            "import time; time.sleep(0.5)\nfrom fedlightning import cli\nprint(cli.seconds_since_start())",
        ],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert float(done.stdout) < 60
    assert 0.5 <= float(early.stdout) < 60
