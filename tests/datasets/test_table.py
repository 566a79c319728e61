"""A table holds what it promises."""

import numpy as np
import pytest

from fedlightning.datasets import Table


def test_take_returns_rows_in_the_order_asked() -> None:
    """Rows come with their own labels, in the order of the positions."""
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    taken = Table(x=x, y=np.array([0.0, 1.0, 2.0])).take([2, 0])
    assert len(taken) == 2
    np.testing.assert_array_equal(taken.x, x[[2, 0]])
    np.testing.assert_array_equal(taken.y, [2.0, 0.0])


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((3, 2), np.float32), np.zeros(2), r"\(3, 2\) and \(2,\)"),
        (np.zeros(3, np.float32), np.zeros(3), r"\(3,\) and \(3,\)"),
        (np.zeros((3, 2)), np.zeros(3), "got float64 and float64"),
        (np.zeros((3, 2), np.float32), np.zeros(3, np.int64), "got float32 and int64"),
    ],
)
def test_shapes_and_types_are_checked(x, y, message: str) -> None:
    """A table of other shapes or types is refused with what was given."""
    with pytest.raises(ValueError, match=message):
        Table(x=x, y=y)
