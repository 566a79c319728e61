"""Tests of which rows a client finds, and how it cuts them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from numpy.typing import NDArray

from fedlightning.datasets import load_table
from fedlightning.datasets.catalogue import find_dataset
from fedlightning.datasets.table import Table
from fedlightning.federation import shard as shard_module
from fedlightning.federation.memory import Memory
from fedlightning.federation.shard import Shard, ShardKey, load_shard, run_config

DATASETS = ("breast_cancer", "wine", "diabetes")


def keys(dataset: str, client_num: int, *, split_seed: int = 2023) -> list[ShardKey]:
    """Return the keys of all clients."""
    return [ShardKey(dataset, 0.75, split_seed, "", partition, client_num) for partition in range(client_num)]


def load(key: ShardKey, *, val_ratio: float = 0.2, seed: int = 0, memory: Memory | None = None) -> Shard:
    """Load a client's rows for the data set's own task."""
    task = find_dataset(key.dataset).task
    # An empty memory counts as false.
    memory = Memory(2**30) if memory is None else memory
    return load_shard(key, task=task, val_ratio=val_ratio, seed=seed, memory=memory)


def as_rows(tables: Sequence[Table]) -> NDArray[np.float64]:
    """Return features and target of all rows side by side, in the tables' order."""
    return np.concatenate([np.column_stack([table.x, table.y]) for table in tables])


