"""Train a federation with one or several client configs and compare each on the test rows."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from fedlightning import cli

if TYPE_CHECKING:
    from fedlightning.config import RunConfig
    from fedlightning.federation.engines import Engine

DESCRIPTION = """\
Train with the values of a client config: grow every client's trees once, share the forest, train the
network round by round, pick the round by federated validation loss, and read the test set once, at the end.
The network is shown beside mean-margin (the same forest, averaged), local-only (each client's own trees)
and centralized XGBoost on the union of the same training rows.
Client configs are found in studies/clients/, then among the published (a9a_5_clients, paper_5_clients, ...).
A key=value sets anything: num_rounds=5, xgb.subsample=0.9, dataset.patience=5, val_ratio=0.1, batch_size=64."""

EXAMPLES = (
    "--dataset a9a --clients a9a_5_clients",
    "--dataset a9a --clients a9a_2_clients,a9a_5_clients --seed 1",
    "--dataset abalone --clients abalone_5_clients num_rounds=30 xgb.gamma=0",
    "--dataset breast_cancer --clients paper_2_clients num_rounds=10 --json",
)


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    command = cli.parser("run", DESCRIPTION, EXAMPLES)
    command.add_argument("--dataset", required=True, metavar="D", help="a data set; `data list` names them")
    command.add_argument("--clients", required=True, metavar="NAME[,NAME...]", help="client configs, one run each")
    cli.add_training_arguments(command)
    return command


def main(argv: Sequence[str] | None = None, *, engine: "Engine | None" = None) -> int:
    """Run the command, in the given engine's federation if there is one, and return its exit status."""
    return cli.run(
        partial(_run, engine=engine),
        build_parser(),
        argv,
        when_stopped="the run is marked KILLED in the tracking store",
    )


def _run(arguments: argparse.Namespace, engine: "Engine | None" = None) -> None:
    from fedlightning.config import effectless, explicit_keys, load_clients, resolve_run

    # All are read before the first one trains: a misspelt second name should not cost the first one's time.
    names = [name.strip() for name in arguments.clients.split(",")]
    configs = [
        resolve_run(
            arguments.dataset,
            load_clients(name, root=arguments.root),
            arguments.overrides,
            seed=arguments.seed,
        )
        for name in names
    ]
    for sentence in dict.fromkeys(s for c in configs for s in effectless(c, explicit_keys(arguments.overrides))):
        cli.logger.warning("%s", sentence)

    from rich.console import Console

    from fedlightning.downloads import fetch_missing

    console = Console(stderr=arguments.json)
    if engine is None:
        # Nodes of a federation have their own rows, and the server may need none.
        fetch_missing(configs[0].dataset.name, arguments.data_dir, console, quiet=arguments.quiet)
    engine = cli.start_engine(arguments, engine, max(config.clients.client_num for config in configs))

    from fedlightning import tables
    from fedlightning.config import to_yaml
    from fedlightning.display import Display, format_bytes
    from fedlightning.experiment import task_of
    from fedlightning.jobs.run import run_clients, test_figures
    from fedlightning.jobs.workspace import Workspace

    workspace = Workspace(arguments.root, arguments.data_dir, arguments.tracking_uri, arguments.accelerator, engine)
    told = 0.0
    for name, config in zip(names, configs, strict=True):
        display = Display(console, task_of(config.dataset).metric, quiet=arguments.quiet)
        display.phase(f"# {name}\n{to_yaml(config).rstrip()}")
        tracked = run_clients(workspace, config, name, display)
        result, fit = tracked.result, tracked.result.fit
        # The first one's seconds include the start of this process.
        seconds, told = cli.seconds_since_start() - told, cli.seconds_since_start()
        if arguments.json:
            best = fit.best.validation
            cli.print_json(
                {
                    "dataset": config.dataset.name,
                    "clients": name,
                    "seed": config.seed,
                    "rounds": len(fit.reports),
                    "best_round": fit.best.number,
                    "metric": result.metric,
                    "validation": {"loss": best.loss, "metric": best.metric} if best else None,
                    "test": test_figures(result.test),
                    "bytes": {"up": fit.traffic.up, "down": fit.traffic.down},
                    "seconds": round(seconds, 3),
                }
            )
            continue
        display.result(
            "\n".join(
                [
                    "",
                    tables.as_text(
                        tables.comparison_rows(validation=result.validation, test=result.test), result.metric
                    ).rstrip(),
                    f"network of round {fit.best.number}, {_reason(config)}; rounds done: {len(fit.reports)}",
                    f"sent in all: up {format_bytes(fit.traffic.up)}, down {format_bytes(fit.traffic.down)}",
                    f"MLflow run: {tracked.run_id}, look at it: {cli.rooted('ui', arguments.root)}",
                    "",
                ]
            )
        )


def _reason(config: "RunConfig") -> str:
    return f"picked by validation {config.objective}" if config.val_ratio else "the last, as nothing was validated"


if __name__ == "__main__":
    sys.exit(main())
