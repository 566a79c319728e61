"""The runs below a study's run in the tracking store."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedlightning.config import RunConfig, flatten
from fedlightning.jobs.run import run_tags
from fedlightning.jobs.workspace import Workspace, describe_data
from fedlightning.search import OWNER
from fedlightning.tracking import TrackedRun

TRIAL_STATE = "trial_state"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NestedRuns:
    """Starts runs below one study's run, in the name of one worker."""

    workspace: Workspace
    study: str
    parent: str
    """Run id of the study."""
    owner: str
    """Lock that says that the worker lives."""

    def tags(self, config: RunConfig, trial: int) -> dict[str, str]:
        """Return the tags of what belongs to a trial."""
        return run_tags(config, engine=self.workspace.engine.name) | {"trial": str(trial)}

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


def close_stale_runs(
    workspace: Workspace, study: str, parent: str, is_alive: Callable[[str], bool], *, parent_too: bool = False
) -> list[str]:
    """End the runs below a study whose workers are gone, and return their ids.

    Args:
        workspace: Whose store is meant.
        study: Name of the study.
        parent: Run id of the study.
        is_alive: Tells of a worker whether it lives.
        parent_too: End the study's own run as well: nobody works on it any more.
    """
    store = workspace.store
    stale: dict[bool, list[str]] = {True: [], False: []}
    for run in store.runs(study, parent=parent, status="RUNNING"):
        if not is_alive(run.data.tags.get(OWNER, "")):
            stale[run.data.tags.get("kind") == "trial"].append(run.info.run_id)
    try:
        closed = store.close_stale(stale[True], "FAILED", tags={TRIAL_STATE: "failed"})
        closed += store.close_stale(stale[False], "FAILED")
        return closed + store.close_stale([parent] if parent_too else [])
    except OSError as error:
        # A study may be recorded elsewhere than it was.
        logger.warning("%s", error)
        return []