def ordered(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return rows in an order that depends on nothing but themselves."""
    return rows[np.lexsort(rows.T)]


def reference_training_rows(dataset: str) -> NDArray[np.float64]:
    """Shuffle the whole table as hfedxgboost does, and take the first three quarters."""
    rows = as_rows([load_table(dataset)])
    np.random.RandomState(2023).shuffle(rows)
    return rows[: int(len(rows) * 0.75)]


@pytest.mark.parametrize("val_ratio", [0.0, 0.2])
@pytest.mark.parametrize("client_num", [1, 2, 5])
@pytest.mark.parametrize("dataset", DATASETS)
def test_all_shards_are_exactly_the_reference_training_rows(dataset: str, client_num: int, val_ratio: float) -> None:
    """The clients' rows together are every training row once, and no test row."""
    shards = [load(key, val_ratio=val_ratio) for key in keys(dataset, client_num)]
    together = as_rows([part for shard in shards for part in (shard.train, shard.validation)])
    np.testing.assert_array_equal(ordered(together), ordered(reference_training_rows(dataset)))


def test_each_shard_is_the_reference_clients_rows() -> None:
    """Client k has the rows that torch's random_split, seeded 0, gives the reference's client k."""
    rows = torch.from_numpy(reference_training_rows("breast_cancer"))
    sizes = [len(rows) // 4] * 3 + [len(rows) - 3 * (len(rows) // 4)]
    parts = torch.utils.data.random_split(rows, sizes, torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    for key, part in zip(keys("breast_cancer", 4), parts, strict=True):
        shard = load(key, val_ratio=0.0)
        np.testing.assert_array_equal(as_rows([shard.train]), rows[part.indices].numpy())


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_cut_depends_on_the_seed_and_the_shard_does_not(dataset: str) -> None:
    """Another seed validates on other rows of the same shard, the same seed on the same, whatever is remembered."""
    memory = Memory(2**30)
    for key in keys(dataset, 3):
        one, other, same = (load(key, seed=seed, memory=memory) for seed in (0, 1, 0))
        more = load(key, val_ratio=0.4, memory=memory)
        assert len(more.validation) > len(one.validation)
        np.testing.assert_array_equal(as_rows([one.validation]), as_rows([same.validation]))
        whole = [ordered(as_rows([shard.train, shard.validation])) for shard in (one, other)]
        np.testing.assert_array_equal(*whole)
        assert not np.array_equal(as_rows([one.validation]), as_rows([other.validation]))


def test_clients_cut_independently() -> None:
    """Two clients with as many rows do not validate on the same positions."""
    first, second, _ = (load(key) for key in keys("diabetes", 3))
    rows = [load(key, val_ratio=0.0).train for key in keys("diabetes", 3)[:2]]
    assert len(rows[0]) == len(rows[1])
    positions = [
        [index for index, row in enumerate(as_rows([whole])) if (as_rows([part.validation]) == row).all(axis=1).any()]
        for whole, part in zip(rows, (first, second), strict=True)
    ]
    assert positions[0] != positions[1]


def test_another_split_seed_gives_other_rows() -> None:
    """The held-out rows, and so the shards, follow ``split_seed``."""
    first, other = (load(keys("wine", 2, split_seed=seed)[0]) for seed in (2023, 1))
    assert not np.array_equal(ordered(as_rows([first.train])), ordered(as_rows([other.train])))


def test_no_validation_keeps_all_rows_for_training() -> None:
    """With ``val_ratio`` 0 the validation part is there, and empty."""
    shard = load(keys("wine", 2)[0], val_ratio=0.0)
    assert len(shard.validation) == 0
    assert shard.validation.x.shape == (0, 13)


def test_clients_in_one_process_read_the_table_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table is read once per process, however many clients and seeds, as long as memory lasts."""
    read = []

    def counted(name: str, **arguments: Path | None) -> Table:
        read.append(name)
        return load_table(name, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(shard_module, "load_table", counted)
    memory = Memory(2**30)
    for seed in (0, 1):
        for key in keys("wine", 3):
            load(key, seed=seed, memory=memory)
    assert read == ["wine"]
    # Without memory the rows are the same, only later.
    forgetful = load(keys("wine", 3)[2], memory=Memory(0))
    np.testing.assert_array_equal(as_rows([forgetful.train]), as_rows([load(keys("wine", 3)[2]).train]))
    assert len(read) == 3


def test_another_task_is_refused() -> None:
    """A server that takes a classification for a regression is told what the data set is."""
    with pytest.raises(ValueError, match="asked for a regression model, but wine is a multiclass data set"):
        load_shard(keys("wine", 2)[0], task="regression", val_ratio=0.2, seed=0, memory=Memory(0))


def context(node: dict[str, int], run: dict[str, str | float]) -> Context:
    """Return a client's context."""
    return Context(run_id=1, node_id=2, node_config=node, state=RecordDict(), run_config=run)  # type: ignore[arg-type]


def test_the_key_is_read_from_the_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run and node configuration lead to the shard, from whatever directory a relative data folder was given."""
    monkeypatch.chdir(tmp_path)
    run = run_config(dataset="wine", train_ratio=0.5, split_seed=7, data_dir=Path("data"))
    key = ShardKey.of(context({"partition-id": 2, "num-partitions": 5}, run))
    assert key == ShardKey("wine", 0.5, 7, str(tmp_path / "data"), 2, 5)
    without = run_config(dataset="wine", train_ratio=0.5, split_seed=7, data_dir=None)
    assert ShardKey.of(context({"partition-id": 2, "num-partitions": 5}, without)) == replace(key, data_dir="")


@pytest.mark.parametrize("missing", ["dataset", "train-ratio", "split-seed", "partition-id", "num-partitions"])
def test_a_missing_key_is_named(missing: str) -> None:
    """A configuration that leads to no rows names the key that it lacks."""
    run = run_config(dataset="wine", train_ratio=0.75, split_seed=2023, data_dir=None)
    node = {"partition-id": 0, "num-partitions": 2}
    run.pop(missing, None)
    node.pop(missing, None)
    with pytest.raises(ValueError, match=f"lacks {missing};"):
        ShardKey.of(context(node, run))


@pytest.mark.parametrize("partition", [-1, 3])
def test_a_partition_that_is_not_there_is_named(partition: int) -> None:
    """A partition id outside 0 .. K-1 is refused with what is allowed."""
    run = run_config(dataset="wine", train_ratio=0.75, split_seed=2023, data_dir=None)
    with pytest.raises(ValueError, match=f"partition-id is {partition}, expected 0 to 2"):
        ShardKey.of(context({"partition-id": partition, "num-partitions": 3}, run))
