"""Search a study's space with Optuna: storage, proposals, pruning, and what a dead worker left behind."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock
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
    trial_clients,
)
from fedlightning.owners import is_alive, living_owners
from fedlightning.seeds import derive_seed
from fedlightning.tracking import sqlite_uri

logger = logging.getLogger(__name__)

Pruned = optuna.TrialPruned
"""Raised by a proposal's report when the trial is not worth going on with."""

DEFINITION = "definition"
OWNER = "owner"
RETRY_OF = "retry_of"
_OWNERLESS_SECONDS = 60
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
    """Open the store of studies, creating it on first use, one process at a time."""
    path = storage_file(root).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with FileLock(path.with_name(".optuna.lock")):
        return optuna.storages.RDBStorage(sqlite_uri(path), engine_kwargs={"connect_args": {"timeout": 60}})


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
                study.enqueue_trial(start, user_attrs={"start_from": str(self.config.start_from)})
        return notices

    def reap(self) -> list[TrialSummary]:
        """Fail the trials whose worker is gone, propose each once more, and return them."""
        folder = owners_folder(self.root)
        reaped = []
        with FileLock(self.root / "mlruns" / ".study.lock"):
            study = self._load()
            alone = len(living_owners(folder)) <= 1
            for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                owner = trial.user_attrs.get(OWNER)
                if is_alive(folder, owner) if owner else not alone and _age(trial) < _OWNERLESS_SECONDS:
                    continue
                self.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
                if RETRY_OF not in trial.user_attrs:
                    study.enqueue_trial(trial.params, user_attrs={RETRY_OF: trial.number})
                reaped.append(_summary(trial))
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
            trial.set_user_attr(OWNER, owner)
            values = {key: _suggest(trial, key, entry) for key, entry in self.config.searched.items()}

            def report(value: float, number: int) -> None:
                if self.stopping.is_set():
                    raise KeyboardInterrupt
                trial.report(value, number)
                if trial.should_prune():
                    raise Pruned(f"round {number} is not among the better half")

            clients = trial_clients(self.config, values)
            return evaluate(Proposal(trial.number, clients, report, trial.set_user_attr))

        while self._claim(total, deadline):
            try:
                study.optimize(objective, n_trials=1, callbacks=[lambda _, trial: on_end(_summary(trial))], catch=())
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
            raise ValueError(f"study {self.name!r} has no complete trial yet; give it more --trials or --timeout")
        return best

    def best_or_none(self) -> TrialSummary | None:
        """Return the best complete trial so far, or None."""
        complete = [t for t in self.trials() if t.state == "complete" and t.value is not None]
        return min(complete, key=lambda trial: (trial.value, trial.number), default=None)

    def trials(self) -> list[TrialSummary]:
        """Return all trials, oldest first."""
        return [_summary(trial) for trial in self._load().get_trials(deepcopy=False)]

    def optuna_study(self) -> optuna.Study:
        """Return Optuna's own view, for its figures."""
        return self._load()

    def attribute(self, key: str) -> Any:
        """Return a stored attribute of the study, or None."""
        return self._load().user_attrs.get(key)

    def set_attribute(self, key: str, value: Any) -> None:
        """Store an attribute of the study."""
        self._load().set_user_attr(key, value)

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
        folder = owners_folder(self.root)
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if is_alive(folder, trial.user_attrs.get(OWNER, "")):
                raise ValueError(f"study {self.name!r} is being worked on; wait for it or stop it before --fresh")
        kept = f"{self.name}@{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}"
        # Copied before it is deleted: nothing is lost if this process dies in between.
        optuna.copy_study(
            from_study_name=self.name, from_storage=self.storage, to_storage=self.storage, to_study_name=kept
        )
        optuna.delete_study(study_name=self.name, storage=self.storage)
        return f"the earlier study {self.name!r} is kept as {kept!r}"


def find_search(name: str, config: StudyConfig, root: Path) -> StudySearch:
    """Return a study that has been begun below a root.

    Raises:
        LookupError: There is none of that name.
    """
    path = storage_file(root)
    if path.exists():
        search = StudySearch(name, config, root, open_storage(root))
        if search._stored() is not None:
            return search
    raise LookupError(f"study {name!r} has no trials in {path}; run `python -m fedlightning.tune --study {name}` first")


def _suggest(trial: optuna.Trial, key: str, entry: Choices | Range) -> Scalar:
    if isinstance(entry, Choices):
        choice = trial.suggest_categorical(key, entry.values)
        assert choice is not None, "a space has no empty choices"
        return choice
    if entry.kind == "int":
        return trial.suggest_int(key, int(entry.low), int(entry.high), step=int(entry.step or 1), log=entry.log)
    return trial.suggest_float(key, entry.low, entry.high, step=entry.step, log=entry.log)


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


def _summary(trial: FrozenTrial) -> TrialSummary:
    seconds = trial.duration.total_seconds() if trial.duration else None
    value = trial.value if trial.state == TrialState.COMPLETE else None
    return TrialSummary(trial.number, _STATES[trial.state], value, dict(trial.params), dict(trial.user_attrs), seconds)


def _age(trial: FrozenTrial) -> float:
    started = trial.datetime_start
    return (datetime.now() - started).total_seconds() if started else 0.0
