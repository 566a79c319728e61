"""Show what was recorded in MLflow's pages, on this machine only."""

import argparse
import sys
from collections.abc import Sequence

from fedlightning import cli

DESCRIPTION = """\
Start MLflow's pages on the store of this folder (or of --root, or --tracking-uri) and print their address. Each
study is an experiment: select its trials and press Compare. Only this machine reaches them; Ctrl-C ends them.
They may stay open while `tune` works: what it records shows up when the page is loaded again."""

EXAMPLES = ("", "--port 5001", "--root ~/experiments")


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    command = cli.parser("ui", DESCRIPTION, EXAMPLES)
    command.add_argument("--port", type=_port, default=5000, metavar="N", help="port to listen on (default: 5000)")
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return cli.run(_ui, build_parser(), argv)


def _ui(arguments: argparse.Namespace) -> None:
    from fedlightning.jobs.ui import find_store, serve

    store = find_store(arguments.root, arguments.tracking_uri)

    def say(address: str) -> None:
        sys.stdout.write(f"{address}\n" if arguments.quiet else f"MLflow's pages: {address} (Ctrl-C ends them)\n")
        sys.stdout.flush()

    if not arguments.quiet:
        sys.stdout.write("starting MLflow's server\n")
        sys.stdout.flush()
    serve(store, port=arguments.port, on_start=say, verbose=arguments.verbose > 0)


def _port(text: str) -> int:
    number = cli.positive_int(text)
    if number > 65_535:
        raise argparse.ArgumentTypeError(f"{number} is not at most 65535")
    return number


if __name__ == "__main__":
    sys.exit(main())
