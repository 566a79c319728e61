"""Tests of the loop: what a round averages, reports and sends, and that nothing else decides its result."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from federations import (
    WatchedGrid,
    bits,
    open_federation,
    run_rounds,
    small_rows,
    small_strategy,
    through_objects,
    through_proto,
)
from flwr.app import ArrayRecord, Error, Message, MetricRecord
from torch import Tensor

from fedlightning import training
from fedlightning.federation import records
from fedlightning.federation.exchange import ClientError
from fedlightning.federation.memory import Memory
from fedlightning.federation.rounds import rounds
from fedlightning.federation.shard import Silo, load_shard
from fedlightning.federation.strategy import read_scores
from fedlightning.seeds import derive_seed
from fedlightning.training import batch_order

DATASETS = ("breast_cancer", "wine", "diabetes")


def metrics_of(reply: Message) -> MetricRecord:
    """Return the numbers of a train or evaluate reply."""
    return reply.content.metric_records["metrics"]


# -- what a round is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_round_is_the_weighted_mean_of_what_clients_sent(dataset: str) -> None:
    """The global network is numpy's mean of the replies, weighted by training rows; scores are pooled sums."""
    grid, strategy = WatchedGrid(open_federation(4)), small_strategy(dataset, 4)
    strategy.prepare(grid)
    rows = [description.train_rows for description in strategy.descriptions]
    assert len(set(rows)) > 1
    for report in rounds(grid, strategy, 2):
        trained, evaluated = (
            [r for r in grid.received if (r.metadata.message_type, r.metadata.group_id) == (kind, str(report.number))]
            for kind in (records.TRAIN, records.EVALUATE)
        )
        for name, average in report.network.items():
            sent = [reply.content.array_records["network"][name].numpy().astype(np.float64) for reply in trained]
            np.testing.assert_allclose(average, np.average(sent, axis=0, weights=rows), rtol=1e-6, atol=1e-9)
        assert [metrics_of(reply)["num-examples"] for reply in trained] == rows
        for scores, replies, count in (
            (report.train, trained, "seen"),
            (report.validation, evaluated, "num-examples"),
        ):
            assert scores is not None
            numbers = [metrics_of(reply) for reply in replies]
            examples = sum(record[count] for record in numbers)
            assert scores.examples == examples
            assert scores.loss == pytest.approx(sum(record["loss_sum"] for record in numbers) / examples, rel=1e-12)
            assert scores.metric == pytest.approx(sum(record["metric_sum"] for record in numbers) / examples, rel=1e-12)


def test_every_client_starts_from_the_average() -> None:
    """A round sends all clients the same network: the fresh one first, then the average of the round before."""
    grid, strategy = WatchedGrid(open_federation()), small_strategy()
    strategy.prepare(grid)
    expected = {name: array.numpy() for name, array in strategy.initial_arrays().items()}
    for report in rounds(grid, strategy, 3):
        for kind, network in ((records.TRAIN, expected), (records.EVALUATE, report.network)):
            sent = [
                message.content.array_records["network"]
                for message in grid.sent
                if (message.metadata.message_type, message.metadata.group_id) == (kind, str(report.number))
            ]
            assert len(sent) == 3
            for arrays in sent:
                assert {name: array.numpy().tobytes() for name, array in arrays.items()} == {
                    name: array.tobytes() for name, array in network.items()
                }
        expected = dict(report.network)


def test_validation_covers_every_validation_row_once() -> None:
    """The federated validation counts the rows of all validation cuts."""
    with open_federation(client_num=4) as grid:
        (report,) = run_rounds(grid, small_strategy(client_num=4), 1)
    cuts = [load_shard(Silo(partition, 4), small_rows(), Memory(0)) for partition in range(4)]
    assert report.validation is not None
    assert report.validation.examples == sum(len(cut.validation) for cut in cuts)
    assert report.train.examples == 4 * 8 * 16


def test_without_validation_rows_nothing_is_evaluated() -> None:
    """With ``val_ratio`` 0 a round is one exchange, and its validation None."""
    grid = WatchedGrid(open_federation())
    reports = run_rounds(grid, small_strategy(val_ratio=0.0))
    assert [report.validation for report in reports] == [None, None]
    assert records.EVALUATE not in {message.metadata.message_type for message in grid.sent}


