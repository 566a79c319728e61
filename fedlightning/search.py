"""Search a study's space with Optuna: proposals, pruning, and who among several workers does what."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from fedlightning.config import (
    Choices,
    ClientsConfig,
    Range,
    Scalar,
    StudyConfig,
    definition,
    differences,
    start_values,
    study_from_definition,
    trial_clients,
)
from fedlightning.config.problems import closest_first
from fedlightning.seeds import derive_seed
from fedlightning.storages import file_of, open_storage, shown
from fedlightning.workers import SILENCE, Workers, owners_folder

logger = logging.getLogger(__name__)

Pruned = optuna.TrialPruned
"""Raised by a proposal's report when the trial is not worth going on with."""

DEFINITION = "definition"
OWNER = "owner"
START_FROM = "start_from"
RETRY_OF = "retry_of"
WITHDRAWN = "withdrawn"
"""Attribute of a trial that another worker's made superfluous before it began."""
_POLL_SECONDS = 1.0
_SETTLING_SECONDS = 2.0
_STARTUP_TRIALS = 5
_WARMUP_ROUNDS = 5


@dataclass(frozen=True)
class Proposal:
    """One point of the space, to be evaluated."""

    number: int
    clients: ClientsConfig
    report: Callable[[float, int], None]
    """(value, round) -> None; raises ``Pruned`` when the trial is not worth going on with."""
    note: Callable[[str, Any], None]
    """Store an attribute of the trial at once; it survives whatever comes later."""


@dataclass(frozen=True)
class TrialSummary:
    """A trial as it ended."""

    number: int
    state: str
    """``complete``, ``pruned``, ``failed``, ``withdrawn``, ``running`` or ``waiting``."""
    value: float | None
    values: Mapping[str, Scalar]
    """The searched keys' values."""
    attributes: Mapping[str, Any]
    seconds: float | None


@dataclass(frozen=True)
class Counts:
    """How many trials of a study ended how."""

    complete: int
    pruned: int
    failed: int

    @property
    def finished(self) -> int:
        """Trials that count towards the study's number."""
        return self.complete + self.pruned


_STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


