"""Real files of LIBSVM Data load as the catalogue says; run where FEDLIGHTNING_DATA_DIR holds them."""

import os
from pathlib import Path

import numpy as np
import pytest

from fedlightning.datasets import CATALOGUE, load_table, verify_dataset
from fedlightning.datasets.locate import locate_dataset
from fedlightning.datasets.readers import read_file

# Read before the tests' own environment takes it out of the search.
DATA_DIR = os.environ.get("FEDLIGHTNING_DATA_DIR")
pytestmark = pytest.mark.skipif(not DATA_DIR, reason="FEDLIGHTNING_DATA_DIR is not set")

POSITIVES = {"a9a": 7_841, "a9a.t": 3_846, "cod-rna.r": 52_471, "ijcnn1.t": 8_712, "ijcnn1.tr": 3_415}
TARGETS = {"abalone_scale": (1, 29), "cpusmall_scale": (0, 99), "space_ga_scale": (-3.05705, 0.100083)}
FILES = [(entry.name, file.name) for entry in CATALOGUE.values() for file in entry.files]


@pytest.mark.parametrize(("dataset", "name"), FILES, ids=[name for _, name in FILES])
def test_file_has_its_rows_features_and_labels(dataset: str, name: str) -> None:
    """Each file that is there has the catalogue's rows, its features and the documented labels."""
    entry = CATALOGUE[dataset]
    sources = locate_dataset(entry, Path(DATA_DIR)).files
    source = next(source for source in sources if source.file.name == name)
    if source.path is None:
        pytest.skip(f"{name} is not in {DATA_DIR}")
    table = read_file(source.path, source.file, entry)
    assert table.x.shape == (source.file.rows, entry.features)
    if entry.task == "binary" and name in POSITIVES:
        assert np.bincount(table.y.astype(int)).tolist() == [len(table) - POSITIVES[name], POSITIVES[name]]
    if name in TARGETS:
        assert (table.y.min(), table.y.max()) == TARGETS[name]


@pytest.mark.parametrize("name", [entry.name for entry in CATALOGUE.values() if entry.files])
def test_data_set_is_its_files_in_order(name: str) -> None:
    """A whole data set is its files one after the other."""
    entry = CATALOGUE[name]
    verdicts = verify_dataset(name, Path(DATA_DIR))
    if any(verdict.status == "missing" for verdict in verdicts):
        pytest.skip(f"not all files of {name} are in {DATA_DIR}")
    assert all(verdict.ok for verdict in verdicts)
    table = load_table(name, data_dir=Path(DATA_DIR))
    last = read_file(verdicts[-1].source.path, verdicts[-1].source.file, entry)
    assert table.x.shape == (entry.rows, entry.features)
    np.testing.assert_array_equal(table.x[-len(last) :], last.x)
    np.testing.assert_array_equal(table.y[-len(last) :], last.y)
