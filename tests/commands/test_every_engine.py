"""Tests that the same configuration gives the same result wherever the clients run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from run_command import run_command
from running_superlink import RunningSuperLink, running_superlink

from fedlightning.tracking import sqlite_uri

CLIENTS = """\
n_estimators_client: 100
num_rounds: 3
client_num: 5
num_iterations: 50
xgb: {max_depth: 8}
CNN: {lr: 0.0005}
"""
RUN = ("--dataset", "a9a", "--clients", "small_clients", "--json")
COMPARED = ("train_loss", "train_accuracy", "validation_loss", "validation_accuracy", "bytes_up", "bytes_down")


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuperLink]:
    """Return a SuperLink with five nodes, each a partition of the bundled a9a."""
    nodes = [f"partition-id={partition} num-partitions=5" for partition in range(5)]
    with running_superlink(tmp_path_factory.mktemp("superlink"), nodes) as superlink:
        yield superlink


def write_clients(root: Path) -> None:
    """Write the client config where it is found by its name."""
    folder = root / "studies" / "clients"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small_clients.yaml").write_text(CLIENTS)


def recorded(root: Path) -> dict[str, Any]:
    """Return what a root's only run recorded: its engine, its rounds' values, its chosen round and its test scores."""
    client = MlflowClient(sqlite_uri(root / "mlruns" / "mlflow.db"))
    (experiment,) = client.search_experiments(filter_string="name = 'a9a-runs'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in COMPARED}
    rounds = {
        name: [metric.value for metric in sorted(history, key=lambda metric: metric.step)]
        for name, history in histories.items()
    }
    final = {name: value for name, value in run.data.metrics.items() if name.startswith(("test_", "best_round"))}
    return {"engine": run.data.tags["engine"], "rounds": rounds, "final": final}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_engines_agree(federation: RunningSuperLink, tmp_path: Path) -> None:
    """Local processes, Ray and SuperNodes give the same values in every round, pick the same one and test alike."""
    found = {}
    for engine in ("local", "ray"):
        root = tmp_path / engine
        write_clients(root)
        done = run_command("run", *RUN, "--engine", engine, cwd=root)
        assert (done.status, done.err) == (0, done.err), done.err
        found[engine] = recorded(root)
    write_clients(federation.folder)
    done = run_command("submit", "run", *RUN, cwd=tmp_path, env=federation.env, patience=500)
    assert done.status == 0, done.out + done.err
    found["superlink"] = recorded(federation.folder)
    assert {name: values["engine"] for name, values in found.items()} == {name: name for name in found}
    local = found["local"]
    assert all(len(values) == 3 for values in local["rounds"].values())
    for values in found.values():
        assert values["final"]["best_round"] == local["final"]["best_round"]
        assert values["rounds"].keys() == local["rounds"].keys()
        for name, expected in local["rounds"].items():
            assert values["rounds"][name] == pytest.approx(expected, abs=1e-6), name
        assert values["final"] == pytest.approx(local["final"], abs=1e-6)
