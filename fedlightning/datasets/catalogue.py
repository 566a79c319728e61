"""The data sets that are known by name, and the files each is made of."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

TaskName = Literal["binary", "multiclass", "regression"]


@dataclass(frozen=True)
class DataFile:
    """One LIBSVM Data file; digests are those of the uncompressed content."""

    name: str
    url_path: str
    """Where LIBSVM Data keeps it, below its base address; the ending tells the compression."""
    rows: int
    sha256: str | None = None
    md5: str | None = None
    """A published MD5, for a file that no stronger digest is known of."""


@dataclass(frozen=True, kw_only=True)
class DatasetEntry:
    """One data set: what it is made of, and the settings that go with it."""

    name: str
    task: TaskName
    files: tuple[DataFile, ...] = ()
    """In the order of their rows; empty for the data sets that scikit-learn brings along."""
    rows: int
    features: int
    classes: int
    """2 for binary, C for multiclass, 0 for regression."""
    patience: int = 10
    """Rounds without a better validation loss before a run stops."""
    train_ratio: float = 0.75
    description: str


_ENTRIES = (
    DatasetEntry(
        name="a9a",
        task="binary",
        files=(
            DataFile(
                "a9a",
                "binary/a9a",
                rows=32_561,
                sha256="f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906",
            ),
            DataFile(
                "a9a.t",
                "binary/a9a.t",
                rows=16_281,
                sha256="1f448a153f0320399a7e40836eb207655b0bde0f21fc941cc472193daa9f5de9",
            ),
        ),
        rows=48_842,
        # a9a.t never uses feature 123, a9a uses it in one row.
        features=123,
        classes=2,
        description="UCI Adult: income above 50,000 dollars, one-hot; bundled",
    ),
    DatasetEntry(
        name="cod_rna",
        task="binary",
        files=(
            # The MD5 is the published one of LIBSVM Data; no stronger digest of this file is known.
            DataFile("cod-rna.t", "binary/cod-rna.t", rows=271_617, md5="b876c22c86a33ef262342b12d2718655"),
            DataFile(
                "cod-rna.r",
                "binary/cod-rna.r",
                rows=157_413,
                sha256="3feb6297255b0254bfed3b80bce3317f8a1e09e27ae160106b2e3b945fe6a49c",
            ),
        ),
        rows=429_030,
        features=8,
        classes=2,
        description="non-coding RNA detection (Uzilov, Keegan and Mathews 2006)",
    ),
    DatasetEntry(
        name="ijcnn1",
        task="binary",
        files=(
            DataFile(
                "ijcnn1.t",
                "binary/ijcnn1.t.bz2",
                rows=91_701,
                sha256="e7b0bbd518641980dc322746c6bc59d019d3153934e6258e48f9d8cfae2c4bb8",
            ),
            DataFile(
                "ijcnn1.tr",
                "binary/ijcnn1.tr.bz2",
                rows=35_000,
                sha256="9454b7a9d98fcb83e4b79f1094b996aec75909677a77eede6094a9bb4f71c461",
            ),
        ),
        rows=126_701,
        features=22,
        classes=2,
        description="IJCNN 2001 neural network competition (Prokhorov)",
    ),
    DatasetEntry(
        name="abalone",
        task="regression",
        files=(
            DataFile(
                "abalone_scale",
                "regression/abalone_scale",
                rows=4_177,
                sha256="7f1f6ca7f636e684949fc3f6388fc4f7503083717f776876bbdd11098fc5378b",
            ),
        ),
        rows=4_177,
        features=8,
        classes=0,
        patience=30,
        description="UCI Abalone: rings of a shell, features scaled",
    ),
    DatasetEntry(
        name="cpusmall",
        task="regression",
        files=(
            DataFile(
                "cpusmall_scale",
                "regression/cpusmall_scale",
                rows=8_192,
                sha256="6ac0a79423de80705e0f6709eae7865bf89f792ae4f9d29d476e44b47c315404",
            ),
        ),
        rows=8_192,
        features=12,
        classes=0,
        patience=100,
        description="Delve comp-activ: share of time in user mode, features scaled",
    ),
    DatasetEntry(
        name="space_ga",
        task="regression",
        files=(
            DataFile(
                "space_ga_scale",
                "regression/space_ga_scale",
                rows=3_107,
                sha256="acf41627906e9018193a70fdd9699587a510ee84183fd54d43ad46afdccad9f6",
            ),
        ),
        rows=3_107,
        features=6,
        classes=0,
        patience=50,
        description="StatLib space_ga: logarithm of a county's share of votes cast, features scaled",
    ),
    DatasetEntry(
        name="YearPredictionMSD",
        task="regression",
        # No digest of these two is published: rows and features are counted at the first fetch,
        # and the sha256 recorded then is checked from there on.
        files=(
            DataFile("YearPredictionMSD", "regression/YearPredictionMSD.bz2", rows=463_715),
            DataFile("YearPredictionMSD.t", "regression/YearPredictionMSD.t.bz2", rows=51_630),
        ),
        rows=515_345,
        features=90,
        classes=0,
        patience=50,
        description="UCI YearPredictionMSD: the year a song was released",
    ),
    DatasetEntry(
        name="breast_cancer",
        task="binary",
        rows=569,
        features=30,
        classes=2,
        description="Breast Cancer Wisconsin, from scikit-learn",
    ),
    DatasetEntry(
        name="diabetes",
        task="regression",
        rows=442,
        features=10,
        classes=0,
        description="Diabetes progression after one year, from scikit-learn",
    ),
    DatasetEntry(
        name="wine",
        task="multiclass",
        rows=178,
        features=13,
        classes=3,
        description="Wine recognition, from scikit-learn",
    ),
    DatasetEntry(
        name="digits",
        task="multiclass",
        rows=1_797,
        features=64,
        classes=10,
        description="Handwritten digits of 8 by 8 pixels, from scikit-learn",
    ),
)

CATALOGUE: Mapping[str, DatasetEntry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})

_ALIASES = MappingProxyType({"cod-rna": "cod_rna"})


def find_dataset(name: str) -> DatasetEntry:
    """Return the data set of this name or alias, or name the nearest ones in the error."""
    entry = CATALOGUE.get(_ALIASES.get(name, name))
    if entry is None:
        by_folded = {known.casefold(): known for known in sorted(CATALOGUE, key=str.casefold)}
        close = difflib.get_close_matches(name.casefold(), by_folded)
        ordered = dict.fromkeys([*close, *by_folded])
        raise LookupError(f"unknown data set {name!r}; known: {', '.join(by_folded[k] for k in ordered)}")
    return entry
