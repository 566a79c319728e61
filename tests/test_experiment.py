"""Tests of one run as a whole: which round is chosen, and whether every competitor's scores are what they claim."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import xgboost as xgb
from numpy.typing import NDArray
from sklearn.metrics import accuracy_score, log_loss, mean_squared_error
from tiny_runs import fit_once, open_federation, tiny_config

from fedlightning import experiment
from fedlightning.config import CentralizedConfig, RunConfig, XgbConfig
from fedlightning.datasets import load_table
from fedlightning.datasets.catalogue import find_dataset
from fedlightning.datasets.table import Table
from fedlightning.experiment import (
    Comparison,
    FederatedFit,
    FederatedModel,
    compare_with_centralized,
    fit_federated,
    held_out,
    objective_value,
    run_centralized,
    union_of_shards,
)
from fedlightning.federation import client_app, records
from fedlightning.federation.exchange import Traffic
from fedlightning.federation.memory import Memory
from fedlightning.federation.rounds import RoundReport
from fedlightning.federation.shard import Silo, load_shard
from fedlightning.model import network_arrays
from fedlightning.partition import hold_out
from fedlightning.seeds import derive_seed
from fedlightning.tasks import Scores, find_task

DATASETS = ("breast_cancer", "wine", "diabetes")
OBJECTIVES = {"binary": "binary:logistic", "multiclass": "multi:softprob", "regression": "reg:squarederror"}


@pytest.fixture(autouse=True)
def client_memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Give in-process clients an empty memory."""
    memory = Memory(2**30)
    monkeypatch.setattr(client_app, "memory", memory)
    return memory


def watched_fit(config: RunConfig) -> tuple[FederatedFit, list[RoundReport]]:
    """Fit, and return all rounds with their networks too."""
    seen: list[RoundReport] = []
    return fit_once(config, [seen.append]), seen


# -- which round, and when to stop ----------------------------------------------------------------------------------

# A step size that makes the validation loss jump, so that the best round is somewhere in the middle.
JUMPY = tiny_config(lr=0.3, num_rounds=12, patience=12)


def validation_loss(report: RoundReport) -> float:
    """Return the validation loss of a round."""
    assert report.validation is not None
    return report.validation.loss


@dataclass(frozen=True)
class Jumpy:
    """A run whose best round is neither the first nor near the end."""

    config: RunConfig
    fit: FederatedFit
    seen: list[RoundReport]
    best: int


@pytest.fixture(scope="module")
def jumpy() -> Jumpy:
    """Find such a run among a few seeds."""
    for seed in range(20):
        config = JUMPY.model_copy(update={"seed": seed})
        fit, seen = watched_fit(config)
        best = 1 + int(np.argmin([validation_loss(report) for report in seen]))
        if 1 < best < len(seen) - 3:
            return Jumpy(config, fit, seen, best)
    raise AssertionError("no seed of the first 20 has its best round in the middle")


def test_the_best_round_has_the_least_validation_loss(jumpy: Jumpy) -> None:
    """The chosen round is the argmin of the federated validation loss, and the model has that round's network."""
    assert len(jumpy.seen) == len(jumpy.fit.reports) == 12
    assert jumpy.fit.best.number == jumpy.best
    assert jumpy.fit.best.validation == jumpy.seen[jumpy.best - 1].validation
    for name, array in network_arrays(jumpy.fit.model.network).items():
        np.testing.assert_array_equal(array, jumpy.seen[jumpy.best - 1].network[name])
        assert (array != jumpy.seen[-1].network[name]).any()


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_training_stops_after_as_many_rounds_without_a_better_one(jumpy: Jumpy, patience: int) -> None:
    """Training ends exactly ``patience`` rounds after the best so far, and does not look further."""
    losses = [validation_loss(report) for report in jumpy.seen]
    best = next(
        number
        for number in range(1, len(losses))
        if losses[number - 1] == min(losses[: number + patience]) and number + patience < len(losses)
    )
    dataset = jumpy.config.dataset.model_copy(update={"patience": patience})
    fit, seen = watched_fit(jumpy.config.model_copy(update={"dataset": dataset}))
    assert [validation_loss(report) for report in seen] == losses[: best + patience]
    assert fit.best.number == best


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_metric_can_choose_the_round(dataset: str) -> None:
    """With ``objective: metric`` the first round with the best metric wins: highest accuracy, least squared error."""
    config = tiny_config(dataset, lr=0.1, num_rounds=8, patience=8, objective="metric")
    higher = find_task(find_dataset(dataset).task).higher_is_better
    fit, seen = watched_fit(config)
    metrics = [report.validation.metric for report in seen if report.validation is not None]
    assert fit.best.number == 1 + int(np.argmax(metrics) if higher else np.argmin(metrics))
    assert len(set(metrics)) > 1


