"""Run one client config on a federation, hold it beside its rivals, and record all of it."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from fedlightning import figures, tables
from fedlightning.config import RunConfig, flatten, to_yaml
from fedlightning.experiment import (
    Comparison,
    FederatedFit,
    RunResult,
    compare_with_centralized,
    fit_federated,
    task_of,
)
from fedlightning.federation.engines import cores
from fedlightning.federation.rounds import RoundReport
from fedlightning.jobs.watchers import RunWatcher
from fedlightning.jobs.workspace import Workspace, describe_data
from fedlightning.tasks import Scores
from fedlightning.tracking import TrackedRun


@dataclass(frozen=True)
class TrackedResult:
    """A run's result and where it is recorded."""

    result: RunResult
    run_id: str


def run_clients(workspace: Workspace, config: RunConfig, name: str, watcher: RunWatcher) -> TrackedResult:
    """Train a federation with one client config and read the test set once, at the end.

    Args:
        workspace: Where rows come from and records go.
        config: Everything that decides the result.
        name: Name of the client config.
        watcher: Sees the run as it goes.
    """
    watcher.phase("opening the tracking store")
    tracked = workspace.store.start_run(
        f"{config.dataset.name}-runs",
        name,
        kind="run",
        params=flatten(config),
        tags=run_tags(config, engine=workspace.engine.name),
        data=describe_data(config.dataset),
    )
    with tracked:
        tracked.log_text(to_yaml(config), "config.yaml")
        result = train_and_compare(workspace, config, tracked, watcher)
        log_result(tracked, result)
        log_tables(tracked, result.metric, validation=result.validation, test=result.test)
        curve = figures.Curve.of(name, result.fit.reports, chosen=result.fit.best.number, validation=result.validation)
        tracked.log_figure(figures.convergence([curve], metric=result.metric), "convergence.png")
    return TrackedResult(result, tracked.run_id)


def train_and_compare(workspace: Workspace, config: RunConfig, tracked: TrackedRun, watcher: RunWatcher) -> RunResult:
    """Fit on a federation, then compare on the test rows."""

    def observe(report: RoundReport) -> None:
        tracked.log_round(report, metric=metric)
        watcher.round_done(report, config.clients.num_rounds)

    metric = task_of(config.dataset).metric
    watcher.phase(f"opening the federation (engine {workspace.engine.name}) and growing the trees")
    fit = workspace.federate(
        partial(fit_federated, config=config, observers=[observe], accelerator=workspace.accelerator, test=True),
        config.clients.client_num,
    )
    watcher.phase("comparing on the test rows")
    return compare_with_centralized(fit, config, data_dir=workspace.data_dir, threads=cores())


def log_result(tracked: TrackedRun, result: RunResult) -> None:
    """Record the chosen round, every competitor's scores, and the bytes."""
    if result.validation is not None:
        tracked.log_comparison("validation", result.validation, metric=result.metric)
    tracked.log_comparison("test", result.test, metric=result.metric)
    log_traffic(tracked, result.fit)


def log_traffic(tracked: TrackedRun, fit: FederatedFit) -> None:
    """Record the chosen round and what was sent: in all, and up to the chosen round."""
    tracked.log_metrics(
        {
            "best_round": fit.best.number,
            "rounds": len(fit.reports),
            "total_bytes_up": fit.traffic.up,
            "total_bytes_down": fit.traffic.down,
            "best_bytes_up": fit.traffic_to_best.up,
            "best_bytes_down": fit.traffic_to_best.down,
            "sent_bytes_up": fit.traffic_sent.up,
            "sent_bytes_down": fit.traffic_sent.down,
            "fits": fit.fits,
        }
    )


def log_tables(tracked: TrackedRun, metric: str, *, validation: Comparison | None, test: Comparison) -> None:
    """Record the comparison for people and for programs."""
    rows = tables.comparison_rows(validation=validation, test=test)
    tracked.log_text(tables.as_markdown(rows, metric), "comparison.md")
    tracked.log_text(tables.as_csv(rows, metric), "comparison.csv")


def run_tags(config: RunConfig, *, engine: str) -> dict[str, str]:
    """Return the tags by which runs are found."""
    return {
        "dataset": config.dataset.name,
        "client_num": str(config.clients.client_num),
        "engine": engine,
        "seed": str(config.seed),
    }


def test_figures(comparison: Comparison) -> dict[str, float | None]:
    """Return each competitor's test metric, as the commands' JSON has them."""
    return {
        "network": comparison.network.metric,
        "mean_margin": comparison.mean_margin.metric,
        "local_only": comparison.local_only_mean.metric,
        "centralized": comparison.centralized.metric if comparison.centralized else None,
    }


def comparison_to_dict(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain values that JSON can hold."""
    return asdict(comparison)


def comparison_from_dict(values: dict[str, Any]) -> Comparison:
    """Read what ``comparison_to_dict`` returned, also after a trip through JSON."""
    return Comparison(
        network=Scores(**values["network"]),
        mean_margin=Scores(**values["mean_margin"]),
        local_only=tuple(Scores(**scores) for scores in values["local_only"]),
        centralized=Scores(**values["centralized"]) if values["centralized"] else None,
    )
