"""Search a study's space with Optuna: storage, proposals, pruning, and what a dead worker left behind."""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock, Timeout
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
from fedlightning.owners import is_alive
from fedlightning.seeds import derive_seed
from fedlightning.tracking import sqlite_uri

logger = logging.getLogger(__name__)

Pruned = optuna.TrialPruned
"""Raised by a proposal's report when the trial is not worth going on with."""

DEFINITION = "definition"
WORKERS = "workers"
OWNER = "owner"
START_FROM = "start_from"
RETRY_OF = "retry_of"
_OWNERLESS_SECONDS = 60
_CREATION_SECONDS = 120
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
    """``complete``, ``pruned``, ``failed``, ``running`` or ``waiting``."""
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


def storage_file(root: Path) -> Path:
    """Return where studies are stored below a root."""
    return root / "mlruns" / "optuna.db"


def owners_folder(root: Path) -> Path:
    """Return where living workers keep their locks below a root."""
    return root / "mlruns" / "workers"


def open_storage(root: Path) -> optuna.storages.BaseStorage:
    """Open the store of studies, creating it on first use, one process at a time.

    Raises:
        OSError: The folder or the database cannot be written.
        ValueError: There is something else in the database's place.
    """
    path = storage_file(root).absolute()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    lock = FileLock(path.with_name(".optuna.lock"), timeout=_CREATION_SECONDS)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise OSError(
            f"another process has held {lock.lock_file} for {_CREATION_SECONDS} s; end it, or try again"
        ) from error
    except OSError as error:
        raise OSError(
            f"cannot write the folder {path.parent}: {error.strerror or error}; choose another --root"
        ) from error
    try:
        _check_database(path)
        return optuna.storages.RDBStorage(sqlite_uri(path), engine_kwargs={"connect_args": {"timeout": 60}})
    finally:
        lock.release()


