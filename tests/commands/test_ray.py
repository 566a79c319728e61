"""Tests for the clients in Flower's simulation on Ray: what comes out, what is refused, and what is left behind."""

import os
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid
from run_command import Finished, run_command

from fedlightning.federation.engines import FederationSettings, RayEngine
from fedlightning.federation.exchange import ClientError
from fedlightning.federation.ray_simulation import run_in_simulation

TINY = ("--dataset", "breast_cancer", "--clients", "paper_2_clients", "num_rounds=2", "num_iterations=5")
SETTINGS = FederationSettings(client_num=2, processes=1)


def ray_processes() -> set[int]:
    """Return the processes of Ray that this machine runs."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"raylet" in words or b"gcs_server" in words or words.startswith(b"ray::"):
            found.add(int(folder.name))
    return found


@pytest.mark.slow
def test_a_run_on_ray_says_no_more_than_a_local_one(tmp_path: Path) -> None:
    """The same lines come out, without Ray's or Flower's own, and no process stays."""
    before = ray_processes()
    done: dict[str, Finished] = {}
    for engine in ("local", "ray"):
        (tmp_path / engine).mkdir()
        done[engine] = run_command("run", *TINY, "--engine", engine, cwd=tmp_path / engine)
        assert (done[engine].status, done[engine].err) == (0, "")

    def told(finished: Finished) -> list[str]:
        return [
            line.rpartition(" | ")[0] if line.startswith("round ") else line
            for line in finished.out.splitlines()
            if not line.startswith(("MLflow run", "opening the federation"))
        ]

    assert told(done["ray"]) == told(done["local"])
    assert "opening the federation (engine ray)" in done["ray"].out
    assert ray_processes() <= before


@pytest.mark.slow
def test_a_simulation_ends_with_its_function_and_leaves_the_environment() -> None:
    """What the function returns or raises comes out, an interrupt too; PYTHONPATH and the rest stay as they were."""
    environment = dict(os.environ)

    def ask(grid: Grid) -> int:
        nodes = list(grid.get_node_ids())
        content = RecordDict({"request": ConfigRecord({"protocol": 0})})
        messages = [grid.create_message(content, "query.describe", node, "0") for node in nodes]
        replies = list(grid.send_and_receive(messages))
        # No rows were named: both clients have said so.
        assert all("no record 'rows'" in str(reply.error.reason) for reply in replies)
        return len(replies)

    def interrupted(grid: Grid) -> None:
        raise KeyboardInterrupt

    def failing(grid: Grid) -> None:
        raise ClientError("client 1 is tired")

    assert RayEngine().run(ask, SETTINGS) == 2
    for function, error in ((interrupted, KeyboardInterrupt), (failing, ClientError)):
        with pytest.raises(error):
            run_in_simulation(function, client_num=2, actors=1)
    assert dict(os.environ) == environment


@pytest.mark.parametrize("engine", ["ray"])
def test_jobs_on_ray_are_refused(engine: str, tmp_path: Path) -> None:
    """More than one job needs a federation each, which one process cannot have on Ray; nothing is begun."""
    done = run_command("tune", "--study", "a9a_5", "--jobs", 2, "--engine", engine, cwd=tmp_path)
    assert done.status == 2
    assert "--jobs is 2, but only engine local opens a federation per job" in done.err
    assert list(tmp_path.iterdir()) == []