# -- what decides the result, and what does not ---------------------------------------------------------------------


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_same_seed_repeats_to_the_bit_and_another_differs(dataset: str) -> None:
    """Scores and networks of all rounds depend on the seed, and on nothing that changes between two runs."""
    runs = []
    for seed in (3, 3, 4):
        with open_federation() as grid:
            runs.append(bits(run_rounds(grid, small_strategy(dataset, seed=seed))))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_federation_that_served_before_gives_the_same() -> None:
    """What clients remember of earlier runs changes no result, to the bit."""
    with open_federation() as grid:
        fresh = bits(run_rounds(grid, small_strategy()))
        run_rounds(grid, small_strategy(n_estimators=6, seed=1))
        run_rounds(grid, small_strategy(n_estimators=7))
        assert bits(run_rounds(grid, small_strategy())) == fresh


@pytest.mark.parametrize(
    "arrange", [lambda r: r[::-1], lambda r: r[1:] + r[:1], lambda r: random.Random(5).sample(r, 5)]
)
def test_the_order_of_replies_does_not_matter(arrange: Callable[[list[Message]], list[Message]]) -> None:
    """However replies arrive, the result is the same to the bit."""
    with open_federation(5) as grid:
        plain = bits(run_rounds(grid, small_strategy("wine", 5)))
    shuffled = WatchedGrid(open_federation(5), arrange=arrange)
    assert bits(run_rounds(shuffled, small_strategy("wine", 5))) == plain


@pytest.mark.usefixtures("warm_processes")
def test_the_number_of_processes_does_not_matter() -> None:
    """Clients in this process, in one or in two of their own give the same, to the bit."""
    outcomes = []
    for processes in (0, 1, 2):
        with open_federation(processes=processes) as grid:
            strategy = small_strategy()
            outcomes.append((bits(run_rounds(grid, strategy)), strategy.compare(grid), strategy.traffic))
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.parametrize("carry", [through_proto, through_objects])
@pytest.mark.parametrize("client_num", [1, 3])
def test_the_wire_does_not_matter(carry: Callable[[Message], Message], client_num: int) -> None:
    """A run whose every message and reply passes Flower's serialisation is the same, to the bit and to the byte."""

    class WireGrid(WatchedGrid):
        def send_and_receive(self, messages: object, *, timeout: float | None = None) -> list[Message]:
            sent = [carry(message) for message in messages]  # type: ignore[attr-defined]
            return [carry(reply) for reply in super().send_and_receive(sent, timeout=timeout)]

    outcomes = []
    for wrap in (WatchedGrid, WireGrid):
        strategy = small_strategy(client_num=client_num)
        reports = run_rounds(wrap(open_federation(client_num=client_num)), strategy)
        traffic = [(report.bytes_up, report.bytes_down) for report in reports]
        outcomes.append((bits(reports), traffic, strategy.traffic))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("n_estimators", [2, 4])
