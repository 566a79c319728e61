"""Who gets which rows: the test rows, each client's shard, and the validation rows of a shard."""

import math

import numpy as np
from numpy.typing import NDArray

from fedlightning.datasets.table import Table

Indices = NDArray[np.int64]


def hold_out(table: Table, *, train_ratio: float, split_seed: int = 2023) -> tuple[Table, Table]:
    """Return the training and the test rows: a shuffle, then the first `int(rows * train_ratio)` train.

    With the default seed these are exactly the rows of Flower's baseline `hfedxgboost`, which shuffles
    the whole table (features and label) with numpy's legacy generator.
    """
    if not 0 < train_ratio < 1:
        raise ValueError(f"`0 < train_ratio < 1` must hold, but got {train_ratio=}")
    rows = len(table)
    train_rows = int(rows * train_ratio)
    if not 0 < train_rows < rows:
        raise ValueError(f"{train_ratio=} of {rows} rows leaves none to {'test' if train_rows else 'train'}")
    # Shuffling positions draws the same swaps as shuffling the rows themselves.
    order = np.arange(rows)
    np.random.RandomState(split_seed).shuffle(order)
    return table.take(order[:train_rows]), table.take(order[train_rows:])


def shard_indices(rows: int, client_num: int) -> list[Indices]:
    """Return each client's training rows: `rows // client_num` at random, the last client takes the rest.

    The same as torch's `random_split` with a generator seeded 0, whatever the run's seed.
    """
    if not 1 <= client_num <= rows:
        raise ValueError(f"`1 <= client_num <= rows` must hold, but got {client_num=}, {rows=}")
    # Imported here because torch takes a second and only this function needs it.
    import torch

    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).numpy()
    size = rows // client_num
    return np.split(order, [size * k for k in range(1, client_num)])


def cut_validation(y: NDArray[np.float64], *, val_ratio: float, seed: int, stratify: bool) -> tuple[Indices, Indices]:
    """Return sorted positions of a shard's training and of its validation rows.

    `val_ratio` 0 keeps all rows for training. With `stratify` each class is cut alike: a class with a
    single row stays in training, and where there are fewer places than classes the rows are drawn by lot.
    """
    if not 0 <= val_ratio < 1:
        raise ValueError(f"`0 <= val_ratio < 1` must hold, but got {val_ratio=}")
    everyone = np.arange(len(y), dtype=np.int64)
    if val_ratio == 0:
        return everyone, everyone[:0]
    classes = None
    candidates = everyone
    if stratify:
        _, members, sizes = np.unique(y, return_inverse=True, return_counts=True)
        candidates = everyone[sizes[members] >= 2]
        classes = members[candidates]
    places = math.ceil(len(candidates) * val_ratio)
    if not 0 < places < len(candidates):
        raise ValueError(
            f"{val_ratio=} of {len(y)} rows ({len(candidates)} of classes with two or more) leaves "
            "nothing to train or nothing to validate; use fewer clients or another val_ratio"
        )
    if classes is not None and min(places, len(candidates) - places) < len(np.unique(classes)):
        classes = None
    # Imported here for the same reason as torch above.
    from sklearn.model_selection import train_test_split

    _, validation = train_test_split(candidates, test_size=places, random_state=seed, stratify=classes)
    validation = np.sort(validation)
    return np.setdiff1d(everyone, validation, assume_unique=True), validation
