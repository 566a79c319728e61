"""What a forest's trees say about a client's rows, computed when somebody asks and kept."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fedlightning.trees import Forest

BLOCK_ROWS = 8192
"""Rows looked at together where all are, to bound memory."""


class TreeOutputs:
    """Tree outputs of one table under one forest; only rows that were asked for are ever computed.

    A shorter forest of the same trees is a choice of columns: nothing is computed again for it.

    Args:
        forest: Clients K with T trees each.
        x: Features, shape ``(rows, features)``.
    """

    def __init__(self, forest: Forest, x: NDArray[np.float32]) -> None:
        self._forest = forest
        self._x = x
        # Pages that nobody writes to take no memory.
        self._values = np.empty((len(x), forest.outputs, len(forest.ensembles), forest.trees), dtype=np.float32)
        self._known = np.zeros(len(x), dtype=np.bool_)

    @property
    def nbytes(self) -> int:
        """Memory in bytes once all rows are known."""
        return self._values.nbytes

    def of(self, rows: NDArray[np.int64], n_estimators: int) -> NDArray[np.float32]:
        """Return the outputs of the first trees of each client, shape ``(len(rows), outputs, K * n_estimators)``."""
        self._compute(rows)
        columns = len(self._forest.ensembles) * n_estimators
        return self._values[rows, :, :, :n_estimators].reshape(len(rows), self._forest.outputs, columns)

    def all(self) -> NDArray[np.float32]:
        """Return the outputs of all trees for all rows, shape ``(rows, outputs, K*T)``, without a copy."""
        self._compute(np.arange(len(self._x)))
        columns = len(self._forest.ensembles) * self._forest.trees
        return self._values.reshape(len(self._x), self._forest.outputs, columns)

    def blocks(self, n_estimators: int) -> Iterator[NDArray[np.float32]]:
        """Yield the outputs of all rows in their order, block by block."""
        for start in range(0, len(self._x), BLOCK_ROWS):
            yield self.of(np.arange(start, min(start + BLOCK_ROWS, len(self._x))), n_estimators)

    def _compute(self, rows: NDArray[np.int64]) -> None:
        unknown = rows[~self._known[rows]]
        for start in range(0, len(unknown), BLOCK_ROWS):
            block = unknown[start : start + BLOCK_ROWS]
            self._values[block] = self._forest.tree_outputs(self._x[block]).reshape(len(block), *self._values.shape[1:])
            self._known[block] = True
