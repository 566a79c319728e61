"""Tests of later runs on the same federation: what they do not ask for again, and that their results do not tell."""

import math
from dataclasses import replace
from typing import Any

import pytest
from federations import XGB, WatchedGrid, bits, count_messages, open_federation, small_strategy
from flwr.serverapp import Grid

from fedlightning.federation import client_app, records
from fedlightning.federation.exchange import ClientError, Traffic
from fedlightning.federation.memory import Memory
from fedlightning.federation.rounds import rounds
from fedlightning.federation.strategy import FedXgbLlr

DATASETS = ("breast_cancer", "wine", "diabetes")
PREPARING = {records.DESCRIBE, records.GROW, records.PLANT}


def outcome(grid: Grid, strategy: FedXgbLlr) -> list[object]:
    """Do everything that a run does, and return what must not depend on earlier runs."""
    digest = strategy.prepare(grid).digest
    return [digest, strategy.compare(grid), bits(rounds(grid, strategy, 2)), strategy.scaling, strategy.preparation()]


def fresh(dataset: str = "breast_cancer", **options: Any) -> list[object]:
    """Return the outcome of a run on a federation of its own."""
    client_app.memory = Memory(2**30)
    with open_federation() as grid:
        return outcome(grid, small_strategy(dataset, **options))


class Runs:
    """Runs on one federation, one after the other, with one memory."""

    def __init__(self, memory: Memory | None = None) -> None:
        self.memory = Memory(2**30) if memory is None else memory
        self.grid = WatchedGrid(open_federation())

    def run(self, dataset: str = "breast_cancer", **options: Any) -> tuple[FedXgbLlr, list[object], list[str]]:
        """Return a run's strategy, its outcome, and the actions that clients were asked for."""
        strategy = small_strategy(dataset, memory=self.memory, **options)
        before = len(self.grid.sent)
        result = outcome(self.grid, strategy)
        return strategy, result, [message.metadata.message_type for message in self.grid.sent[before:]]


@pytest.mark.parametrize("dataset", DATASETS)
def test_fewer_trees_are_neither_grown_nor_sent_again(dataset: str) -> None:
    """A run with fewer or as many trees as one before prepares nothing, and ends as on a federation of its own."""
    runs = Runs()
    first, result, _ = runs.run(dataset, n_estimators=6)
    assert result == fresh(dataset, n_estimators=6)
    for n_estimators in (6, 2, 5, 2):
        strategy, result, asked = runs.run(dataset, n_estimators=n_estimators)
        assert result == fresh(dataset, n_estimators=n_estimators)
        assert not PREPARING & set(asked)
        assert (strategy.fits, first.fits) == (0, 3)
        assert strategy.forest is not None
        assert strategy.forest.trees == n_estimators


def test_more_trees_are_grown_for_all_that_come_after() -> None:
    """A run with more trees grows and plants, without asking for descriptions; shorter ones then use its forest."""
    runs = Runs()
    runs.run(n_estimators=3)
    strategy, result, asked = runs.run(n_estimators=6)
    assert result == fresh(n_estimators=6)
    assert (strategy.fits, asked.count(records.GROW), asked.count(records.PLANT)) == (3, 3, 3)
    assert records.DESCRIBE not in asked
    strategy, result, asked = runs.run(n_estimators=4)
    assert result == fresh(n_estimators=4)
    assert strategy.fits == 0
    assert not PREPARING & set(asked)


def test_trees_for_later_runs_are_grown_at_once() -> None:
    """With ``grow_at_least`` the first run grows what others will want, and uses and reports only its own."""
    runs = Runs()
    strategy, result, _ = runs.run(n_estimators=3, grow_at_least=6)
    assert result == fresh(n_estimators=3)
    assert strategy.preparation().down < strategy.traffic.down
    strategy, result, asked = runs.run(n_estimators=6, grow_at_least=6)
    assert result == fresh(n_estimators=6)
    assert strategy.fits == 0
    assert not PREPARING & set(asked)
    # Who wants more than that gets it.
    assert fresh(n_estimators=7, grow_at_least=6) == fresh(n_estimators=7)


