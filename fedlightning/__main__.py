"""List the commands, and run one: `fedlightning tune ...` is `python -m fedlightning.tune ...`."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from fedlightning import __version__, cli

COMMANDS = {
    "tune": "search a study's space, refit the winner, export it",
    "ui": "show what was recorded, in MLflow's pages",
    "export": "write the best trial of a study as a client config",
    "run": "train with one or several client configs, and compare",
    "submit": "do a run or a study on a live federation, over a SuperLink",
    "centralized": "fit XGBoost on all rows in one place, for comparison",
    "data": "list, fetch and verify the data sets",
}
"""Each command, which is a module, and what it does; the module is imported only when it is called."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of a command's name."""
    program = "fedlightning" if Path(sys.argv[0]).stem == "fedlightning" else "python -m fedlightning"
    made = cli.Parser(
        prog=program,
        usage=f"{program} COMMAND [argument ...]",
        description="Federated XGBoost without exchanging gradients: tune it, run it, compare it.",
        epilog="\n".join(
            [
                "commands:",
                *(f"  {name:<12}{purpose}" for name, purpose in COMMANDS.items()),
                f"\n{program} COMMAND --help tells more.",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    made.add_argument("--version", action="version", version=f"fedlightning {__version__}")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names, and return its exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    # What follows the command's name is for its own parser.
    command = build_parser().parse_args(arguments[:1]).command
    status: int = importlib.import_module(f"fedlightning.{command}").main(arguments[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
