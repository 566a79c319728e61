"""Tests for studies in Optuna: spaces, resuming, pruning, and what dead and living workers leave."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from fedlightning.config import Range, StudyConfig, flatten, start_values, trial_clients, widen
from fedlightning.config.study_files import study_from_document
from fedlightning.owners import Owner, is_alive
from fedlightning.search import (
    OWNER,
    RETRY_OF,
    Proposal,
    Pruned,
    StudySearch,
    TrialSummary,
    _as_written,
    _suggest,
    find_search,
)
from fedlightning.storages import open_storage, storage_file
from fedlightning.workers import owners_folder

SPACE: dict[str, Any] = {
    "n_estimators_client": {"choices": [5, 10, 50]},
    "num_iterations": {"low": 10, "high": 50, "step": 10},
    "num_rounds": {"low": 1, "high": 64, "log": True},
    "xgb.max_depth": {"low": 2, "high": 8},
    "xgb.subsample": {"low": 0.1, "high": 1.0, "step": 0.1},
    "xgb.gamma": {"choices": [0, 1.5, 5]},
    "xgb.alpha": {"low": 0, "high": 5},
    "CNN.lr": {"low": 1e-5, "high": 1e-2, "log": True},
    "CNN.batch_size": 16,
}
START = {
    "n_estimators_client": 100,
    "num_iterations": 500,
    "num_rounds": 30,
    "xgb.max_depth": 8,
    "xgb.subsample": 0.8,
    "xgb.gamma": 5.0,
    "xgb.alpha": 5.0,
    "CNN.lr": 5e-4,
}
"""The published a9a_5_clients, and the paper's values behind it."""


def study(space: dict[str, Any] | None = None, **changes: Any) -> StudyConfig:
    """Return a small study's definition."""
    document = {"dataset": "a9a", "client_num": 5, "trials": 10, "pruner": "none", "space": space or SPACE, **changes}
    return study_from_document(document, source="test")


Make = Callable[..., StudySearch]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that opens a study in this test's own store, which is kept in memory."""
    storage = optuna.storages.InMemoryStorage()
    (tmp_path / "mlruns").mkdir()

    def search(config: StudyConfig | None = None, *, name: str = "s", **options: Any) -> StudySearch:
        found = StudySearch(name, config or study(), tmp_path, storage)
        found.open(**options)
        return found

    return search


def evaluated(search: StudySearch, total: int, evaluate: Callable[[Proposal], float] | None = None) -> list[Proposal]:
    """Bring a study to its number of trials and return what was proposed; by default a value is the trial's number."""
    proposals: list[Proposal] = []

    def note(proposal: Proposal) -> float:
        proposals.append(proposal)
        return evaluate(proposal) if evaluate else float(proposal.number)

    search.run(note, total=total, owner="nobody")
    return proposals


def searched(search: StudySearch, proposal: Proposal) -> dict[str, Any]:
    """Return a proposal's values of the searched keys."""
    flat = flatten(proposal.clients)
    return {key: flat[key] for key in search.config.searched}


def states(search: StudySearch) -> list[str]:
    """Return how the trials of a study stand, oldest first."""
    return [trial.state for trial in search.trials()]


# -- proposals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["random", "tpe", pytest.param("gp", marks=pytest.mark.slow)])
def test_proposals_lie_inside_the_space(make: Make, sampler: str) -> None:
    """Every kind of distribution gives values that the study's own definition holds, whatever draws them."""
    search = make(study(sampler=sampler))
    for proposal in evaluated(search, 13, lambda p: p.clients.CNN.lr):
        values = searched(search, proposal)
        assert [key for key, entry in search.config.searched.items() if not entry.contains(values[key])] == []
        assert proposal.clients.CNN.batch_size == 16
        assert proposal.clients.client_num == 5
    for trial in search.trials():
        assert all(search.config.searched[key].contains(value) for key, value in trial.values.items())


def test_samplers_know_the_scale(make: Make) -> None:
    """A range that is searched by its logarithm is one for Optuna too, a grid keeps its step, and ends are included."""
    search = make()
    evaluated(search, 1)
    (trial,) = search.optuna_study().trials
    assert trial.distributions == {
        "n_estimators_client": CategoricalDistribution((5, 10, 50)),
        "num_iterations": IntDistribution(10, 50, step=10),
        "num_rounds": IntDistribution(1, 64, log=True),
        "xgb.max_depth": IntDistribution(2, 8),
        "xgb.subsample": FloatDistribution(0.1, 1.0, step=0.1),
        "xgb.gamma": CategoricalDistribution((0.0, 1.5, 5.0)),
        "xgb.alpha": FloatDistribution(0.0, 5.0),
        "CNN.lr": FloatDistribution(1e-5, 1e-2, log=True),
    }


