"""Rows of a data set, as every other module sees them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of a data set: dense features and one label each."""

    x: NDArray[np.float32]
    """Features, shape (rows, features)."""
    y: NDArray[np.float64]
    """Class index 0..C-1, or the raw regression target, shape (rows,)."""

    def __post_init__(self) -> None:
        if self.x.ndim != 2 or self.y.ndim != 1 or len(self.x) != len(self.y):
            raise ValueError(
                "a table needs features of shape (rows, features) and labels of shape (rows,), "
                f"but got {self.x.shape} and {self.y.shape}"
            )
        if self.x.dtype != np.float32 or self.y.dtype != np.float64:
            raise ValueError(
                f"a table holds float32 features and float64 labels, but got {self.x.dtype} and {self.y.dtype}"
            )

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        return f"Table({len(self)} rows, {self.x.shape[1]} features)"

    def take(self, indices: ArrayLike) -> "Table":
        """Return the rows at these positions, in this order, as a table of its own."""
        positions = np.asarray(indices, dtype=np.int64)
        return Table(x=self.x[positions], y=self.y[positions])