@dataclass
class StudySearch:
    """One study in its storage.

    Args:
        name: Name of the study.
        config: Its definition, wide enough for its starting values.
        root: Where workers keep their locks.
        storage: An opened store.
    """

    name: str
    config: StudyConfig
    root: Path
    storage: optuna.storages.BaseStorage
    stopping: threading.Event = field(default_factory=threading.Event)
    workers: Workers = field(init=False)
    _rank: int = 0

    def __post_init__(self) -> None:
        self.workers = Workers(owners_folder(self.root), lambda: self._load().user_attrs, self.set_attribute)

    def lock(self) -> FileLock:
        """Return the lock under which workers of this root change what they share."""
        return FileLock(self.root / "mlruns" / ".study.lock")

    def open(self, *, fresh: bool = False) -> list[str]:
        """Create the study, or take up where it was left; return what was noticed on the way.

        Args:
            fresh: Keep an existing study under another name and begin anew.

        Raises:
            ValueError: The stored study has another definition, or somebody still works on it.
        """
        notices = []
        existing = self._stored()
        if existing is not None and fresh and self.workers.surely_living():
            raise ValueError(f"study {self.name!r} is being worked on; wait for it or stop it before --fresh")
        with self.lock():
            existing = self._stored()
            if existing is not None and fresh:
                notices.append(self._archive(existing))
                existing = None
            if existing is None or self._is_unfinished(existing):
                self._create()
            else:
                self._check_definition(existing)
        return notices

    def enter(self, owner: str) -> list[TrialSummary]:
        """Note that a worker works on the study; fail the trials of those that are gone, and return them.

        Args:
            owner: Name of the lock that says that the worker lives.
        """
        with self.lock():
            # Workers that begin at the same moment shall not draw the same.
            self._rank = len(self.workers.living())
            self.workers.beat(owner)
            return self._reap(owner)

    def look_after(self, owner: str) -> list[TrialSummary]:
        """Show that a worker lives; fail the trials of those that are gone, and return them."""
        self.workers.beat(owner)
        with self.lock():
            return self._reap(owner)

    def leave(self, owner: str) -> bool:
        """Note that a worker has ended; return whether it was the last one."""
        with self.lock():
            self.workers.leave(owner)
            return not [other for other in self.workers.living() if other != owner]

    def claim(self, task: str, owner: str) -> bool:
        """Take a task that only one worker may do; False while another one that lives has it.

        It is free again when the worker leaves, or dies.
        """
        with self.lock():
            holder = self.attribute(task)
            if holder and holder != owner and self.workers.is_alive(holder):
                return False
            self.set_attribute(task, owner)
            far = [other for other in self.workers.living() if not self.workers.is_near(other)]
        if far:
            # They do not see our lock: of two that took the task at once, the later one has it.
            time.sleep(_SETTLING_SECONDS)
        return bool(self.attribute(task) == owner)

    def run(
        self,
        evaluate: Callable[[Proposal], float],
        *,
        total: int,
        owner: str,
        deadline: float | None = None,
        worker: int = 0,
        on_end: Callable[[TrialSummary], None] = lambda summary: None,
        on_wait: Callable[[Sequence[int]], None] = lambda numbers: None,
    ) -> None:
        """Evaluate proposals until the study has ``total`` finished trials or time is up.

        While all missing trials are running in other workers, it waits to do what these leave.

        Args:
            evaluate: Returns a proposal's value, to be minimised.
            total: Complete and pruned trials that the study shall have.
            owner: Name of the lock that says that this worker lives.
            deadline: ``time.monotonic()`` after which no further trial starts.
            worker: Number of this worker among several in this process.
            on_end: Called after each trial.
            on_wait: Called with the numbers of the trials that are waited for, when these change.
        """
        # The same seed again would repeat the draws of the trials that are already there.
        seed = derive_seed(self.config.seed, "sampler", len(self._load().trials), worker + 1000 * self._rank)
        study = optuna.load_study(
            study_name=self.name,
            storage=self.storage,
            sampler=_sampler(self.config.sampler, seed),
            pruner=_pruner(self.config.pruner),
        )
        awaited: list[int] = []
        while not self.stopping.is_set() and (deadline is None or time.monotonic() < deadline):
            trial = self._claim(study, total, owner)
            if trial is not None:
                self._attempt(study, trial, evaluate)
                on_end(self._summary(self.storage.get_trial(trial._trial_id)))
                continue
            with self.lock():
                self._reap(owner)
            before, awaited = awaited, self._running_elsewhere(owner)
            if self.counts().finished >= total or (not awaited and _under_way(study) >= total):
                return
            if awaited and awaited != before:
                on_wait(awaited)
            self.stopping.wait(_POLL_SECONDS if awaited else 0)

    def let_others_finish(self, owner: str, on_wait: Callable[[Sequence[int]], None] = lambda numbers: None) -> None:
        """Wait for the trials that are running in other workers now, but not for those that these begin later."""
        awaited = self._running_elsewhere(owner)
        if awaited:
            on_wait(awaited)
        while awaited and not self.stopping.wait(_POLL_SECONDS):
            running = self._running_elsewhere(owner)
            awaited = [number for number in awaited if number in running]

    def counts(self) -> Counts:
        """Return how many trials ended how."""
        states = [_state(trial) for trial in self._load().get_trials(deepcopy=False)]
        return Counts(states.count("complete"), states.count("pruned"), states.count("failed"))

    def best(self) -> TrialSummary:
        """Return the complete trial with the lowest value.

        Raises:
            ValueError: No trial is complete.
        """
        best = self.best_or_none()
        if best is None:
            counts = self.counts()
            raise ValueError(
                f"study {self.name!r} has no complete trial ({counts.pruned} pruned, {counts.failed} failed); "
                "give it more --trials or a longer --timeout"
            )
        return best

    def best_or_none(self) -> TrialSummary | None:
        """Return the best complete trial so far, or None."""
        complete = [t for t in self.trials() if t.state == "complete" and t.value is not None]
        return min(complete, key=lambda trial: (trial.value, trial.number), default=None)

    def trials(self) -> list[TrialSummary]:
        """Return all trials, oldest first."""
        return [self._summary(trial) for trial in self._load().get_trials(deepcopy=False)]

    def optuna_study(self) -> optuna.Study:
        """Return Optuna's own view, for its figures."""
        return self._load()

    def attribute(self, key: str) -> Any:
        """Return a stored attribute of the study, or None."""
        return self._load().user_attrs.get(key)

    def stored_attribute(self, key: str) -> Any:
        """Return an attribute of the study as it is stored, or None; also where it was never begun."""
        study = self._stored()
        return None if study is None else study.user_attrs.get(key)

    def set_attribute(self, key: str, value: Any) -> None:
        """Store an attribute of the study."""
        self._load().set_user_attr(key, value)

    def _summary(self, trial: FrozenTrial) -> TrialSummary:
        seconds = trial.duration.total_seconds() if trial.duration else None
        value = trial.value if trial.state == TrialState.COMPLETE else None
        space = self.config.searched
        values = {key: _as_written(space[key], taken) if key in space else taken for key, taken in trial.params.items()}
        return TrialSummary(trial.number, _state(trial), value, values, dict(trial.user_attrs), seconds)

    def _claim(self, study: optuna.Study, total: int, owner: str) -> optuna.Trial | None:
        """Begin a trial, or return None if with those under way there are enough."""
        with self.lock():
            if _under_way(study) >= total:
                return None
            trial = study.ask()
            trial.set_user_attr(OWNER, owner)
        # Workers elsewhere do not see our lock: of those that began the last trial at once, all but one give way.
        frozen = self.storage.get_trial(trial._trial_id)
        proposed_before = "fixed_params" in frozen.system_attrs  # its number is old, and says nothing of who was first
        if _under_way(study, lambda other: other != trial.number and (proposed_before or other < trial.number)) < total:
            return trial
        trial.set_user_attr(WITHDRAWN, True)
        _propose_again(study, frozen, {})
        study.tell(trial, state=TrialState.FAIL)
        return None

    def _attempt(self, study: optuna.Study, trial: optuna.Trial, evaluate: Callable[[Proposal], float]) -> None:
        """Evaluate a trial and store how it ended."""

        def report(value: float, number: int) -> None:
            if self.stopping.is_set():
                raise KeyboardInterrupt
            trial.report(value, number)
            if trial.should_prune():
                raise Pruned(f"its best of {number} rounds is worse than the median of the other trials")

        try:
            values = {
                key: _as_written(entry, _suggest(trial, key, entry)) for key, entry in self.config.searched.items()
            }
            clients = trial_clients(self.config, values)
            value = evaluate(Proposal(trial.number, clients, report, trial.set_user_attr))
            study.tell(trial, value, skip_if_finished=True)
        except Pruned:
            study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)
        except UpdateFinishedTrialError:
            logger.warning(
                "trial %d was given up by another worker, which saw no sign of life of this one for %.0f s",
                trial.number,
                SILENCE,
            )
        except BaseException as reason:
            self._take_back(study, trial, reason)
            raise

    def _take_back(self, study: optuna.Study, trial: optuna.Trial, reason: BaseException) -> None:
        """Fail a trial; propose an interrupted one again, and the starting values once more if theirs failed."""
        frozen = self.storage.get_trial(trial._trial_id)
        if frozen.state.is_finished():
            return
        if not isinstance(reason, Exception):
            _propose_again(study, frozen, {})
        elif START_FROM in frozen.user_attrs and RETRY_OF not in frozen.user_attrs:
            _propose_again(study, frozen, {RETRY_OF: trial.number})
        study.tell(trial, state=TrialState.FAIL)

    def _reap(self, owner: str) -> list[TrialSummary]:
        """Fail the running trials whose workers are gone, and return them.

        Each is proposed once more: one that ends its process every time must not go on for ever.
        """
        study = self._load()
        alone = not [other for other in self.workers.living() if other != owner]
        reaped = []
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            known = trial.user_attrs.get(OWNER)
            if known is None:
                # So it is for the moment in which its worker begins with it.
                gone = alone or self.workers.keeps_still(f"trial {trial.number}", known)
            else:
                gone = known != owner and not self.workers.is_alive(known)
            if not gone:
                continue
            try:
                self.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
            except UpdateFinishedTrialError:
                continue  # a worker elsewhere has seen it, too
            if RETRY_OF not in trial.user_attrs:
                _propose_again(study, trial, {RETRY_OF: trial.number})
            reaped.append(self._summary(self.storage.get_trial(trial._trial_id)))
        return reaped

    def _running_elsewhere(self, owner: str) -> list[int]:
        running = self._load().get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [trial.number for trial in running if trial.user_attrs.get(OWNER) != owner]

    def _stored(self) -> optuna.Study | None:
        try:
            return self._load()
        except KeyError:
            return None

    def _load(self) -> optuna.Study:
        return optuna.load_study(study_name=self.name, storage=self.storage)

    def _create(self) -> None:
        try:
            study = optuna.create_study(storage=self.storage, study_name=self.name, direction="minimize")
        except DuplicatedStudyError:
            study = self._load()  # left unfinished, or made elsewhere at this moment
        start = start_values(self.config)
        if start:
            study.enqueue_trial(start, user_attrs={START_FROM: str(self.config.start_from)}, skip_if_exists=True)
        study.set_user_attr(DEFINITION, definition(self.config))

    def _is_unfinished(self, study: optuna.Study) -> bool:
        """Return whether a study's creation was broken off: it has no definition yet, and nothing was tried."""
        if DEFINITION in study.user_attrs:
            return False
        return all(trial.state == TrialState.WAITING for trial in study.get_trials(deepcopy=False))

    def _check_definition(self, study: optuna.Study) -> None:
        differing = differences(study.user_attrs.get(DEFINITION, {}), definition(self.config))
        if differing:
            raise ValueError(
                f"study {self.name!r} was begun with another definition:\n  "
                + "\n  ".join(differing)
                + "\nundo the change to go on with it, or add --fresh to keep it under another name and begin anew"
            )

    def _archive(self, study: optuna.Study) -> str:
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
        kept = f"{self.name}@{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}"
        # Copied before it is deleted: nothing is lost if this process dies in between.
        optuna.copy_study(
            from_study_name=self.name, from_storage=self.storage, to_storage=self.storage, to_study_name=kept
        )
        optuna.delete_study(study_name=self.name, storage=self.storage)
        return f"the earlier study {self.name!r} is kept as {kept!r}"


