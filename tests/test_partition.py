"""Every row has one owner and one role, the same ones as in the reference."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import random_split

from fedlightning.datasets import Table, load_table
from fedlightning.partition import cut_validation, hold_out, shard_indices

quick = settings(deadline=None, max_examples=60)


def numbered(rows: int, features: int = 2) -> Table:
    """Return a table whose rows can be told apart."""
    x = np.arange(rows * features, dtype=np.float32).reshape(rows, features)
    return Table(x=x, y=np.arange(rows, dtype=np.float64))


@quick
@given(rows=st.integers(2, 300), train_ratio=st.floats(0.01, 0.99), split_seed=st.integers(0, 2**32 - 1))
def test_hold_out_equals_shuffling_the_whole_table(rows: int, train_ratio: float, split_seed: int) -> None:
    """The rows are those of shuffling features and label together with numpy's legacy generator."""
    assume(0 < int(rows * train_ratio) < rows)
    table = numbered(rows)
    whole = np.concatenate([table.x, table.y[:, np.newaxis]], axis=1)
    np.random.RandomState(split_seed).shuffle(whole)
    cut = int(rows * train_ratio)
    train, test = hold_out(table, train_ratio=train_ratio, split_seed=split_seed)
    for part, expected in ((train, whole[:cut]), (test, whole[cut:])):
        np.testing.assert_array_equal(part.x, expected[:, :-1])
        np.testing.assert_array_equal(part.y, expected[:, -1])


def test_hold_out_of_a9a_equals_the_references() -> None:
    """On real data the defaults give the reference's rows: seed 2023, the first 75 % train."""
    table = load_table("a9a")
    whole = np.concatenate([table.x, table.y[:, np.newaxis]], axis=1)
    np.random.seed(2023)
    np.random.shuffle(whole)
    train, test = hold_out(table, train_ratio=0.75)
    assert (len(train), len(test)) == (36_631, 12_211)
    np.testing.assert_array_equal(np.concatenate([train.x, test.x]), whole[:, :-1])
    np.testing.assert_array_equal(np.concatenate([train.y, test.y]), whole[:, -1])


@pytest.mark.parametrize("train_ratio", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_hold_out_refuses_impossible_ratios(train_ratio: float) -> None:
    """A ratio outside (0, 1) is named."""
    with pytest.raises(ValueError, match=r"`0 < train_ratio < 1` must hold, but got train_ratio="):
        hold_out(numbered(10), train_ratio=train_ratio)


def test_hold_out_refuses_to_leave_a_side_empty() -> None:
    """A ratio that gives no row to one side is named with the rows."""
    with pytest.raises(ValueError, match=r"train_ratio=0\.01 of 10 rows leaves none to train"):
        hold_out(numbered(10), train_ratio=0.01)


@quick
@given(data=st.data(), rows=st.integers(1, 500))
def test_shards_are_torchs_random_split(data, rows: int) -> None:
    """Disjoint, complete, `rows // client_num` each with the rest in the last, and torch's own draw."""
    client_num = data.draw(st.integers(1, rows))
    shards = shard_indices(rows, client_num)
    size = rows // client_num
    assert [len(shard) for shard in shards] == [size] * (client_num - 1) + [rows - size * (client_num - 1)]
    assert sorted(np.concatenate(shards).tolist()) == list(range(rows))
    assert all(shard.dtype == np.int64 for shard in shards)
    lengths = [len(shard) for shard in shards]
    oracle = random_split(range(rows), lengths, generator=torch.Generator().manual_seed(0))
    assert [shard.tolist() for shard in shards] == [list(subset.indices) for subset in oracle]


def test_shards_do_not_depend_on_the_runs_seed() -> None:
    """Global seeds, as a run sets them, neither change the shards nor are changed by them."""
    first = shard_indices(100, 3)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    second = shard_indices(100, 3)
    assert [shard.tolist() for shard in first] == [shard.tolist() for shard in second]
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("client_num", [0, -1, 11])
def test_shards_refuse_impossible_client_numbers(client_num: int) -> None:
    """Fewer than one client or more clients than rows is an error with both numbers."""
    with pytest.raises(ValueError, match=rf"must hold, but got client_num={client_num}, rows=10"):
        shard_indices(10, client_num)


labels = st.lists(st.integers(0, 4).map(float), min_size=2, max_size=200).map(np.array)


@quick
@given(y=labels, val_ratio=st.floats(0.05, 0.9), seed=st.integers(0, 2**32 - 1), stratify=st.booleans())
def test_cut_is_a_partition_and_keeps_class_shares(y, val_ratio: float, seed: int, stratify: bool) -> None:
    """Sorted, disjoint, complete, repeatable, `ceil(val_ratio * rows)` to validate, classes cut alike."""
    _, members, sizes = np.unique(y, return_inverse=True, return_counts=True)
    cuttable = sizes[members] >= 2 if stratify else np.ones(len(y), dtype=bool)
    places = int(np.ceil(cuttable.sum() * val_ratio))
    assume(0 < places < cuttable.sum())
    train, validation = cut_validation(y, val_ratio=val_ratio, seed=seed, stratify=stratify)
    assert len(validation) == places
    assert sorted([*train, *validation]) == list(range(len(y)))
    for part in (train, validation):
        assert part.dtype == np.int64
        assert np.all(np.diff(part) > 0)
    again = cut_validation(y, val_ratio=val_ratio, seed=seed, stratify=stratify)
    assert (train.tolist(), validation.tolist()) == (again[0].tolist(), again[1].tolist())
    if stratify:
        assert not np.isin(validation, np.flatnonzero(sizes[members] == 1)).any()
        classes = np.count_nonzero(sizes >= 2)
        if min(places, cuttable.sum() - places) >= classes:
            share = places / cuttable.sum()
            for label in np.unique(y[cuttable]):
                assert abs(np.sum(y[validation] == label) - share * np.sum(y == label)) <= 1


def test_cut_depends_on_the_seed() -> None:
    """Another seed validates on other rows."""
    y = np.zeros(100)
    cuts = {tuple(cut_validation(y, val_ratio=0.2, seed=seed, stratify=True)[1]) for seed in range(5)}
    assert len(cuts) == 5


def test_cut_of_nothing_keeps_all_rows() -> None:
    """A ratio of 0 trains on every row."""
    train, validation = cut_validation(np.zeros(5), val_ratio=0, seed=0, stratify=True)
    assert train.tolist() == [0, 1, 2, 3, 4]
    assert len(validation) == 0


@pytest.mark.parametrize("val_ratio", [-0.1, 1.0, float("nan")])
def test_cut_refuses_impossible_ratios(val_ratio: float) -> None:
    """A ratio outside [0, 1) is named."""
    with pytest.raises(ValueError, match=r"`0 <= val_ratio < 1` must hold, but got val_ratio="):
        cut_validation(np.zeros(5), val_ratio=val_ratio, seed=0, stratify=False)


@pytest.mark.parametrize("y", [[0.0], [], [0.0, 1.0, 2.0]], ids=["one row", "no row", "single rows"])
def test_cut_refuses_to_leave_a_side_empty(y: list[float]) -> None:
    """Too few rows to train and to validate is an error with the rows and a way out."""
    with pytest.raises(ValueError, match=rf"of {len(y)} rows .* use fewer clients or another val_ratio"):
        cut_validation(np.array(y), val_ratio=0.2, seed=0, stratify=True)
