"""Tune: search the space, refit the winner, compare it on the test rows, export it, and record all of it."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flwr.serverapp import Grid

from fedlightning import figures
from fedlightning.config import (
    ClientsConfig,
    StudyConfig,
    fingerprint,
    start_values,
    to_yaml,
    trial_clients,
    widen,
)
from fedlightning.experiment import Comparison, centralized_rival, task_of
from fedlightning.federation.engines import cores
from fedlightning.jobs.exports import MARK, best_clients, export_path, provenance, write_clients
from fedlightning.jobs.nested import NestedRuns, close_stale_runs
from fedlightning.jobs.refit import REFIT, Refit, refit_of, refit_winner
from fedlightning.jobs.run import comparison_from_dict, log_tables
from fedlightning.jobs.trial import BEST_ROUND, ROUNDS, RUN_ID, VALIDATION, evaluate_proposal, trial_config
from fedlightning.jobs.watchers import StudyWatcher
from fedlightning.jobs.workspace import Workspace, describe_data
from fedlightning.owners import Owner
from fedlightning.search import Counts, Proposal, StudySearch, TrialSummary, open_storage, owners_folder
from fedlightning.tracking import TrackedRun

logger = logging.getLogger(__name__)

CURVES = 5
"""Best trials that the study's convergence figure shows."""


@dataclass(frozen=True)
class StudyResult:
    """What a study ends with."""

    name: str
    metric: str
    counts: Counts
    best: TrialSummary
    clients: ClientsConfig
    """The winner, with the refit's number of rounds."""
    validation: Comparison
    """Of the winning trial."""
    test: Comparison
    """Of the refit on all training rows."""
    config_file: Path | None
    run_id: str
    """The study's run in the tracking store."""


def tune_study(
    workspace: Workspace,
    name: str,
    config: StudyConfig,
    watcher: StudyWatcher,
    *,
    jobs: int = 1,
    fresh: bool = False,
    export: bool = True,
) -> StudyResult:
    """Bring a study to its number of trials, or as far as time allows, and refit its winner.

    Called again, it goes on where it was left; a finished study whose winner is already refitted only reports.

    Args:
        workspace: Where rows come from and records go.
        name: Name of the study.
        config: Its definition.
        watcher: Sees the study as it goes.
        jobs: Trials side by side, each with its own client processes.
        fresh: Keep an existing study under another name and begin anew.
        export: Write the winner to ``studies/clients/``.

    Raises:
        ValueError: The stored study has another definition, or no trial could be completed.
    """
    config, notices = widen(config, start_values(config) or {})
    watcher.phase("opening the stores")
    search = StudySearch(name, config, workspace.root, open_storage(workspace.root))
    earlier = search.stored_attribute(RUN_ID) if fresh else None
    for notice in notices + search.open(fresh=fresh):
        watcher.phase(notice)
    if earlier is not None:
        close_stale_runs(workspace, name, earlier, parent_too=True)
    with Owner(owners_folder(workspace.root)) as owner, _study_run(workspace, search) as parent:
        for trial in search.enter(owner.name):
            watcher.phase(f"trial {trial.number} was left unfinished by a process that is gone")
        close_stale_runs(workspace, name, parent.run_id)
        runs = NestedRuns(workspace, name, parent.run_id, owner.name)
        refit = _search_and_refit(search, runs, watcher, jobs)
        result = _result(search, refit, parent)
        if export:
            result = replace(result, config_file=_export(workspace.root, search, result, watcher))
        _log_study(parent, search, result)
    return result


def _search_and_refit(search: StudySearch, runs: NestedRuns, watcher: StudyWatcher, jobs: int) -> Refit:
    config, workspace = search.config, runs.workspace
    counts = search.counts()
    missing = config.trials - counts.finished
    refit = partial(_refit_if_needed, search=search, runs=runs, watcher=watcher)
    federate = partial(workspace.federate, client_num=config.client_num)
    if missing <= 0:
        watcher.phase(f"study {search.name} already has its {config.trials} trials")
        return refit_of(search) or federate(refit)
    deadline = None if config.timeout is None else time.monotonic() + config.timeout

    def work(grid: Grid, worker: int = 0) -> None:
        def evaluate(proposal: Proposal) -> float:
            return evaluate_proposal(grid, proposal, study=config, runs=runs, watcher=watcher)

        def ended(summary: TrialSummary) -> None:
            watcher.trial_ends(summary, search.counts(), search.best_or_none())

        search.run(evaluate, total=config.trials, owner=runs.owner, deadline=deadline, worker=worker, on_end=ended)

    def end_search() -> None:
        watcher.search_ends()
        done = search.counts().finished
        if done < config.trials:
            watcher.phase(f"time is up after {done} of {config.trials} trials; the same command does the others")

    def work_and_refit(grid: Grid) -> Refit:
        work(grid)
        end_search()
        return refit(grid)

    watcher.search_begins(counts, config.trials, config.timeout)
    jobs = min(jobs, missing)
    if jobs == 1:
        return federate(work_and_refit)
    _side_by_side(jobs, search, lambda worker: federate(partial(work, worker=worker), jobs=jobs))
    end_search()
    return federate(refit)