def find_search(name: str, root: Path, url: str | None = None) -> StudySearch:
    """Return a study that has been begun below a root, or in another store, as it was begun.

    Raises:
        LookupError: There is none of that name.
    """
    place, file = shown(root, url), file_of(root, url)
    names: list[str] = []
    if file is None or file.exists():
        storage = open_storage(root, url)
        names = optuna.get_all_study_names(storage)
        if name in names:
            stored = optuna.load_study(study_name=name, storage=storage).user_attrs.get(DEFINITION, {})
            config = study_from_definition(stored, source=f"{place}: study {name!r}")
            return StudySearch(name, config, root, storage)
    stored_names = ", ".join(closest_first(name, names)) or "none"
    another = "--root" if url is None else "--storage"
    raise LookupError(
        f"no study {name!r} in {place}; stored: {stored_names}; "
        f"begin it with `python -m fedlightning.tune --study {name}`, or give another {another}"
    )


def _state(trial: FrozenTrial) -> str:
    return "withdrawn" if trial.user_attrs.get(WITHDRAWN) else _STATES[trial.state]


def _under_way(study: optuna.Study, counted: Callable[[int], bool] = lambda number: True) -> int:
    """Return how many trials are finished, or running and to be counted by their number."""
    trials = study.get_trials(deepcopy=False)
    finished = sum(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in trials)
    return finished + sum(trial.state == TrialState.RUNNING and counted(trial.number) for trial in trials)