def test_what_a_study_minimises() -> None:
    """A study minimises the loss, the squared error, or the accuracy's negative."""
    scores = Scores(0.5, 0.75, 10)
    assert objective_value(scores, "loss", find_task("binary")) == 0.5
    assert objective_value(scores, "metric", find_task("binary")) == -0.75
    assert objective_value(scores, "metric", find_task("multiclass")) == -0.75
    assert objective_value(scores, "metric", find_task("regression")) == 0.75


def test_without_validation_rows_the_last_round_counts() -> None:
    """With ``val_ratio`` 0 all rows train, all rounds are done, the last wins, and nothing is evaluated."""
    config = tiny_config(val_ratio=0.0, num_rounds=4, patience=1)
    sent = []
    with open_federation(config) as grid:
        send = grid.send_and_receive

        def watch(messages: object, **options: float | None) -> object:
            messages = list(messages)  # type: ignore[call-overload]
            sent.extend(message.metadata.message_type for message in messages)
            return send(messages, **options)

        grid.send_and_receive = watch  # type: ignore[method-assign, assignment]
        fit = fit_federated(grid, config)
    assert (len(fit.reports), fit.best.number) == (4, 4)
    assert fit.best.validation is None
    assert fit.validation is None
    assert fit.mean_margin is None
    assert fit.local_only == ()
    assert fit.training_rows == int(569 * 0.75)
    assert set(sent) == {records.DESCRIBE, records.GROW, records.PLANT, records.TRAIN}
    assert sent.count(records.TRAIN) == 4 * 3


def test_an_observer_that_raises_ends_the_run() -> None:
    """Pruning is an exception out of an observer: no further round is trained, and the federation serves the next."""

    class Enough(Exception):
        """Say that enough was seen."""

    seen: list[int] = []

    def stop(report: RoundReport) -> None:
        seen.append(report.number)
        if report.number == 2:
            raise Enough

    config = tiny_config(num_rounds=5)
    with open_federation(config) as grid:
        with pytest.raises(Enough):
            fit_federated(grid, config, observers=[stop])
        assert seen == [1, 2]
        fit = fit_federated(grid, config)
    assert fit.fits == 0
    fresh = fit_once(config)
    assert [report.validation for report in fit.reports] == [report.validation for report in fresh.reports]


def test_reports_do_not_hoard_networks() -> None:
    """Only the chosen round keeps its network, however many rounds there were."""
    fit = fit_once(tiny_config(num_rounds=4))
    assert all(not report.network for report in fit.reports)
    assert fit.best.network


def test_traffic_adds_up(jumpy: Jumpy) -> None:
    """What was sent is the preparation plus the rounds, and up to the chosen round only those."""
    fit = jumpy.fit
    for traffic, rounds in ((fit.traffic, jumpy.seen), (fit.traffic_to_best, jumpy.seen[: jumpy.best])):
        assert traffic.up == fit.preparation.up + sum(report.bytes_up for report in rounds)
        assert traffic.down == fit.preparation.down + sum(report.bytes_down for report in rounds)
    assert fit.preparation.up > 0
    assert fit.preparation.down > fit.preparation.up


