"""Where a job reads its rows and leaves what it found."""

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedlightning.config import DatasetConfig
from fedlightning.datasets.catalogue import find_dataset
from fedlightning.federation.engines import FederationSettings, client_processes
from fedlightning.tracking import DataDescription, TrackingStore


@dataclass(frozen=True)
class Workspace:
    """A root folder with its stores, the folder of data files, and the device that trains."""

    root: Path
    data_dir: Path | None = None
    tracking_uri: str | None = None
    accelerator: str = "cpu"

    @cached_property
    def store(self) -> TrackingStore:
        """The tracking store, opened at first use."""
        return TrackingStore.open(self.root, self.tracking_uri)

    def federation(self, dataset: DatasetConfig, client_num: int, *, jobs: int = 1) -> FederationSettings:
        """Return a federation on this machine whose clients share this worker's part of the cores."""
        return FederationSettings(
            dataset=dataset.name,
            train_ratio=dataset.train_ratio,
            split_seed=dataset.split_seed,
            client_num=client_num,
            data_dir=self.data_dir,
            processes=client_processes(client_num, jobs),
        )


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
