"""The bundled a9a is the official one, and loads with nothing else installed or fetched."""

import hashlib
import lzma

import numpy as np
import pytest

from fedlightning.datasets import CATALOGUE, load_table, verify_dataset
from fedlightning.datasets.locate import BUNDLED


@pytest.mark.parametrize("file", CATALOGUE["a9a"].files, ids=lambda file: file.name)
def test_content_has_the_official_sha256(file) -> None:
    """The uncompressed content is LIBSVM Data's, byte for byte."""
    assert hashlib.sha256(lzma.decompress((BUNDLED / f"{file.name}.xz").read_bytes())).hexdigest() == file.sha256


def test_table_has_the_official_shape_and_classes(cache) -> None:
    """a9a then a9a.t, 123 one-hot features, 37,155 negative and 11,687 positive rows, no download."""
    table = load_table("a9a")
    assert table.x.shape == (48_842, 123)
    assert np.unique(table.x).tolist() == [0, 1]
    assert np.bincount(table.y.astype(int)).tolist() == [24_720 + 12_435, 7_841 + 3_846]
    assert np.bincount(table.y[:32_561].astype(int)).tolist() == [24_720, 7_841]
    # Feature 123 occurs in one row of a9a and in none of a9a.t.
    assert table.x[:32_561, 122].sum() == 1
    assert table.x[32_561:, 122].sum() == 0
    assert not cache.exists()


def test_verify_says_so() -> None:
    """Both files are found in the package and right."""
    verdicts = verify_dataset("a9a")
    assert [(v.ok, v.source.origin) for v in verdicts] == [(True, "bundled")] * 2


def test_the_licence_asks_for_attribution() -> None:
    """The notice that CC BY 4.0 asks for lies beside the files."""
    notice = (BUNDLED / "README.md").read_text()
    assert "Barry Becker and Ronny Kohavi" in notice
    assert "CC BY 4.0" in notice
