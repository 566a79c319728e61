"""Find a client's own rows from its node's configuration."""

from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context

from fedlightning.datasets import load_table
from fedlightning.datasets.catalogue import find_dataset
from fedlightning.datasets.table import Table
from fedlightning.federation.memory import Memory
from fedlightning.federation.records import NUM_PARTITIONS, PARTITION_ID
from fedlightning.partition import cut_validation, hold_out, shard_indices
from fedlightning.seeds import derive_seed
from fedlightning.tasks import find_task

DATASET = "dataset"
TRAIN_RATIO = "train-ratio"
SPLIT_SEED = "split-seed"
DATA_DIR = "data-dir"


@dataclass(frozen=True)
class ShardKey:
    """Which rows of which data set are this client's."""

    dataset: str
    train_ratio: float
    split_seed: int
    data_dir: str
    partition: int
    partitions: int

    @classmethod
    def of(cls, context: Context) -> "ShardKey":
        """Read the key from the run's and the node's configuration."""
        run, node = context.run_config, context.node_config
        missing = [key for key in (DATASET, TRAIN_RATIO, SPLIT_SEED) if key not in run]
        missing += [key for key in (PARTITION_ID, NUM_PARTITIONS) if key not in node]
        if missing:
            raise ValueError(f"the configuration lacks {', '.join(missing)}; without it a client has no rows")
        key = cls(
            dataset=str(run[DATASET]),
            train_ratio=float(run[TRAIN_RATIO]),
            split_seed=int(run[SPLIT_SEED]),
            data_dir=str(run.get(DATA_DIR, "")),
            partition=int(node[PARTITION_ID]),
            partitions=int(node[NUM_PARTITIONS]),
        )
        if not 0 <= key.partition < key.partitions:
            raise ValueError(f"{PARTITION_ID} is {key.partition}, expected 0 to {key.partitions - 1}")
        return key


def run_config(*, dataset: str, train_ratio: float, split_seed: int, data_dir: Path | None) -> dict[str, str | float]:
    """Return the run configuration from which every client finds its rows."""
    config: dict[str, str | float] = {DATASET: dataset, TRAIN_RATIO: train_ratio, SPLIT_SEED: split_seed}
    if data_dir is not None:
        config[DATA_DIR] = str(data_dir.resolve())
    return config


@dataclass(frozen=True)
class Shard:
    """One client's rows, cut into training and validation."""

    task: str
    train: Table
    validation: Table


def load_shard(key: ShardKey, *, task: str, val_ratio: float, seed: int, memory: Memory) -> Shard:
    """Return a client's rows; the cut depends on the run's seed, the shard does not.

    Raises:
        ValueError: The data set is of another task, or has fewer rows than clients.
    """
    entry = find_dataset(key.dataset)
    if entry.task != task:
        raise ValueError(f"asked for a {task} model, but {entry.name} is a {entry.task} data set")
    rows = memory.recall(("rows", key), lambda: _own_rows(key, memory), _table_bytes)

    def cut() -> Shard:
        train, validation = cut_validation(
            rows.y,
            val_ratio=val_ratio,
            seed=derive_seed(seed, "validation", key.partition),
            stratify=find_task(task).is_classification,
        )
        return Shard(task, rows.take(train), rows.take(validation))

    return memory.recall(
        ("shard", key, val_ratio, seed),
        cut,
        lambda shard: _table_bytes(shard.train) + _table_bytes(shard.validation),
    )


def _own_rows(key: ShardKey, memory: Memory) -> Table:
    def load() -> Table:
        table = load_table(key.dataset, data_dir=Path(key.data_dir) if key.data_dir else None)
        train, _ = hold_out(table, train_ratio=key.train_ratio, split_seed=key.split_seed)
        return train

    # Several clients in one process share the table that their shards are cut from.
    shared = ("table", key.dataset, key.train_ratio, key.split_seed, key.data_dir)
    train = memory.recall(shared, load, _table_bytes)
    return train.take(shard_indices(len(train), key.partitions)[key.partition])


def _table_bytes(table: Table) -> int:
    return table.x.nbytes + table.y.nbytes
