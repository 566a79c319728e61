"""Tests for workers on one study: who lives is told by locks nearby, and by heartbeats from elsewhere."""

import threading
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from fedlightning.config import StudyConfig
from fedlightning.config.study_files import study_from_document
from fedlightning.owners import Owner
from fedlightning.search import OWNER, RETRY_OF, WITHDRAWN, Proposal, StudySearch
from fedlightning.storages import open_storage
from fedlightning.workers import PERIOD, SILENCE, Workers, repeating


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def workers(folder: Path, attributes: dict[str, Any], clock: Clock) -> Workers:
    """Return the workers of a study whose attributes are a plain dictionary."""
    return Workers(folder, lambda: attributes, attributes.__setitem__, clock)


def test_a_heartbeat_from_elsewhere(tmp_path: Path) -> None:
    """A worker of another folder lives while its heartbeat changes, whatever it says; 45 s without make it dead."""
    attributes: dict[str, Any] = {}
    clock = Clock()
    here, there = workers(tmp_path / "a", attributes, clock), workers(tmp_path / "b", attributes, clock)
    there.beat("far")
    assert here.is_alive("far")
    for _ in range(20):
        clock.now += SILENCE - 1
        there.beat("far")
        assert here.is_alive("far")
        assert here.living() == ["far"]
    clock.now += SILENCE - 1
    assert here.is_alive("far")
    clock.now += 1
    assert not here.is_alive("far")
    assert here.living() == []
    # A machine that slept wakes up.
    there.beat("far")
    assert here.is_alive("far")


def test_death_is_noticed_within_a_minute() -> None:
    """A last heartbeat seen late, the silence, and the time until the next look: together less than 60 s."""
    assert PERIOD + SILENCE + PERIOD < 60


def test_who_leaves_is_gone_at_once(tmp_path: Path) -> None:
    """Nobody waits for the next heartbeat of a worker that ended properly."""
    attributes: dict[str, Any] = {}
    clock = Clock()
    here, there = workers(tmp_path / "a", attributes, clock), workers(tmp_path / "b", attributes, clock)
    there.beat("far")
    assert here.is_alive("far")
    there.leave("far")
    assert not here.is_alive("far")


def test_nearby_the_lock_decides(tmp_path: Path) -> None:
    """A worker of the same folder lives as long as its lock is held, however long it keeps still."""
    attributes: dict[str, Any] = {}
    clock = Clock()
    one, other = workers(tmp_path, attributes, clock), workers(tmp_path, attributes, clock)
    with Owner(tmp_path) as owner:
        one.beat(owner.name)
        assert other.is_alive(owner.name)
        clock.now += 100 * SILENCE
        assert other.is_alive(owner.name)
        assert other.is_near(owner.name)
    assert not other.is_alive(owner.name)
    assert not other.is_alive("never heard of")


def test_looking_after_goes_on_after_an_error() -> None:
    """A store that fails for a moment does not end the thread that looks after others; the block's end does."""
    calls: list[int] = []
    third = threading.Event()

    def act() -> None:
        calls.append(len(calls))
        if len(calls) == 3:
            third.set()
        raise OSError("the store is locked")

    with repeating(act, 0.01):
        assert third.wait(30)
    count = len(calls)
    assert [thread.name for thread in threading.enumerate() if thread.name == "looks after workers"] == []
    assert len(calls) == count


def study(total: int = 3) -> StudyConfig:
    """Return a small study's definition."""
    space = {"n_estimators_client": 5, "num_iterations": 5, "num_rounds": 2, "CNN.lr": {"low": 0.1, "high": 1.0}}
    document = {"dataset": "a9a", "client_num": 5, "trials": total, "pruner": "none", "space": space}
    return study_from_document(document, source="test")


def on_machine(root: Path, storage: optuna.storages.BaseStorage) -> StudySearch:
    """Return a study as a process on a machine of its own sees it: the store is shared, the root is not."""
    (root / "mlruns").mkdir(parents=True)
    search = StudySearch("s", study(), root, storage)
    search.open()
    return search