def test_a_later_fit_on_the_same_federation_sends_only_its_rounds() -> None:
    """With one memory a fit with fewer trees grows and plants nothing, and is that of a federation of its own."""
    longer, shorter = tiny_config(n_estimators=6), tiny_config(n_estimators=4)
    memory = Memory(2**30)
    with open_federation(longer) as grid:
        first = fit_federated(grid, longer, memory=memory)
        later = fit_federated(grid, shorter, memory=memory)
    fresh = fit_once(shorter)
    assert (first.fits, later.fits) == (3, 0)
    assert first.sent_before == first.preparation
    assert first.traffic_sent == first.traffic
    assert later.sent_before == Traffic()
    assert later.preparation == fresh.preparation == fresh.sent_before
    assert (later.traffic, later.traffic_to_best) == (fresh.traffic, fresh.traffic_to_best)
    rounds = Traffic(sum(r.bytes_up for r in later.reports), sum(r.bytes_down for r in later.reports))
    assert later.traffic_sent == rounds
    assert [replace(report, seconds=0.0) for report in later.reports] == [
        replace(report, seconds=0.0) for report in fresh.reports
    ]
    assert (later.best.number, later.validation) == (fresh.best.number, fresh.validation)
    assert later.model.forest.digest == fresh.model.forest.digest
    for name, array in network_arrays(fresh.model.network).items():
        np.testing.assert_array_equal(network_arrays(later.model.network)[name], array)


def test_trees_for_later_fits_are_no_part_of_this_one() -> None:
    """What is grown along for others is sent, but neither used nor counted as this training's."""
    config = tiny_config(n_estimators=4)
    with open_federation(config) as grid:
        fit = fit_federated(grid, config, grow_at_least=8)
    fresh = fit_once(config)
    assert fit.model.forest.digest == fresh.model.forest.digest
    assert fit.validation == fresh.validation
    assert fit.traffic == fresh.traffic
    assert fit.traffic_sent.up > fit.traffic.up
    assert fit.traffic_sent.down > fit.traffic.down


def test_a_single_client_is_a_federation_too() -> None:
    """With one client the forest is its own ensemble, and mean-margin and local-only are the same."""
    config = tiny_config(client_num=1)
    fit = fit_once(config)
    result = compare_with_centralized(fit, config)
    assert len(fit.model.forest.ensembles) == 1
    assert result.test.local_only == (result.test.mean_margin,)
    assert fit.local_only == (fit.mean_margin,)


# -- whether the scores are true ------------------------------------------------------------------------------------


def direct_scores(task: str, margins: NDArray[np.float64], y: NDArray[np.float64], std: float = 1.0) -> Scores:
    """Score margins of shape ``(rows, outputs)`` with scikit-learn alone."""
    if task == "regression":
        mse = float(mean_squared_error(y, margins[:, 0]))
        return Scores(mse / std**2, mse, len(y))
    if task == "binary":
        positive = 1 / (1 + np.exp(-margins[:, 0]))
        return Scores(float(log_loss(y, positive, labels=[0, 1])), float(accuracy_score(y, positive > 0.5)), len(y))
    exponentials = np.exp(margins - margins.max(axis=1, keepdims=True))
    probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
    labels = np.arange(margins.shape[1])
    loss = float(log_loss(y, probabilities, labels=labels))
    return Scores(loss, float(accuracy_score(y, probabilities.argmax(axis=1))), len(y))


def assert_close(scores: Scores, expected: Scores, *, rel: float = 1e-6) -> None:
    """Check scores against an oracle that computes in another order and precision."""
    assert scores.loss == pytest.approx(expected.loss, rel=rel)
    assert scores.metric == pytest.approx(expected.metric, rel=rel)
    assert scores.examples == expected.examples


def together(tables: Sequence[Table]) -> Table:
    """Return the rows of all tables."""
    return Table(np.concatenate([table.x for table in tables]), np.concatenate([table.y for table in tables]))


