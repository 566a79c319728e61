"""Tests of clients whose nodes hold files of their own: whose rows are where, and which are never trained on."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from federations import WatchedGrid, open_machines, small_strategy, write_libsvm
from flwr.app import Message, MetricRecord, RecordDict
from machines import app as machines

from fedlightning.config import ClientsConfig, CnnConfig, DatasetConfig, RunConfig, XgbConfig
from fedlightning.datasets import load_table
from fedlightning.datasets.table import Table
from fedlightning.experiment import FederatedFit, compare_with_centralized, fit_federated
from fedlightning.federation import records
from fedlightning.federation.exchange import ClientError
from fedlightning.federation.shard import DATA_FILE
from fedlightning.partition import hold_out
from fedlightning.tasks import Scores

DATASETS = ("breast_cancer", "wine", "diabetes")


def config_of(dataset: str, *, num_rounds: int = 3) -> RunConfig:
    """Return a configuration of a run that takes a fraction of a second."""
    return RunConfig(
        dataset=DatasetConfig(name=dataset, patience=10),
        clients=ClientsConfig(
            n_estimators_client=4,
            num_rounds=num_rounds,
            client_num=3,
            num_iterations=12,
            xgb=XgbConfig(max_depth=3, learning_rate=0.3, alpha=0.0, gamma=0.0),
            CNN=CnnConfig(lr=0.01, batch_size=16, channels=4),
        ),
        val_ratio=0.2,
        seed=0,
        objective="loss",
    )


def parts_of(dataset: str) -> list[Table]:
    """Return three silos' rows, of different sizes."""
    table = load_table(dataset)
    order = np.random.default_rng(1).permutation(len(table))
    return [table.take(part) for part in np.split(order, [len(table) // 5, len(table) // 2])]


def give_files(folder: Path, parts: Sequence[Table]) -> None:
    """Give every client a file in a folder of its own, one of them packed."""
    for partition, rows in enumerate(parts):
        path = folder / f"silo {partition}" / ("rows.xz" if partition == 1 else "rows")
        write_libsvm(path, rows)
        machines.nodes[partition] = {DATA_FILE: str(path)}


def fit_on_files(folder: Path, parts: Sequence[Table], config: RunConfig) -> FederatedFit:
    """Fit on clients with files of their own."""
    give_files(folder, parts)
    with open_machines(folder / "trees") as grid:
        return fit_federated(grid, config, test=True)


def test_parts(parts: Sequence[Table]) -> list[Table]:
    """Return the rows that each silo holds out."""
    return [hold_out(part, train_ratio=0.75, split_seed=2023)[1] for part in parts]


test_parts.__test__ = False  # type: ignore[attr-defined]


def close(scores: Scores) -> Scores:
    """Return scores that compare as nearly equal."""
    return Scores(pytest.approx(scores.loss, rel=1e-5), pytest.approx(scores.metric, rel=1e-5), scores.examples)


@pytest.mark.parametrize("dataset", DATASETS)
def test_clients_score_the_test_rows_that_they_hold(dataset: str, tmp_path: Path) -> None:
    """The federated test scores are those of the model on the union of what the silos hold out, and of each on its."""
    parts = parts_of(dataset)
    fit = fit_on_files(tmp_path, parts, config_of(dataset))
    held_out = test_parts(parts)
    union = Table(np.concatenate([part.x for part in held_out]), np.concatenate([part.y for part in held_out]))
    oracle = fit.model.compare(union)
    assert fit.test is not None
    assert len(fit.reports) == 3
    assert fit.test.network == close(oracle.network)
    assert fit.test.mean_margin == close(oracle.mean_margin)
    assert fit.test.centralized is None
    own = [fit.model.compare(rows).local_only[partition] for partition, rows in enumerate(held_out)]
    assert list(fit.test.local_only) == [close(scores) for scores in own]
    assert fit.training_rows + fit.best.validation.examples + len(union) == sum(map(len, parts))  # type: ignore[union-attr]
    # Nobody has the union of their rows, and the comparison does not look for it.
    compared = compare_with_centralized(fit, config_of(dataset))
    assert (compared.test, compared.validation) == (fit.test, fit.validation)


def test_the_test_rows_of_own_files_change_nothing_but_the_test_scores(tmp_path: Path) -> None:
    """With garbage for the rows that silos hold out, training, choice and validation are the same to the bit."""
    parts, config = parts_of("breast_cancer"), config_of("breast_cancer", num_rounds=4)
    fit = fit_on_files(tmp_path / "whole", parts, config)
    poisoned = []
    for part in parts:
        order = np.arange(len(part))
        np.random.RandomState(2023).shuffle(order)
        test = order[int(len(part) * 0.75) :]
        x, y = part.x.copy(), part.y.copy()
        x[test] = np.random.default_rng(0).normal(scale=1e3, size=x[test].shape)
        y[test] = 1 - y[test]
        poisoned.append(Table(x, y))
    machines.reset()
    other = fit_on_files(tmp_path / "poisoned", poisoned, config)
    assert other.model.forest.digest == fit.model.forest.digest
    for one, two in zip(fit.reports, other.reports, strict=True):
        assert replace(one, seconds=0.0) == replace(two, seconds=0.0)
    assert {k: v.tobytes() for k, v in other.best.network.items()} == {
        k: v.tobytes() for k, v in fit.best.network.items()
    }
    assert other.validation == fit.validation
    assert fit.test is not None
    assert other.test is not None
    assert other.test.network.metric < 0.6 < fit.test.network.metric


def test_who_does_not_ask_gets_no_test_scores(tmp_path: Path) -> None:
    """During a study nobody asks for the test rows, and no message names them."""
    give_files(tmp_path, parts_of("wine"))
    grid = WatchedGrid(open_machines(tmp_path / "trees"))
    assert fit_federated(grid, config_of("wine"), test=False).test is None
    requests = [message.content.config_records["request"] for message in grid.sent]
    assert {request["part"] for request in requests if "part" in request} == {"validation"}


def test_without_test_rows_at_the_clients_nobody_is_asked(tmp_path: Path) -> None:
    """Where the test rows lie with the server, asking for the clients' has no effect."""
    with open_machines(tmp_path) as grid:
        assert fit_federated(grid, config_of("wine"), test=True).test is None


@pytest.mark.parametrize("without", [0, 2])
def test_files_for_some_are_refused(without: int, tmp_path: Path) -> None:
    """A federation in which only some hold test rows of their own is told whom, and the way out."""
    give_files(tmp_path, parts_of("breast_cancer"))
    del machines.nodes[without][DATA_FILE]
    holding = [partition for partition in range(3) if partition != without]
    with (
        open_machines(tmp_path / "trees") as grid,
        pytest.raises(ClientError, match=rf"only the clients \{holding}.*data-file, or none".replace(" [", r" \[")),
    ):
        small_strategy().prepare(grid)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("1 1:1\n-1 31:2\n", r"row 2: feature index is 31, allowed: 1 to 30"),
        ("1 1:1\n3 2:1\n", r"row 2: label is 3, allowed: -1, 1"),
    ],
)
def test_a_wrong_file_is_named_to_the_server(text: str, error: str, tmp_path: Path) -> None:
    """A file of other columns or labels ends the run with the node, the file and the row."""
    give_files(tmp_path, parts_of("breast_cancer"))
    path = Path(machines.nodes[2][DATA_FILE])
    path.write_text(text)
    with (
        open_machines(tmp_path / "trees") as grid,
        pytest.raises(ClientError, match=rf"client on node 4 failed in 'query.describe'(.|\n)*{path}: {error}"),
    ):
        small_strategy().prepare(grid)


def test_who_counts_other_test_rows_than_it_described_is_named(tmp_path: Path) -> None:
    """A client cannot weigh more in the test scores than by the rows that it described."""
    give_files(tmp_path, parts_of("breast_cancer"))

    def boast(message: Message, reply: Message) -> Message:
        if message.metadata.message_type != records.EVALUATE or message.metadata.dst_node_id != 3:
            return reply
        metrics = MetricRecord({**reply.content.metric_records["metrics"], "num-examples": 1000})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    grid, strategy = WatchedGrid(open_machines(tmp_path / "trees"), change=boast), small_strategy()
    strategy.prepare(grid)
    assert strategy.clients_hold_test_rows
    network = strategy.read_network(strategy.initial_arrays())
    with pytest.raises(ClientError, match="client 1 evaluated 1000 rows, but described 43"):
        strategy.test(grid, network)
