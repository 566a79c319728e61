"""The runs below a study's run in the tracking store."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedlightning.config import RunConfig, flatten
from fedlightning.jobs.workspace import Workspace, describe_data
from fedlightning.owners import is_alive
from fedlightning.search import OWNER, owners_folder
from fedlightning.tracking import TrackedRun


@dataclass(frozen=True)
class NestedRuns:
    """Starts runs below one study's run, in the name of one worker."""

    workspace: Workspace
    study: str
    parent: str
    """Run id of the study."""
    owner: str
    """Lock that says that the worker lives."""

    def start(
        self, name: str, kind: str, *, config: RunConfig | None = None, tags: Mapping[str, str] | None = None
    ) -> TrackedRun:
        """Start a run of a kind: ``trial``, ``refit`` or ``comparator``."""
        return self.workspace.store.start_run(
            self.study,
            name,
            kind=kind,
            parent=self.parent,
            params=flatten(config) if config else None,
            tags={**(tags or {}), OWNER: self.owner},
            data=describe_data(config.dataset) if config else None,
        )


def close_stale_runs(workspace: Workspace, study: str, parent: str) -> list[str]:
    """End the runs below a study whose workers are gone, and return their ids."""
    folder = owners_folder(workspace.root)
    stale = [
        run.info.run_id
        for run in workspace.store.runs(study, parent=parent)
        if run.info.status == "RUNNING" and not is_alive(folder, run.data.tags.get(OWNER, ""))
    ]
    return workspace.store.close_stale(stale)
