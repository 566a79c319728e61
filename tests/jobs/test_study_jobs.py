"""Tests for a whole study in this process: search, refit, comparison, export, and what the stores hold afterwards."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import xgboost as xgb
from flwr.serverapp import Grid
from mlflow import MlflowClient
from mlflow.entities import Run
from numpy.typing import NDArray
from optuna.trial import TrialState
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import accuracy_score, log_loss

from fedlightning import experiment, figures, training
from fedlightning.config import (
    ClientsConfig,
    StudyConfig,
    flatten,
    load_clients,
    load_study,
    trial_clients,
)
from fedlightning.config.study_files import study_from_document
from fedlightning.federation.engines import FederationSettings, LocalEngine
from fedlightning.federation.exchange import ClientError
from fedlightning.federation.rounds import RoundReport
from fedlightning.jobs import study as study_jobs
from fedlightning.jobs.exports import best_clients
from fedlightning.jobs.study import StudyResult, tune_study
from fedlightning.jobs.trial import ROUNDS
from fedlightning.jobs.workspace import Workspace
from fedlightning.model import initial_network
from fedlightning.owners import Owner
from fedlightning.partition import cut_validation
from fedlightning.search import OWNER, Counts, StudySearch, TrialSummary, find_search
from fedlightning.seeds import derive_seed
from fedlightning.storages import open_storage
from fedlightning.tasks import Scores
from fedlightning.training import IterationLoader, batch_order
from fedlightning.workers import owners_folder

CLIENTS, ROUNDS_DONE, ITERATIONS, SEED, RATIO = 2, 3, 5, 5, 0.25
SPACE = {
    "n_estimators_client": {"choices": [3, 5]},
    "num_iterations": ITERATIONS,
    "num_rounds": ROUNDS_DONE,
    "xgb.max_depth": {"low": 2, "high": 3},
    "xgb.gamma": 0,
    "xgb.alpha": 0,
    # So large that the last round is not always the best one.
    "CNN.lr": {"low": 0.05, "high": 0.5, "log": True},
}

T = TypeVar("T")


class InProcess(LocalEngine):
    """The local engine, with clients that are called in this process."""

    def run(self, function: Callable[[Grid], T], settings: FederationSettings) -> T:
        """Open a federation without processes of its own."""
        return super().run(function, replace(settings, processes=0))


class Notes:
    """A watcher that writes down what it is told."""

    def __init__(self, at_round: Callable[[int, RoundReport], None] = lambda trial, report: None) -> None:
        self.phases: list[str] = []
        self.begun: list[int] = []
        self.rounds: dict[int, list[RoundReport]] = {}
        self.refit_rounds: list[RoundReport] = []
        self.ended: list[tuple[TrialSummary, Counts, int | None]] = []
        self._at_round = at_round

    def phase(self, text: str) -> None:
        """Write down what begins."""
        self.phases.append(text)

    def round_done(self, report: RoundReport, num_rounds: int) -> None:
        """Write down a round of the refit."""
        self.refit_rounds.append(report)

    def search_begins(self, counts: Counts, total: int, timeout: float | None) -> None:
        """Write down how far the study is."""
        self.phase(f"search begins at {counts.finished} of {total}")

    def trial_begins(self, number: int, clients: ClientsConfig) -> None:
        """Write down a trial."""
        self.begun.append(number)

    def trial_round(self, number: int, report: RoundReport, num_rounds: int) -> None:
        """Write down a round, or do what the test wants done in it."""
        self.rounds.setdefault(number, []).append(report)
        self._at_round(number, report)

    def trial_ends(self, summary: TrialSummary, counts: Counts, best: TrialSummary | None) -> None:
        """Write down how a trial ended."""
        self.ended.append((summary, counts, best.number if best else None))

    def search_ends(self) -> None:
        """Write down the end of the search."""
        self.phase("search ends")


def definition(**changes: Any) -> StudyConfig:
    """Return the small study of these tests."""
    document = {
        "dataset": "breast_cancer",
        "client_num": CLIENTS,
        "trials": 4,
        "seed": SEED,
        "val_ratio": RATIO,
        "pruner": "none",
        "space": SPACE,
        **changes,
    }
    return study_from_document(document, source="test")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all studies of this file: making the stores takes over a second."""
    return tmp_path_factory.mktemp("project")


