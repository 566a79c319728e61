"""Write the best trial of a study so far as a client config."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedlightning import cli

DESCRIPTION = """\
Write the best trial that a study has so far as a client config, the way `tune` does at its end; also while the
study is still being searched, or after it was interrupted. The values are those that the trial ran with, whatever
has become of the study's file since; num_rounds is the round that was best.
Without --out the file is studies/clients/STUDY_clients.yaml, which `run --clients STUDY_clients` finds."""

EXAMPLES = (
    "--study a9a_5",
    "--study a9a_5 --out best.yaml",
    "--study a9a_5 --out -",
)


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    command = cli.parser("export", DESCRIPTION, EXAMPLES)
    command.add_argument("--study", required=True, metavar="NAME|PATH", help="a study that was begun with `tune`")
    cli.add_storage_argument(command)
    command.add_argument("--out", metavar="FILE", help="where to write; - is stdout")
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return cli.run(_export, build_parser(), argv)


def _export(arguments: argparse.Namespace) -> None:
    from fedlightning.config import study_name
    from fedlightning.config.files import looks_like_path
    from fedlightning.jobs.exports import best_export, export_path, write_clients
    from fedlightning.search import find_search

    search = find_search(study_name(arguments.study), arguments.root, arguments.storage)
    export = best_export(search)
    if arguments.out == "-":
        sys.stdout.write(export.text)
        return
    path = export_path(arguments.root, search.name) if arguments.out is None else Path(arguments.out)
    kept = write_clients(path, export.clients, export.header)
    if kept is not None:
        cli.logger.warning("%s was not an exported file; it is kept as %s", path, kept)
    if arguments.quiet:
        sys.stdout.write(f"{path}\n")
        return
    clients = path.stem if arguments.out is None else str(path)
    if arguments.out is not None and not looks_like_path(clients):
        clients = f"./{clients}"
    use = cli.rooted("run", arguments.root, "--dataset", search.config.dataset.name, "--clients", clients)
    sys.stdout.write(f"client config: {path} (trial {export.best.number})\nuse it:        {use}\n")


if __name__ == "__main__":
    sys.exit(main())
