"""Train a study's winner on all training rows and read the test set, once."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from flwr.serverapp import Grid

from fedlightning.config import RunConfig
from fedlightning.experiment import (
    Comparison,
    RunResult,
    centralized_rival,
    compare_with_centralized,
    fit_federated,
    task_of,
)
from fedlightning.federation.engines import cores
from fedlightning.federation.rounds import RoundReport
from fedlightning.jobs.nested import NestedRuns
from fedlightning.jobs.run import (
    comparison_from_dict,
    comparison_to_dict,
    log_result,
    log_tables,
)
from fedlightning.jobs.watchers import RunWatcher
from fedlightning.search import StudySearch

REFIT = "refit"


@dataclass(frozen=True)
class Refit:
    """What the refit of a trial gave; kept with the study, so that the test set is not read again."""

    trial: int
    run_id: str
    validation: Comparison
    """Of the trial, beside its rivals fitted on the same 80 %."""
    test: Comparison
    """Of the refit, beside its rivals fitted on the same rows."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        return {
            "trial": self.trial,
            "run_id": self.run_id,
            "validation": comparison_to_dict(self.validation),
            "test": comparison_to_dict(self.test),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what ``to_dict`` returned, also after a trip through JSON."""
        validation, test = comparison_from_dict(values["validation"]), comparison_from_dict(values["test"])
        return cls(values["trial"], values["run_id"], validation, test)


def refit_of(search: StudySearch) -> Refit | None:
    """Return the refit of the present winner, if it was made before."""
    stored = search.attribute(REFIT)
    refit = Refit.from_dict(stored) if stored else None
    return refit if refit is not None and refit.trial == search.best().number else None


def refit_winner(
    grid: Grid,
    config: RunConfig,
    *,
    searched: RunConfig,
    trial: int,
    validation: Comparison,
    runs: NestedRuns,
    watcher: RunWatcher,
) -> Refit:
    """Train on all training rows for the winner's number of rounds, and compare on the test rows.

    Args:
        grid: The federation.
        config: The winner's configuration; ``num_rounds`` is the round that was best.
        searched: What its trial had: validation rows are held out.
        trial: The winner's number.
        validation: The winner's scores.
        runs: Where nested runs are recorded.
        watcher: Sees the training as it goes.
    """
    config = config.model_copy(update={"val_ratio": 0.0})
    num_rounds = config.clients.num_rounds
    watcher.phase(f"refitting trial {trial} on all training rows, rounds: {num_rounds}")
    tags = runs.tags(config, trial)

    def observe(report: RoundReport) -> None:
        tracked.log_round(report, metric=metric)
        watcher.round_done(report, num_rounds)

    metric = task_of(config.dataset).metric
    workspace = runs.workspace
    with runs.start("refit", "refit", config=config, tags=tags) as tracked:
        fit = fit_federated(grid, config, observers=[observe], accelerator=workspace.accelerator, test=True)
        watcher.phase("comparing on the test rows")
        result = compare_with_centralized(fit, config, data_dir=workspace.data_dir, threads=cores())
        if result.test.centralized is not None:
            _, centralized = centralized_rival(searched, data_dir=workspace.data_dir, threads=cores())
            validation = replace(validation, centralized=centralized)
        result = replace(result, validation=validation)
        log_result(tracked, result)
        log_tables(tracked, result.metric, validation=result.validation, test=result.test)
    _log_rivals(result, runs, tags)
    return Refit(trial, tracked.run_id, validation, result.test)


def _log_rivals(result: RunResult, runs: NestedRuns, tags: Mapping[str, str]) -> None:
    validation, test = result.validation, result.test
    assert validation is not None
    rivals = {
        "mean-margin": (validation.mean_margin, test.mean_margin),
        "local-only": (validation.local_only_mean, test.local_only_mean),
        "centralized": (validation.centralized, test.centralized),
    }
    for name, (on_validation, on_test) in rivals.items():
        with runs.start(name, "comparator", tags=tags) as tracked:
            if on_validation is not None:
                tracked.log_scores("validation", on_validation, metric=result.metric)
            if on_test is not None:
                tracked.log_scores("test", on_test, metric=result.metric)