class Oracle:
    """The run's trees, grown by XGBoost itself on the rows that the reference's split gives."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.task = find_dataset(config.dataset.name).task
        table = load_table(config.dataset.name)
        order = np.arange(len(table))
        np.random.RandomState(2023).shuffle(order)
        self.test = table.take(order[int(len(table) * 0.75) :])
        clients = config.clients.client_num
        rows = records.RowsRequest(config.dataset.name, self.task, 0.75, 2023, config.val_ratio, config.seed)
        self.shards = [load_shard(Silo(client, clients), rows, Memory(2**30)) for client in range(clients)]
        self.train = together([shard.train for shard in self.shards])
        self.validation = together([shard.validation for shard in self.shards])
        self.std = float(self.train.y.std())
        trees = config.clients.n_estimators_client
        self.boosters = [self.grow(shard.train, trees, "trees", client) for client, shard in enumerate(self.shards)]
        self.centralized = self.grow(self.train, clients * trees, "trees", "centralized")

    def grow(self, rows: Table, trees: int, *purpose: str | int) -> xgb.Booster:
        """Grow trees as XGBoost does, from the prior of all training rows."""
        base_score = 0.0 if self.task == "multiclass" else float(self.train.y.mean())
        params = {
            **self.config.clients.xgb.model_dump(by_alias=True),
            "objective": OBJECTIVES[self.task],
            "base_score": base_score,
            "seed": derive_seed(self.config.seed, *purpose),
            "nthread": 1,
        }
        if self.task == "multiclass":
            params["num_class"] = find_dataset(self.config.dataset.name).classes
        return xgb.train(params, xgb.DMatrix(rows.x, label=rows.y), trees)

    def margins(self, booster: xgb.Booster, rows: Table) -> NDArray[np.float64]:
        """Return XGBoost's own margins, shape ``(rows, outputs)``."""
        margins = booster.predict(xgb.DMatrix(rows.x), output_margin=True).astype(np.float64)
        return margins.reshape(len(rows), -1)

    def score(self, margins: NDArray[np.float64], rows: Table) -> Scores:
        """Score margins on rows."""
        return direct_scores(self.task, margins, rows.y, self.std)

    def check_rivals(self, comparison: Comparison, rows: Table) -> None:
        """Check everything in a comparison but the network and local-only."""
        margins = [self.margins(booster, rows) for booster in self.boosters]
        assert_close(comparison.mean_margin, self.score(np.mean(margins, axis=0), rows))
        assert comparison.centralized is not None
        assert_close(comparison.centralized, self.score(self.margins(self.centralized, rows), rows))


def network_scores(model: FederatedModel, rows: Table, task: str) -> Scores:
    """Predict with the model's parts one after the other, and score with scikit-learn."""
    scaled = torch.from_numpy(model.forest.tree_outputs(rows.x) / np.float32(model.scaling.std))
    with torch.no_grad():
        outputs = model.network(scaled).numpy().astype(np.float64)
    return direct_scores(task, outputs * model.scaling.std + model.scaling.mean, rows.y, model.scaling.std)


@pytest.fixture(scope="module", params=DATASETS)
def fitted(request: pytest.FixtureRequest) -> tuple[Oracle, FederatedFit]:
    """Return a run of every kind of task and its oracle."""
    config = tiny_config(request.param, num_rounds=4)
    return Oracle(config), fit_once(config)


def test_the_test_scores_are_those_of_xgboost_itself(fitted: tuple[Oracle, FederatedFit]) -> None:
    """Mean-margin, every local-only and centralized equal what boosters grown and asked directly say."""
    oracle, fit = fitted
    result = compare_with_centralized(fit, oracle.config)
    oracle.check_rivals(result.test, oracle.test)
    for own, booster in zip(result.test.local_only, oracle.boosters, strict=True):
        assert_close(own, oracle.score(oracle.margins(booster, oracle.test), oracle.test))
    assert_close(result.test.network, network_scores(fit.model, oracle.test, oracle.task), rel=1e-5)
    assert (result.task, result.metric) == (oracle.task, find_task(oracle.task).metric)


def test_the_validation_scores_are_those_of_the_union(fitted: tuple[Oracle, FederatedFit]) -> None:
    """What the clients' tallies add up to is what one evaluation of the union of their validation rows gives."""
    oracle, fit = fitted
    _, validation = union_of_shards(oracle.config)
    np.testing.assert_array_equal(validation.x, oracle.validation.x)
    compared = compare_with_centralized(fit, oracle.config).validation
    assert compared is not None
    assert compared.network == fit.best.validation
    assert_close(compared.network, network_scores(fit.model, validation, oracle.task), rel=1e-5)
    assert_close(compared.network, fit.model.compare(validation).network, rel=1e-5)
    oracle.check_rivals(compared, validation)
    for own, booster, shard in zip(compared.local_only, oracle.boosters, oracle.shards, strict=True):
        assert_close(own, oracle.score(oracle.margins(booster, shard.validation), shard.validation))


