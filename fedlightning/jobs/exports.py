"""Write the best parameters of a study as a client config."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fedlightning import __version__
from fedlightning.config import ClientsConfig, StudyConfig, dump_clients, fingerprint, trial_clients
from fedlightning.experiment import task_of
from fedlightning.jobs.refit import refit_of
from fedlightning.jobs.trial import BEST_ROUND, RUN_ID, VALIDATION
from fedlightning.search import StudySearch, TrialSummary
from fedlightning.tables import format_loss, format_metric

MARK = "Exported by fedlightning"


def export_path(root: Path, study: str) -> Path:
    """Return where a study's client config goes: the name under which `run --clients` finds it."""
    return root / "studies" / "clients" / f"{study}_clients.yaml"


def best_clients(study: StudyConfig, best: TrialSummary) -> ClientsConfig:
    """Return a trial's config with the number of rounds that its refit takes: the round that was best."""
    return trial_clients(study, best.values).model_copy(update={"num_rounds": int(best.attributes[BEST_ROUND])})


@dataclass(frozen=True)
class Export:
    """What is known of a study's winner so far."""

    best: TrialSummary
    clients: ClientsConfig
    header: list[str]
    """Where it comes from, a line each."""

    @property
    def text(self) -> str:
        """The client config as its file holds it."""
        return dump_clients(self.clients, header=self.header)


def best_export(search: StudySearch) -> Export:
    """Return the best trial so far as a client config.

    Raises:
        ValueError: No trial is complete.
    """
    best = search.best()
    # A study that is still being searched, or was interrupted, has no refit of its present winner.
    run_id = search.attribute(RUN_ID) if refit_of(search) else None
    metric = task_of(search.config.dataset).metric
    return Export(best, best_clients(search.config, best), provenance(search, best, metric, run_id=run_id))


def provenance(search: StudySearch, best: TrialSummary, metric: str, *, run_id: str | None = None) -> list[str]:
    """Return the header lines that say where a client config comes from."""
    study, counts = search.config, search.counts()
    validation = best.attributes[VALIDATION]["network"]
    lines = [
        f"{MARK} {__version__} from study {search.name} ({fingerprint(study)[:12]}), seed {study.seed}:",
        f"trial {best.number}, the best of {counts.complete} complete and {counts.pruned} pruned ones,",
        f"validation loss {format_loss(validation['loss'])}, {metric} {format_metric(metric, validation['metric'])}"
        f" in round {best.attributes[BEST_ROUND]}; num_rounds is that round.",
    ]
    if run_id:
        lines.append(f"Refitted in MLflow run {run_id}.")
    return lines


def write_clients(path: Path, clients: ClientsConfig, header: list[str]) -> Path | None:
    """Write a client config in one step; somebody's own file of that name is kept beside it.

    Returns:
        Where an earlier file that was not exported went, or None.
    """
    text = dump_clients(clients, header=header)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _keep_own(path)
        _replace(path, text)
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"cannot write {path}: {reason}; `fedlightning export --out FILE` writes elsewhere") from error
    return kept


def _keep_own(path: Path) -> Path | None:
    if not path.exists() or MARK in path.read_text(encoding="utf-8", errors="replace"):
        return None
    kept = path.with_name(path.name + ".kept")
    os.replace(path, kept)
    return kept


def _replace(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
