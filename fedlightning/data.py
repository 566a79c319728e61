"""List the known data sets, fetch their files, and verify them."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedlightning import cli

if TYPE_CHECKING:
    from fedlightning.datasets import DatasetSources, FileSource, FileVerdict

DESCRIPTION = """\
List the known data sets, fetch their files, or verify the files that are there.
  list              each data set, and where its files come from
  fetch NAME|all    download what is missing; a file is kept only if its content is right
  verify NAME|all   check each file; nothing is downloaded or changed
Files are looked for in --data-dir, in the folder FEDLIGHTNING_DATA_DIR, among those that ship with the package, and
in the cache (FEDLIGHTNING_CACHE_DIR, by default ~/.cache/fedlightning), where downloads go. They may be plain or
compressed (.xz, .bz2, .gz). Downloads come from LIBSVM Data, or from the address FEDLIGHTNING_DATA_URL; a proxy is
taken from HTTPS_PROXY and HTTP_PROXY."""

EXAMPLES = (
    "list",
    "fetch abalone",
    "fetch all --data-dir ~/libsvm",
    "verify all --json",
)

SKLEARN = "scikit-learn"


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    command = cli.parser("data", DESCRIPTION, EXAMPLES)
    command.add_argument("action", choices=("list", "fetch", "verify"), metavar="list|fetch|verify")
    command.add_argument("names", nargs="*", default=[], metavar="NAME", help="data sets, or all")
    command.add_argument("--json", action="store_true", help="print nothing but JSON, an object per line, on stdout")
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return cli.run(_data, build_parser(), argv, when_stopped="no half downloaded file is kept")


def _data(arguments: argparse.Namespace) -> None:
    from fedlightning.datasets import CATALOGUE, find_dataset

    if not arguments.names and arguments.action != "list":
        raise ValueError(f"{arguments.action} what? name a data set, or all; known: {', '.join(CATALOGUE)}")
    everything = not arguments.names or "all" in arguments.names
    names = list(CATALOGUE) if everything else list(dict.fromkeys(find_dataset(n).name for n in arguments.names))
    {"list": _list, "fetch": _fetch, "verify": _verify}[arguments.action](arguments, names)


def _list(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    from fedlightning import tables
    from fedlightning.datasets import list_datasets

    found = [sources for sources in list_datasets(arguments.data_dir) if sources.entry.name in names]
    if arguments.json:
        for sources in found:
            entry = sources.entry
            cli.print_json(
                {
                    "dataset": entry.name,
                    "task": entry.task,
                    "rows": entry.rows,
                    "features": entry.features,
                    "classes": entry.classes,
                    "available": sources.available,
                    "files": [_file(source) for source in sources.files],
                    "description": entry.description,
                }
            )
        return
    cells = [[s.entry.name, s.entry.task, f"{s.entry.rows:,}", str(s.entry.features), _whereabouts(s)] for s in found]
    sys.stdout.write(tables.align([["name", "task", "rows", "features", "files"], *cells], left=(0, 1, 4)))


def _whereabouts(sources: "DatasetSources") -> str:
    if not sources.files:
        return f"with {SKLEARN}"
    places = dict.fromkeys(_place(source) for source in sources.files if source.path is not None)
    missing = [source.file.name for source in sources.files if source.path is None]
    return "; ".join([*places, *([f"missing, `data fetch` downloads: {', '.join(missing)}"] if missing else [])])


def _place(source: "FileSource") -> str:
    assert source.path is not None
    return {"bundled": "bundled", "cache": "cache", "data_dir": str(source.path.parent)}[source.origin]


def _fetch(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    from rich.console import Console

    from fedlightning.datasets import fetch_dataset
    from fedlightning.downloads import DownloadDisplay

    failed: list[str] = []
    console = Console(stderr=arguments.json)
    for name in names:
        try:
            with DownloadDisplay(console, quiet=arguments.quiet) as progress:
                sources = fetch_dataset(name, arguments.data_dir, progress)
        # One that cannot be had should not keep the others away.
        except (OSError, ValueError) as error:
            if arguments.json:
                cli.print_json({"dataset": name, "status": "failed", "detail": str(error)})
            if len(names) == 1:
                raise
            cli.logger.error("%s", error)
            failed.append(name)
            continue
        for source in sources:
            _say(arguments, name, "ok", str(source.path), source)
        if not sources:
            _say(arguments, name, "ok", f"comes with {SKLEARN}")
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(names)} data sets could not be fetched: {', '.join(failed)}")


def _verify(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    from fedlightning.datasets import verify_dataset

    bad: list[str] = []
    count = 0
    for name in names:
        verdicts = verify_dataset(name, arguments.data_dir)
        for verdict in verdicts:
            _say(arguments, name, verdict.status, _advice(verdict), verdict.source)
        if not verdicts:
            _say(arguments, name, "ok", f"comes with {SKLEARN}")
        count += len(verdicts)
        bad += [verdict.source.file.name for verdict in verdicts if not verdict.ok]
    if bad:
        raise RuntimeError(f"{len(bad)} of {count} files are damaged or missing: {', '.join(bad)}")


def _advice(verdict: "FileVerdict") -> str:
    from fedlightning.datasets import way_out

    source = verdict.source
    if verdict.ok:
        return f"{verdict.detail} ({source.path})"
    if source.origin in ("data_dir", "bundled"):
        return f"{verdict.detail}; {way_out(source)}"
    return f"{verdict.detail}; `data fetch` downloads it"


def _say(
    arguments: argparse.Namespace, dataset: str, status: str, detail: str, source: "FileSource | None" = None
) -> None:
    if arguments.json:
        file = _file(source) if source else {"file": None, "origin": SKLEARN, "path": None, "url": None}
        cli.print_json({"dataset": dataset, **file, "status": status, "detail": detail})
    else:
        sys.stdout.write(f"{dataset}: {status}: {detail}\n")
        sys.stdout.flush()


def _file(source: "FileSource") -> dict[str, Any]:
    return {
        "file": source.file.name,
        "origin": source.origin,
        "path": str(source.path) if source.path else None,
        "url": source.url,
    }


if __name__ == "__main__":
    sys.exit(main())
