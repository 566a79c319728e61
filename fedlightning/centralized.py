"""Fit XGBoost on all training rows in one place: the rival that a federation is measured by."""

import argparse
import sys
from collections.abc import Sequence

from fedlightning import cli

DESCRIPTION = """\
Fit one XGBoost model on all training rows of a data set, as if no party had to keep its rows to itself, and score
it on the training and the test rows. The test rows are the same as those of `run` and `tune`.
--params names a published parameter set: paper, or one of the data sets that have their own (abalone, cpusmall,
YearPredictionMSD). Without it a data set's own set is taken if there is one, else the paper's.
A key=value sets anything: n_estimators=300, xgb.max_depth=6, dataset.train_ratio=0.8, dataset.split_seed=1."""

EXAMPLES = (
    "--dataset a9a",
    "--dataset abalone --params paper",
    "--dataset a9a xgb.max_depth=6 n_estimators=300 dataset.train_ratio=.80",
    "--dataset breast_cancer --seed 1 --json",
)


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    command = cli.parser("centralized", DESCRIPTION, EXAMPLES)
    command.add_argument("--dataset", required=True, metavar="D", help="a data set; `data list` names them")
    command.add_argument("--params", metavar="NAME", help="paper, or a data set that has its own parameters")
    cli.add_training_arguments(command, network=False)
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return cli.run(_centralized, build_parser(), argv, when_stopped="the run is marked KILLED in the tracking store")


def _centralized(arguments: argparse.Namespace) -> None:
    from fedlightning.config import default_centralized, load_centralized, resolve_centralized

    name = arguments.params or default_centralized(arguments.dataset)
    config = resolve_centralized(arguments.dataset, load_centralized(name), arguments.overrides, seed=arguments.seed)

    from rich.console import Console

    from fedlightning import tables
    from fedlightning.display import Display
    from fedlightning.downloads import fetch_missing
    from fedlightning.experiment import task_of
    from fedlightning.jobs.centralized import fit_centralized, resolved
    from fedlightning.jobs.workspace import Workspace

    workspace = Workspace(arguments.root, arguments.data_dir, arguments.tracking_uri)
    console = Console(stderr=arguments.json)
    display = Display(console, task_of(config.dataset).metric, quiet=arguments.quiet)
    why = f"published for {name}" if name == config.dataset.name else f"none are published for {config.dataset.name}"
    display.phase(f"# parameters: {name}{'' if arguments.params else f' ({why})'}\n{resolved(config).rstrip()}")
    fetch_missing(config.dataset.name, arguments.data_dir, console, quiet=arguments.quiet)
    display.phase(f"growing {config.n_estimators} trees")
    tracked = fit_centralized(workspace, config, name)
    result = tracked.result
    scores = {"train": result.train, "test": result.test}
    if arguments.json:
        cli.print_json(
            {
                "dataset": config.dataset.name,
                "params": name,
                "seed": config.seed,
                "metric": result.metric,
                **{rows: {"loss": score.loss, "metric": score.metric} for rows, score in scores.items()},
                "run_id": tracked.run_id,
                "seconds": round(cli.seconds_since_start(), 3),
            }
        )
        return
    cells = [
        [rows, str(score.examples), tables.format_loss(score.loss), tables.format_metric(result.metric, score.metric)]
        for rows, score in scores.items()
    ]
    table = tables.align([["on", "rows", "loss", result.metric], *cells])
    display.result(f"\n{table}(run {tracked.run_id})\n")


if __name__ == "__main__":
    sys.exit(main())