def _check_database(path: Path) -> None:
    """Fail with the file's name and a way out, where Optuna would show SQLAlchemy's statement."""
    try:
        with closing(sqlite3.connect(path, timeout=60)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.rollback()
    except sqlite3.OperationalError as error:
        raise OSError(f"cannot write the database of studies {path}: {error}; choose another --root") from error
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} is no database of studies ({error}); move it away and run again") from error


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
    _claims: threading.Lock = field(default_factory=threading.Lock)
    _claimed: int = 0

    def open(self, *, fresh: bool = False) -> list[str]:
        """Create the study, or take up where it was left; return what was noticed on the way.

        Args:
            fresh: Keep an existing study under another name and begin anew.

        Raises:
            ValueError: The stored study has another definition, or somebody still works on it.
        """
        notices = []
        with FileLock(self.root / "mlruns" / ".study.lock"):
            existing = self._stored()
            if existing is not None and fresh:
                notices.append(self._archive(existing))
                existing = None
            if existing is not None:
                self._check_definition(existing)
                return notices
            study = optuna.create_study(storage=self.storage, study_name=self.name, direction="minimize")
            study.set_user_attr(DEFINITION, definition(self.config))
            start = start_values(self.config)
            if start:
                study.enqueue_trial(start, user_attrs={START_FROM: str(self.config.start_from)})
        return notices

    def enter(self, owner: str) -> list[TrialSummary]:
        """Note that a worker works on the study; fail the trials of those that are gone, and return them.

        Each of those trials is proposed once more: one that ends its process every time must not go on for ever.

        Args:
            owner: Name of the lock that says that the worker lives.
        """
        folder = owners_folder(self.root)
        reaped = []
        with FileLock(self.root / "mlruns" / ".study.lock"):
            study = self._load()
            others = self._living_workers(study)
            study.set_user_attr(WORKERS, [*others, owner])
            for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                known = trial.user_attrs.get(OWNER)
                # A trial has no owner yet for the moment in which its worker begins with it.
                if is_alive(folder, known) if known else others and _age(trial) < _OWNERLESS_SECONDS:
                    continue
                self.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
                if RETRY_OF not in trial.user_attrs:
                    _propose_again(study, trial, {RETRY_OF: trial.number})
                reaped.append(self._summary(self.storage.get_trial(trial._trial_id)))
        return reaped

    def run(
        self,
        evaluate: Callable[[Proposal], float],
        *,
        total: int,
        owner: str,
        deadline: float | None = None,
        worker: int = 0,
        on_end: Callable[[TrialSummary], None] = lambda summary: None,
    ) -> None:
        """Evaluate proposals until the study has ``total`` finished trials or time is up.

        Args:
            evaluate: Returns a proposal's value, to be minimised.
            total: Complete and pruned trials that the study shall have.
            owner: Name of the lock that says that this worker lives.
            deadline: ``time.monotonic()`` after which no further trial starts.
            worker: Number of this worker among several in this process.
            on_end: Called after each trial.
        """
        # The same seed again would repeat the draws of the trials that are already there.
        seed = derive_seed(self.config.seed, "sampler", len(self._load().trials), worker)
        study = optuna.load_study(
            study_name=self.name,
            storage=self.storage,
            sampler=_sampler(self.config.sampler, seed),
            pruner=_pruner(self.config.pruner),
        )

        def objective(trial: optuna.Trial) -> float:
            try:
                return attempt(trial)
            except Pruned:
                raise
            except BaseException as reason:
                self._take_back(study, trial, reason)
                raise

        def attempt(trial: optuna.Trial) -> float:
            trial.set_user_attr(OWNER, owner)
            values = {
                key: _as_written(entry, _suggest(trial, key, entry)) for key, entry in self.config.searched.items()
            }

            def report(value: float, number: int) -> None:
                if self.stopping.is_set():
                    raise KeyboardInterrupt
                trial.report(value, number)
                if trial.should_prune():
                    raise Pruned(f"its best of {number} rounds is worse than the median of the other trials")

            clients = trial_clients(self.config, values)
            return evaluate(Proposal(trial.number, clients, report, trial.set_user_attr))

        while self._claim(total, deadline):
            try:
                study.optimize(
                    objective, n_trials=1, callbacks=[lambda _, trial: on_end(self._summary(trial))], catch=()
                )
            finally:
                with self._claims:
                    self._claimed -= 1

    def counts(self) -> Counts:
        """Return how many trials ended how."""
        states = [trial.state for trial in self._load().get_trials(deepcopy=False)]
        return Counts(states.count(TrialState.COMPLETE), states.count(TrialState.PRUNED), states.count(TrialState.FAIL))

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
        return TrialSummary(trial.number, _STATES[trial.state], value, values, dict(trial.user_attrs), seconds)

    def _take_back(self, study: optuna.Study, trial: optuna.Trial, reason: BaseException) -> None:
        """Propose an interrupted trial again, and the starting values once more if their trial failed."""
        frozen = self.storage.get_trial(trial._trial_id)
        if not isinstance(reason, Exception):
            _propose_again(study, frozen, {})
        elif START_FROM in frozen.user_attrs and RETRY_OF not in frozen.user_attrs:
            _propose_again(study, frozen, {RETRY_OF: trial.number})
        if not isinstance(reason, Exception | KeyboardInterrupt):
            # Optuna ends a trial after the other two only.
            self.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)

    def _living_workers(self, study: optuna.Study) -> list[str]:
        folder = owners_folder(self.root)
        return [worker for worker in study.user_attrs.get(WORKERS, ()) if is_alive(folder, worker)]

    def _claim(self, total: int, deadline: float | None) -> bool:
        if self.stopping.is_set() or (deadline is not None and time.monotonic() >= deadline):
            return False
        with self._claims:
            if self.counts().finished + self._claimed >= total:
                return False
            self._claimed += 1
            return True

    def _stored(self) -> optuna.Study | None:
        try:
            return self._load()
        except KeyError:
            return None

    def _load(self) -> optuna.Study:
        return optuna.load_study(study_name=self.name, storage=self.storage)

    def _check_definition(self, study: optuna.Study) -> None:
        differing = differences(study.user_attrs.get(DEFINITION, {}), definition(self.config))
        if differing:
            raise ValueError(
                f"study {self.name!r} was begun with another definition:\n  "
                + "\n  ".join(differing)
                + "\nundo the change to go on with it, or add --fresh to keep it under another name and begin anew"
            )

    def _archive(self, study: optuna.Study) -> str:
        if self._living_workers(study):
            raise ValueError(f"study {self.name!r} is being worked on; wait for it or stop it before --fresh")
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
        kept = f"{self.name}@{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}"
        # Copied before it is deleted: nothing is lost if this process dies in between.
        optuna.copy_study(
            from_study_name=self.name, from_storage=self.storage, to_storage=self.storage, to_study_name=kept
        )
        optuna.delete_study(study_name=self.name, storage=self.storage)
        return f"the earlier study {self.name!r} is kept as {kept!r}"


def find_search(name: str, root: Path) -> StudySearch:
    """Return a study that has been begun below a root, with the definition that it was begun with.

    Raises:
        LookupError: There is none of that name.
    """
    path = storage_file(root)
    names: list[str] = []
    if path.exists():
        storage = open_storage(root)
        names = optuna.get_all_study_names(storage)
        if name in names:
            stored = optuna.load_study(study_name=name, storage=storage).user_attrs.get(DEFINITION, {})
            config = study_from_definition(stored, source=f"{path}: study {name!r}")
            return StudySearch(name, config, root, storage)
    stored_names = ", ".join(closest_first(name, names)) or "none"
    raise LookupError(
        f"no study {name!r} in {path}; stored: {stored_names}; "
        f"begin it with `python -m fedlightning.tune --study {name}`, or give another --root"
    )


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


def _age(trial: FrozenTrial) -> float:
    started = trial.datetime_start
    return (datetime.now() - started).total_seconds() if started else 0.0