def test_a_trial_that_dies_elsewhere_is_tried_again(tmp_path: Path) -> None:
    """Of a worker on another machine only silence tells; then its trial is failed, and its values come once more."""
    storage = optuna.storages.InMemoryStorage()
    here, there = on_machine(tmp_path / "a", storage), on_machine(tmp_path / "b", storage)
    clock = Clock()
    here.workers = Workers(tmp_path / "a" / "w", lambda: here.optuna_study().user_attrs, here.set_attribute, clock)
    there.enter("far")
    assert here.enter("near") == []
    trial = there.optuna_study().ask()
    trial.set_user_attr(OWNER, "far")
    trial.suggest_float("CNN.lr", 0.1, 1.0)
    assert here.look_after("near") == []
    clock.now += SILENCE + 1
    (reaped,) = here.look_after("near")
    assert (reaped.number, reaped.state) == (0, "failed")
    here.run(lambda p: 1.0, total=1, owner="near")
    again = here.trials()[1]
    assert (again.attributes[RETRY_OF], again.values) == (0, trial.params)
    assert here.look_after("near") == []


def test_the_last_trial_is_begun_once(tmp_path: Path) -> None:
    """Two machines that begin the last trial at the same moment see it afterwards: the later one gives way."""
    storage = optuna.storages.InMemoryStorage()
    here, there = on_machine(tmp_path / "a", storage), on_machine(tmp_path / "b", storage)
    here.enter("near")
    there.enter("far")
    study_here = here.optuna_study()
    ask, asked = study_here.ask, []

    def ask_late(*arguments: Any, **options: Any) -> optuna.Trial:
        if not asked:
            other = there.optuna_study().ask()
            other.set_user_attr(OWNER, "far")
            asked.append(other.number)
        return ask(*arguments, **options)

    study_here.ask = ask_late  # type: ignore[method-assign]
    assert here._claim(study_here, 1, "near") is None
    assert [trial.state for trial in here.trials()] == ["running", "withdrawn"]
    assert here.trials()[1].attributes[WITHDRAWN] is True
    assert (here.counts().failed, here.counts().finished) == (0, 0)


def test_a_worker_waits_for_what_others_do(tmp_path: Path) -> None:
    """While all missing trials run elsewhere a worker waits, says so, and ends when they are done; or does theirs."""
    storage = optuna.storages.InMemoryStorage()
    here, there = on_machine(tmp_path / "a", storage), on_machine(tmp_path / "b", storage)
    here.enter("near")
    there.enter("far")
    for state in (TrialState.COMPLETE, TrialState.FAIL):
        trial = there.optuna_study().ask()
        trial.set_user_attr(OWNER, "far")
        waited: list[list[int]] = []
        done: list[int] = []

        def end(numbers: Any, trial: Any = trial, state: Any = state, waited: Any = waited) -> None:
            waited.append(list(numbers))
            there.optuna_study().tell(trial.number, 1.0 if state == TrialState.COMPLETE else None, state=state)

        def evaluate(proposal: Proposal, done: Any = done) -> float:
            done.append(proposal.number)
            return 1.0

        total = here.counts().finished + 1
        here.run(evaluate, total=total, owner="near", on_wait=end)
        assert waited == [[trial.number]]
        assert len(done) == (state == TrialState.FAIL)
        assert here.counts().finished == total


def test_a_task_has_one_holder(tmp_path: Path) -> None:
    """Only one worker may refit; it is free again when that one leaves, or when its lock is gone."""
    search = on_machine(tmp_path, optuna.storages.InMemoryStorage())
    folder = tmp_path / "mlruns" / "workers"
    with Owner(folder) as first, Owner(folder) as second:
        search.enter(first.name)
        search.enter(second.name)
        assert search.claim("refit", first.name)
        assert not search.claim("refit", second.name)
        assert search.claim("refit", first.name)
        assert not search.leave(first.name)
    with Owner(folder) as third:
        search.enter(third.name)
        assert search.claim("refit", third.name)
        assert search.leave(third.name)


@pytest.mark.parametrize("begun", [False, True])
def test_a_creation_that_was_broken_off(tmp_path: Path, begun: bool) -> None:
    """A study whose creator died before it stored the definition is created to its end by the next one."""
    storage = open_storage(tmp_path) if begun else optuna.storages.InMemoryStorage()
    optuna.create_study(storage=storage, study_name="s")
    (tmp_path / "mlruns").mkdir(exist_ok=True)
    search = StudySearch("s", study(), tmp_path, storage)
    assert search.open() == []
    assert search.open() == []
    search.run(lambda p: 1.0, total=1, owner="o")
    assert search.counts().complete == 1
