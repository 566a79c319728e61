"""Tests for single runs as a user does them: one line of JSON per client config, tables, failures, and rude ends."""

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from run_command import (
    Finished,
    call_command,
    press_ctrl_c,
    read_until,
    rest_of,
    run_command,
    started_command,
)

from fedlightning.config import dump_clients, load_clients
from fedlightning.datasets.locate import BUNDLED
from fedlightning.tracking import sqlite_uri

SMALL = ["num_rounds=3", "num_iterations=5", "n_estimators_client=4", "xgb.gamma=0", "xgb.alpha=0", "CNN.lr=0.01"]
LONG = ["num_rounds=60", "num_iterations=400", "n_estimators_client=20", "dataset.patience=60"]


def runs(root: Path, dataset: str) -> list[Run]:
    """Return the recorded single runs on a data set, oldest first."""
    client = MlflowClient(tracking_uri=sqlite_uri(root / "mlruns" / "mlflow.db"))
    experiment = client.get_experiment_by_name(f"{dataset}-runs")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]))


def files(root: Path) -> set[str]:
    """Return all that is below a folder."""
    return {str(path.relative_to(root)) for path in root.rglob("*")}


@dataclass(frozen=True)
class Done:
    """A folder in which two configs were run, and what the command printed."""

    root: Path
    printed: Finished


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Two client configs, one of them the user's own, run one after the other with --json."""
    root = tmp_path_factory.mktemp("project")
    own = root / "studies" / "clients" / "own_clients.yaml"
    own.parent.mkdir(parents=True)
    own.write_text(dump_clients(load_clients("paper_2_clients").model_copy(update={"client_num": 3})))
    words = ("--dataset", "breast_cancer", "--clients", "paper_2_clients,own_clients", "--seed", 4, "--json", *SMALL)
    return Done(root, call_command("run", *words, cwd=root))


def test_json_is_one_line_per_config(done: Done) -> None:
    """stdout holds one object per client config, in the order given; its keys are a promise to programs."""
    assert done.printed.status == 0
    answers = done.printed.json_lines()
    assert [answer["clients"] for answer in answers] == ["paper_2_clients", "own_clients"]
    for answer in answers:
        assert set(answer) == {
            "dataset",
            "clients",
            "seed",
            "rounds",
            "best_round",
            "metric",
            "validation",
            "test",
            "bytes",
            "seconds",
        }
        assert (answer["dataset"], answer["seed"], answer["metric"]) == ("breast_cancer", 4, "accuracy")
        assert 1 <= answer["best_round"] <= answer["rounds"] == 3
        assert set(answer["validation"]) == {"loss", "metric"}
        assert set(answer["test"]) == {"network", "mean_margin", "local_only", "centralized"}
        assert all(0 <= value <= 1 for value in answer["test"].values())
        assert set(answer["bytes"]) == {"up", "down"}
        assert answer["seconds"] > 0
    assert answers[1]["bytes"]["up"] > answers[0]["bytes"]["up"]  # three clients send more than two


def test_json_says_what_the_store_holds(done: Done) -> None:
    """The printed figures are the recorded ones, and the run holds its rounds, settings and artifacts."""
    client = MlflowClient(tracking_uri=sqlite_uri(done.root / "mlruns" / "mlflow.db"))
    for answer, run in zip(done.printed.json_lines(), runs(done.root, "breast_cancer"), strict=True):
        metrics = run.data.metrics
        assert run.info.status == "FINISHED"
        assert run.data.tags["kind"] == "run"
        assert run.info.run_name == answer["clients"]
        assert answer["test"] == {name: metrics[f"test_{name}_accuracy"] for name in answer["test"]}
        assert answer["validation"]["loss"] == metrics["validation_network_loss"]
        assert answer["best_round"] == metrics["best_round"]
        assert answer["bytes"] == {"up": metrics["total_bytes_up"], "down": metrics["total_bytes_down"]}
        losses = client.get_metric_history(run.info.run_id, "validation_loss")
        assert [entry.step for entry in losses] == [1, 2, 3]
        assert min(losses, key=lambda entry: entry.value).step == answer["best_round"]
        assert run.data.params["xgb.gamma"] == "0.0"
        assert run.data.params["seed"] == "4"
        artifacts = {item.path for item in client.list_artifacts(run.info.run_id)}
        assert artifacts == {"config.yaml", "comparison.md", "comparison.csv", "convergence.png"}


