"""Centralized XGBoost from the command line: right figures, all settings, everything on record."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost as xgb
from run_command import Finished
from sklearn.metrics import accuracy_score, log_loss, mean_squared_error

from fedlightning.config import load_centralized
from fedlightning.datasets import load_table
from fedlightning.partition import hold_out
from fedlightning.tracking import TrackingStore

Call = Callable[..., Finished]

# With all rows in every tree, XGBoost's seed decides nothing.
PLAIN = {"max_depth": 3, "learning_rate": 0.3, "subsample": 1.0, "reg_alpha": 0.5, "gamma": 0.1, "reg_lambda": 2.0}
PLAIN_ARGUMENTS = (
    "n_estimators=12",
    "xgb.max_depth=3",
    "xgb.learning_rate=0.3",
    "xgb.subsample=1",
    "xgb.alpha=.5",
    "xgb.gamma=0.1",
    "xgb.lambda=2",
)
QUICK = ("n_estimators=4", "xgb.max_depth=2")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the tests that do not look at what is recorded, since making a database takes over a second."""
    return tmp_path_factory.mktemp("project")


def figures(done: Finished) -> dict[str, Any]:
    """Return the one object that a successful command printed."""
    assert done.status == 0, done.err
    (values,) = done.json_lines()
    return values


@pytest.mark.parametrize("dataset", ["breast_cancer", "wine"])
def test_figures_of_classes_are_those_of_xgboost(call: Call, root: Path, dataset: str) -> None:
    """Loss and accuracy are scikit-learn's for a classifier that XGBoost's own interface fits on the same rows."""
    found = figures(call("centralized", "--root", root, "--dataset", dataset, "--json", *PLAIN_ARGUMENTS))
    train, test = hold_out(load_table(dataset), train_ratio=0.75)
    prior = train.y.mean() if dataset == "breast_cancer" else 0.5
    oracle = xgb.XGBClassifier(n_estimators=12, n_jobs=1, base_score=prior, **PLAIN).fit(train.x, train.y)
    assert found["metric"] == "accuracy"
    for rows, table in (("train", train), ("test", test)):
        assert found[rows]["metric"] == pytest.approx(accuracy_score(table.y, oracle.predict(table.x)))
        assert found[rows]["loss"] == pytest.approx(log_loss(table.y, oracle.predict_proba(table.x)), rel=1e-4)


def test_figures_of_a_regression_are_those_of_xgboost(call: Call, root: Path) -> None:
    """The metric is the squared error in the target's units, the loss the same in units of its training variance."""
    found = figures(call("centralized", "--root", root, "--dataset", "diabetes", "--json", *PLAIN_ARGUMENTS))
    train, test = hold_out(load_table("diabetes"), train_ratio=0.75)
    oracle = xgb.XGBRegressor(n_estimators=12, n_jobs=1, base_score=train.y.mean(), **PLAIN).fit(train.x, train.y)
    assert found["metric"] == "mse"
    for rows, table in (("train", train), ("test", test)):
        error = mean_squared_error(table.y, oracle.predict(table.x))
        assert found[rows] == pytest.approx({"metric": error, "loss": error / np.var(train.y)}, rel=1e-4)


def test_a_run_is_on_record(call: Call) -> None:
    """The tracking store has the settings, the figures as printed, the data and the configuration of each run."""
    found = figures(
        call("centralized", "--dataset", "wine", "--seed", "3", "--json", *QUICK, "dataset.split_seed=5", "-q")
    )
    assert list(found) == ["dataset", "params", "seed", "metric", "train", "test", "run_id", "seconds"]
    assert (found["dataset"], found["params"], found["seed"]) == ("wine", "paper", 3)
    assert found["seconds"] > 0
    store = TrackingStore.open(Path())
    (run,) = store.runs("wine-runs")
    assert (run.info.run_id, run.info.run_name, run.info.status) == (found["run_id"], "centralized paper", "FINISHED")
    assert run.data.tags.items() >= {"kind": "centralized", "dataset": "wine", "seed": "3"}.items()
    assert {f"{rows}_{key}": run.data.metrics[f"{rows}_{key}"] for rows in ("train", "test") for key in ("loss",)} == {
        "train_loss": found["train"]["loss"],
        "test_loss": found["test"]["loss"],
    }
    assert run.data.metrics["train_accuracy"] == found["train"]["metric"]
    assert run.data.metrics["test_accuracy"] == found["test"]["metric"]
    expected = {"dataset.name": "wine", "dataset.split_seed": "5", "seed": "3", "n_estimators": "4"}
    assert run.data.params.items() >= {**expected, "xgb.max_depth": "2", "xgb.gamma": "5.0"}.items()
    assert [entry.dataset.name for entry in run.inputs.dataset_inputs] == ["wine"]
    config = store.client.download_artifacts(found["run_id"], "config.yaml")
    assert "n_estimators: 4\nxgb:\n  max_depth: 2\n" in Path(config).read_text()