@given(
    low=st.integers(0, 2000),
    step=st.integers(1, 500),
    steps=st.integers(0, 60),
    scale=st.sampled_from([1, 10, 1000]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_grids_are_decimal(low: int, step: int, steps: int, scale: int, seed: int) -> None:
    """A draw from a grid is the number that a study file would hold: 0.3, not 0.30000000000000004."""
    grid = Range(low / scale, (low + step * steps) / scale, step / scale)
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed)).ask()
    value = _as_written(grid, _suggest(trial, "xgb.gamma", grid))
    assert grid.contains(value)
    assert value in [(low + step * count) / scale for count in range(steps + 1)]


def test_what_was_tried_is_what_is_remembered(make: Make) -> None:
    """The best trial's stored values give back exactly the config that it was evaluated with."""
    search = make()
    proposals = evaluated(search, 12)
    for proposal, trial in zip(proposals, search.trials(), strict=True):
        assert trial_clients(search.config, trial.values) == proposal.clients


def test_starting_values_come_first(make: Make) -> None:
    """Trial 0 has the values of start_from, even where they widen the space."""
    config = study(start_from="published")
    widened, notices = widen(config, start_values(config) or {})
    search = make(widened)
    first, second = evaluated(search, 2)
    assert searched(search, first) == START
    assert searched(search, second) != START
    assert len(notices) == 2  # trees and iterations lie outside
    assert search.trials()[0].attributes["start_from"] == "published"


def test_same_seed_same_proposals(make: Make) -> None:
    """Two studies of the same seed propose the same, a third one of another seed does not."""
    drawn = [
        [p.clients for p in evaluated(make(study(seed=seed), name=name), 6)]
        for name, seed in (("a", 7), ("b", 7), ("c", 8))
    ]
    assert drawn[0] == drawn[1]
    assert not set(map(repr, drawn[0])) & set(map(repr, drawn[2]))


def test_resumed_study_draws_on(make: Make) -> None:
    """A study that is taken up again does not propose its first trials once more."""
    proposals = [proposal for total in (4, 8, 12) for proposal in evaluated(make(), total)]
    assert len({proposal.clients.CNN.lr for proposal in proposals}) == 12


def test_side_by_side_workers_draw_differently(make: Make) -> None:
    """Two workers that start at the same moment propose different values."""
    drawn = []
    for worker in (0, 1):
        make(name=f"w{worker}").run(
            lambda p: drawn.append(p.clients.CNN.lr) or 0.0, total=3, owner="nobody", worker=worker
        )
    assert len(set(drawn)) == 6


# -- how many -------------------------------------------------------------------------------------------------------


def test_total_counts_complete_and_pruned_trials(make: Make) -> None:
    """A study goes on to its total: pruned trials count, failed ones do not."""

    def evaluate(proposal: Proposal) -> float:
        if proposal.number == 1:
            raise Pruned
        if proposal.number == 2:
            raise RuntimeError("client 0 failed")
        return 1.0

    search = make()
    with pytest.raises(RuntimeError, match="client 0 failed"):
        evaluated(search, 5, evaluate)
    assert states(search) == ["complete", "pruned", "failed"]
    assert len(evaluated(make(), 5, evaluate)) == 3
    counts = make().counts()
    assert (counts.complete, counts.pruned, counts.failed, counts.finished) == (4, 1, 1, 5)
    assert evaluated(make(), 5) == []
    assert evaluated(make(), 3) == []


def test_workers_never_exceed_the_total(make: Make) -> None:
    """While one worker evaluates the last missing trial, the others stop instead of beginning another."""
    search = make()
    inside, others_done = threading.Event(), threading.Event()

    def evaluate(proposal: Proposal) -> float:
        if not inside.is_set():
            inside.set()
            assert others_done.wait(30)
        return 1.0

    def work(worker: int) -> None:
        search.run(evaluate, total=1, owner="nobody", worker=worker)

    first, *others = (threading.Thread(target=work, args=(worker,)) for worker in range(4))
    first.start()
    assert inside.wait(30)
    for thread in others:
        thread.start()
    for thread in others:
        thread.join(30)
    others_done.set()
    first.join(30)
    assert states(search) == ["complete"]


