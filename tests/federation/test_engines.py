"""Tests of how a federation is opened, and with how many processes."""

import os
import shutil
from pathlib import Path

import pytest
from flwr.serverapp import Grid

from fedlightning.federation.engines import FederationSettings, LocalEngine, OpenedFederation, client_processes
from fedlightning.federation.local_grid import LocalGrid
from fedlightning.federation.records import (
    DESCRIBE,
    GROW,
    PROTOCOL,
    DescribeRequest,
    Description,
    GrowRequest,
    RowsRequest,
    content,
)

WINE = RowsRequest("wine", "multiclass", 0.5, 7, 0.0, 0)
THREE = FederationSettings(client_num=3)


def describe(grid: Grid) -> list[Description]:
    """Ask every client for its rows."""
    request = content(WINE, DescribeRequest(PROTOCOL))
    messages = [grid.create_message(request, DESCRIBE, node, "0") for node in grid.get_node_ids()]
    return [Description.from_content(reply.content) for reply in grid.send_and_receive(messages)]


def test_a_function_runs_inside_its_federation() -> None:
    """The function gets a grid of the clients and rows that were asked for, and what it returns comes out."""
    described = LocalEngine().run(describe, THREE)
    assert sorted(description.partition for description in described) == [0, 1, 2]
    assert sum(description.train_rows for description in described) == 178 // 2


@pytest.mark.parametrize("fails", [False, True])
def test_the_federation_ends_with_the_function(fails: bool) -> None:
    """The federation is closed behind the function, also if it raises."""
    opened: list[LocalGrid] = []

    def keep(grid: Grid) -> None:
        assert isinstance(grid, LocalGrid)
        assert len(list(grid.get_node_ids())) == 3
        opened.append(grid)
        if fails:
            raise ArithmeticError("something else")

    try:
        LocalEngine().run(keep, THREE)
    except ArithmeticError:
        assert fails
    assert [list(grid.get_node_ids()) for grid in opened] == [[]]


def test_clients_read_from_the_given_folder(tmp_path: Path) -> None:
    """A data folder reaches the clients: what is wrong in it is their error."""
    (tmp_path / "a9a").write_text("1 1:1\n")
    settings = FederationSettings(client_num=2, data_dir=tmp_path)

    def ask(grid: Grid) -> list[str]:
        request = content(RowsRequest("a9a", "binary", 0.75, 2023, 0.0, 0), DescribeRequest(PROTOCOL))
        messages = [grid.create_message(request, DESCRIBE, node, "0") for node in grid.get_node_ids()]
        return [str(reply.error.reason) for reply in grid.send_and_receive(messages)]

    assert all(str(tmp_path) in reason for reason in LocalEngine().run(ask, settings))


@pytest.mark.usefixtures("warm_processes")
def test_clients_keep_trees_where_the_user_says_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client processes use the cache of who opens the federation, even where it is relative and they are older."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDLIGHTNING_CACHE_DIR", "relative")
    for processes in (0, 1):
        LocalEngine().run(grow, FederationSettings(client_num=3, processes=processes))
        assert len(list((tmp_path / "relative" / "trees").glob("*.ensemble"))) == 3
        shutil.rmtree(tmp_path / "relative")


def grow(grid: Grid) -> None:
    """Let every client grow a tree."""
    request = content(WINE, GrowRequest(3, 1, 0.5, 0.0, ["max_depth"], [2.0]))
    replies = grid.send_and_receive([grid.create_message(request, GROW, node, "0") for node in grid.get_node_ids()])
    assert [reply.error.reason for reply in replies if reply.has_error()] == []


def test_an_opened_federation_waits_for_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function gets the grid that somebody else opened once all nodes are there, and the grid stays open."""
    with LocalGrid(3) as grid:
        looks: list[int] = []

        def connecting() -> list[int]:
            looks.append(len(looks))
            return [2, 3, 4][: len(looks)]

        monkeypatch.setattr(grid, "get_node_ids", connecting)
        described = OpenedFederation(grid).run(describe, THREE)
        assert len(described) == 3
        assert len(looks) >= 3
        # Who is missing in the end is for the function to say.
        assert OpenedFederation(grid, nodes_timeout=0.1).run(lambda grid: len(list(grid.get_node_ids())), THREE) == 3
        assert len(list(grid.get_node_ids())) == 3


@pytest.mark.parametrize(
    ("cores", "client_num", "jobs", "processes"),
    [
        (1, 5, 1, 0),
        (2, 5, 1, 2),
        (8, 5, 1, 5),
        (8, 1, 1, 0),
        # Side by side, even a single process per worker keeps the workers from waiting for each other.
        (2, 5, 2, 1),
        (8, 5, 2, 4),
        (2, 5, 8, 1),
    ],
)
def test_workers_share_the_cores(
    cores: int, client_num: int, jobs: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker gets its share of the cores, at most a process per client, and none where one would only wait."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert client_processes(client_num, jobs) == processes
