"""Where a job reads its rows and leaves what it found."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from flwr.serverapp import Grid

from fedlightning.config import DatasetConfig
from fedlightning.datasets.catalogue import find_dataset
from fedlightning.federation.engines import Engine, FederationSettings, LocalEngine, client_processes
from fedlightning.tracking import DataDescription, TrackingStore

T = TypeVar("T")


@dataclass(frozen=True)
class Workspace:
    """A root folder with its stores, the folder of data files, and the device that trains."""

    root: Path
    data_dir: Path | None = None
    tracking_uri: str | None = None
    accelerator: str = "cpu"
    engine: Engine = field(default_factory=LocalEngine)
    storage_url: str | None = None
    """Where studies are stored; None for the database below the root."""

    @cached_property
    def store(self) -> TrackingStore:
        """The tracking store, opened at first use."""
        return TrackingStore.open(self.root, self.tracking_uri)

    def federate(self, function: Callable[[Grid], T], client_num: int, *, jobs: int = 1) -> T:
        """Call a function inside a federation whose clients share this worker's part of the cores."""
        settings = FederationSettings(
            client_num=client_num, processes=client_processes(client_num, jobs), data_dir=self.data_dir
        )
        return self.engine.run(function, settings)


def describe_data(dataset: DatasetConfig) -> DataDescription:
    """Return what the tracking store shows of a data set."""
    entry = find_dataset(dataset.name)
    digests = [file.sha256 or file.name for file in entry.files]
    return DataDescription(
        name=entry.name,
        digest=hashlib.sha256("".join([entry.name, *digests]).encode()).hexdigest(),
        rows=entry.rows,
        features=entry.features,
        source=" + ".join(file.name for file in entry.files) or "scikit-learn",
    )
