"""Write the best parameters of a study as a client config."""

import os
import tempfile
from pathlib import Path

from fedlightning import __version__
from fedlightning.config import ClientsConfig, StudyConfig, dump_clients, fingerprint, trial_clients
from fedlightning.jobs.trial import BEST_ROUND, VALIDATION
from fedlightning.search import StudySearch, TrialSummary
from fedlightning.tables import format_loss, format_metric

MARK = "Exported by fedlightning"


def export_path(root: Path, study: str) -> Path:
    """Return where a study's client config goes: the name under which `run --clients` finds it."""
    return root / "studies" / "clients" / f"{study}_clients.yaml"


def best_clients(study: StudyConfig, best: TrialSummary) -> ClientsConfig:
    """Return a trial's config with the number of rounds that its refit takes: the round that was best."""
    return trial_clients(study, best.values).model_copy(update={"num_rounds": int(best.attributes[BEST_ROUND])})


def provenance(search: StudySearch, best: TrialSummary, metric: str, *, run_id: str | None = None) -> list[str]:
    """Return the header lines that say where a client config comes from."""
    study, counts = search.config, search.counts()
    validation = best.attributes[VALIDATION]["network"]
    lines = [
        f"{MARK} {__version__} from study {search.name} ({fingerprint(study)[:12]}), seed {study.seed}:",
        f"trial {best.number} of {counts.complete} complete and {counts.pruned} pruned ones,",
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
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = None
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        kept = path.with_name(path.name + ".kept")
        os.replace(path, kept)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return kept