@pytest.mark.parametrize("block_rows", [1, 7, 10_000])
def test_blocks_do_not_matter(
    block_rows: int, fitted: tuple[Oracle, FederatedFit], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test set that is looked at in pieces has the same scores as in one."""
    oracle, fit = fitted
    whole = fit.model.compare(oracle.test)
    monkeypatch.setattr(experiment, "BLOCK_ROWS", block_rows)
    pieces = fit.model.compare(oracle.test)
    assert_close(pieces.network, whole.network, rel=1e-5)
    assert_close(pieces.mean_margin, whole.mean_margin, rel=1e-12)
    for piece, own in zip(pieces.local_only, whole.local_only, strict=True):
        assert_close(piece, own, rel=1e-12)
    assert pieces.centralized is None


def test_the_mean_of_local_only_counts_clients_alike() -> None:
    """Local-only's summary is the plain mean over clients, on as many rows as each was scored."""
    scores = Scores(0.0, 0.0, 1)
    comparison = Comparison(scores, scores, (Scores(1.0, 0.5, 40), Scores(2.0, 0.9, 40)))
    assert comparison.local_only_mean == Scores(1.5, pytest.approx(0.7), 40)


def test_held_out_rows_are_the_splits() -> None:
    """Training and test rows of the comparisons are those of the data set's own split."""
    config = tiny_config("wine").dataset.model_copy(update={"train_ratio": 0.6, "split_seed": 5})
    for rows, expected in zip(
        held_out(config), hold_out(load_table("wine"), train_ratio=0.6, split_seed=5), strict=True
    ):
        np.testing.assert_array_equal(rows.x, expected.x)
        np.testing.assert_array_equal(rows.y, expected.y)


def test_the_union_holds_all_training_rows() -> None:
    """Centralized gets the clients' training rows, client by client, and without validation all there are."""
    config = tiny_config("wine", val_ratio=0.0)
    train, validation = union_of_shards(config)
    assert (len(train), len(validation)) == (133, 0)
    rows, _ = held_out(config.dataset)
    np.testing.assert_array_equal(train.x[np.lexsort(train.x.T)], rows.x[np.lexsort(rows.x.T)])


@pytest.mark.parametrize("dataset", DATASETS)
def test_centralized_alone_is_xgboost(dataset: str) -> None:
    """The centralized command's model is XGBoost on all training rows, scored on them and on the test rows."""
    config = tiny_config(dataset, val_ratio=0.0, client_num=1)
    settings = CentralizedConfig(n_estimators=5, xgb=XgbConfig(max_depth=3, alpha=0.0, gamma=0.0))
    result = run_centralized(config.dataset, settings, seed=3)
    train, _ = held_out(config.dataset)
    oracle = Oracle(replace_xgb(config, settings.xgb, seed=3))
    booster = oracle.grow(train, 5, "trees", "centralized")
    assert_close(result.train, oracle.score(oracle.margins(booster, train), train))
    assert_close(result.test, oracle.score(oracle.margins(booster, oracle.test), oracle.test))
    assert result.splits == booster.trees_to_dataframe()["Feature"].ne("Leaf").sum()


def replace_xgb(config: RunConfig, settings: XgbConfig, *, seed: int) -> RunConfig:
    """Return a configuration with other tree settings and another seed."""
    clients = config.clients.model_copy(update={"xgb": settings})
    return config.model_copy(update={"clients": clients, "seed": seed})


# -- one number per task --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "validation", "test"),
    [
        ("breast_cancer", 0.4792985619, 0.4904276120),
        ("wine", 0.9078601501, 0.9049592499),
        ("diabetes", 0.8966498656, 0.5849828264),
    ],
)
def test_golden_numbers(dataset: str, validation: float, test: float) -> None:
    """A small run of each task ends where it always did; a refactor that moves these changes the method."""
    config = tiny_config(dataset, num_rounds=2)
    fit = fit_once(config)
    assert fit.best.validation is not None
    _, rows = held_out(config.dataset)
    assert fit.best.validation.loss == pytest.approx(validation, abs=1e-6)
    assert fit.model.compare(rows).network.loss == pytest.approx(test, abs=1e-6)
