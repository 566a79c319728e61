"""Find a client's own rows: a partition of a data set that everybody has, or a file that only its node has."""

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np
from flwr.app import Context

from fedlightning.datasets import load_own_file, load_table
from fedlightning.datasets.catalogue import find_dataset
from fedlightning.datasets.table import Table
from fedlightning.federation.memory import Memory
from fedlightning.federation.records import RowsRequest
from fedlightning.partition import cut_validation, hold_out, shard_indices
from fedlightning.seeds import derive_seed
from fedlightning.tasks import find_task

PARTITION_ID = "partition-id"
"""Key of a node's configuration: which client it is, from 0."""
NUM_PARTITIONS = "num-partitions"
DATA_DIR = "data-dir"
DATA_FILE = "data-file"
CACHE_DIR = "cache-dir"


@dataclass(frozen=True)
class Silo:
    """What a node's configuration says about its client; the server has no say in it."""

    partition: int
    partitions: int = 0
    """Clients that share the data set; 0 with a file of its own."""
    data_dir: str = ""
    """Folder with the data set's files."""
    data_file: str = ""
    """The client's own rows, of the same columns as the data set."""
    cache_dir: str = ""

    @classmethod
    def of(cls, context: Context) -> "Silo":
        """Read a node's configuration.

        Raises:
            ValueError: It does not say which client this is.
        """
        node = context.node_config
        own = bool(node.get(DATA_FILE))
        needed = (PARTITION_ID,) if own else (PARTITION_ID, NUM_PARTITIONS)
        missing = [key for key in needed if key not in node]
        if missing:
            raise ValueError(
                f"the node's configuration lacks {', '.join(missing)}; "
                f'start it with --node-config "{PARTITION_ID}=0 {NUM_PARTITIONS}=2", '
                f"or with {PARTITION_ID} and a {DATA_FILE} of its own"
            )
        silo = cls(
            partition=int(node[PARTITION_ID]),
            partitions=0 if own else int(node[NUM_PARTITIONS]),
            data_dir=str(node.get(DATA_DIR, "")),
            data_file=str(node.get(DATA_FILE, "")),
            cache_dir=str(node.get(CACHE_DIR, "")),
        )
        if silo.partition < 0 or (not silo.data_file and silo.partition >= silo.partitions):
            allowed = f"0 to {silo.partitions - 1}" if silo.partitions else "0 or more"
            raise ValueError(f"{PARTITION_ID} is {silo.partition}, expected {allowed}")
        return silo


@dataclass(frozen=True)
class Shard:
    """One client's rows, cut into training, validation and, where it holds them itself, test."""

    train: Table
    validation: Table
    test: Table

    @cached_property
    def digest(self) -> str:
        """Sha256 over the training rows: whoever grows trees on the same ones may share them."""
        digest = sha256(f"{self.train.x.shape}".encode())
        for array in (self.train.x, self.train.y):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @property
    def nbytes(self) -> int:
        """Memory of all rows in bytes."""
        return sum(map(_table_bytes, (self.train, self.validation, self.test)))


def load_shard(silo: Silo, rows: RowsRequest, memory: Memory) -> Shard:
    """Return a client's rows; the validation cut depends on the run's seed, the shard and the test rows do not.

    Raises:
        ValueError: The data set is of another task, has fewer rows than clients, or the file is not like it.
        OSError: The file cannot be read.
    """
    entry = find_dataset(rows.dataset)
    if entry.task != rows.task:
        raise ValueError(f"asked for a {rows.task} model, but {entry.name} is a {entry.task} data set")

    def cut() -> Shard:
        own, test = _own_rows(silo, rows, memory)
        train, validation = cut_validation(
            own.y,
            val_ratio=rows.val_ratio,
            seed=derive_seed(rows.seed, "validation", silo.partition),
            stratify=find_task(rows.task).is_classification,
        )
        return Shard(own.take(train), own.take(validation), test)

    return memory.recall(("shard", silo, rows), cut, lambda shard: shard.nbytes)


def _own_rows(silo: Silo, rows: RowsRequest, memory: Memory) -> tuple[Table, Table]:
    """Return a client's rows for training and validation, and the test rows that it holds itself."""
    folder = Path(silo.data_dir) if silo.data_dir else None
    # Clients of one process share the table that their shards are cut from.
    source = silo.data_file or silo.data_dir
    key = ("table", rows.dataset, source, rows.train_ratio, rows.split_seed)

    def load() -> tuple[Table, Table]:
        if silo.data_file:
            return _own_file(Path(silo.data_file), rows)
        table = load_table(rows.dataset, data_dir=folder)
        train, test = hold_out(table, train_ratio=rows.train_ratio, split_seed=rows.split_seed)
        # The test rows of a data set that everybody has are the server's to read.
        return train, test.take([])

    train, test = memory.recall(key, load, lambda tables: sum(map(_table_bytes, tables)))
    if silo.data_file:
        return train, test
    return train.take(shard_indices(len(train), silo.partitions)[silo.partition]), test


def _own_file(path: Path, rows: RowsRequest) -> tuple[Table, Table]:
    table = load_own_file(path, rows.dataset)
    try:
        return hold_out(table, train_ratio=rows.train_ratio, split_seed=rows.split_seed)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _table_bytes(table: Table) -> int:
    return table.x.nbytes + table.y.nbytes