def _side_by_side(jobs: int, search: StudySearch, work: Callable[[int], None]) -> None:
    """Run workers in threads; the first that fails, or Ctrl-C, stops them all."""

    def guarded(worker: int) -> None:
        try:
            work(worker)
        except BaseException:
            search.stopping.set()
            raise

    with ThreadPoolExecutor(jobs, thread_name_prefix="worker") as pool:
        futures = [pool.submit(guarded, worker) for worker in range(jobs)]
        try:
            wait(futures)
        except BaseException:
            # Ctrl-C reaches only the main thread; the workers notice at their next round.
            search.stopping.set()
            raise
    errors = [error for future in futures if (error := future.exception()) is not None]
    # The others were interrupted because of the one that failed.
    for error in sorted(errors, key=lambda error: not isinstance(error, Exception)):
        raise error


def _refit_if_needed(grid: Grid, *, search: StudySearch, runs: NestedRuns, watcher: StudyWatcher) -> Refit:
    known = refit_of(search)
    if known is not None:
        return known
    best, workspace = search.best(), runs.workspace
    config = trial_config(search.config, trial_clients(search.config, best.values))
    validation = comparison_from_dict(best.attributes[VALIDATION])
    _, centralized = centralized_rival(config, data_dir=workspace.data_dir, threads=cores())
    refit = refit_winner(
        grid,
        config.model_copy(update={"clients": best_clients(search.config, best)}),
        trial=best.number,
        validation=replace(validation, centralized=centralized),
        runs=runs,
        watcher=watcher,
    )
    search.set_attribute(REFIT, refit.to_dict())
    return refit


def _result(search: StudySearch, refit: Refit, parent: TrackedRun) -> StudyResult:
    best = search.best()
    return StudyResult(
        name=search.name,
        metric=task_of(search.config.dataset).metric,
        counts=search.counts(),
        best=best,
        clients=best_clients(search.config, best),
        validation=refit.validation,
        test=refit.test,
        config_file=None,
        run_id=parent.run_id,
    )


def _study_run(workspace: Workspace, search: StudySearch) -> TrackedRun:
    """Return the study's run: the one it had, or a new one."""
    known = search.attribute(RUN_ID)
    if known is not None:
        try:
            return workspace.store.resume_run(known)
        except OSError as error:
            logger.warning("the study's earlier run is gone from the tracking store (%s); starting a new one", error)
    config = search.config
    tracked = workspace.store.start_run(
        search.name,
        search.name,
        kind="study",
        params={
            "dataset.name": config.dataset.name,
            "client_num": config.client_num,
            "seed": config.seed,
            "sampler": config.sampler,
            "pruner": config.pruner,
            "objective": config.objective,
        },
        tags={
            "dataset": config.dataset.name,
            "client_num": str(config.client_num),
            "engine": "local",
            "fingerprint": fingerprint(config),
        },
        data=describe_data(config.dataset),
    )
    search.set_attribute(RUN_ID, tracked.run_id)
    tracked.log_text(to_yaml(config), "study.yaml")
    return tracked


def _export(root: Path, search: StudySearch, result: StudyResult, watcher: StudyWatcher) -> Path:
    path = export_path(root, search.name)
    header = provenance(search, result.best, result.metric, run_id=result.run_id)
    kept = write_clients(path, result.clients, header)
    if kept is not None:
        watcher.phase(f"{path} did not begin with '{MARK}'; it is kept as {kept.name}")
    return path


def _log_study(parent: TrackedRun, search: StudySearch, result: StudyResult) -> None:
    counts = result.counts
    log_tables(parent, result.metric, validation=result.validation, test=result.test)
    parent.log_comparison("validation", result.validation, metric=result.metric)
    parent.log_comparison("test", result.test, metric=result.metric)
    parent.log_metrics(
        {
            "trials_complete": counts.complete,
            "trials_pruned": counts.pruned,
            "trials_failed": counts.failed,
            "best_trial": result.best.number,
        }
    )
    parent.set_tags({f"best.{key}": str(value) for key, value in result.best.values.items()})
    if result.config_file is not None:
        parent.log_file(result.config_file)
    curves = _best_curves(search, result)
    if curves:
        title = f"{search.name}: {len(curves)} best of {counts.finished} trials"
        parent.log_figure(figures.convergence(curves, metric=result.metric, title=title), "convergence.png")
    study, value_name = search.optuna_study(), f"validation {search.config.objective}"
    for name, figure in (
        ("optimization_history.png", figures.optimization_history_figure(study, value_name=value_name)),
        ("param_importances.png", figures.importances_figure(study, value_name=value_name)),
    ):
        if figure is not None:
            parent.log_figure(figure, name)
    for name, page in (
        ("optimization_history.html", figures.optimization_history_page(study, value_name=value_name)),
        ("param_importances.html", figures.importances_page(study, value_name=value_name)),
    ):
        if page is not None:
            parent.log_text(page, name)


def _best_curves(search: StudySearch, result: StudyResult) -> list[figures.Curve]:
    """Return the rounds of the winner, with its rivals' levels, and of the next best trials."""
    complete = [trial for trial in search.trials() if trial.state == "complete" and ROUNDS in trial.attributes]
    ranked = sorted(complete, key=lambda trial: (trial.value, trial.number))
    curves = []
    for trial in ranked[:CURVES]:
        train_loss, validation_loss, validation_metric = zip(*trial.attributes[ROUNDS], strict=True)
        won = trial.number == result.best.number
        curves.append(
            figures.Curve(
                f"trial {trial.number}",
                tuple(range(1, len(train_loss) + 1)),
                train_loss,
                validation_loss,
                validation_metric,
                chosen=int(trial.attributes[BEST_ROUND]),
                mean_margin=result.validation.mean_margin if won else None,
                local_only=result.validation.local_only_mean if won else None,
            )
        )
    return curves
