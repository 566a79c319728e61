"""Open a federation and hand its grid to a function."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from flwr.serverapp import Grid

from fedlightning.federation.local_grid import LocalGrid

T = TypeVar("T")


@dataclass(frozen=True)
class FederationSettings:
    """Which clients take part, and where they run."""

    dataset: str
    train_ratio: float
    split_seed: int
    client_num: int
    data_dir: Path | None = None
    processes: int = 0
    """Processes of this machine to share the clients between; 0 calls them in this process."""


def run_in_federation(function: Callable[[Grid], T], settings: FederationSettings) -> T:
    """Open a federation, call ``function`` with its grid, and close it.

    One federation serves a whole study: clients keep rows and trees between trials.
    """
    # Imported here because it takes seconds, and who only counts processes does not need it.
    from fedlightning.federation.shard import run_config

    config = run_config(
        dataset=settings.dataset,
        train_ratio=settings.train_ratio,
        split_seed=settings.split_seed,
        data_dir=settings.data_dir,
    )
    with LocalGrid(config, settings.client_num, processes=settings.processes) as grid:
        return function(grid)


def client_processes(client_num: int, jobs: int = 1) -> int:
    """Return how many client processes a worker gets: its share of the cores, none if there is only one to use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = min(client_num, max(1, cores // jobs))
    return 0 if share == 1 and jobs == 1 else share
