"""Flower's simulation on Ray, opened for one function."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedlightning.datasets.locate import cache_dir
from fedlightning.federation import client_app
from fedlightning.federation.prompt_grid import PromptGrid

T = TypeVar("T")

_EXTRA = "engine ray needs Ray: pip install 'fedlightning[ray]', or use --engine local"
_NODES_SECONDS = 120
_OBJECT_STORE_BYTES = 512 * 2**20
"""Ray's shared memory; what passes through it at a time is a network or a forest per client."""


def run_in_simulation(
    function: Callable[[Grid], T], *, client_num: int, actors: int, data_dir: Path | None = None
) -> T:
    """Open a simulation, call ``function`` in its ServerApp, and close it.

    Args:
        function: Gets the simulation's grid.
        client_num: Clients, each a node of its own.
        actors: Ray processes that clients take turns in, where Ray is started here.
        data_dir: Folder with data files.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: The simulation ended before the function did.
    """
    environment = dict(os.environ)
    try:
        import ray
        from flwr.simulation import run_simulation
    except ImportError as error:
        raise ImportError(_EXTRA) from error

    returned: list[T] = []
    raised: list[BaseException] = []
    stopping = threading.Event()
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        # Flower hands on exceptions only, and an interrupt is none.
        try:
            prompt = PromptGrid(grid, stopping)
            # Flower starts its ServerApp before the nodes.
            prompt.wait_for_nodes(client_num, timeout=_NODES_SECONDS)
            returned.append(function(prompt))
        except BaseException as error:
            raised.append(error)

    _start_ray(ray, actors, data_dir)
    try:
        with _without_remarks():
            # Deprecated in favour of `flwr run`, which starts servers that stay; there is no other way to a
            # simulation that ends with a function.
            run_simulation(server_app, client_app.app, client_num, backend_config={"client_resources": {"num_cpus": 1}})
    except BaseException:
        if not raised:
            raise
    finally:
        stopping.set()
        ray.shutdown()
        # Ray and Flower leave variables of theirs, and PYTHONPATH grows with every simulation.
        os.environ.clear()
        os.environ.update(environment)
    if raised:
        raise raised[0]
    if not returned:
        raise RuntimeError("the simulation on Ray ended before its ServerApp did; run with -v for Ray's own messages")
    return returned[0]


def _start_ray(ray: ModuleType, actors: int, data_dir: Path | None) -> None:
    """Start Ray as Flower would, but bounded and silent."""
    # Flower gives simulated nodes no configuration of ours: their processes find it in the environment.
    variables = {"FEDLIGHTNING_DATA_DIR": str(data_dir.resolve())} if data_dir else {}
    bounds: dict[str, object] = {}
    if not os.environ.get("RAY_ADDRESS"):
        variables["FEDLIGHTNING_CACHE_DIR"] = str(cache_dir().resolve())
        bounds = {"num_cpus": actors, "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    ray.init(logging_level=logging.ERROR, log_to_driver=False, runtime_env={"env_vars": variables}, **bounds)


@contextmanager
def _without_remarks() -> Iterator[None]:
    """Keep Flower from remarking that its function is deprecated; whatever else it says is heard."""

    def is_news(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("DEPRECATED FEATURE")

    flower = logging.getLogger("flwr")
    flower.addFilter(is_news)
    try:
        yield
    finally:
        flower.removeFilter(is_news)
