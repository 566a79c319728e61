"""Fit XGBoost on rows that are all in one place, and record it."""

import logging
from dataclasses import dataclass

from fedlightning.config import CentralizedRunConfig, Scalar, flatten
from fedlightning.config.documents import dump
from fedlightning.config.keys import nested
from fedlightning.experiment import CentralizedResult, run_centralized
from fedlightning.federation.engines import cores
from fedlightning.jobs.workspace import Workspace, describe_data

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedCentralized:
    """A centralized run's result and where it is recorded."""

    result: CentralizedResult
    run_id: str


def fit_centralized(workspace: Workspace, config: CentralizedRunConfig, name: str) -> TrackedCentralized:
    """Fit on all training rows and score on training and test rows.

    Args:
        workspace: Where rows come from and records go.
        config: Everything that decides the result.
        name: Name of the parameter set.
    """
    dataset = config.dataset
    tracked = workspace.store.start_run(
        f"{dataset.name}-runs",
        f"centralized {name}",
        kind="centralized",
        params=settings(config),
        tags={"dataset": dataset.name, "seed": str(config.seed)},
        data=describe_data(dataset),
    )
    with tracked:
        tracked.log_text(resolved(config), "config.yaml")
        result = run_centralized(dataset, config, seed=config.seed, data_dir=workspace.data_dir, threads=cores())
        if not result.splits:
            logger.warning(
                "%d trees without a split: they say the same of every row; "
                "lower xgb.gamma, xgb.alpha or xgb.min_child_weight",
                config.n_estimators,
            )
        tracked.log_scores("train", result.train, metric=result.metric)
        tracked.log_scores("test", result.test, metric=result.metric)
        tracked.log_metrics({"splits": result.splits})
    return TrackedCentralized(result, tracked.run_id)


def settings(config: CentralizedRunConfig) -> dict[str, Scalar]:
    """Return the settings that count, by dotted key: there are no rounds to be patient about."""
    return {key: value for key, value in flatten(config).items() if key != "dataset.patience"}


def resolved(config: CentralizedRunConfig) -> str:
    """Return the settings that count as YAML."""
    return dump(nested(CentralizedRunConfig, settings(config)))
