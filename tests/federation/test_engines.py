"""Tests of how a federation is opened, and with how many processes."""

import os
from pathlib import Path

import pytest
from flwr.serverapp import Grid

from fedlightning.federation.engines import FederationSettings, client_processes, run_in_federation
from fedlightning.federation.local_grid import LocalGrid
from fedlightning.federation.records import DESCRIBE, PROTOCOL, DescribeRequest, Description

WINE = FederationSettings(dataset="wine", train_ratio=0.5, split_seed=7, client_num=3)


def describe(grid: Grid) -> list[Description]:
    """Ask every client for its rows."""
    request = DescribeRequest(PROTOCOL, "multiclass", 0.0, 0).to_content()
    messages = [grid.create_message(request, DESCRIBE, node, "0") for node in grid.get_node_ids()]
    return [Description.from_content(reply.content) for reply in grid.send_and_receive(messages)]


def test_a_function_runs_inside_its_federation() -> None:
    """The function gets a grid of the clients and rows that were asked for, and what it returns comes out."""
    described = run_in_federation(describe, WINE)
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
        run_in_federation(keep, WINE)
    except ArithmeticError:
        assert fails
    assert [list(grid.get_node_ids()) for grid in opened] == [[]]


def test_clients_read_from_the_given_folder(tmp_path: Path) -> None:
    """A data folder reaches the clients: what is wrong in it is their error."""
    (tmp_path / "a9a").write_text("1 1:1\n")
    settings = FederationSettings("a9a", 0.75, 2023, client_num=2, data_dir=tmp_path)

    def ask(grid: Grid) -> list[str]:
        request = DescribeRequest(PROTOCOL, "binary", 0.0, 0).to_content()
        messages = [grid.create_message(request, DESCRIBE, node, "0") for node in grid.get_node_ids()]
        return [str(reply.error.reason) for reply in grid.send_and_receive(messages)]

    assert all(str(tmp_path) in reason for reason in run_in_federation(ask, settings))


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