def test_the_configuration_comes_before_the_figures(call: Call, root: Path) -> None:
    """People see every setting, then a table with both sets of rows; --quiet leaves the table."""
    done = call("centralized", "--root", root, "--dataset", "breast_cancer", *QUICK, "dataset.train_ratio=.80")
    assert done.status == 0
    assert done.out.startswith("# parameters: paper (none are published for breast_cancer)\nn_estimators: 4\nxgb:\n")
    assert "\ndataset:\n  name: breast_cancer\n  train_ratio: 0.8\n  split_seed: 2023\nseed: 0\n" in done.out
    assert "patience" not in done.out
    table = done.out[done.out.index("\non") :]
    assert re.search(r"^train +455 +0\.\d+ +\d\d\.\d\d %\ntest +114 +0\.\d+ +\d\d\.\d\d %$", table, re.MULTILINE)
    quiet = call(
        "centralized", "--root", root, "--dataset", "breast_cancer", *QUICK, "dataset.train_ratio=.80", "--quiet"
    )
    run = re.compile(r"run [0-9a-f]{32}")
    assert run.sub("run", quiet.out) == run.sub("run", table)


def test_json_is_alone_on_stdout(call: Call, root: Path) -> None:
    """With --json everything else goes to stderr, and without --quiet it is still told."""
    done = call("centralized", "--root", root, "--dataset", "wine", *QUICK, "--json")
    assert json.loads(done.out)["dataset"] == "wine"
    assert "# parameters: paper" in done.err


def test_the_seed_decides(call: Call, root: Path) -> None:
    """The same seed gives the same figures, another one other trees, on the same rows."""
    first, again, other = (
        figures(
            call("centralized", "--root", root, "--dataset", "breast_cancer", "--json", "-q", f"seed={seed}", *QUICK)
        )
        for seed in (1, 1, 2)
    )
    for rows in ("train", "test"):
        assert first[rows] == again[rows]
    assert first["train"]["loss"] != other["train"]["loss"]


def test_a_published_set_can_be_named(call: Call, root: Path) -> None:
    """--params takes any set for any data set, in the reference's own spelling too, and overrides come on top."""
    own = load_centralized("abalone")
    for name in ("abalone", "abalone_xgboost_centralized"):
        done = call("centralized", "--root", root, "--dataset", "diabetes", "--params", name, "n_estimators=4")
        assert done.status == 0
        assert done.out.startswith(f"# parameters: {name}\nn_estimators: 4\nxgb:\n  max_depth: {own.xgb.max_depth}\n")
        assert f"subsample: {own.xgb.subsample}" in done.out


def test_a_data_set_with_its_own_set_takes_it(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said which set was taken, before the rows are fetched; rows that cannot be had are an error."""
    monkeypatch.setenv("FEDLIGHTNING_DATA_URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("no_proxy", "*")
    done = call("centralized", "--dataset", "abalone")
    assert done.status == 1
    assert done.out.startswith("# parameters: abalone (published for abalone)\nn_estimators: 200\n")
    assert "abalone_scale: fetching http://127.0.0.1:9/regression/abalone_scale failed" in done.err
    assert not Path("mlruns").exists()


def test_trees_without_a_split_are_told(call: Call, root: Path) -> None:
    """A model that says the same of every row is no surprise in the table only."""
    done = call("centralized", "--root", root, "--dataset", "wine", *QUICK, "xgb.gamma=1e9")
    assert done.status == 0
    assert "WARNING: 4 trees without a split" in done.err
    assert "lower xgb.gamma" in done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dataset", "wines"], "unknown data set 'wines'; known: wine, "),
        (["--dataset", "wine", "--params", "papr"], "unknown centralized parameter set 'papr'; known: paper, "),
        (["--dataset", "wine", "num_rounds=3"], "unknown key 'num_rounds'; known: "),
        (["--dataset", "wine", "dataset.patience=3"], "unknown key 'dataset.patience'; known: "),
        (["--dataset", "wine", "xgb.max_depth=0"], "xgb.max_depth is 0; allowed: a whole number from 1 to 30"),
        (["--dataset", "wine", "seed=1", "--seed", "2"], "seed is given twice: 2 and 1"),
    ],
)
def test_mistakes_cost_nothing(call: Call, arguments: list[str], said: str) -> None:
    """A wrong argument is named before anything is loaded or recorded."""
    done = call("centralized", *arguments)
    assert (done.status, done.out) == (2, "")
    assert said in done.err
    assert list(Path().iterdir()) == []
