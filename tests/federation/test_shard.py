"""Tests of which rows a client finds, and how it cuts them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import write_libsvm
from flwr.app import Context, RecordDict
from numpy.typing import NDArray

from fedlightning.datasets import load_table
from fedlightning.datasets.catalogue import find_dataset
from fedlightning.datasets.table import Table
from fedlightning.federation import shard as shard_module
from fedlightning.federation.memory import Memory
from fedlightning.federation.records import RowsRequest
from fedlightning.federation.shard import Shard, Silo, load_shard
from fedlightning.partition import hold_out

DATASETS = ("breast_cancer", "wine", "diabetes")


def silos(client_num: int) -> list[Silo]:
    """Return the silos of all clients of a data set that everybody has."""
    return [Silo(partition, client_num) for partition in range(client_num)]


def load(
    silo: Silo,
    dataset: str,
    *,
    val_ratio: float = 0.2,
    seed: int = 0,
    split_seed: int = 2023,
    memory: Memory | None = None,
) -> Shard:
    """Load a client's rows for the data set's own task."""
    rows = RowsRequest(dataset, find_dataset(dataset).task, 0.75, split_seed, val_ratio, seed)
    # An empty memory counts as false.
    return load_shard(silo, rows, Memory(2**30) if memory is None else memory)


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
    shards = [load(silo, dataset, val_ratio=val_ratio) for silo in silos(client_num)]
    together = as_rows([part for shard in shards for part in (shard.train, shard.validation)])
    np.testing.assert_array_equal(ordered(together), ordered(reference_training_rows(dataset)))


def test_each_shard_is_the_reference_clients_rows() -> None:
    """Client k has the rows that torch's random_split, seeded 0, gives the reference's client k."""
    rows = torch.from_numpy(reference_training_rows("breast_cancer"))
    sizes = [len(rows) // 4] * 3 + [len(rows) - 3 * (len(rows) // 4)]
    parts = torch.utils.data.random_split(rows, sizes, torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    for silo, part in zip(silos(4), parts, strict=True):
        shard = load(silo, "breast_cancer", val_ratio=0.0)
        np.testing.assert_array_equal(as_rows([shard.train]), rows[part.indices].numpy())


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_cut_depends_on_the_seed_and_the_shard_does_not(dataset: str) -> None:
    """Another seed validates on other rows of the same shard, the same seed on the same, whatever is remembered."""
    memory = Memory(2**30)
    for silo in silos(3):
        one, other, same = (load(silo, dataset, seed=seed, memory=memory) for seed in (0, 1, 0))
        more = load(silo, dataset, val_ratio=0.4, memory=memory)
        assert len(more.validation) > len(one.validation)
        np.testing.assert_array_equal(as_rows([one.validation]), as_rows([same.validation]))
        whole = [ordered(as_rows([shard.train, shard.validation])) for shard in (one, other)]
        np.testing.assert_array_equal(*whole)
        assert not np.array_equal(as_rows([one.validation]), as_rows([other.validation]))


def test_clients_cut_independently() -> None:
    """Two clients with as many rows do not validate on the same positions."""
    first, second, _ = (load(silo, "diabetes") for silo in silos(3))
    rows = [load(silo, "diabetes", val_ratio=0.0).train for silo in silos(3)[:2]]
    assert len(rows[0]) == len(rows[1])
    positions = [
        [index for index, row in enumerate(as_rows([whole])) if (as_rows([part.validation]) == row).all(axis=1).any()]
        for whole, part in zip(rows, (first, second), strict=True)
    ]
    assert positions[0] != positions[1]


def test_another_split_seed_gives_other_rows() -> None:
    """The held-out rows, and so the shards, follow ``split_seed``."""
    first, other = (load(silos(2)[0], "wine", split_seed=seed) for seed in (2023, 1))
    assert not np.array_equal(ordered(as_rows([first.train])), ordered(as_rows([other.train])))


def test_no_validation_keeps_all_rows_for_training() -> None:
    """With ``val_ratio`` 0 the validation part is there, and empty."""
    shard = load(silos(2)[0], "wine", val_ratio=0.0)
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
        for silo in silos(3):
            load(silo, "wine", seed=seed, memory=memory)
    assert read == ["wine"]
    # Without memory the rows are the same, only later.
    forgetful = load(silos(3)[2], "wine", memory=Memory(0))
    np.testing.assert_array_equal(as_rows([forgetful.train]), as_rows([load(silos(3)[2], "wine").train]))
    assert len(read) == 3


def test_another_task_is_refused() -> None:
    """A server that takes a classification for a regression is told what the data set is."""
    with pytest.raises(ValueError, match="asked for a regression model, but wine is a multiclass data set"):
        load_shard(silos(2)[0], RowsRequest("wine", "regression", 0.75, 2023, 0.2, 0), Memory(0))


def context(node: Mapping[str, str | int]) -> Context:
    """Return the context of a node."""
    return Context(run_id=1, node_id=2, node_config=dict(node), state=RecordDict(), run_config={})


def test_the_silo_is_read_from_the_nodes_configuration() -> None:
    """A node says which client it is, how many share the data set, and where its files are; the rest is empty."""
    assert Silo.of(context({"partition-id": 2, "num-partitions": 5})) == Silo(2, 5)
    folders = {"data-dir": "/data", "cache-dir": "/cache"}
    assert Silo.of(context({"partition-id": 2, "num-partitions": 5, **folders})) == Silo(2, 5, "/data", "", "/cache")
    assert Silo.of(context({"partition-id": 7, "data-file": "/own.xz"})) == Silo(7, data_file="/own.xz")
    # How many others there are does not matter to who has a file of its own.
    shared = {"partition-id": 7, "num-partitions": 2, "data-file": "/own.xz"}
    assert Silo.of(context(shared)) == Silo(7, data_file="/own.xz")


@pytest.mark.parametrize(
    ("node", "missing"),
    [
        ({"partition-id": 0}, "num-partitions"),
        ({"num-partitions": 2}, "partition-id"),
        ({"data-dir": "/data"}, "partition-id, num-partitions"),
        ({"data-file": "/own.xz"}, "partition-id"),
        ({"partition-id": 0, "data-file": ""}, "num-partitions"),
    ],
)
def test_a_missing_key_is_named(node: dict[str, str | int], missing: str) -> None:
    """A node that does not say which client it is names the keys that it lacks, and how to give them."""
    with pytest.raises(ValueError, match=f"lacks {missing};.*--node-config.*data-file"):
        Silo.of(context(node))


@pytest.mark.parametrize("partition", [-1, 3])
def test_a_partition_that_is_not_there_is_named(partition: int) -> None:
    """A partition id outside 0 .. K-1 is refused with what is allowed."""
    with pytest.raises(ValueError, match=f"partition-id is {partition}, expected 0 to 2"):
        Silo.of(context({"partition-id": partition, "num-partitions": 3}))


def test_a_silo_with_a_file_needs_a_partition_from_zero() -> None:
    """Without a number of clients there is no upper bound, but below 0 is nobody."""
    with pytest.raises(ValueError, match="partition-id is -1, expected 0 or more"):
        Silo.of(context({"partition-id": -1, "data-file": "/own.xz"}))


def test_test_rows_of_a_shared_data_set_are_not_the_clients() -> None:
    """Who has a partition of a data set that everybody has holds no test rows."""
    assert len(load(silos(2)[0], "wine").test) == 0


def test_the_digest_is_that_of_the_training_rows() -> None:
    """Equal training rows have one digest, wherever they come from; other rows, another cut or target another."""
    first = load(silos(3)[0], "wine")
    assert load(silos(3)[0], "wine").digest == first.digest
    moved = replace(first, validation=first.test, test=first.validation)
    assert moved.digest == first.digest
    relabelled = replace(first, train=Table(first.train.x, first.train.y[::-1]))
    others = [load(silos(3)[1], "wine"), load(silos(3)[0], "wine", seed=1), relabelled]
    assert len({first.digest, *(shard.digest for shard in others)}) == 4


# -- own files ------------------------------------------------------------------------------------------------------


def own_silo(path: Path, rows: Table) -> Silo:
    """Return a silo whose rows lie in a file of its own."""
    write_libsvm(path, rows)
    return Silo(0, data_file=str(path))


@pytest.mark.parametrize("ending", ["", ".xz", ".bz2", ".gz"])
def test_an_own_file_is_held_out_and_cut_at_the_client(tmp_path: Path, ending: str) -> None:
    """A file's rows are all there: the split of this file alone trains and validates, what it holds out is the test."""
    rows = load_table("breast_cancer").take(np.arange(100, 160))
    silo = own_silo(tmp_path / f"own{ending}", rows)
    shard = load(silo, "breast_cancer")
    train, test = hold_out(rows, train_ratio=0.75, split_seed=2023)
    np.testing.assert_array_equal(as_rows([shard.test]), as_rows([test]))
    np.testing.assert_array_equal(ordered(as_rows([shard.train, shard.validation])), ordered(as_rows([train])))
    assert (len(shard.test), len(shard.validation)) == (15, 9)
    # Another seed cuts other validation rows; the test rows stay.
    other = load(silo, "breast_cancer", seed=1)
    np.testing.assert_array_equal(other.test.x, shard.test.x)
    assert not np.array_equal(other.validation.x, shard.validation.x)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("1 1:1\n-1 31:2\n", r"row 2: feature index is 31, allowed: 1 to 30"),
        ("1 1:1\n3 2:1\n", r"row 2: label is 3, allowed: -1, 1"),
        ("1 1:1\nfour 2:1\n", "line 2: not in LIBSVM format"),
        ("1 1:nan\n", "row 1: feature 1 is nan"),
        ("", "not in LIBSVM format|rows"),
        ("1 1:1\n", "rows"),
    ],
)
def test_a_wrong_own_file_is_named(tmp_path: Path, text: str, error: str) -> None:
    """A file with too many columns, other labels, too few rows, or that is no LIBSVM is named, with the place."""
    path = tmp_path / "own.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}.*({error})"):
        load(Silo(0, data_file=str(path)), "breast_cancer")


def test_an_own_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A path that leads nowhere is the operating system's own error, with the path."""
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(Silo(0, data_file=str(tmp_path / "nowhere")), "breast_cancer")
