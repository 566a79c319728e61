"""Tests of clients that are a new process for every message, as in a deployment: the folder is all they have."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from federations import WatchedGrid, bits, open_federation, open_machines, small_strategy
from flwr.app import Message
from flwr.serverapp import Grid

from fedlightning.federation import records
from fedlightning.federation.exchange import ClientError, Traffic
from fedlightning.federation.rounds import rounds
from fedlightning.federation.strategy import FedXgbLlr

DATASETS = ("breast_cancer", "wine", "diabetes")


def outcome(grid: Grid, strategy: FedXgbLlr) -> list[object]:
    """Do everything that a run does, and return what must not differ between equal runs."""
    digest = strategy.prepare(grid).digest
    compared = strategy.compare(grid)
    return [digest, compared, bits(rounds(grid, strategy, 2)), strategy.traffic, strategy.fits]


def actions(grid: WatchedGrid) -> list[str]:
    """Return the actions that clients were asked for."""
    return [message.metadata.message_type for message in grid.sent]


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_folder_is_all_that_a_client_needs(dataset: str, cache_dir: Path) -> None:
    """With a new process for every message nothing is lost or sent twice, and the result is the same to the bit."""
    with open_federation() as grid:
        plain = outcome(grid, small_strategy(dataset))
    fresh = WatchedGrid(open_machines(cache_dir, stays=False))
    assert outcome(fresh, small_strategy(dataset)) == plain
    assert not any(records.is_lost(reply.content) for reply in fresh.received)
    assert {kind: actions(fresh).count(kind) for kind in actions(fresh)} == {
        records.DESCRIBE: 3,
        records.GROW: 3,
        records.PLANT: 3,
        records.COMPARE: 3,
        records.TRAIN: 6,
        records.EVALUATE: 6,
    }


@pytest.mark.parametrize(
    ("action", "group"),
    [(records.PLANT, "0"), (records.COMPARE, "0"), (records.TRAIN, "1"), (records.EVALUATE, "1"), (records.TRAIN, "2")],
)
def test_a_deleted_folder_is_filled_again(action: str, group: str, cache_dir: Path) -> None:
    """Whenever a client's folder is deleted it gets the forest again, it alone, and the result is the same."""
    with open_federation() as grid:
        plain = outcome(grid, small_strategy())
    deleted: list[str] = []

    def delete(messages: Sequence[Message]) -> None:
        metadata = messages[0].metadata
        if (metadata.message_type, metadata.group_id) == (action, group) and not deleted:
            shutil.rmtree(cache_dir / "1")
            deleted.append(action)

    fresh = WatchedGrid(open_machines(cache_dir, stays=False), before=delete)
    strategy = small_strategy()
    assert outcome(fresh, strategy)[:3] == plain[:3]
    assert deleted == [action]
    lost = [reply.metadata.src_node_id for reply in fresh.received if records.is_lost(reply.content)]
    assert lost == [3]
    assert actions(fresh).count(records.PLANT) == 4


def test_a_later_server_finds_the_trees_where_they_grew(cache_dir: Path) -> None:
    """A server that knows nothing of earlier runs has clients that do: they fit nothing, for as many trees or fewer."""
    with open_federation() as grid:
        short = outcome(grid, small_strategy(n_estimators=3))
    with open_machines(cache_dir, stays=False) as grid:
        assert outcome(grid, small_strategy(n_estimators=5))[-1] == 3
        later = outcome(grid, small_strategy(n_estimators=3))
    assert later[-1] == 0
    assert later[:3] == short[:3]
    fitted, found = short[3], later[3]
    assert fitted == found
    assert isinstance(found, Traffic)


def test_a_client_that_can_keep_nothing_is_named(tmp_path: Path) -> None:
    """Where neither process nor folder stays, the run ends with the client's name instead of planting for ever."""
    (tmp_path / "1").touch()
    with (
        open_machines(tmp_path, stays=False) as grid,
        pytest.raises(ClientError, match=r"client.* \[?1\]? cannot keep"),
    ):
        outcome(grid, small_strategy())
