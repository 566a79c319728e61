"""What all commands share: arguments, logging, quiet libraries, and how a failure ends."""

import argparse
import io
import itertools
import json
import logging
import os
import shlex
import signal
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TextIO

from fedlightning import __version__

if TYPE_CHECKING:
    from fedlightning.federation.engines import Engine

EXIT_USAGE = 2
"""Something given was wrong: an argument, a file, a value."""
EXIT_FAILED = 1
"""Something failed on the way: a client, a store, a download."""
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

# Libraries that send usage reports or look for updates; a user who has set them has decided.
_QUIET_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # What later versions do anyway; Ray announces the change at every start otherwise.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}

_NOISY = ("flwr", "ray", "lightning", "mlflow", "alembic", "optuna", "sqlalchemy")
"""Libraries whose log is shown only to those who ask for more."""

TRAINING_COMMANDS = ("run", "tune")
"""Commands that train on a federation, and can be handed to a live one."""

_HELP_WIDTH = 108

logger = logging.getLogger("fedlightning")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        """Leave with the message."""
        self.exit(EXIT_USAGE, f"ERROR: {message}; see {self.prog} --help\n")


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what sys.stderr is at that moment: a live line puts itself there, so that it is not torn apart."""

    @property
    def stream(self) -> TextIO:
        """The stream to write to."""
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass


def parser(command: str, description: str, examples: Sequence[str], *, places: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every command takes; ``places`` are those of this machine's folders."""
    called = program(command)
    made = Parser(
        prog=called,
        description=_filled(description),
        epilog="examples:\n" + "\n".join(f"  {called} {line}".rstrip() for line in examples),
        # The same text in every terminal, and wide enough that it fits one screen.
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=26, width=_HELP_WIDTH
        ),
        allow_abbrev=False,
    )
    common = made.add_argument_group("everywhere")
    if places:
        _add_places(common)
    common.add_argument("-v", "--verbose", action="count", default=0, help="say more; twice for debugging")
    common.add_argument("-q", "--quiet", action="store_true", help="print results and errors only")
    common.add_argument("--version", action="version", version=f"fedlightning {__version__}")
    return made


def _add_places(common: "argparse._ArgumentGroup") -> None:
    common.add_argument(
        "--root",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where mlruns/ and studies/ live (default: here)",
    )
    common.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="data files to use before any other (or FEDLIGHTNING_DATA_DIR)",
    )
    common.add_argument(
        "--tracking-uri", metavar="URI", help="MLflow store or server (default: <root>/mlruns/mlflow.db)"
    )


def program(command: str) -> str:
    """Return how a command is called: as a module, or below the program that lists all commands."""
    started = Path(sys.argv[0])
    if started.stem == "fedlightning":
        return f"fedlightning {command}"
    if started.parts[-2:] == ("fedlightning", "__main__.py"):
        return f"python -m fedlightning {command}"
    return f"python -m fedlightning.{command}"


def rooted(command: str, root: Path, *words: object) -> str:
    """Return a command line to copy: what else it takes, and the same root if it is not this folder."""
    place = [] if root == Path() else ["--root", root]
    return " ".join([program(command), *(shlex.quote(str(word)) for word in (*words, *place))])


def add_training_arguments(command: argparse.ArgumentParser, *, network: bool = True) -> None:
    """Add what the commands that train share; those without a network take no device for it."""
    purposes = "trees, validation cut, network and batches" if network else "the trees"
    command.add_argument("--seed", type=_seed, metavar="N", help=f"seed of {purposes}")
    if network:
        command.add_argument(
            "--accelerator", choices=("cpu", "auto"), default="cpu", help="device for the network (default: cpu)"
        )
        command.add_argument(
            "--engine", choices=("local", "ray"), default="local", help="where the clients run (default: local)"
        )
    command.add_argument("--json", action="store_true", help="print nothing but JSON, an object per line, on stdout")
    command.add_argument("overrides", nargs="*", metavar="key=value", help="settings by their dotted path")


def add_storage_argument(command: argparse.ArgumentParser) -> None:
    """Add where studies are stored."""
    command.add_argument(
        "--storage",
        metavar="URL",
        help="store of studies: a database's URL, journal://FILE, FILE.log or grpc://HOST:PORT",
    )


