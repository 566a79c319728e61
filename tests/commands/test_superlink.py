"""Tests over a real SuperLink, whose two nodes hold files of their own."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from mlflow import MlflowClient
from run_command import run_command
from running_superlink import RunningSuperLink, running_superlink
from sklearn.datasets import dump_svmlight_file, load_breast_cancer

from fedlightning.federation.shard import DATA_FILE
from fedlightning.tracking import sqlite_uri

ROWS = (300, 269)
STUDY = {
    "dataset": "breast_cancer",
    "client_num": 2,
    "trials": 2,
    "seed": 3,
    "space": {
        "n_estimators_client": {"choices": [3, 5]},
        "num_iterations": 5,
        "num_rounds": 1,
        "xgb.max_depth": 2,
        "xgb.gamma": 0,
        "xgb.alpha": 0,
        "CNN.lr": {"low": 1e-3, "high": 1e-1, "log": True},
    },
    "sampler": "random",
    "pruner": "none",
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuperLink]:
    """Return a SuperLink with two nodes; each has its part of the breast cancer rows in a file of its own."""
    folder = tmp_path_factory.mktemp("superlink")
    x, y = load_breast_cancer(return_X_y=True)
    nodes, start = [], 0
    for partition, rows in enumerate(ROWS):
        path = folder / f"silo{partition}.libsvm"
        part = slice(start, start + rows)
        dump_svmlight_file(x[part], np.where(y[part] == 1, 1, -1), str(path), zero_based=False)
        nodes.append(f"partition-id={partition} {DATA_FILE}='{path}'")
        start += rows
    with running_superlink(folder / "run", nodes) as superlink:
        studies = superlink.folder / "studies"
        studies.mkdir()
        (studies / "silos.yaml").write_text(yaml.safe_dump(STUDY))
        yield superlink


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_study_on_silos_with_files_of_their_own(federation: RunningSuperLink, tmp_path: Path) -> None:
    """A study ends with a winner, tested where the test rows are; its second trial finds its trees and sends none."""
    done = run_command("submit", "tune", "--study", "silos", cwd=tmp_path, env=federation.env, patience=500)
    assert done.status == 0, done.out + done.err
    assert "silos: 2 complete and 0 pruned trials, 0 failed" in done.out
    assert "centralized" not in done.out
    client = MlflowClient(sqlite_uri(federation.folder / "mlruns" / "mlflow.db"))
    experiment = client.get_experiment_by_name("silos")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"])
    assert {run.info.status for run in runs} == {"FINISHED"}
    by_kind = {kind: [run for run in runs if run.data.tags["kind"] == kind] for kind in ("trial", "refit", "study")}
    first, second = by_kind["trial"]
    (refit,), (study,) = by_kind["refit"], by_kind["study"]
    assert [run.data.metrics["fits"] for run in (first, second, refit)] == [2, 0, 2]
    # What a fresh federation would send is told apart from what was sent: fewer bytes than a forest's.
    rounds = client.get_metric_history(second.info.run_id, "bytes_down")
    assert second.data.metrics["sent_bytes_down"] == sum(metric.value for metric in rounds)
    assert second.data.metrics["total_bytes_down"] > second.data.metrics["sent_bytes_down"]
    assert refit.data.tags["engine"] == "superlink"
    assert 0.5 < study.data.metrics["test_network_accuracy"] <= 1
    assert (federation.folder / "studies" / "clients" / "silos_clients.yaml").exists()


@pytest.mark.slow
def test_a_failed_run_has_a_status_of_its_own(federation: RunningSuperLink, tmp_path: Path) -> None:
    """A command that fails on the server fails here, and says why; a wrong word does not even travel."""
    run = ("run", "--dataset", "wine", "--clients", "paper_2_clients")
    failed = run_command("submit", *run, cwd=tmp_path, env=federation.env)
    assert failed.status == 1
    assert "feature index is 14, allowed: 1 to 13" in failed.out
    assert "is finished:failed" in failed.err
    misspelt = run_command("submit", *run[:-1], "--clints", "x", cwd=tmp_path, env=federation.env)
    assert misspelt.status == 2
    assert misspelt.out == ""
    nowhere = run_command("submit", "--superlink", "nowhere", *run, cwd=tmp_path, env=federation.env)
    assert nowhere.status == 1
    assert "'nowhere' not found" in nowhere.err
