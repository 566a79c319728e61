"""Open a federation and hand its grid to a function: on this machine, on Ray, or one that somebody else opened."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from flwr.serverapp import Grid

T = TypeVar("T")

EngineName = Literal["local", "ray", "superlink"]


@dataclass(frozen=True)
class FederationSettings:
    """How many clients take part, and what they find on this machine."""

    client_num: int
    processes: int = 0
    """Processes of this machine to share the clients between; 0 calls them in this process."""
    data_dir: Path | None = None
    """Folder with data files."""


class Engine(Protocol):
    """Runs functions inside federations."""

    @property
    def name(self) -> EngineName:
        """What the engine is called in arguments and tags."""

    def run(self, function: Callable[[Grid], T], settings: FederationSettings) -> T:
        """Open a federation, call ``function`` with its grid, and close it.

        One federation serves a whole study: clients keep rows and trees between trials.
        """


class LocalEngine:
    """Clients in this machine's processes, without Ray and without a network."""

    name: EngineName = "local"

    def run(self, function: Callable[[Grid], T], settings: FederationSettings) -> T:
        """Open a local grid, call ``function`` with it, and close it."""
        # Imported here because it takes a while, and who only counts processes does not need it.
        from fedlightning.federation.cache import trees_folder
        from fedlightning.federation.local_grid import LocalGrid
        from fedlightning.federation.shard import CACHE_DIR, DATA_DIR

        # Resolved here: a process that was started earlier may have another folder, or another environment.
        node_config = {CACHE_DIR: str(trees_folder().resolve())}
        if settings.data_dir is not None:
            node_config[DATA_DIR] = str(settings.data_dir.resolve())
        configs = [node_config] * settings.client_num
        with LocalGrid(settings.client_num, processes=settings.processes, node_configs=configs) as grid:
            return function(grid)


class RayEngine:
    """Clients in Flower's simulation on Ray: on this machine, or on the cluster that RAY_ADDRESS names."""

    name: EngineName = "ray"

    def run(self, function: Callable[[Grid], T], settings: FederationSettings) -> T:
        """Open a simulation, call ``function`` in its ServerApp, and close it."""
        from fedlightning.federation.ray_simulation import run_in_simulation

        return run_in_simulation(
            function,
            client_num=settings.client_num,
            actors=max(1, settings.processes),
            data_dir=settings.data_dir,
        )


@dataclass(frozen=True)
class OpenedFederation:
    """A federation that Flower opened: the nodes of a SuperLink, whose configuration is their own."""

    grid: Grid
    name: EngineName = "superlink"
    nodes_timeout: float = 120.0
    """Seconds to wait for nodes that are not yet connected."""

    def run(self, function: Callable[[Grid], T], settings: FederationSettings) -> T:
        """Wait for the clients' nodes, and call ``function`` with the grid."""
        from fedlightning.federation.prompt_grid import PromptGrid

        prompt = PromptGrid(self.grid)
        prompt.wait_for_nodes(settings.client_num, timeout=self.nodes_timeout)
        return function(prompt)


ENGINES: dict[str, Callable[[], Engine]] = {"local": LocalEngine, "ray": RayEngine}
"""Engines that open a federation of their own."""


def client_processes(client_num: int, jobs: int = 1) -> int:
    """Return how many client processes a worker gets: its share of the cores, none if there is only one to use."""
    share = min(client_num, max(1, cores() // jobs))
    return 0 if share == 1 and jobs == 1 else share


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