@pytest.mark.parametrize("client_num", [1, 3])
@pytest.mark.parametrize("dataset", DATASETS)
def test_preparation_is_what_a_fresh_run_sends(dataset: str, client_num: int) -> None:
    """What a run says that it takes is, byte for byte, what one on a federation of its own sends before its rounds."""
    grid = WatchedGrid(open_federation(client_num))
    strategy = small_strategy(dataset, client_num, n_estimators=3)
    strategy.prepare(grid)
    sent = Traffic(up=count_messages(grid.received), down=count_messages(grid.sent))
    assert strategy.preparation() == strategy.traffic == sent
    memory = Memory(2**30)
    for n_estimators, grow_at_least in ((1, 5), (3, 5), (5, 1)):
        later = small_strategy(
            dataset, client_num, n_estimators=n_estimators, grow_at_least=grow_at_least, memory=memory
        )
        later.prepare(grid)
        if n_estimators == 3:
            assert later.preparation() == sent
            assert later.traffic == Traffic()
    # The keys of parameters are bytes, too.
    more = XGB | {"lambda": 1.0}
    own = small_strategy(dataset, client_num, n_estimators=3, xgb=more)
    own.prepare(grid)
    later = small_strategy(dataset, client_num, n_estimators=3, xgb=more, memory=memory)
    later.prepare(grid)
    assert later.preparation() == own.traffic == own.preparation()


def test_rivals_are_scored_once() -> None:
    """What needs no network is asked for once per forest, rows and cut."""
    runs = Runs()
    asked = [runs.run(**options)[2] for options in ({}, {}, {"n_estimators": 3}, {"lr": 0.1}, {"seed": 1})]
    assert [actions.count(records.COMPARE) for actions in asked] == [3, 0, 3, 0, 3]


@pytest.mark.parametrize(
    ("other", "described"),
    [
        ({"seed": 1}, 3),
        ({"val_ratio": 0.4}, 3),
        ({"dataset": "diabetes"}, 3),
        ({"xgb": XGB | {"learning_rate": 0.1}}, 0),
    ],
)
def test_other_rows_or_parameters_are_prepared_anew(other: dict[str, Any], described: int) -> None:
    """Nothing of an earlier run with other rows, another seed or other tree parameters is taken for this one's."""
    runs = Runs()
    runs.run()
    strategy, result, asked = runs.run(**other)
    assert result == fresh(**other)
    assert [asked.count(kind) for kind in (records.DESCRIBE, records.GROW, records.PLANT)] == [described, 3, 3]
    assert strategy.fits == 3
    # And what was there before is still there.
    assert not PREPARING & set(runs.run()[2])


def test_the_order_of_parameters_does_not_matter() -> None:
    """The same parameters in another order are the same trees."""
    runs = Runs()
    runs.run()
    assert not PREPARING & set(runs.run(xgb=dict(reversed(XGB.items())))[2])


def test_clients_that_forgot_meanwhile_get_the_forest_again() -> None:
    """Trees that the server remembers and no client holds any more are planted again, and the result is the same."""
    runs = Runs()
    runs.run(n_estimators=6)
    client_app.memory = Memory(2**30)
    runs.grid.grid = open_federation()
    strategy, result, asked = runs.run(n_estimators=4)
    assert result == fresh(n_estimators=4)
    assert (asked.count(records.PLANT), asked.count(records.GROW), strategy.fits) == (3, 0, 0)


def test_a_server_that_forgets_prepares_again() -> None:
    """A memory without room changes what is sent, never what comes out."""
    runs = Runs(Memory(0))
    results = [runs.run(n_estimators=n_estimators) for n_estimators in (5, 4, 4)]
    assert [result for _, result, _ in results] == [fresh(n_estimators=n) for n in (5, 4, 4)]
    assert all(set(asked) >= PREPARING for _, _, asked in results)


def test_another_number_of_clients_is_refused_whatever_is_remembered() -> None:
    """A second run that expects fewer or more clients than there are is refused like a first one."""
    runs = Runs()
    runs.run()
    for client_num in (2, 4):
        with pytest.raises(ClientError, match=f"3 nodes, the configuration says client_num {client_num}"):
            small_strategy(client_num=client_num, memory=runs.memory).prepare(runs.grid)


def test_a_run_that_failed_leaves_nothing_wrong() -> None:
    """A run whose forest was not planted everywhere is prepared again by the next one."""
    memory, failing = Memory(2**30), True
    grid = WatchedGrid(
        open_federation(),
        change=lambda message, reply: (
            None
            if failing and message.metadata.message_type == records.PLANT and message.metadata.dst_node_id == 4
            else reply
        ),
    )
    with pytest.raises(ClientError, match="client 2 did not answer"):
        small_strategy(memory=memory).prepare(grid)
    failing = False
    strategy = small_strategy(memory=memory)
    assert outcome(grid, strategy) == fresh()
    assert math.isfinite(strategy.scaling.std)


def test_what_a_run_keeps_it_does_not_change() -> None:
    """A later run's other network settings leave the kept descriptions and trees as they are."""
    runs = Runs()
    first, _, _ = runs.run(n_estimators=5)
    second, _, _ = runs.run(n_estimators=3, lr=0.1)
    assert second.descriptions == first.descriptions
    assert replace(second.scaling) == first.scaling
