"""Tests that a study never grows or sends the same trees twice."""

import io
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from rich.console import Console

from fedlightning.config import StudyConfig
from fedlightning.config.study_files import study_from_document
from fedlightning.display import Display
from fedlightning.jobs.study import tune_study
from fedlightning.jobs.trial import trees_to_grow
from fedlightning.jobs.workspace import Workspace

CLIENTS = 3
SPACE = {
    "n_estimators_client": {"choices": [3, 5, 8]},
    "num_iterations": {"choices": [4, 6]},
    "num_rounds": 1,
    "xgb.max_depth": {"low": 2, "high": 3},
    "xgb.gamma": {"choices": [0, 1]},
    "xgb.alpha": 0,
    "CNN.lr": {"low": 0.01, "high": 0.1, "log": True},
}
TREE_SETTINGS = ("xgb.max_depth", "xgb.gamma")


def definition(**changes: Any) -> StudyConfig:
    """Return a study of few rounds and many trials."""
    document = {
        "dataset": "breast_cancer",
        "client_num": CLIENTS,
        "trials": 12,
        "seed": 5,
        "sampler": "random",
        "pruner": "none",
        "space": SPACE,
        **changes,
    }
    return study_from_document(document, source="test")


def runs_of(workspace: Workspace, kind: str) -> list[Run]:
    """Return a study's runs of a kind, oldest first."""
    client = MlflowClient(workspace.store.uri)
    found = client.get_experiment_by_name("once")
    assert found is not None
    return client.search_runs([found.experiment_id], f"tags.kind = '{kind}'", order_by=["attributes.start_time"])


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_study_fits_each_tree_setting_once_per_client(jobs: int, tmp_path: Path) -> None:
    """Only a new setting of the trees causes fits, K of them, whatever T and the network's keys are; so does the refit.

    With two jobs, each with client processes of its own, the clients find each other's trees.
    """
    workspace = Workspace(tmp_path)
    tune_study(workspace, "once", definition(), Display(Console(file=io.StringIO()), "accuracy"), jobs=jobs)
    trials, (refit,) = runs_of(workspace, "trial"), runs_of(workspace, "refit")
    settings = {tuple(run.data.params[key] for key in TREE_SETTINGS) for run in trials}
    assert len({run.data.params["n_estimators_client"] for run in trials}) == 3
    assert sum(run.data.metrics["fits"] for run in trials) == CLIENTS * len(settings)
    assert refit.data.metrics["fits"] == CLIENTS
    assert len(trials) == 12 > len(settings)
    if jobs == 1:
        seen = set()
        for run in trials:
            setting = tuple(run.data.params[key] for key in TREE_SETTINGS)
            assert run.data.metrics["fits"] == (0 if setting in seen else CLIENTS)
            # A trial whose trees are there sends networks only; a fresh federation would send trees, too.
            networks = run.data.metrics["bytes_up"]  # of its only round
            assert (run.data.metrics["sent_bytes_up"] == networks) == (setting in seen)
            assert run.data.metrics["total_bytes_up"] > networks
            seen.add(setting)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 8),
        ({"n_estimators_client": {"low": 10, "high": 40, "step": 10}}, 40),
        ({"n_estimators_client": 7}, 1),
        # No two trials share a rate out of a continuum, but of a grid they may.
        ({"xgb.learning_rate": {"low": 0.1, "high": 0.3}}, 1),
        ({"xgb.learning_rate": {"low": 0.1, "high": 0.3, "step": 0.1}}, 8),
    ],
)
def test_trees_are_grown_as_far_as_any_trial_may_want(changes: dict[str, Any], expected: int) -> None:
    """A trial grows the largest T of the space, unless no other trial could use it."""
    assert trees_to_grow(definition(space={**SPACE, **changes})) == expected
