"""Search a study's space, refit the winner, compare it on the test rows, and export it."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from fedlightning import cli

if TYPE_CHECKING:
    from fedlightning.config import StudyConfig
    from fedlightning.federation.engines import Engine

DESCRIPTION = """\
Search a study's space, trial by trial, on federated validation loss; then refit the best trial on all
training rows, read the test set once, and export the winner to studies/clients/STUDY_clients.yaml.

Started again, a study goes on where it was left: --trials is the number of complete and pruned trials that
it shall have in all, --timeout the seconds after which this call starts no further trial (the refit comes
on top). Ctrl-C is safe (exit status 130), and so is kill -9: the trial is tried again. Started several times
(elsewhere with --storage and --tracking-uri), it shares the trials, and one call refits. A key=value fixes a
searched key (xgb.max_depth=6), or sets one of the study's own (val_ratio=0.1)."""

EXAMPLES = (
    "--study a9a_5",
    "--study a9a_5 --jobs 2 --timeout 300 xgb.max_depth=6",
    "--study my_study.yaml --fresh",
)


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    command = cli.parser("tune", DESCRIPTION, EXAMPLES)
    command.add_argument("--study", required=True, metavar="NAME|PATH", help="a study in studies/, or a file")
    command.add_argument("--trials", type=cli.positive_int, metavar="N", help="trials in all, those there included")
    command.add_argument("--timeout", type=cli.positive_float, metavar="S", help="seconds for the search")
    command.add_argument(
        "--jobs", type=cli.positive_int, default=1, metavar="N", help="trials side by side (default: 1)"
    )
    command.add_argument(
        "--fresh", action="store_true", help="begin anew; the earlier study is kept under another name"
    )
    cli.add_storage_argument(command)
    command.add_argument("--no-export", action="store_true", help="do not write the client config")
    cli.add_training_arguments(command)
    return command


def main(argv: Sequence[str] | None = None, *, engine: "Engine | None" = None) -> int:
    """Run the command, in the given engine's federation if there is one, and return its exit status."""
    return cli.run(
        partial(_tune, engine=engine),
        build_parser(),
        argv,
        when_stopped="finished trials are stored, and the same command goes on from there",
    )


def _tune(arguments: argparse.Namespace, engine: "Engine | None" = None) -> None:
    from fedlightning.config import effectless, explicit_keys, load_study, override_study, study_name

    if arguments.jobs > 1 and (engine is not None or arguments.engine != "local"):
        raise ValueError(
            f"--jobs is {arguments.jobs}, but only engine local opens a federation per job: Ray starts once in a "
            "process and takes all its cores, and a SuperLink's nodes serve one run at a time; leave --jobs out, "
            "or start the same command several times"
        )
    given = [
        f"{key}={value}" for key in ("trials", "timeout", "seed") if (value := getattr(arguments, key)) is not None
    ]
    overrides = [*given, *arguments.overrides]
    study = override_study(load_study(arguments.study, root=arguments.root), overrides, root=arguments.root)
    for sentence in effectless(study, explicit_keys(overrides)):
        cli.logger.warning("%s", sentence)

    from rich.console import Console
    from rich.text import Text

    name = study_name(arguments.study)
    console = Console(stderr=arguments.json)
    if not arguments.quiet:
        # Said before the imports, which take a while.
        console.print(Text(_headline(name, study)), soft_wrap=True)

    from fedlightning.downloads import fetch_missing

    if engine is None:
        # Nodes of a federation have their own rows, and the server may need none.
        fetch_missing(study.dataset.name, arguments.data_dir, console, quiet=arguments.quiet)
    engine = cli.start_engine(arguments, engine, study.client_num, arguments.jobs)

    from fedlightning import tables
    from fedlightning.config import flatten
    from fedlightning.display import Display
    from fedlightning.experiment import task_of
    from fedlightning.jobs.run import test_figures
    from fedlightning.jobs.study import tune_study
    from fedlightning.jobs.workspace import Workspace

    workspace = Workspace(
        arguments.root, arguments.data_dir, arguments.tracking_uri, arguments.accelerator, engine, arguments.storage
    )
    display = Display(console, task_of(study.dataset).metric, quiet=arguments.quiet)
    try:
        result = tune_study(
            workspace,
            name,
            study,
            display,
            jobs=arguments.jobs,
            fresh=arguments.fresh,
            export=not arguments.no_export,
        )
    finally:
        display.close()
    if arguments.json:
        validation = result.validation.network
        cli.print_json(
            {
                "study": result.name,
                "trials": {
                    "complete": result.counts.complete,
                    "pruned": result.counts.pruned,
                    "failed": result.counts.failed,
                },
                "best": {
                    "number": result.best.number,
                    "validation": {"loss": validation.loss, "metric": validation.metric},
                    "params": flatten(result.clients),
                },
                "test": test_figures(result.test),
                "config_file": str(result.config_file) if result.config_file else None,
                "run_id": result.run_id,
                "seconds": round(cli.seconds_since_start(), 3),
            }
        )
        return
    counts = result.counts
    rows = tables.comparison_rows(validation=result.validation, test=result.test)
    asked = "" if counts.finished >= study.trials else f" ({counts.finished} of the {study.trials} asked for)"
    lines = [
        "",
        f"{result.name}: {counts.complete} complete and {counts.pruned} pruned trials{asked}, {counts.failed} failed;"
        f" the best is trial {result.best.number}:",
        *(
            f"  {key} = {value}"
            for key, value in flatten(result.clients).items()
            if key in SHOWN or key in result.best.values
        ),
        "",
        tables.as_text(rows, result.metric).rstrip(),
        f"validation: fitted on {1 - study.val_ratio:.0%} of each client's training rows, scored on the other"
        f" {study.val_ratio:.0%}",
        "test: fitted again on all training rows; the test rows were read once, after the search",
        "",
    ]
    if result.config_file is not None:
        use = ("--dataset", study.dataset.name, "--clients", result.config_file.stem)
        lines.append(f"client config: {result.config_file}")
        lines.append(f"use it:        {cli.rooted('run', arguments.root, *use)}")
    lines.append(f"look at it:    {cli.rooted('ui', arguments.root)}")
    display.result("\n".join(lines))


def _headline(name: str, study: "StudyConfig") -> str:
    searched = ", ".join(study.searched) or "nothing"
    clients = "1 client" if study.client_num == 1 else f"{study.client_num} clients"
    return f"study {name}: {study.dataset.name} with {clients}, seed {study.seed}; searched: {searched}"


SHOWN = ("n_estimators_client", "num_rounds", "client_num", "num_iterations", "xgb.max_depth", "CNN.lr")

if __name__ == "__main__":
    sys.exit(main())