@pytest.fixture(scope="module")
def workspace(root: Path) -> Iterator[Workspace]:
    """A workspace in that folder, whatever the environment says of stores and data."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_URI", "FEDLIGHTNING_DATA_DIR"):
            patch.delenv(name, raising=False)
        yield Workspace(root, engine=InProcess())


@pytest.fixture
def client(workspace: Workspace) -> MlflowClient:
    """A client of the tracking store that has seen nothing of what was recorded."""
    return MlflowClient(tracking_uri=workspace.store.uri)


@dataclass(frozen=True)
class Tuned:
    """A study that was done, and what was seen of it."""

    result: StudyResult
    notes: Notes
    test_readings: int


def tune(workspace: Workspace, name: str, config: StudyConfig, notes: Notes | None = None, **options: Any) -> Tuned:
    """Tune, and count how often the held-out rows are read."""
    readings, held_out = [], experiment.held_out

    def count(*arguments: Any) -> Any:
        readings.append(arguments)
        return held_out(*arguments)

    notes = notes or Notes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "held_out", count)
        result = tune_study(workspace, name, config, notes, **options)
    return Tuned(result, notes, len(readings))


@pytest.fixture(scope="module")
def tuned(workspace: Workspace) -> Tuned:
    """The study that most tests look at."""
    return tune(workspace, "tiny", definition())


def runs_of(client: MlflowClient, experiment_name: str) -> dict[str, list[Run]]:
    """Return the runs of an experiment by their kind, oldest first."""
    found = client.get_experiment_by_name(experiment_name)
    assert found is not None
    by_kind: dict[str, list[Run]] = {}
    for run in sorted(client.search_runs([found.experiment_id]), key=lambda run: run.info.start_time):
        by_kind.setdefault(run.data.tags["kind"], []).append(run)
    return by_kind


def history(client: MlflowClient, run: Run, key: str) -> list[tuple[int, float]]:
    """Return a metric's steps and values."""
    return [(entry.step, entry.value) for entry in client.get_metric_history(run.info.run_id, key)]


# -- the search -----------------------------------------------------------------------------------------------------


def test_a_study_does_its_trials(tuned: Tuned) -> None:
    """All trials are done, each in all its rounds, and the winner has the lowest validation loss."""
    result, notes = tuned.result, tuned.notes
    assert (result.counts.complete, result.counts.pruned, result.counts.failed) == (4, 0, 0)
    assert notes.begun == [0, 1, 2, 3]
    assert {number: len(reports) for number, reports in notes.rounds.items()} == dict.fromkeys(range(4), ROUNDS_DONE)
    lowest = {n: min(r.validation.loss for r in reports if r.validation) for n, reports in notes.rounds.items()}
    assert result.best.number == min(lowest, key=lambda number: lowest[number])
    assert result.best.value == lowest[result.best.number]
    assert result.clients.num_rounds < ROUNDS_DONE, "choose a seed whose winner is best before its last round"
    assert [(summary.number, counts.finished) for summary, counts, _ in notes.ended] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert notes.ended[-1][2] == result.best.number
    assert notes.phases[:3] == ["opening the stores", "search begins at 0 of 4", "search ends"]


def test_the_pruner_sees_the_best_so_far(tuned: Tuned, root: Path) -> None:
    """What a trial reports after a round is its best loss up to there: that is what it will be judged by."""
    for trial in find_search("tiny", root).optuna_study().trials:
        losses = [report.validation.loss for report in tuned.notes.rounds[trial.number] if report.validation]
        assert trial.intermediate_values == {n: min(losses[:n]) for n in range(1, ROUNDS_DONE + 1)}
    assert losses[-1] > min(losses), "choose a seed whose last trial gets worse in the end"


def test_the_test_rows_are_read_once(tuned: Tuned) -> None:
    """Searching never reads the test rows; the refit does, once."""
    assert tuned.test_readings == 1
    assert [report.validation for report in tuned.notes.refit_rounds] == [None] * tuned.result.clients.num_rounds


