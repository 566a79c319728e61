"""Run a command on a live federation: hand it to a SuperLink, show its log, and exit as it ended."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial

from fedlightning import cli

DESCRIPTION = """\
Hand a `run` or `tune` command to a SuperLink, whose SuperNodes are its clients; show the log; exit with status 0
only if it succeeded. Ctrl-C stops the run. What follows COMMAND is the command's own. Its relative paths are seen
from the folder that the SuperLink was started in: mlruns/ and studies/ are there. No code travels: the SuperLink's and
the nodes' machines run the fedlightning that they have installed."""

EXAMPLES = (
    "run --dataset a9a --clients a9a_2_clients",
    "--superlink hospital tune --study a9a_2 --trials 20",
)


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser; the words from COMMAND on are not for it."""
    command = cli.parser("submit", DESCRIPTION, EXAMPLES, places=False)
    command.usage = f"{cli.program('submit')} [-h] [--superlink NAME] [-v] [-q] [--version] COMMAND [argument ...]"
    command.add_argument(
        "--superlink", metavar="NAME", help="a connection in Flower's config.toml (default: its default one)"
    )
    command.add_argument(
        "command", choices=cli.TRAINING_COMMANDS, metavar="COMMAND", help=" or ".join(cli.TRAINING_COMMANDS)
    )
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    first = next((index for index, word in enumerate(given) if word in cli.TRAINING_COMMANDS), len(given))
    return cli.run(
        partial(_submit, words=given[first:]),
        build_parser(),
        given[: first + 1],
        when_stopped="the run on the SuperLink is stopped, too",
    )


def _submit(arguments: argparse.Namespace, words: Sequence[str]) -> None:
    import importlib

    from fedlightning.federation.submission import follow, outcome, submit

    # A mistake in the arguments is told here and now, not in a log on another machine.
    importlib.import_module(f"fedlightning.{arguments.command}").build_parser().parse_intermixed_args(words[1:])
    line = shlex.join(words)
    run_id = submit(line, arguments.superlink)
    if not arguments.quiet:
        cli.logger.info("run %s: %s", run_id, line)
    follow(run_id, arguments.superlink)
    ended = outcome(run_id, arguments.superlink)
    if not ended.completed:
        raise RuntimeError(f"run {ended.run_id} is {ended.status}: {ended.details}")


if __name__ == "__main__":
    sys.exit(main())