def _propose_again(study: optuna.Study, trial: FrozenTrial, attributes: Mapping[str, Any]) -> None:
    """Enqueue a trial's values; those it was given are kept even if it ended before it took them all."""
    values = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
    kept = {key: trial.user_attrs[key] for key in (START_FROM, RETRY_OF) if key in trial.user_attrs}
    if values:
        study.enqueue_trial(values, user_attrs={**kept, **attributes})


def _suggest(trial: optuna.Trial, key: str, entry: Choices | Range) -> Scalar:
    if isinstance(entry, Choices):
        choice = trial.suggest_categorical(key, entry.values)
        assert choice is not None, "a space has no empty choices"
        return choice
    if entry.kind == "int":
        return trial.suggest_int(key, int(entry.low), int(entry.high), step=int(entry.step or 1), log=entry.log)
    return trial.suggest_float(key, entry.low, entry.high, step=entry.step, log=entry.log)


def _as_written(entry: Choices | Range, value: Scalar) -> Scalar:
    """Return a value of a grid as its study file would write it: counted in binary, 0.1 + 2 * 0.1 is not 0.3."""
    if not isinstance(entry, Range) or entry.step is None or entry.kind == "int":
        return value
    low, step = Fraction(repr(entry.low)), Fraction(repr(entry.step))
    return float(low + round((Fraction(value) - low) / step) * step)


def _sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if name == "gp":
        return optuna.samplers.GPSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed)


def _pruner(name: str) -> optuna.pruners.BasePruner:
    if name == "none":
        return optuna.pruners.NopPruner()
    return optuna.pruners.MedianPruner(n_startup_trials=_STARTUP_TRIALS, n_warmup_steps=_WARMUP_ROUNDS)
