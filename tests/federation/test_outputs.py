"""Tests of tree outputs: the forest's own, for the rows that are asked for and no others."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedlightning.federation import outputs as outputs_module
from fedlightning.federation.outputs import TreeOutputs
from fedlightning.trees import Forest, grow_ensemble

ROWS, CLIENTS, TREES = 50, 3, 4
X = np.random.default_rng(0).normal(size=(ROWS, 5)).astype(np.float32)


def grow_forest(classes: int) -> Forest:
    """Grow a forest of one output, or of one per class."""
    targets = [
        np.digitize(X[:, client], np.linspace(-0.5, 0.5, classes - 1)).astype(float) for client in range(CLIENTS)
    ]
    return Forest(
        tuple(
            grow_ensemble(
                X,
                y,
                objective="multi:softprob" if classes > 2 else "binary:logistic",
                outputs=classes if classes > 2 else 1,
                n_estimators=TREES,
                base_score=0.5,
                intercept=0.5 if classes > 2 else 0.0,
                xgb_params={"max_depth": 2},
                seed=client,
            )
            for client, y in enumerate(targets)
        )
    )


FORESTS = [grow_forest(2), grow_forest(3)]
EXPECTED = [forest.tree_outputs(X) for forest in FORESTS]


class CountedForest(Forest):
    """A forest that notes how many rows it looked at."""

    def tree_outputs(self, x: NDArray[np.float32], *, threads: int = 1) -> NDArray[np.float32]:
        """Look at rows."""
        self.__dict__.setdefault("looked_at", []).append(len(x))
        return super().tree_outputs(x, threads=threads)


@given(
    chosen=st.sampled_from(range(len(FORESTS))),
    asked=st.lists(
        st.tuples(st.lists(st.integers(0, ROWS - 1), max_size=12), st.integers(1, TREES)), min_size=1, max_size=5
    ),
)
@settings(deadline=None, max_examples=60)
def test_any_rows_in_any_order_are_the_forests_own(chosen: int, asked: list[tuple[list[int], int]]) -> None:
    """In any order, asked for again or twice, rows have the outputs of the forest's first trees, to the bit."""
    forest = CountedForest(FORESTS[chosen].ensembles)
    found = TreeOutputs(forest, X)
    for rows, n_estimators in asked:
        values = found.of(np.array(rows, dtype=np.int64), n_estimators)
        assert values.shape == (len(rows), forest.outputs, CLIENTS * n_estimators)
        np.testing.assert_array_equal(values, FORESTS[chosen].prefix(n_estimators).tree_outputs(X)[rows])
    distinct = {row for rows, _ in asked for row in rows}
    # A row that is asked for twice at once may be looked at twice.
    asked_once = all(len(set(rows)) == len(rows) for rows, _ in asked)
    looked_at = sum(forest.__dict__.get("looked_at", []))
    assert looked_at == len(distinct) if asked_once else looked_at >= len(distinct)


@pytest.mark.parametrize("chosen", range(len(FORESTS)))
def test_only_rows_that_were_asked_for_are_computed(chosen: int) -> None:
    """Each row is looked at once, when it is first asked for, whatever the number of trees."""
    forest = CountedForest(FORESTS[chosen].ensembles)
    found = TreeOutputs(forest, X)
    assert "looked_at" not in forest.__dict__
    found.of(np.array([7, 3, 5]), 2)
    found.of(np.array([5, 3]), TREES)
    found.of(np.array([3, 9, 7]), 1)
    assert forest.__dict__["looked_at"] == [3, 1]
    np.testing.assert_array_equal(found.all(), EXPECTED[chosen])
    assert sum(forest.__dict__["looked_at"]) == ROWS
    found.all()
    assert sum(forest.__dict__["looked_at"]) == ROWS


@pytest.mark.parametrize("n_estimators", [1, 3, TREES])
@pytest.mark.parametrize("block_rows", [1, 7, ROWS, 1000])
def test_blocks_are_all_rows_in_their_order(
    n_estimators: int, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block by block come the shorter forest's outputs for all rows, never more rows at once than allowed."""
    monkeypatch.setattr(outputs_module, "BLOCK_ROWS", block_rows)
    forest = CountedForest(FORESTS[1].ensembles)
    blocks = list(TreeOutputs(forest, X).blocks(n_estimators))
    assert max(len(block) for block in blocks) == min(block_rows, ROWS)
    assert max(forest.__dict__["looked_at"]) <= block_rows
    np.testing.assert_array_equal(np.concatenate(blocks), FORESTS[1].prefix(n_estimators).tree_outputs(X))


def test_all_rows_come_without_a_copy() -> None:
    """Who asks for everything sees the very memory that counts as its size."""
    found = TreeOutputs(FORESTS[1], X)
    assert np.shares_memory(found.all(), found.all())
    assert found.nbytes == EXPECTED[1].nbytes == found.all().nbytes


def test_no_rows_have_no_outputs() -> None:
    """A table without rows, or a choice of none, has outputs of the right shape."""
    assert TreeOutputs(FORESTS[0], X[:0]).all().shape == (0, 1, CLIENTS * TREES)
    assert TreeOutputs(FORESTS[0], X).of(np.array([], dtype=np.int64), 2).shape == (0, 1, CLIENTS * 2)
    assert list(TreeOutputs(FORESTS[0], X[:0]).blocks(2)) == []
