"""Readers return the numbers that are written, or say where they are not numbers."""

import bz2
import gzip
import hashlib
import io
import lzma
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedlightning.datasets import DamagedFileError, DataFile, DatasetEntry, load_table
from fedlightning.datasets.readers import read_file

COMPRESS = {"": bytes, ".xz": lzma.compress, ".bz2": bz2.compress, ".gz": gzip.compress}


def tiny(content: bytes, *, rows: int, features: int = 3, task: str = "regression", classes: int = 0):
    """Return a file and an entry that describe a content made up by the test."""
    file = DataFile("tiny", "regression/tiny", rows=rows, sha256=hashlib.sha256(content).hexdigest())
    entry = DatasetEntry(
        name="tiny", task=task, files=(file,), rows=rows, features=features, classes=classes, description=""
    )
    return file, entry


def read(folder: Path, content: bytes, **described):
    """Write a content to a file and read it back as a table."""
    path = folder / "tiny"
    path.write_bytes(content)
    file, entry = tiny(content, **described)
    return read_file(path, file, entry)


@settings(deadline=None, max_examples=50)
@given(
    x=arrays(np.float32, (4, 3), elements=st.sampled_from([0, 1, -0.5]) | st.floats(-1e6, 1e6, width=32)),
    y=arrays(np.float64, 4, elements=st.floats(-1e9, 1e9)),
)
def test_what_scikit_learn_writes_is_read_back(tmp_path_factory, x, y) -> None:
    """Features and targets come back as written: dense, float32 and float64, with absent zeros."""
    written = io.BytesIO()
    sklearn.datasets.dump_svmlight_file(x, y, written, zero_based=False)
    table = read(tmp_path_factory.mktemp("read"), written.getvalue(), rows=4)
    np.testing.assert_array_equal(table.x, x)
    # The writer prints 16 significant digits, one short of an exact float64.
    np.testing.assert_allclose(table.y, y, rtol=1e-15)
    assert table.x.dtype == np.float32
    assert table.y.dtype == np.float64


@pytest.mark.parametrize("ending", COMPRESS)
def test_every_compression_reads_the_same(tmp_path: Path, ending: str) -> None:
    """A file reads the same plain and compressed, and its digest is that of the plain content."""
    content = b"-1 1:1 3:2.5 \n+1 2:4\n"
    file, entry = tiny(content, rows=2, task="binary", classes=2)
    path = tmp_path / f"tiny{ending}"
    path.write_bytes(COMPRESS[ending](content))
    table = read_file(path, file, entry)
    np.testing.assert_array_equal(table.x, [[1, 0, 2.5], [0, 4, 0]])
    np.testing.assert_array_equal(table.y, [0, 1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1 1:2\n1 2:x\n", "tiny: line 2: not in LIBSVM format"),
        (b"one 1:2\n", "tiny: line 1: not in LIBSVM format"),
        (b"1 1:2\n1 3:1 2:1\n", "tiny: line 2: .*sorted and unique"),
        (b"1 0:1\n", "tiny: line 1: .*index 0"),
        (b"1 1:2\n1 4:1\n", "tiny: row 2: feature index is 4, allowed: 1 to 3"),
        (b"1 1:2\n1 1:1 2:nan\n", "tiny: row 2: feature 2 is nan"),
        (b"1 3:1e60\n", "tiny: row 1: feature 3 is inf"),
        (b"1 1:2\ninf 1:2\n", "tiny: row 2: label is inf"),
        (b"1 1:2\n", "tiny: 1 rows, expected 2"),
        (b"", "tiny: 0 rows, expected 2"),
    ],
)
def test_malformed_content_is_named_with_its_place(tmp_path: Path, content: bytes, message: str) -> None:
    """The error names the file and the line or row, whatever is wrong in it."""
    with pytest.raises(ValueError, match=message):
        read(tmp_path, content, rows=2)


@pytest.mark.parametrize(
    ("content", "task", "classes", "message"),
    [
        (b"-1 1:2\n2 1:2\n", "binary", 2, "tiny: row 2: label is 2, allowed: -1, 1"),
        (b"0 1:2\n0.5 1:2\n", "multiclass", 3, "tiny: row 2: label is 0.5, allowed: 0, 1, 2"),
        (b"3 1:2\n2 1:2\n", "multiclass", 3, "tiny: row 1: label is 3, allowed: 0, 1, 2"),
    ],
)
def test_labels_must_fit_the_task(tmp_path: Path, content, task, classes, message) -> None:
    """A label that is no class of the task is named with its row."""
    with pytest.raises(ValueError, match=message):
        read(tmp_path, content, rows=2, task=task, classes=classes)


def test_regression_targets_stay_as_they_are(tmp_path: Path) -> None:
    """A target of -1 is a number like any other where the task is regression."""
    table = read(tmp_path, b"-1 1:1\n0.1 1:1\n", rows=2)
    np.testing.assert_array_equal(table.y, [-1, 0.1])


def test_a_damaged_copy_is_reported_as_damaged_not_as_malformed(tmp_path: Path) -> None:
    """When the digest is wrong too, the digest is the error: the line is only where it shows."""
    file, entry = tiny(b"1 1:2\n", rows=1)
    path = tmp_path / "tiny"
    path.write_bytes(b"1 1:x\n")
    with pytest.raises(DamagedFileError, match=r"tiny: sha256 is [0-9a-f]{12}\.\.\., expected"):
        read_file(path, file, entry)


def test_without_a_digest_the_features_must_all_occur(tmp_path: Path) -> None:
    """Where rows and features are the only check, too few features are noticed."""
    file = DataFile("tiny", "regression/tiny", rows=1)
    _, entry = tiny(b"", rows=1)
    path = tmp_path / "tiny"
    path.write_bytes(b"1 2:2\n")
    with pytest.raises(DamagedFileError, match="tiny: 2 features, expected 3"):
        read_file(path, file, entry)


@pytest.mark.parametrize("name", ["breast_cancer", "diabetes", "wine", "digits"])
def test_scikit_learns_sets_are_its_own_rows(name: str) -> None:
    """A set without files holds exactly what scikit-learn returns."""
    x, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    table = load_table(name)
    np.testing.assert_array_equal(table.x, x.astype(np.float32))
    np.testing.assert_array_equal(table.y, y)