def start_engine(arguments: argparse.Namespace, opened: "Engine | None", client_num: int, jobs: int = 1) -> "Engine":
    """Return the engine that a command runs on: one whose federation is open already, or what its arguments say.

    The local one begins to import what its clients need, in the background.
    """
    from fedlightning.federation.engines import ENGINES, client_processes
    from fedlightning.federation.local_grid import warm_up

    if opened is not None:
        return opened
    if arguments.engine == "local" and client_processes(client_num, jobs):
        warm_up()
    return ENGINES[arguments.engine]()


def run(
    main: Callable[[argparse.Namespace], None],
    made: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    *,
    when_stopped: str = "",
) -> int:
    """Parse, call a command's main function, and turn what it raises into a message and an exit status.

    Args:
        main: The command.
        made: Its parser.
        argv: Arguments in place of the process's own.
        when_stopped: What becomes of the work when somebody stops the command.
    """
    arguments = made.parse_intermixed_args(argv)
    configure(verbose=arguments.verbose, quiet=arguments.quiet)
    if threading.current_thread() is threading.main_thread():
        # In a simulation, Flower calls its ServerApp in another one.
        signal.signal(signal.SIGTERM, _terminate)
    ending = f"; {when_stopped}" if when_stopped else ""
    try:
        if "root" in arguments:
            _check_paths(arguments.root.absolute(), arguments.data_dir)
        main(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        logger.error("interrupted%s", ending)
        return EXIT_INTERRUPTED
    except SystemExit as stop:
        if stop.code == EXIT_TERMINATED:
            logger.error("terminated%s", ending)
        raise
    except BrokenPipeError:
        # Whoever read our output has seen enough; what is left in the buffer has no reader.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (ValueError, LookupError, FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        return _fail(error, EXIT_USAGE, arguments.verbose)
    except (OSError, RuntimeError, ImportError) as error:
        return _fail(error, EXIT_FAILED, arguments.verbose)
    return 0


def configure(*, verbose: int, quiet: bool) -> None:
    """Set up logging and keep the libraries quiet unless the user asks."""
    for name, value in _QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal's character set lacks is no reason to lose a result.
        sys.stdout.reconfigure(errors="backslashreplace")
    level = logging.ERROR if quiet else (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s" if verbose < 2 else logging.BASIC_FORMAT))
    logging.basicConfig(level=logging.INFO if verbose > 1 else logging.WARNING, handlers=[handler], force=True)
    logger.setLevel(level)
    if not verbose:
        # Third parties' remarks on themselves; ours come through the log.
        warnings.simplefilter("ignore")
        for noisy in _NOISY:
            logging.getLogger(noisy).setLevel(logging.ERROR)
        # Some set their own level again when they are imported.
        handler.addFilter(lambda record: record.levelno >= logging.ERROR or record.name.split(".")[0] not in _NOISY)


def print_json(values: object) -> None:
    """Print one object on one line."""
    sys.stdout.write(json.dumps(values, allow_nan=False) + "\n")
    sys.stdout.flush()


def seconds_since_start() -> float:
    """Return the seconds since this process began, imports included."""
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime", encoding="ascii") as file:
            uptime = float(file.read().split()[0])
        return uptime - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        import time

        return time.process_time()


def _check_paths(*paths: Path | None) -> None:
    """Refuse a path that is no text here before a database is asked to open it."""
    for path in filter(None, paths):
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"the path {str(path)!a} is not text in the character set {sys.getfilesystemencoding()}; "
                "set PYTHONUTF8=1, or choose another folder"
            ) from None


def _filled(text: str) -> str:
    """Return a text with its paragraphs filled; indented lines, such as a list's, stay as they are."""
    parts = []
    for is_plain, lines in itertools.groupby(text.splitlines(), lambda line: bool(line) and line[0] != " "):
        together = "\n".join(lines)
        parts.append(textwrap.fill(together, _HELP_WIDTH) if is_plain else together)
    return "\n".join(parts)


def _fail(error: BaseException, status: int, verbose: int) -> int:
    if verbose:
        traceback.print_exception(error)
    # A KeyError shows its text in quotes.
    text = str(error.args[0]) if isinstance(error, LookupError) and error.args else str(error)
    logger.error("%s", text or type(error).__name__)
    return status


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(EXIT_TERMINATED)


def _seed(text: str) -> int:
    from fedlightning.config.models import MAX_SEED

    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not 0 <= value <= MAX_SEED:
        raise argparse.ArgumentTypeError(f"{value} is not in 0..{MAX_SEED}")
    return value


def positive_int(text: str) -> int:
    """Read a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def positive_float(text: str) -> float:
    """Read a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return value