def test_progress_goes_to_stderr_with_json(done: Done) -> None:
    """With --json people still see the settings in full and every round on stderr."""
    lines = done.printed.err.splitlines()
    assert [line for line in lines if line.startswith("# ")] == ["# paper_2_clients", "# own_clients"]
    assert "  client_num: 3" in lines
    assert "    gamma: 0.0" in lines
    assert sum(line.startswith("round ") for line in lines) == 6


def test_the_same_again_for_people(done: Done, tmp_path: Path) -> None:
    """Without --json there is a table, from any folder; the same seed gives the same figures to the last digit."""
    words = ("--root", done.root, "--dataset", "breast_cancer", "--clients", "paper_2_clients", "--seed", 4, *SMALL)
    printed = call_command("run", *words, "-q", cwd=tmp_path)
    assert (printed.status, printed.err) == (0, "")
    first = done.printed.json_lines()[0]
    lines = printed.out.splitlines()
    names = [line.split("  ")[0] for line in lines if line]
    assert names[:2] == ["model", "-" * len("local-only client 0")]
    assert names[2:6] == ["network", "mean-margin", "local-only mean", "centralized"]
    network = next(line for line in lines if line.startswith("network "))
    assert network.endswith(f"{100 * first['test']['network']:.2f} %")
    text = printed.out
    assert f"network of round {first['best_round']}, picked by validation loss; rounds done: 3" in text
    *_, last = runs(done.root, "breast_cancer")
    assert f"MLflow run: {last.info.run_id}, look at it: python -m fedlightning.ui --root {done.root}" in text
    assert files(tmp_path) == set()
    assert (
        last.data.metrics["test_network_loss"] == runs(done.root, "breast_cancer")[0].data.metrics["test_network_loss"]
    )


def test_without_validation_the_last_round_counts(done: Done) -> None:
    """With val_ratio 0 all rounds are done, the table has no validation figures, and the text says what counted."""
    words = ("--dataset", "breast_cancer", "--clients", "paper_2_clients", "val_ratio=0", *SMALL)
    as_json = call_command("run", *words, "--json", "-q", cwd=done.root)
    (answer,) = as_json.json_lines()
    assert answer["validation"] is None
    assert answer["best_round"] == answer["rounds"] == 3
    text = call_command("run", *words, "dataset.patience=1", cwd=done.root)
    assert "network of round 3, the last, as nothing was validated" in text.out
    assert text.err.startswith("WARNING: dataset.patience has no effect: with val_ratio 0 there are no validation rows")


@pytest.mark.slow
@pytest.mark.parametrize(("dataset", "metric"), [("diabetes", "mse"), ("wine", "accuracy")])
def test_other_tasks(tmp_path: Path, dataset: str, metric: str) -> None:
    """Regression and several classes go the same way; an error is in the target's units squared."""
    words = ("--dataset", dataset, "--clients", "paper_2_clients", "--json", *SMALL)
    printed = call_command("run", *words, cwd=tmp_path)
    (answer,) = printed.json_lines()
    assert answer["metric"] == metric
    if metric == "mse":
        assert all(1000 < value < 100_000 for value in answer["test"].values())
        assert " mse " in printed.err


# -- what goes wrong ------------------------------------------------------------------------------------------------


