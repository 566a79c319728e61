"""The known data sets: find, fetch, verify and load them."""

from pathlib import Path

import numpy as np

from fedlightning.datasets.catalogue import CATALOGUE, DataFile, DatasetEntry, find_dataset
from fedlightning.datasets.content import DamagedFileError
from fedlightning.datasets.fetch import (
    FileVerdict,
    download_file,
    fetch_dataset,
    verify_dataset,
    way_out,
)
from fedlightning.datasets.locate import DatasetSources, FileSource, list_datasets, locate_dataset
from fedlightning.datasets.readers import read_file, read_own_file, read_sklearn
from fedlightning.datasets.table import Table
from fedlightning.datasets.transfer import Progress

__all__ = [
    "CATALOGUE",
    "DamagedFileError",
    "DataFile",
    "DatasetEntry",
    "DatasetSources",
    "FileSource",
    "FileVerdict",
    "Table",
    "fetch_dataset",
    "find_dataset",
    "list_datasets",
    "load_own_file",
    "load_table",
    "locate_dataset",
    "verify_dataset",
    "way_out",
]


def load_table(name: str, *, data_dir: Path | None = None, progress: Progress | None = None) -> Table:
    """Return all rows of a data set in the order of its files, fetching and verifying what is needed.

    Searched are `data_dir`, the folder FEDLIGHTNING_DATA_DIR, the files bundled with the package and
    the cache; what is nowhere is downloaded into the cache.
    """
    entry = find_dataset(name)
    if not entry.files:
        return read_sklearn(entry)
    parts = [_load_file(source, entry, progress) for source in locate_dataset(entry, data_dir).files]
    x, y = [part.x for part in parts], [part.y for part in parts]
    table = Table(x=np.concatenate(x), y=np.concatenate(y))
    assert table.x.shape == (entry.rows, entry.features)
    return table


def load_own_file(path: Path, like: str) -> Table:
    """Return the rows of a LIBSVM file (plain, .xz, .bz2 or .gz) of the same columns and labels as a data set.

    Raises:
        ValueError: The file is not in LIBSVM format, or has other columns or labels; the text names the file.
        OSError: The file cannot be read.
    """
    return read_own_file(path, find_dataset(like))


def _load_file(source: FileSource, entry: DatasetEntry, progress: Progress | None) -> Table:
    path = source.path or download_file(source.file, entry, progress=progress)
    try:
        return read_file(path, source.file, entry)
    except DamagedFileError as error:
        if source.origin in ("data_dir", "bundled"):
            raise DamagedFileError(f"{error}; {way_out(source)}") from error
        path.unlink(missing_ok=True)
        raise DamagedFileError(f"{error}; the file was removed, run again to fetch it") from error
