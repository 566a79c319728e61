"""What all commands share: arguments, logging, quiet libraries, and how a failure ends."""

import argparse
import json
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from fedlightning import __version__

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
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}

logger = logging.getLogger("fedlightning")


def parser(command: str, description: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every command takes."""
    made = argparse.ArgumentParser(
        prog=f"python -m fedlightning.{command}",
        description=description,
        epilog="examples:\n" + "\n".join(f"  python -m fedlightning.{command} {line}".rstrip() for line in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    common = made.add_argument_group("everywhere")
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
    common.add_argument("-v", "--verbose", action="count", default=0, help="say more; twice for debugging")
    common.add_argument("-q", "--quiet", action="store_true", help="print results and errors only")
    common.add_argument("--version", action="version", version=f"fedlightning {__version__}")
    return made


def add_training_arguments(command: argparse.ArgumentParser) -> None:
    """Add what the commands that train share."""
    command.add_argument("--seed", type=_seed, metavar="N", help="seed of trees, validation cut, network and batches")
    command.add_argument(
        "--accelerator", choices=("cpu", "auto"), default="cpu", help="device for the network (default: cpu)"
    )
    command.add_argument("--json", action="store_true", help="print nothing but JSON, an object per line, on stdout")
    command.add_argument("overrides", nargs="*", metavar="key=value", help="settings by their dotted path")


def run(main: Callable[[argparse.Namespace], None], made: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Parse, call a command's main function, and turn what it raises into a message and an exit status."""
    arguments = made.parse_intermixed_args(argv)
    configure(verbose=arguments.verbose, quiet=arguments.quiet)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        main(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        logger.error("interrupted; what was finished is stored, and the same command goes on from there")
        return EXIT_INTERRUPTED
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
    level = logging.ERROR if quiet else (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s" if verbose < 2 else logging.BASIC_FORMAT))
    logging.basicConfig(level=logging.INFO if verbose > 1 else logging.WARNING, handlers=[handler], force=True)
    logger.setLevel(level)
    if not verbose:
        # Third parties' remarks on themselves; ours come through the log.
        warnings.simplefilter("ignore")
        for noisy in ("flwr", "lightning", "mlflow", "alembic", "optuna", "sqlalchemy"):
            logging.getLogger(noisy).setLevel(logging.ERROR)


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
