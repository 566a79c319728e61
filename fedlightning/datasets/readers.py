"""From files and from scikit-learn's collection to dense tables."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlightning.datasets.catalogue import DataFile, DatasetEntry
from fedlightning.datasets.content import Content, DamagedFileError, expected_digest
from fedlightning.datasets.table import Table


def read_file(path: Path, file: DataFile, entry: DatasetEntry) -> Table:
    """Read one catalogue file and check its digest, rows, features and labels in the same pass."""
    digest = expected_digest(file, path.parent)
    with Content(path, name=file.name, digest=digest) as content:
        try:
            sparse, labels = parse_libsvm(content)
        except DamagedFileError:
            raise
        except ValueError:
            # A damaged copy explains the failure better than the line that happens to be broken.
            content.check()
            raise
        content.check()
    check_width(sparse, name=file.name, features=entry.features, exactly=digest is None)
    if len(labels) != file.rows:
        raise DamagedFileError(f"{file.name}: {len(labels)} rows, expected {file.rows}")
    return _dense(sparse, labels, name=file.name, entry=entry)


def read_own_file(path: Path, entry: DatasetEntry) -> Table:
    """Read somebody's own file of the same columns and labels as a catalogue entry, with any number of rows."""
    with Content(path, name=str(path), digest=None) as content:
        sparse, labels = parse_libsvm(content)
    check_width(sparse, name=str(path), features=entry.features, exactly=False)
    return _dense(sparse, labels, name=str(path), entry=entry)


def _dense(sparse: Any, labels: NDArray[np.float64], *, name: str, entry: DatasetEntry) -> Table:
    x = np.zeros((len(labels), entry.features), dtype=np.float32)
    sparse.resize(x.shape)
    sparse.toarray(out=x)
    return Table(x=x, y=class_indices(labels, name=name, entry=entry))


def parse_libsvm(content: Content) -> tuple[Any, NDArray[np.float64]]:
    """Parse LIBSVM text into a sparse float32 matrix (rows, highest feature index) and the raw labels.

    Values and labels must be finite; errors name the file and the line.
    """
    # Imported here because listing or fetching data sets needs no second of scikit-learn.
    from sklearn.datasets import load_svmlight_file

    try:
        with np.errstate(over="ignore"):
            sparse, labels = load_svmlight_file(content, dtype=np.float32, zero_based=False)
    except DamagedFileError:
        raise
    except (ValueError, OverflowError) as error:
        # An empty file has no line to blame.
        where = f"line {content.lines}: " if content.lines else ""
        raise ValueError(f"{content.name}: {where}not in LIBSVM format ({error})") from error
    bad_values = np.flatnonzero(~np.isfinite(sparse.data))
    if len(bad_values):
        row = int(np.searchsorted(sparse.indptr, bad_values[0], side="right"))
        feature = sparse.indices[bad_values[0]] + 1
        raise ValueError(
            f"{content.name}: row {row}: feature {feature} is {sparse.data[bad_values[0]]}, "
            "expected a finite number within float32"
        )
    bad_labels = np.flatnonzero(~np.isfinite(labels))
    if len(bad_labels):
        raise ValueError(
            f"{content.name}: row {bad_labels[0] + 1}: label is {labels[bad_labels[0]]}, expected a finite number"
        )
    return sparse, np.asarray(labels, dtype=np.float64)


def check_width(sparse: Any, *, name: str, features: int, exactly: bool) -> None:
    """Check that no feature index is above the number of features, or that the highest is exactly it."""
    width = sparse.shape[1]
    if width > features:
        first = int(np.flatnonzero(sparse.indices >= features)[0])
        row = int(np.searchsorted(sparse.indptr, first, side="right"))
        index = sparse.indices[first] + 1
        raise ValueError(f"{name}: row {row}: feature index is {index}, allowed: 1 to {features}")
    if exactly and width < features:
        raise DamagedFileError(f"{name}: {width} features, expected {features}")


def class_indices(labels: NDArray[np.float64], *, name: str, entry: DatasetEntry) -> NDArray[np.float64]:
    """Return class indices 0..C-1 for labels as written (binary: -1 becomes 0); targets stay untouched."""
    if entry.task == "regression":
        return labels
    allowed = [-1.0, 1.0] if entry.task == "binary" else [float(c) for c in range(entry.classes)]
    strange = np.flatnonzero(~np.isin(labels, allowed))
    if len(strange):
        row = strange[0]
        spelled = ", ".join(f"{value:g}" for value in allowed)
        raise ValueError(f"{name}: row {row + 1}: label is {labels[row]:g}, allowed: {spelled}")
    return np.where(labels < 0, 0.0, labels)


def read_sklearn(entry: DatasetEntry) -> Table:
    """Return one of the data sets that scikit-learn brings along."""
    import sklearn.datasets

    load = getattr(sklearn.datasets, f"load_{entry.name}")
    x, y = load(return_X_y=True)
    table = Table(x=np.asarray(x, dtype=np.float32), y=np.asarray(y, dtype=np.float64))
    assert table.x.shape == (entry.rows, entry.features)
    return table
