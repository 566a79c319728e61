"""Tune: search the space, refit the winner, compare it on the test rows, export it, and record all of it."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
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
from fedlightning.experiment import Comparison, task_of
from fedlightning.federation.memory import Memory, default_capacity
from fedlightning.jobs.exports import MARK, best_clients, best_export, export_path, write_clients
from fedlightning.jobs.nested import NestedRuns, close_stale_runs
from fedlightning.jobs.refit import REFIT, Refit, refit_of, refit_winner
from fedlightning.jobs.run import comparison_from_dict, log_tables
from fedlightning.jobs.trial import BEST_ROUND, ROUNDS, RUN_ID, VALIDATION, evaluate_proposal, trial_config
from fedlightning.jobs.watchers import StudyWatcher
from fedlightning.jobs.workspace import Workspace, describe_data
from fedlightning.owners import Owner
from fedlightning.search import Counts, Proposal, StudySearch, TrialSummary
from fedlightning.storages import open_storage
from fedlightning.tracking import TrackedRun
from fedlightning.workers import owners_folder, repeating

logger = logging.getLogger(__name__)

CURVES = 5
"""Best trials that the study's convergence figure shows."""

REFITTED_BY = "refitted_by"
"""Attribute of a study: the worker that refits the winner, and reads the test set for all."""

_POLL_SECONDS = 1.0


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
    Several processes may do this at once: they share the trials, and one of them refits.

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
    search = StudySearch(name, config, workspace.root, open_storage(workspace.root, workspace.storage_url))
    earlier = search.stored_attribute(RUN_ID) if fresh else None
    for notice in notices + search.open(fresh=fresh):
        watcher.phase(notice)
    if earlier is not None:
        close_stale_runs(workspace, name, earlier, search.workers.is_alive, parent_too=True)
    with Owner(owners_folder(workspace.root)) as owner, _at_work(workspace, search, owner.name, watcher) as parent:
        runs = NestedRuns(workspace, name, parent.run_id, owner.name)
        refit = _search_and_refit(search, runs, watcher, jobs)
        result = _result(search, refit, parent)
        if export:
            result = replace(result, config_file=_export(workspace.root, search, watcher))
        _log_study(parent, search, result)
    return result


@contextmanager
def _at_work(workspace: Workspace, search: StudySearch, owner: str, watcher: StudyWatcher) -> Iterator[TrackedRun]:
    """Work on a study beside others: look after what dead workers leave, and end the study's run as its last worker."""

    def clear(left: Sequence[TrialSummary]) -> None:
        for trial in left:
            watcher.phase(f"trial {trial.number} was left unfinished by a process that is gone")
        close_stale_runs(workspace, search.name, parent.run_id, search.workers.is_alive)

    left = search.enter(owner)
    with search.lock():
        parent = _study_run(workspace, search)
    try:
        clear(left)
        with repeating(lambda: clear(search.look_after(owner))):
            yield parent
        clear(search.look_after(owner))
    except BaseException as error:
        if search.leave(owner):
            parent.__exit__(type(error), error, error.__traceback__)
        raise
    parent.finish("FINISHED")
    search.leave(owner)


def _search_and_refit(search: StudySearch, runs: NestedRuns, watcher: StudyWatcher, jobs: int) -> Refit:
    config, workspace = search.config, runs.workspace
    counts = search.counts()
    missing = config.trials - counts.finished
    refit = partial(_refit_if_needed, search=search, runs=runs, watcher=watcher)
    my_turn = partial(_await_refit, search, runs.owner, watcher)
    said: set[tuple[int, ...]] = set()

    def waits(numbers: Sequence[int]) -> None:
        if tuple(numbers) not in said:
            said.add(tuple(numbers))
            names = ", ".join(f"trial {number}" for number in numbers)
            watcher.phase(f"waiting for {names} of other workers")

    federate = partial(workspace.federate, client_num=config.client_num)
    if missing <= 0:
        watcher.phase(f"study {search.name} already has its {config.trials} trials")
        my_turn()
        return refit_of(search) or federate(refit)
    deadline = None if config.timeout is None else time.monotonic() + config.timeout

    def work(grid: Grid, worker: int = 0) -> None:
        # What this federation's clients hold after one trial need not be sent for the next.
        memory = Memory(default_capacity())

        def evaluate(proposal: Proposal) -> float:
            return evaluate_proposal(grid, proposal, study=config, runs=runs, watcher=watcher, memory=memory)

        def ended(summary: TrialSummary) -> None:
            watcher.trial_ends(summary, search.counts(), search.best_or_none())

        search.run(
            evaluate,
            total=config.trials,
            owner=runs.owner,
            deadline=deadline,
            worker=worker,
            on_end=ended,
            on_wait=waits,
        )

    def end_search() -> None:
        if search.counts().finished < config.trials:
            search.let_others_finish(runs.owner, waits)
        watcher.search_ends()
        done = search.counts().finished
        if done < config.trials:
            watcher.phase(f"time is up after {done} of {config.trials} trials; the same command does the others")
        my_turn()

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
    return refit_of(search) or federate(refit)


def _await_refit(search: StudySearch, owner: str, watcher: StudyWatcher) -> None:
    """Return when nobody else refits the winner, or will before this worker is gone."""
    if search.claim(REFITTED_BY, owner):
        return
    watcher.phase("waiting for another worker, which refits the winner")
    while not search.claim(REFITTED_BY, owner):
        time.sleep(_POLL_SECONDS)


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
    best = search.best()
    config = trial_config(search.config, trial_clients(search.config, best.values))
    refit = refit_winner(
        grid,
        config.model_copy(update={"clients": best_clients(search.config, best)}),
        searched=config,
        trial=best.number,
        validation=comparison_from_dict(best.attributes[VALIDATION]),
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
            "engine": workspace.engine.name,
            "fingerprint": fingerprint(config),
        },
        data=describe_data(config.dataset),
    )
    search.set_attribute(RUN_ID, tracked.run_id)
    tracked.log_text(to_yaml(config), "study.yaml")
    return tracked


def _export(root: Path, search: StudySearch, watcher: StudyWatcher) -> Path:
    path, winner = export_path(root, search.name), best_export(search)
    kept = write_clients(path, winner.clients, winner.header)
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