WRONG: dict[str, tuple[list[str], str]] = {
    "no data set": (["a9b", "a9a_5_clients"], "unknown data set 'a9b'; known: a9a, "),
    "no clients": (["a9a", "a9a_5"], "unknown client config 'a9a_5'; known: a9a_"),
    "no second clients": (["a9a", "a9a_5_clients,nope"], "unknown client config 'nope'"),
    "no name": (["a9a", "a9a_5_clients,"], "unknown client config ''"),
    "no file": (["a9a", "x.yaml"], "no client config file x.yaml"),
    "no key": (["a9a", "a9a_5_clients", "num_round=1"], "unknown key 'num_round'; known: num_rounds, "),
    "no value": (["a9a", "a9a_5_clients", "num_rounds"], "'num_rounds' has no value"),
    "impossible": (["a9a", "a9a_5_clients", "val_ratio=1"], "val_ratio is 1; allowed: a number at least 0 and below 1"),
    "no folder": (["a9a", "a9a_5_clients", "--data-dir", "nowhere"], "the data folder 'nowhere' is no folder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_words_cost_nothing(tmp_path: Path, case: str) -> None:
    """A wrong name, key or value is one clear line and exit status 2, before anything is created or trained."""
    (dataset, clients, *more), said = WRONG[case]
    printed = call_command("run", "--dataset", dataset, "--clients", clients, *more, cwd=tmp_path)
    assert (printed.status, printed.out) == (2, "")
    assert printed.err.startswith("ERROR: ")
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert files(tmp_path) == set()


def test_wrong_words_as_a_process(tmp_path: Path) -> None:
    """The same from a shell: one line on stderr, exit status 2, an empty folder as before."""
    printed = run_command("run", "--dataset", "a9a", cwd=tmp_path)
    said = "ERROR: the following arguments are required: --clients; see python -m fedlightning.run --help\n"
    assert printed == Finished(2, "", said)
    assert files(tmp_path) == set()


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    """A file in the root's place is named in one line that says what else to try."""
    root = tmp_path / "file"
    root.write_text("")
    words = ("--root", root, "--dataset", "breast_cancer", "--clients", "paper_2_clients", "-q")
    printed = call_command("run", *words, cwd=tmp_path)
    assert (printed.status, printed.out) == (1, "")
    assert printed.err.startswith(f"ERROR: cannot write the tracking folder {root}/mlruns: Not a directory; choose")
    assert printed.err.count("\n") == 1


def damaged_data(folder: Path) -> Path:
    """Return a data folder whose a9a has a damaged byte in the middle."""
    folder.mkdir()
    for name in ("a9a.xz", "a9a.t.xz"):
        shutil.copy(BUNDLED / name, folder / name)
    content = bytearray((folder / "a9a.xz").read_bytes())
    content[len(content) // 2] ^= 0xFF
    (folder / "a9a.xz").write_bytes(content)
    return folder


@pytest.mark.parametrize("words", [[], ["--json"]], ids=["for people", "as json"])
def test_a_client_that_raises(tmp_path: Path, words: list[str]) -> None:
    """A client that cannot read its rows ends the run with its traceback; the run is FAILED and stdout has no JSON."""
    data = damaged_data(tmp_path / "data")
    more = ("--data-dir", data, "num_rounds=1", "-q", *words)
    printed = call_command("run", "--dataset", "a9a", "--clients", "a9a_2_clients", *more, cwd=tmp_path)
    assert (printed.status, printed.out) == (1, "")
    assert "client" in printed.err.splitlines()[0]
    assert "failed in 'query.describe':\nTraceback (most recent call last):\n" in printed.err
    assert f"{data / 'a9a.xz'}" in printed.err.splitlines()[-1]
    (run,) = runs(tmp_path, "a9a")
    assert run.info.status == "FAILED"
    assert run.data.tags["fedlightning.error"].startswith("ClientError: ")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ctrl-c", "sigterm"])
def test_stopped_in_the_middle(tmp_path: Path, kind: str) -> None:
    """Ctrl-C and SIGTERM end a run with one line; it is KILLED in the store and keeps the rounds it did."""
    words: list[Any] = ["--dataset", "breast_cancer", "--clients", "paper_2_clients", *LONG]
    with started_command("run", *words, cwd=tmp_path) as process:
        before = read_until(process, "round  2/60 | train loss")
        if kind == "ctrl-c":
            press_ctrl_c(process)
        else:
            process.send_signal(signal.SIGTERM)
        ended = rest_of(process)
    assert ended.status == {"ctrl-c": 130, "sigterm": 143}[kind]
    word = {"ctrl-c": "interrupted", "sigterm": "terminated"}[kind]
    assert ended.out.splitlines()[-1] == f"ERROR: {word}; the run is marked KILLED in the tracking store"
    assert "Traceback" not in before + ended.out
    (run,) = runs(tmp_path, "breast_cancer")
    assert run.info.status == "KILLED"
    client = MlflowClient(tracking_uri=sqlite_uri(tmp_path / "mlruns" / "mlflow.db"))
    assert len(client.get_metric_history(run.info.run_id, "train_loss")) >= 2


@pytest.mark.slow
def test_client_processes_and_this_process_agree(done: Done, tmp_path: Path) -> None:
    """As a process of its own, with client processes, a run gives the figures of a run in one process."""
    words = ("--dataset", "breast_cancer", "--clients", "paper_2_clients", "--seed", 4, "--json", *SMALL)
    printed = run_command("run", *words, cwd=tmp_path)
    assert printed.status == 0
    (answer,) = printed.json_lines()
    assert {**answer, "seconds": 0} == {**done.printed.json_lines()[0], "seconds": 0}