def test_many_workers_share_the_total(make: Make) -> None:
    """Several workers together evaluate exactly as many trials as were asked for, each once."""
    search, seen, lock = make(), [], threading.Lock()

    def evaluate(proposal: Proposal) -> float:
        with lock:
            seen.append(proposal.number)
        return 1.0

    threads = [
        threading.Thread(target=search.run, args=(evaluate,), kwargs={"total": 15, "owner": "o", "worker": worker})
        for worker in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(seen) == list(range(15))
    assert search.counts().finished == 15


def test_deadline_lets_the_running_trial_end(make: Make) -> None:
    """No trial starts after the deadline, and the one that is under way is finished."""
    search = make()
    search.run(lambda p: 1.0, total=9, owner="nobody", deadline=time.monotonic() - 1)
    assert states(search) == []
    deadline = time.monotonic() + 0.2

    def evaluate(proposal: Proposal) -> float:
        while time.monotonic() < deadline:
            time.sleep(0.01)
        return 1.0

    search.run(evaluate, total=9, owner="nobody", deadline=deadline)
    assert states(search) == ["complete"]


def test_ends_are_told(make: Make) -> None:
    """After each trial the caller hears how it ended, with values, attributes and duration."""
    search, ends = make(), []

    def evaluate(proposal: Proposal) -> float:
        proposal.note("round", proposal.number + 1)
        if proposal.number == 1:
            raise Pruned("enough")
        return 3.5

    search.run(evaluate, total=2, owner="me", on_end=ends.append)
    first, second = ends
    assert isinstance(first, TrialSummary)
    assert (first.number, first.state, first.value) == (0, "complete", 3.5)
    assert (second.number, second.state, second.value) == (1, "pruned", None)
    assert first.attributes == {OWNER: "me", "round": 1}
    assert first.values.keys() == search.config.searched.keys()
    assert first.seconds is not None
    assert first.seconds >= 0
    assert search.trials() == ends


def test_best_is_the_lowest_complete_value(make: Make) -> None:
    """The best trial has the lowest value, the earlier of two equals; a study without one says what happened."""
    search = make()
    with pytest.raises(ValueError, match=r"study 's' has no complete trial \(0 pruned, 0 failed\).*--trials"):
        search.best()
    evaluated(search, 4, lambda p: [2.0, 1.0, 1.0, 3.0][p.number])
    assert search.best().number == 1


# -- pruning --------------------------------------------------------------------------------------------------------


def pruned_after(search: StudySearch, values: Callable[[int], float], rounds: int = 10) -> int | None:
    """Evaluate one more trial, reporting a value each round; returns the round that ended it, or None."""
    reached = []

    def evaluate(proposal: Proposal) -> float:
        for number in range(1, rounds + 1):
            reached.append(number)
            proposal.report(values(number), number)
        reached.append(0)
        return values(rounds)

    evaluated(search, search.counts().finished + 1, evaluate)
    return reached[-1] or None


def test_median_pruner_ends_what_is_worse_than_half(make: Make) -> None:
    """After the first five trials, one that is worse than the median ends early, but not before it has warmed up."""
    search = make(study(pruner="median"))
    assert [pruned_after(search, lambda n, start=start: start - n / 100) for start in (1, 2, 3, 4, 5)] == [None] * 5
    assert pruned_after(search, lambda n: 2.5 - n / 100) is None
    ended = pruned_after(search, lambda n: 9.0)
    assert ended is not None
    assert 5 <= ended < 10
    assert states(search)[-1] == "pruned"


def test_pruner_none_ends_nothing(make: Make) -> None:
    """Without a pruner every trial does all its rounds."""
    search = make()
    assert [pruned_after(search, lambda n, start=start: float(start)) for start in (1, 1, 1, 1, 1, 9)] == [None] * 6


# -- failures and interruptions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [ValueError("bad"), KeyboardInterrupt(), SystemExit(143)], ids=repr)
def test_an_evaluation_that_raises_leaves_a_failed_trial(make: Make, reason: BaseException) -> None:
    """Whatever ends an evaluation comes through, and the trial is failed, not running for ever."""
    search = make()

    def evaluate(proposal: Proposal) -> float:
        raise reason

    with pytest.raises(type(reason)):
        evaluated(search, 2, evaluate)
    assert states(search)[0] == "failed"
    assert search.counts().finished == 0


@pytest.mark.parametrize("reason", [KeyboardInterrupt(), SystemExit(143)], ids=repr)
def test_interrupted_trials_are_proposed_again(make: Make, reason: BaseException) -> None:
    """What Ctrl-C or a request to end broke off is tried again, however often; the starting values are not lost."""
    config = widen(study(start_from="published"), START)[0]

    def evaluate(proposal: Proposal) -> float:
        raise reason

    for _ in range(3):
        with pytest.raises(type(reason)):
            evaluated(make(config), 2, evaluate)
    search = make(config)
    first, second = evaluated(search, 2)
    assert searched(search, first) == START
    assert searched(search, second) != START
    assert states(search) == ["failed"] * 3 + ["complete"] * 2
    assert search.trials()[3].attributes["start_from"] == "published"


def test_failed_starting_values_are_tried_once_more(make: Make) -> None:
    """A failure of trial 0 costs its values one more try, so that a repaired client still answers for them."""
    config = widen(study(start_from="published"), START)[0]
    tried = []

    def failing(proposal: Proposal) -> float:
        tried.append(searched(make(config), proposal))
        raise RuntimeError("client 0 failed")

    for _ in range(3):
        with pytest.raises(RuntimeError):
            evaluated(make(config), 9, failing)
    assert [values == START for values in tried] == [True, True, False]


def test_stopping_ends_workers_at_their_next_round(make: Make) -> None:
    """Once a study is to stop, a report raises and no further trial begins; what was broken off waits for later."""
    search = make()

    def evaluate(proposal: Proposal) -> float:
        proposal.report(1.0, 1)
        search.stopping.set()
        proposal.report(1.0, 2)
        raise AssertionError("the second report should have raised")

    with pytest.raises(KeyboardInterrupt):
        evaluated(search, 5, evaluate)
    assert evaluated(search, 5) == []
    assert states(search) == ["failed", "waiting"]


# -- definitions ----------------------------------------------------------------------------------------------------


def test_resumed_with_the_same_definition(make: Make) -> None:
    """Trials, timeout, sampler and pruner may change between calls; the trials that are there stay."""
    evaluated(make(), 3)
    again = make(study(trials=99, timeout=5, sampler="random", pruner="median"))
    assert states(again) == ["complete"] * 3


def test_another_definition_is_refused(make: Make) -> None:
    """A study begun with another definition is not mixed: the message names the keys, both values, and --fresh."""
    evaluated(make(), 2)
    changed = {**SPACE, "xgb.max_depth": {"low": 2, "high": 9}, "CNN.batch_size": 32}
    with pytest.raises(ValueError, match="begun with another definition") as error:
        make(study(changed, seed=3))
    text = str(error.value)
    assert "xgb.max_depth: {low: 2, high: 8} before, {low: 2, high: 9} now" in text
    assert "CNN.batch_size: 16 before, 32 now" in text
    assert "seed: 0 before, 3 now" in text
    assert "--fresh" in text
    assert "CNN.lr" not in text
    assert states(make()) == ["complete"] * 2


def test_fresh_keeps_the_old_study(make: Make) -> None:
    """--fresh begins anew under the same name; the earlier trials are found under another one."""
    old = make()
    evaluated(old, 3)
    values = [trial.values for trial in old.trials()]
    new = StudySearch("s", study(seed=5), old.root, old.storage)
    (notice,) = new.open(fresh=True)
    assert states(new) == []
    kept = [name for name in optuna.get_all_study_names(old.storage) if name != "s"]
    assert len(kept) == 1
    assert kept[0].startswith("s@")
    assert repr(kept[0]) in notice
    assert [trial.values for trial in StudySearch(kept[0], study(), old.root, old.storage).trials()] == values


def test_fresh_on_nothing_just_begins(make: Make) -> None:
    """--fresh of a study that was never begun is an ordinary beginning."""
    search = make(fresh=True)
    assert optuna.get_all_study_names(search.storage) == ["s"]


# -- workers that live and workers that died ------------------------------------------------------------------------


@contextmanager
def another_worker(root: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a process of its own that holds an owner's lock; yields the owner's name."""
    script = (
        "import sys, time; from pathlib import Path; from fedlightning.owners import Owner\n"
        "with Owner(Path(sys.argv[1])) as owner: print(owner.name, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(owners_folder(root))], stdout=subprocess.PIPE, encoding="utf-8"
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def begin_trial(search: StudySearch, owner: str | None) -> optuna.Trial:
    """Leave a trial running, as a worker does that is in the middle of it."""
    trial = search.optuna_study().ask()
    if owner is not None:
        trial.set_user_attr(OWNER, owner)
    for key, entry in search.config.searched.items():
        _suggest(trial, key, entry)
    return trial


def test_a_lock_tells_who_lives(tmp_path: Path) -> None:
    """An owner lives as long as its process; kill -9 ends it, and its lock file is cleared away."""
    folder = owners_folder(tmp_path)
    with another_worker(tmp_path) as (name, process):
        assert is_alive(folder, name)
        assert is_alive(folder, name)
        process.kill()
        process.wait()
        assert not is_alive(folder, name)
    assert list(folder.iterdir()) == []
    with Owner(folder) as own:
        assert is_alive(folder, own.name)
    assert not is_alive(folder, own.name)
    assert list(folder.iterdir()) == []


def test_trials_of_the_living_are_left_alone(make: Make) -> None:
    """A running trial of another live process is neither failed nor proposed again."""
    search = make()
    with another_worker(search.root) as (other, _):
        search.enter(other)
        begin_trial(search, other)
        begin_trial(search, None)  # it is about to write down that it is the owner
        with Owner(owners_folder(search.root)) as own:
            assert search.enter(own.name) == []
    assert states(search) == ["running", "running"]


def test_trials_of_the_dead_are_tried_once_more(make: Make) -> None:
    """A trial whose process was killed is failed and its values proposed again; the second death is the last."""
    search = make()
    values = []
    for _ in range(2):
        with another_worker(search.root) as (other, process):
            search.enter(other)
            values.append(begin_trial(search, other).params)
            process.kill()
            process.wait()
            with Owner(owners_folder(search.root)) as own:
                (reaped,) = search.enter(own.name)
                assert reaped.state == "failed"
    assert values[0] == values[1]
    assert states(search) == ["failed", "failed"]
    assert search.trials()[1].attributes[RETRY_OF] == 0
    (proposal,) = evaluated(search, 1)
    assert proposal.clients.CNN.lr != values[0]["CNN.lr"]


def test_a_trial_that_died_before_it_drew_keeps_its_values(make: Make) -> None:
    """The starting values survive a process that is killed before it has taken them all."""
    config = widen(study(start_from="published"), START)[0]
    search = make(config)
    search.optuna_study().ask().suggest_categorical("xgb.gamma", config.space["xgb.gamma"].values)
    with Owner(owners_folder(search.root)) as own:
        assert [trial.number for trial in search.enter(own.name)] == [0]
    (proposal,) = evaluated(search, 1)
    assert searched(search, proposal) == START


def test_fresh_waits_for_the_living(make: Make) -> None:
    """--fresh refuses while a worker lives, also between two trials and in the refit; after its death it goes on."""
    search = make()
    with another_worker(search.root) as (other, process):
        search.enter(other)
        begin_trial(search, other)
        for state in (None, TrialState.COMPLETE):
            if state is not None:
                search.optuna_study().tell(0, 1.0)
            with pytest.raises(ValueError, match=r"study 's' is being worked on.*--fresh"):
                make(fresh=True)
        begin_trial(search, other)
        process.kill()
        process.wait()
        make(fresh=True)
    (kept,) = [name for name in optuna.get_all_study_names(search.storage) if name != "s"]
    # What the dead one left does not seem to be running for ever.
    assert states(StudySearch(kept, study(), search.root, search.storage)) == ["complete", "failed"]


# -- the store on disk ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "a b#c?d", "100%25 %2F", "Köln 東京"])
def test_any_folder_can_be_a_root(tmp_path: Path, name: str) -> None:
    """The store of studies lies in exactly the folder asked for, whatever characters its name has."""
    root = tmp_path / name
    search = StudySearch("s", study(), root, open_storage(root))
    search.open()
    evaluated(search, 2)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert storage_file(root) == root / "mlruns" / "optuna.db"
    assert storage_file(root).is_file()
    again = find_search("s", root)
    assert states(again) == ["complete"] * 2
    assert again.trials() == search.trials()


def test_what_is_no_database_is_named(tmp_path: Path) -> None:
    """A file that is no database is not overwritten, and a folder that cannot be written is an error with a way out."""
    (tmp_path / "mlruns").mkdir()
    storage_file(tmp_path).write_text("not a database, but long enough to be looked at as one" * 20)
    with pytest.raises(ValueError, match=r"optuna\.db is no database of studies .*move it away"):
        open_storage(tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OSError, match=r"cannot write the folder .*file/mlruns: Not a directory; choose another --root"):
        open_storage(file)