@pytest.mark.parametrize("num_iterations", [3, 8, 40])
@pytest.mark.parametrize("dataset", DATASETS)
def test_few_iterations_see_the_batches_that_all_rows_would_give(
    dataset: str, num_iterations: int, n_estimators: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a fit visits few of the rows or all, its batches are those drawn from all rows, scaled and sliced."""
    seen: list[tuple[Any, ...]] = []
    original = training.fit

    def watch(network: Any, outputs: Tensor, targets: Tensor, *, order: Tensor, **options: Any) -> Any:
        seen.append((outputs[order], targets[order], len(outputs)))
        return original(network, outputs, targets, order=order, **options)

    monkeypatch.setattr(training, "fit", watch)
    memory = Memory(2**30)
    with open_federation() as grid:
        small_strategy(dataset, n_estimators=4, memory=memory).prepare(grid)
        strategy = small_strategy(dataset, n_estimators=n_estimators, num_iterations=num_iterations, memory=memory)
        run_rounds(grid, strategy, 2)
    assert strategy.forest is not None
    for index, (outputs, targets, rows) in enumerate(seen):
        partition, number = index % 3, 1 + index // 3
        train = load_shard(Silo(partition, 3), small_rows(dataset), Memory(0)).train
        order = batch_order(len(train), num_iterations, 16, seed=derive_seed(0, "batches", partition, number))
        scaled = strategy.forest.tree_outputs(train.x) / np.float32(strategy.scaling.std)
        assert torch.equal(outputs, torch.from_numpy(scaled)[order])
        assert torch.equal(targets, torch.from_numpy(train.y)[order])
        assert rows == len(order.unique())
    assert len(seen) == 6


# -- the generator --------------------------------------------------------------------------------------------------


def test_rounds_do_no_work_that_nobody_asks_for() -> None:
    """A consumer that stops listening has sent exactly the messages of the rounds that it saw."""
    grid, strategy = WatchedGrid(open_federation()), small_strategy()
    strategy.prepare(grid)
    before = len(grid.sent)
    stream = rounds(grid, strategy, 100)
    assert len(grid.sent) == before
    for number in (1, 2):
        assert next(stream).number == number
        assert len(grid.sent) == before + number * 2 * 3
    stream.close()
    assert len(grid.sent) == before + 2 * 2 * 3


def test_a_long_run_begins_with_the_short_one() -> None:
    """The first rounds do not depend on how many are to come."""
    runs = []
    for num_rounds in (2, 4):
        with open_federation() as grid:
            runs.append(bits(run_rounds(grid, small_strategy(), num_rounds)))
    assert runs[1][:2] == runs[0]


def test_bytes_are_those_of_the_records() -> None:
    """Bytes up and down of every round, and of what comes before, are the sum over what passed."""

    def size(messages: list[Message], group: str) -> int:
        return records.count_bytes(message.content for message in messages if message.metadata.group_id == group)

    grid, strategy = WatchedGrid(open_federation()), small_strategy()
    reports = run_rounds(grid, strategy)
    assert (strategy.traffic.up, strategy.traffic.down) == (size(grid.received, "0"), size(grid.sent, "0"))
    for report in reports:
        group = str(report.number)
        assert (report.bytes_up, report.bytes_down) == (size(grid.received, group), size(grid.sent, group))
    parameters = sum(array.nbytes for array in reports[0].network.values())
    assert 3 * parameters < reports[0].bytes_up < reports[0].bytes_down


# -- Flower's own loop ----------------------------------------------------------------------------------------------


def test_flowers_own_loop_gives_the_same() -> None:
    """``Strategy.start`` after ``prepare`` ends as our rounds do, to the bit, however replies arrive."""
    with open_federation(4) as grid:
        reports = run_rounds(grid, small_strategy("wine", 4), 3)
        strategy = small_strategy("wine", 4)
        strategy.prepare(grid)
        shuffled = WatchedGrid(grid, arrange=lambda replies: replies[::-1])
        result = strategy.start(shuffled, strategy.initial_arrays(), num_rounds=3)
    assert {name: array.numpy().tobytes() for name, array in result.arrays.items()} == {
        name: array.tobytes() for name, array in reports[-1].network.items()
    }
    for report in reports:
        assert read_scores(result.train_metrics_clientapp[report.number]) == report.train
        assert read_scores(result.evaluate_metrics_clientapp[report.number]) == report.validation


def test_flowers_own_loop_works_without_validation_rows() -> None:
    """With ``val_ratio`` 0 Flower's loop trains, and evaluates nothing."""
    grid, strategy = WatchedGrid(open_federation()), small_strategy(val_ratio=0.0)
    strategy.prepare(grid)
    result = strategy.start(grid, strategy.initial_arrays(), num_rounds=2)
    assert records.EVALUATE not in {message.metadata.message_type for message in grid.sent}
    assert isinstance(result.arrays, ArrayRecord)
    assert list(result.train_metrics_clientapp) == [1, 2]
    assert list(result.evaluate_metrics_clientapp) == []


@pytest.mark.parametrize("action", [records.TRAIN, records.EVALUATE])
@pytest.mark.parametrize("missing", [False, True])
def test_flowers_own_loop_goes_on_without_nobody(action: str, missing: bool) -> None:
    """A client that fails or does not answer stops Flower's loop too, by its name."""

    def interfere(message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type != action or message.metadata.dst_node_id != 3:
            return reply
        return None if missing else Message(Error(2, "OSError: disk full"), reply_to=message)

    grid, strategy = WatchedGrid(open_federation(), change=interfere), small_strategy()
    strategy.prepare(grid)
    with pytest.raises(ClientError, match="client 1 did not answer" if missing else "client 1 failed.*\n.*disk full"):
        strategy.start(grid, strategy.initial_arrays(), num_rounds=1)
