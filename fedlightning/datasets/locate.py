"""Where a data set's files are found: the search order, without reading any of them."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedlightning.datasets.catalogue import CATALOGUE, DataFile, DatasetEntry
from fedlightning.datasets.content import STORED_ENDINGS

LIBSVM_URL = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/"
BUNDLED = Path(__file__).parent / "bundled"

Origin = Literal["data_dir", "bundled", "cache", "download"]


@dataclass(frozen=True)
class FileSource:
    """Where one data file comes from when it is asked for."""

    file: DataFile
    origin: Origin
    path: Path | None
    """The stored file; None if it has to be downloaded."""
    url: str


@dataclass(frozen=True)
class DatasetSources:
    """Where each file of a data set comes from; no files for the ones scikit-learn brings along."""

    entry: DatasetEntry
    files: tuple[FileSource, ...]

    @property
    def available(self) -> bool:
        """Whether the data set loads without a download."""
        return all(source.path is not None for source in self.files)


def cache_dir() -> Path:
    """Return the folder for downloads: FEDLIGHTNING_CACHE_DIR, else `fedlightning` in the user's cache."""
    if own := os.environ.get("FEDLIGHTNING_CACHE_DIR"):
        return Path(own)
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification asks to ignore a relative path.
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "fedlightning"


def file_url(file: DataFile, base_url: str | None = None) -> str:
    """Return a file's address below `base_url`, else FEDLIGHTNING_DATA_URL, else LIBSVM Data."""
    base = base_url or os.environ.get("FEDLIGHTNING_DATA_URL") or LIBSVM_URL
    if not base.startswith(("http://", "https://")):
        raise ValueError(f"data address {base!r} must start with http:// or https://")
    return f"{base.rstrip('/')}/{file.url_path}"


def search_folders(data_dir: Path | None = None) -> list[tuple[Origin, Path]]:
    """Return the folders that are searched for files, in order; a folder asked for must exist."""
    folders: list[tuple[Origin, Path]] = []
    from_environment = os.environ.get("FEDLIGHTNING_DATA_DIR")
    asked_for = {"the data folder": data_dir, "FEDLIGHTNING_DATA_DIR": from_environment}
    for asker, folder in asked_for.items():
        if not folder:
            continue
        if not Path(folder).is_dir():
            raise NotADirectoryError(f"{asker} {str(folder)!r} is no folder; create it or correct the path")
        folders.append(("data_dir", Path(folder)))
    return [*folders, ("bundled", BUNDLED), ("cache", cache_dir())]


def locate_file(file: DataFile, data_dir: Path | None = None, *, base_url: str | None = None) -> FileSource:
    """Return the first stored copy of a file in the search order, else the download.

    A copy may be plain, .xz, .bz2 or .gz, and lie in a folder itself or in its `libsvm` subfolder.
    """
    url = file_url(file, base_url)
    for origin, folder in search_folders(data_dir):
        for place in (folder, folder / "libsvm"):
            for ending in STORED_ENDINGS:
                path = place / f"{file.name}{ending}"
                if path.is_file():
                    return FileSource(file, origin, path, url)
    return FileSource(file, "download", None, url)


def locate_dataset(entry: DatasetEntry, data_dir: Path | None = None) -> DatasetSources:
    """Return where each file of a data set would come from."""
    return DatasetSources(entry, tuple(locate_file(file, data_dir) for file in entry.files))


def list_datasets(data_dir: Path | None = None) -> tuple[DatasetSources, ...]:
    """Return every known data set and where its files would come from, in the catalogue's order."""
    return tuple(locate_dataset(entry, data_dir) for entry in CATALOGUE.values())