# -- the refit, computed anew ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Anew:
    """The comparison as this file computes it: scikit-learn's rows and scores, XGBoost's and torch's own calls."""

    network: tuple[float, float]
    mean_margin: tuple[float, float]
    local_only: list[tuple[float, float]]
    centralized: tuple[float, float]


def scored(logits: NDArray[np.float64], y: NDArray[np.int64]) -> tuple[float, float]:
    """Return loss and accuracy by scikit-learn."""
    probability = 1 / (1 + np.exp(-logits))
    return log_loss(y, np.column_stack([1 - probability, probability])), accuracy_score(y, logits > 0)


def compute_anew(clients: ClientsConfig, *, val_ratio: float, on_test: bool) -> Anew:
    """Train and compare without the federation: on the clients' rows, scored on validation or on test rows."""
    data = load_breast_cancer()
    x, y = data.data.astype(np.float32), data.target
    order = np.arange(len(y))
    np.random.RandomState(2023).shuffle(order)
    cut = int(0.75 * len(y))
    held_out = order[cut:]
    shuffled = torch.randperm(cut, generator=torch.Generator().manual_seed(0)).numpy()
    shards = [order[:cut][part] for part in np.split(shuffled, [cut // CLIENTS])]
    train, validation = [], []
    for k, shard in enumerate(shards):
        seed = derive_seed(SEED, "validation", k)
        kept, checked = cut_validation(y[shard].astype(float), val_ratio=val_ratio, seed=seed, stratify=True)
        train.append(shard[kept])
        validation.append(shard[checked])
    union = np.concatenate(train)
    rate = y[union].mean()
    intercept = np.log(rate / (1 - rate))

    def grow(rows: NDArray[np.int64], trees: int, *purpose: str | int) -> xgb.Booster:
        params = clients.xgb.model_dump(by_alias=True) | {"objective": "binary:logistic", "base_score": rate}
        params |= {"seed": derive_seed(SEED, "trees", *purpose), "nthread": 1, "tree_method": "hist"}
        return xgb.train(params, xgb.DMatrix(x[rows], label=y[rows]), trees)

    count = clients.n_estimators_client
    boosters = [grow(rows, count, k) for k, rows in enumerate(train)]
    centralized = grow(union, CLIENTS * count, "centralized")

    def margin(booster: xgb.Booster, rows: NDArray[np.int64], **options: Any) -> NDArray[np.float64]:
        return booster.predict(xgb.DMatrix(x[rows]), output_margin=True, **options).astype(np.float64)

    def tree_outputs(rows: NDArray[np.int64]) -> torch.Tensor:
        columns = [
            margin(booster, rows, iteration_range=(t, t + 1)) - intercept for booster in boosters for t in range(count)
        ]
        return torch.tensor(np.stack(columns, axis=1)[:, None, :], dtype=torch.float32)

    def network_of(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
        conv = torch.nn.Conv1d(1, 64, kernel_size=count, stride=count)
        linear = torch.nn.Linear(64 * CLIENTS, 1)
        layers = torch.nn.Sequential(conv, torch.nn.Flatten(), torch.nn.ReLU(), linear)
        layers.load_state_dict(dict(zip(layers.state_dict(), weights.values(), strict=True)))
        return layers

    weights = initial_network(CLIENTS, count, seed=derive_seed(SEED, "network")).state_dict()
    inputs = [tree_outputs(rows) for rows in train]
    for number in range(1, clients.num_rounds + 1):
        trained = []
        for k, rows in enumerate(train):
            network = network_of(weights)
            optimizer = torch.optim.Adam(network.parameters(), lr=clients.CNN.lr, betas=(0.5, 0.999))
            targets = torch.tensor(y[rows], dtype=torch.float64)
            seed = derive_seed(SEED, "batches", k, number)
            order = batch_order(len(targets), clients.num_iterations, 32, seed=seed)
            for batches, wanted in IterationLoader(inputs[k], targets, order):
                for batch, labels in zip(batches, wanted, strict=True):
                    optimizer.zero_grad()
                    logits = network(batch)[:, 0]
                    torch.nn.functional.binary_cross_entropy_with_logits(logits, labels.float()).backward()
                    optimizer.step()
            trained.append((len(rows), network.state_dict()))
        total = sum(size for size, _ in trained)
        weights = {name: sum(size * state[name] for size, state in trained) / total for name in trained[0][1]}

    rows = held_out if on_test else np.concatenate(validation)
    with torch.no_grad():
        logits = network_of(weights)(tree_outputs(rows))[:, 0].double().numpy()
    # Each client's own trees are scored on the test rows, or on that client's own validation rows.
    own = [held_out] * CLIENTS if on_test else validation
    return Anew(
        network=scored(logits, y[rows]),
        mean_margin=scored(np.mean([margin(booster, rows) for booster in boosters], axis=0), y[rows]),
        local_only=[scored(margin(booster, mine), y[mine]) for booster, mine in zip(boosters, own, strict=True)],
        centralized=scored(margin(centralized, rows), y[rows]),
    )


def pair(scores: Scores | None) -> tuple[float, float]:
    """Return loss and metric."""
    assert scores is not None
    return scores.loss, scores.metric


@pytest.mark.parametrize("part", ["test", "validation"])
def test_figures_are_those_of_a_plain_computation(tuned: Tuned, part: str) -> None:
    """The winner's scores and its refit's, and all their rivals', are what plain torch and XGBoost calls give."""
    on_test = part == "test"
    anew = compute_anew(tuned.result.clients, val_ratio=0.0 if on_test else RATIO, on_test=on_test)
    found = tuned.result.test if on_test else tuned.result.validation
    # Single precision, and sums in another order.
    close = {"rel": 2e-4}
    assert pair(found.network) == pytest.approx(anew.network, **close)
    assert pair(found.mean_margin) == pytest.approx(anew.mean_margin, **close)
    assert [pair(scores) for scores in found.local_only] == [pytest.approx(own, **close) for own in anew.local_only]
    assert pair(found.centralized) == pytest.approx(anew.centralized, **close)
    assert found.network.examples == (143 if on_test else 108)


# -- what the tracking store holds ----------------------------------------------------------------------------------


def test_one_parent_and_everything_below_it(tuned: Tuned, client: MlflowClient) -> None:
    """A study is one run; trials, refit and rivals are nested below it, told apart by their kind, and all ended."""
    runs = runs_of(client, "tiny")
    (parent,) = runs["study"]
    assert parent.info.run_id == tuned.result.run_id
    assert "mlflow.parentRunId" not in parent.data.tags
    assert {kind: len(found) for kind, found in runs.items()} == {"study": 1, "trial": 4, "refit": 1, "comparator": 3}
    nested = [run for kind, found in runs.items() if kind != "study" for run in found]
    assert {run.data.tags["mlflow.parentRunId"] for run in nested} == {parent.info.run_id}
    assert {run.info.status for run in [parent, *nested]} == {"FINISHED"}
    assert [run.info.run_name for run in runs["trial"]] == [f"trial {n}" for n in range(4)]
    assert [run.info.run_name for run in runs["comparator"]] == ["mean-margin", "local-only", "centralized"]
    assert {run.data.tags["trial_state"] for run in runs["trial"]} == {"complete"}


def test_trials_hold_their_rounds(tuned: Tuned, client: MlflowClient) -> None:
    """Each trial's run has one value per round of everything that a round reports, at the round's number."""
    for run in runs_of(client, "tiny")["trial"]:
        reports = tuned.notes.rounds[int(run.data.tags["trial"])]
        for key, value in {
            "train_loss": lambda report: report.train.loss,
            "train_accuracy": lambda report: report.train.metric,
            "validation_loss": lambda report: report.validation.loss,
            "validation_accuracy": lambda report: report.validation.metric,
            "bytes_up": lambda report: report.bytes_up,
            "bytes_down": lambda report: report.bytes_down,
        }.items():
            assert history(client, run, key) == [(report.number, value(report)) for report in reports]
        assert len(history(client, run, "round_seconds")) == ROUNDS_DONE


def test_trials_hold_their_settings(tuned: Tuned, client: MlflowClient, root: Path) -> None:
    """A trial's parameters are its settings by dotted key; its tags and its data set say what it ran on."""
    trials = find_search("tiny", root).trials()
    for run, trial in zip(runs_of(client, "tiny")["trial"], trials, strict=True):
        expected = flatten(trial_clients(definition(), trial.values))
        assert {key: run.data.params[key] for key in expected} == {key: str(value) for key, value in expected.items()}
        assert run.data.params["dataset.name"] == "breast_cancer"
        assert run.data.params["val_ratio"] == str(RATIO)
        assert run.data.tags["dataset"] == "breast_cancer"
        assert run.data.tags["client_num"] == str(CLIENTS)
        assert run.data.tags["engine"] == "local"
        assert run.data.metrics["objective"] == trial.value
        assert [item.dataset.name for item in run.inputs.dataset_inputs] == ["breast_cancer"]
        assert trial.attributes["run_id"] == run.info.run_id


def test_the_refit_is_recorded(tuned: Tuned, client: MlflowClient) -> None:
    """The refit's run has its rounds and every competitor's scores; the rivals' runs and the parent have theirs."""
    runs, result = runs_of(client, "tiny"), tuned.result
    (refit,) = runs["refit"]
    assert [step for step, _ in history(client, refit, "train_loss")] == list(range(1, result.clients.num_rounds + 1))
    assert refit.data.params["val_ratio"] == "0.0"
    assert refit.data.params["num_rounds"] == str(result.clients.num_rounds)
    assert refit.data.tags["trial"] == str(result.best.number)
    competitors = {
        "network": (result.validation.network, result.test.network),
        "mean_margin": (result.validation.mean_margin, result.test.mean_margin),
        "local_only": (result.validation.local_only_mean, result.test.local_only_mean),
        "centralized": (result.validation.centralized, result.test.centralized),
    }
    for run in (refit, runs["study"][0]):
        for name, (on_validation, on_test) in competitors.items():
            for part, scores in (("validation", on_validation), ("test", on_test)):
                assert run.data.metrics[f"{part}_{name}_loss"] == pair(scores)[0]
                assert run.data.metrics[f"{part}_{name}_accuracy"] == pair(scores)[1]
    for run, name in zip(runs["comparator"], list(competitors)[1:], strict=True):
        assert run.data.metrics["test_loss"] == pair(competitors[name][1])[0]
        assert run.data.metrics["validation_accuracy"] == pair(competitors[name][0])[1]


def test_artifacts(tuned: Tuned, client: MlflowClient, tmp_path: Path) -> None:
    """The study's run holds its definition, the winner's config, both tables and all figures, readable as such."""
    run_id = tuned.result.run_id
    files = {item.path: item.file_size for item in client.list_artifacts(run_id)}
    assert set(files) == {
        "study.yaml",
        "tiny_clients.yaml",
        "comparison.md",
        "comparison.csv",
        "convergence.png",
        "optimization_history.png",
        "optimization_history.html",
        "param_importances.png",
        "param_importances.html",
    }
    folder = Path(client.download_artifacts(run_id, "", str(tmp_path)))
    assert load_study(folder / "study.yaml") == definition()
    assert load_clients(folder / "tiny_clients.yaml") == tuned.result.clients
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in files if name.endswith("png"))
    lines = (folder / "comparison.csv").read_text().splitlines()
    names = ["network", "mean-margin", "local-only mean", "centralized", "local-only client 0", "local-only client 1"]
    assert [line.split(",")[0] for line in lines] == ["model", *names]
    scores = tuned.result.test.network
    assert lines[1].split(",")[-2:] == [repr(scores.loss), repr(scores.metric)]


def test_convergence_figure_shows_the_best_trials(
    tuned: Tuned, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figure's curves are the rounds of the best trials, best first; only the winner's rivals are levels."""
    drawn: list[figures.Curve] = []
    convergence = figures.convergence

    def note(curves: list[figures.Curve], **options: Any) -> Any:
        drawn[:] = curves
        return convergence(curves, **options)

    monkeypatch.setattr(figures, "convergence", note)
    monkeypatch.setattr(study_jobs, "CURVES", 3)
    tune(workspace, "tiny", definition())
    ranked = sorted(tuned.notes.ended, key=lambda end: end[0].value or 0.0)
    assert [curve.label for curve in drawn] == [f"trial {end[0].number}" for end in ranked[:3]]
    for curve, (summary, _, _) in zip(drawn, ranked, strict=False):
        reports = tuned.notes.rounds[summary.number]
        expected = figures.Curve.of("", reports, chosen=summary.attributes["best_round"])
        assert replace(curve, label="", mean_margin=None, local_only=None) == expected
    validation = tuned.result.validation
    assert (drawn[0].mean_margin, drawn[0].local_only) == (validation.mean_margin, validation.local_only_mean)
    assert {(curve.mean_margin, curve.local_only) for curve in drawn[1:]} == {(None, None)}


def test_export_is_the_winner(tuned: Tuned, root: Path) -> None:
    """The exported file is found by its name, and is the winner with the round that was best as its rounds."""
    result = tuned.result
    assert result.config_file == root / "studies" / "clients" / "tiny_clients.yaml"
    clients = load_clients("tiny_clients", root=root)
    search = find_search("tiny", root)
    assert clients == result.clients == best_clients(search.config, search.best())
    losses = [row[1] for row in search.best().attributes[ROUNDS]]
    assert clients.num_rounds == 1 + losses.index(min(losses))


# -- called again ---------------------------------------------------------------------------------------------------


def test_a_finished_study_only_reports(
    tuned: Tuned, workspace: Workspace, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second call opens no federation, reads no test row, and reports the same figures to the last bit."""
    monkeypatch.delattr(InProcess, "run")
    monkeypatch.delattr(LocalEngine, "run")
    again = tune(workspace, "tiny", definition())
    assert again.test_readings == 0
    assert (again.notes.begun, again.notes.refit_rounds) == ([], [])
    assert again.result == tuned.result
    assert again.notes.phases == ["opening the stores", "study tiny already has its 4 trials"]
    assert sum(map(len, runs_of(client, "tiny").values())) == 9


@pytest.mark.slow
def test_more_trials_refit_only_a_new_winner(workspace: Workspace, client: MlflowClient) -> None:
    """With more trials the study goes on; the test rows are read again only if there is a new winner."""
    readings = []
    space = {**SPACE, "CNN.lr": {"low": 0.1, "high": 1.0, "log": True}}
    for trials in (1, 2, 3, 4):
        again = tune(workspace, "growing", definition(trials=trials, seed=3, space=space), export=False)
        assert again.result.counts.finished == trials
        assert again.notes.begun == [trials - 1]
        assert again.result.config_file is None
        readings.append((again.result.best.number, again.test_readings))
    winners = [number for number, _ in readings]
    assert [read for _, read in readings] == [1] + [int(now != before) for before, now in pairwise(winners)]
    assert {0, 1} == {read for _, read in readings[1:]}, "choose a seed with both cases"
    runs = runs_of(client, "growing")
    assert len(runs["study"]) == 1
    assert len(runs["trial"]) == 4
    assert len(runs["refit"]) == sum(read for _, read in readings)


@pytest.mark.slow
def test_a_deleted_tracking_run_is_made_anew(workspace: Workspace, client: MlflowClient) -> None:
    """If somebody has deleted the study's run, a new one gets everything that the study knows."""
    first = tune(workspace, "deleted", definition(trials=1)).result
    client.delete_run(first.run_id)
    second = tune(workspace, "deleted", definition(trials=1))
    assert second.result.run_id == first.run_id or second.test_readings == 0
    assert client.get_run(second.result.run_id).info.status == "FINISHED"
    files = {item.path for item in client.list_artifacts(second.result.run_id)}
    assert {"study.yaml", "comparison.md", "convergence.png", "deleted_clients.yaml"} <= files


@pytest.mark.slow
def test_fresh_begins_a_run_of_its_own(workspace: Workspace, client: MlflowClient, root: Path) -> None:
    """--fresh leaves the earlier study's runs as they are, ends those that hang, and records beside them."""
    first = tune(workspace, "again", definition(trials=1)).result
    # What kill -9 leaves: a run that nobody will end.
    workspace.store.resume_run(first.run_id)
    hanging = workspace.store.start_run(
        "again", "trial 1", kind="trial", parent=first.run_id, tags={OWNER: "somebody who is gone"}
    )
    second = tune(workspace, "again", definition(trials=1, seed=SEED + 1), fresh=True)
    assert second.result.run_id != first.run_id
    assert second.result.counts.complete == 1
    assert any(phase.startswith("the earlier study 'again' is kept as 'again@") for phase in second.notes.phases)
    assert client.get_run(first.run_id).info.status == "KILLED"
    ended = client.get_run(hanging.run_id)
    assert (ended.info.status, ended.data.tags["trial_state"]) == ("FAILED", "failed")
    assert [run.info.status for run in runs_of(client, "again")["study"]] == ["KILLED", "FINISHED"]


# -- what goes wrong ------------------------------------------------------------------------------------------------


def test_diverged_training_counts_as_pruned(
    workspace: Workspace, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose weights leave the finite numbers ends its trial as pruned, with the reason, not the study."""
    fit, calls = training.fit, []

    def diverging(network: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        tally = fit(network, *arguments, **options)
        calls.append(options["lr"])
        if len(calls) == 3:
            with torch.no_grad():
                next(network.parameters()).fill_(float("nan"))
        return tally

    monkeypatch.setattr(training, "fit", diverging)
    done = tune(workspace, "diverging", definition(trials=2))
    assert (done.result.counts.complete, done.result.counts.pruned) == (1, 1)
    (summary, _, best), _ = done.notes.ended
    assert (summary.state, best) == ("pruned", None)
    assert "client 0 diverged" in summary.attributes["pruned_because"]
    run = runs_of(client, "diverging")["trial"][0]
    assert (run.info.status, run.data.tags["trial_state"]) == ("FINISHED", "pruned")
    assert run.data.tags["pruned_because"] == summary.attributes["pruned_because"]
    assert len(history(client, run, "train_loss")) == 1


@pytest.mark.slow
def test_pruned_trials_keep_the_rounds_they_did(workspace: Workspace, client: MlflowClient) -> None:
    """The median pruner ends a bad trial of a real study; its run is finished and tells why."""
    space = {**SPACE, "num_rounds": 8, "num_iterations": 1, "n_estimators_client": 3, "xgb.max_depth": 2}
    config = definition(trials=14, pruner="median", sampler="random", space=space)
    done = tune(workspace, "pruning", config)
    counts = done.result.counts
    assert counts.finished == 14
    assert counts.pruned > 0
    for summary, _, _ in done.notes.ended:
        if summary.state == "pruned":
            assert "median" in summary.attributes["pruned_because"]
            run = client.get_run(summary.attributes["run_id"])
            assert (run.info.status, run.data.tags["trial_state"]) == ("FINISHED", "pruned")
            rounds = len(done.notes.rounds[summary.number])
            assert len(history(client, run, "validation_loss")) == rounds
            assert 5 <= rounds <= 8


def test_a_client_that_fails_ends_the_study(workspace: Workspace, client: MlflowClient, root: Path) -> None:
    """A client with too few rows raises; the study ends with its traceback, and nothing is left running."""
    config = definition(client_num=300)
    with pytest.raises(ClientError, match=r"(?s)client .* failed in 'query\.describe'.*Traceback.*ValueError"):
        tune(workspace, "failing", config)
    runs = runs_of(client, "failing")
    assert [run.info.status for run in (*runs["study"], *runs["trial"])] == ["FAILED", "FAILED"]
    assert runs["trial"][0].data.tags["trial_state"] == "failed"
    assert "client" in runs["trial"][0].data.tags["fedlightning.error"]
    assert [trial.state for trial in find_search("failing", root).trials()] == ["failed"]
    assert list(owners_folder(root).iterdir()) == []


def test_ctrl_c_in_a_round(workspace: Workspace, client: MlflowClient, root: Path) -> None:
    """Ctrl-C fails the trial and kills its run; the same call again tries it anew and brings the study to its end."""

    def interrupt(trial: int, report: RoundReport) -> None:
        if (trial, report.number) == (1, 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(workspace, "interrupted", definition(trials=3), Notes(interrupt))
    runs = runs_of(client, "interrupted")
    assert [run.info.status for run in runs["trial"]] == ["FINISHED", "KILLED"]
    assert runs["trial"][1].data.tags["trial_state"] == "failed"
    assert len(history(client, runs["trial"][1], "validation_loss")) == 2
    assert [run.info.status for run in runs["study"]] == ["KILLED"]
    search = find_search("interrupted", root)
    assert [trial.state for trial in search.trials()] == ["complete", "failed", "waiting"]
    done = tune(workspace, "interrupted", definition(trials=3))
    trials = search.trials()
    assert [trial.state for trial in trials] == ["complete", "failed", "complete", "complete"]
    assert trials[2].values == trials[1].values
    runs = runs_of(client, "interrupted")
    assert [run.info.run_id for run in runs["study"]] == [done.result.run_id]
    assert [run.info.status for run in (*runs["study"], *runs["trial"])] == [
        "FINISHED",
        "FINISHED",
        "KILLED",
        "FINISHED",
        "FINISHED",
    ]


@pytest.mark.slow
def test_what_a_killed_process_left_is_cleared(workspace: Workspace, client: MlflowClient, root: Path) -> None:
    """A trial and its run whose worker is gone are ended by the next call; those of a living one are left alone."""
    name, config = "abandoned", definition(trials=3)
    first = tune(workspace, name, definition(trials=1))
    search = StudySearch(name, config, root, open_storage(root))
    with Owner(owners_folder(root)) as living:
        search.enter(living.name)
        left = {}
        for owner in ("somebody who is gone", living.name):
            trial = search.optuna_study().ask()
            trial.set_user_attr(OWNER, owner)
            left[owner] = workspace.store.start_run(
                name, f"trial {trial.number}", kind="trial", parent=first.result.run_id, tags={OWNER: owner}
            )
        # Three trials in all, of which the living one has one under way: this call does one and waits for the other.
        statuses = []

        def when_waiting(text: str) -> None:
            if text.startswith("waiting for trial 2 of other workers"):
                statuses.extend(client.get_run(run.run_id).info.status for run in left.values())
                left[living.name].finish("FINISHED")
                search.optuna_study().tell(2, state=TrialState.PRUNED)

        notes = Notes()
        told, notes.phase = notes.phase, lambda text: (told(text), when_waiting(text))[0]  # type: ignore[method-assign]
        tune(workspace, name, config, notes)
        assert statuses == ["FAILED", "RUNNING"]
        assert [trial.state for trial in search.trials()] == ["complete", "failed", "pruned", "complete"]
    assert "trial 1 was left unfinished by a process that is gone" in notes.phases


@pytest.mark.slow
def test_time_is_up(workspace: Workspace) -> None:
    """A study that hits its timeout says how many trials it did, and is refitted with what it has."""
    done = tune(workspace, "timed", definition(trials=50, timeout=0.4))
    counts = done.result.counts
    assert 1 <= counts.finished < 50
    notice = f"time is up after {counts.finished} of 50 trials; the same command does the others"
    assert notice in done.notes.phases
    assert done.test_readings == 1


@pytest.mark.slow
def test_no_complete_trial_is_an_error(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study of which no trial could be completed has nothing to refit, and says what became of its trials."""
    fit = training.fit

    def diverging(network: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        tally = fit(network, *arguments, **options)
        with torch.no_grad():
            next(network.parameters()).fill_(float("inf"))
        return tally

    monkeypatch.setattr(training, "fit", diverging)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"no complete trial \(2 pruned, 0 failed\)"):
            tune(workspace, "hopeless", definition(trials=2))


# -- side by side ---------------------------------------------------------------------------------------------------


@dataclass
class Stoppable:
    """What workers share of a study."""

    stopping: threading.Event


def test_the_failure_is_told_not_the_interruption() -> None:
    """When one worker fails the others are interrupted; what comes through is the failure."""
    search = Stoppable(threading.Event())

    def work(worker: int) -> None:
        if worker == 2:
            raise ClientError("client 1 failed")
        assert search.stopping.wait(30)
        raise KeyboardInterrupt

    with pytest.raises(ClientError, match="client 1 failed"):
        study_jobs._side_by_side(3, search, work)  # type: ignore[arg-type]


def test_workers_that_stop_are_an_interruption() -> None:
    """When workers only stopped, that is what comes through; when all came to their end, nothing does."""

    def stop(worker: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study_jobs._side_by_side(2, Stoppable(threading.Event()), stop)  # type: ignore[arg-type]
    done = []
    study_jobs._side_by_side(3, Stoppable(threading.Event()), done.append)  # type: ignore[arg-type]
    assert sorted(done) == [0, 1, 2]
