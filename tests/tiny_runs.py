"""Runs that are quick to do: a small data set, few trees, few iterations."""

from collections.abc import Sequence
from uuid import uuid4

from fedlightning.config import ClientsConfig, CnnConfig, DatasetConfig, RunConfig, XgbConfig
from fedlightning.experiment import FederatedFit, Observer, fit_federated
from fedlightning.federation.cache import trees_folder
from fedlightning.federation.local_grid import LocalGrid
from fedlightning.federation.shard import CACHE_DIR


def tiny_config(
    dataset: str = "breast_cancer",
    *,
    client_num: int = 3,
    n_estimators: int = 4,
    num_rounds: int = 3,
    num_iterations: int = 8,
    lr: float = 0.01,
    batch_size: int = 16,
    patience: int = 10,
    val_ratio: float = 0.2,
    seed: int = 0,
    objective: str = "loss",
) -> RunConfig:
    """Return a configuration of a run that takes a fraction of a second."""
    return RunConfig(
        dataset=DatasetConfig(name=dataset, patience=patience),
        clients=ClientsConfig(
            n_estimators_client=n_estimators,
            num_rounds=num_rounds,
            client_num=client_num,
            num_iterations=num_iterations,
            xgb=XgbConfig(max_depth=3, learning_rate=0.3, alpha=0.0, gamma=0.0),
            CNN=CnnConfig(lr=lr, batch_size=batch_size, channels=4),
        ),
        val_ratio=val_ratio,
        seed=seed,
        objective=objective,  # type: ignore[arg-type]
    )


def open_federation(config: RunConfig) -> LocalGrid:
    """Return a federation in this process with the configuration's clients, which has no trees yet."""
    clients = config.clients.client_num
    return LocalGrid(clients, node_configs=[{CACHE_DIR: str(trees_folder() / uuid4().hex)}] * clients)


def fit_once(config: RunConfig, observers: Sequence[Observer] = ()) -> FederatedFit:
    """Fit on a federation of its own."""
    with open_federation(config) as grid:
        return fit_federated(grid, config, observers=observers)
