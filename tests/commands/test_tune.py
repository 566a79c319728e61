"""Tests for tuning as a user does it: what is printed, what a wrong word costs, and what survives a rude end."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from run_command import (
    PATIENCE,
    Finished,
    call_command,
    command_environment,
    command_line,
    kill_group,
    press_ctrl_c,
    read_until,
    rest_of,
    run_command,
    started_command,
)

from fedlightning.config import flatten, load_clients
from fedlightning.config.documents import dump
from fedlightning.search import OWNER, RETRY_OF, StudySearch, TrialSummary, find_search
from fedlightning.tracking import sqlite_uri
from fedlightning.workers import owners_folder

SPACE = {
    "n_estimators_client": {"choices": [3, 5]},
    "num_iterations": 5,
    "num_rounds": 3,
    "xgb.max_depth": {"low": 2, "high": 3},
    "xgb.gamma": 0,
    "xgb.alpha": 0,
    "CNN.lr": {"low": 1e-3, "high": 1e-1, "log": True},
}
LONG = {**SPACE, "num_rounds": 40, "num_iterations": 250}
"""A trial of some seconds: time enough to be interrupted in the middle."""


WHAT_IS_LEFT = "finished trials are stored, and the same command goes on from there"


def write_study(root: Path, name: str = "tiny", **changes: Any) -> Path:
    """Write a study file where it is found by its name."""
    document = {
        "dataset": "breast_cancer",
        "client_num": 2,
        "trials": 3,
        "seed": 3,
        "pruner": "none",
        "space": SPACE,
        **changes,
    }
    path = root / "studies" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump(document), encoding="utf-8")
    return path


def files(root: Path) -> set[str]:
    """Return all that is below a folder."""
    return {str(path.relative_to(root)) for path in root.rglob("*")}


@dataclass(frozen=True)
class Stores:
    """What the stores below a root hold of a study."""

    trials: list[TrialSummary]
    runs: list[Run]

    @classmethod
    def read(cls, root: Path, name: str = "tiny") -> "Stores":
        """Read both stores afresh."""
        client = MlflowClient(tracking_uri=sqlite_uri(root / "mlruns" / "mlflow.db"))
        experiment = client.get_experiment_by_name(name)
        runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
        return cls(find_search(name, root).trials(), list(runs))

    @staticmethod
    def runs_of(root: Path, name: str = "tiny") -> dict[str, list[str]]:
        """How the runs of a study ended, by kind, oldest first."""
        client = MlflowClient(tracking_uri=sqlite_uri(root / "mlruns" / "mlflow.db"))
        experiment = client.get_experiment_by_name(name)
        found: dict[str, list[str]] = {}
        for run in client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]):
            found.setdefault(run.data.tags["kind"], []).append(run.info.status)
        return found

    @property
    def states(self) -> list[str]:
        """How the trials stand, oldest first."""
        return [trial.state for trial in self.trials]

    def statuses(self, kind: str) -> list[str]:
        """How the runs of a kind ended, oldest first."""
        return [run.info.status for run in self.runs if run.data.tags["kind"] == kind]


# -- a study from beginning to end ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """A folder with a finished study, and what the command printed."""

    root: Path
    printed: Finished


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A study that was tuned once with --json."""
    root = tmp_path_factory.mktemp("my project")
    write_study(root)
    return Done(root, call_command("tune", "--study", "tiny", "--json", cwd=root))


def test_json_is_one_object_with_these_keys(done: Done) -> None:
    """stdout holds one line of JSON and nothing else; its keys are a promise to programs."""
    assert done.printed.status == 0
    (answer,) = done.printed.json_lines()
    assert set(answer) == {"study", "trials", "best", "test", "config_file", "run_id", "seconds"}
    assert answer["study"] == "tiny"
    assert answer["trials"] == {"complete": 3, "pruned": 0, "failed": 0}
    assert set(answer["best"]) == {"number", "validation", "params"}
    assert set(answer["best"]["validation"]) == {"loss", "metric"}
    assert set(answer["test"]) == {"network", "mean_margin", "local_only", "centralized"}
    assert all(0 <= value <= 1 for value in answer["test"].values())
    assert answer["seconds"] > 0


def test_json_says_what_the_stores_hold(done: Done) -> None:
    """The printed figures, values, file and run are those that were stored."""
    (answer,) = done.printed.json_lines()
    best = find_search("tiny", done.root).best()
    assert answer["best"]["number"] == best.number
    assert answer["best"]["validation"]["loss"] == best.value
    clients = load_clients(done.root / answer["config_file"])
    assert answer["best"]["params"] == flatten(clients)
    (parent,) = [run for run in Stores.read(done.root).runs if run.data.tags["kind"] == "study"]
    assert answer["run_id"] == parent.info.run_id
    assert answer["test"] == {name: parent.data.metrics[f"test_{name}_accuracy"] for name in answer["test"]}


def test_progress_goes_to_stderr_with_json(done: Done) -> None:
    """With --json people still see on stderr what happens: each trial, the best so far, the rounds of the refit."""
    lines = done.printed.err.splitlines()
    assert lines[0] == (
        "study tiny: breast_cancer with 2 clients, seed 3; searched: n_estimators_client, xgb.max_depth, CNN.lr"
    )
    trials = [
        line for line in lines if re.match(r"\[\d/3\] trial \d: loss 0\.\d+ accuracy \d+\.\d\d % in round ", line)
    ]
    assert [line[:14] for line in trials] == ["[1/3] trial 0:", "[2/3] trial 1:", "[3/3] trial 2:"]
    assert all("| best so far: trial " in line for line in trials)
    assert all(re.search(r"about \d+:\d\d left$", line) for line in trials[:2])
    assert (
        sum(line.startswith("round ") for line in lines) == done.printed.json_lines()[0]["best"]["params"]["num_rounds"]
    )


def test_a_finished_study_is_shown_again(done: Done) -> None:
    """The same call again prints the result for people: winner, comparison, and what to type next."""
    before = find_search("tiny", done.root).trials()
    printed = call_command("tune", "--study", "tiny", cwd=done.root)
    assert (printed.status, printed.err) == (0, "")
    assert find_search("tiny", done.root).trials() == before
    out = printed.out
    assert "study tiny already has its 3 trials" in out
    answer = done.printed.json_lines()[0]
    assert f"the best is trial {answer['best']['number']}:" in out
    assert f"  CNN.lr = {answer['best']['params']['CNN.lr']}" in out
    table = out[out.index("\nmodel ") :].splitlines()
    assert table[3].split() == ["network", *table[3].split()[1:]]
    assert table[3].endswith(f"{100 * answer['test']['network']:.2f} %")
    assert "client config: studies/clients/tiny_clients.yaml\n" in out
    assert "python -m fedlightning.run --dataset breast_cancer --clients tiny_clients\n" in out
    assert out.rstrip().endswith("python -m fedlightning.ui")


def test_quiet_prints_the_result_only(done: Done) -> None:
    """With -q only the result is printed; with -q --json only the object."""
    printed = call_command("tune", "--study", "tiny", "-q", cwd=done.root)
    assert (printed.status, printed.err) == (0, "")
    assert printed.out.startswith("\ntiny: 3 complete and 0 pruned trials, 0 failed; the best is trial ")
    as_json = call_command("tune", "--study", "tiny", "-q", "--json", cwd=done.root)
    assert as_json.err == ""
    again, first = as_json.json_lines()[0], done.printed.json_lines()[0]
    assert {**again, "seconds": 0} == {**first, "seconds": 0}


def test_root_can_be_named_from_elsewhere(done: Done, tmp_path: Path) -> None:
    """With --root the study is the same from any folder; nothing is left there, and the next commands name it too."""
    printed = call_command("tune", "--root", done.root, "--study", "tiny", "--no-export", cwd=tmp_path)
    assert printed.status == 0
    assert "already has its 3 trials" in printed.out
    assert "client config" not in printed.out
    assert printed.out.rstrip().endswith(f"python -m fedlightning.ui --root '{done.root}'")
    by_path = call_command(
        "tune", "--root", done.root, "--study", done.root / "studies" / "tiny.yaml", "--json", cwd=tmp_path
    )
    (answer,) = by_path.json_lines()
    assert answer["run_id"] == done.printed.json_lines()[0]["run_id"]
    assert answer["config_file"] == str(done.root / "studies" / "clients" / "tiny_clients.yaml")
    assert files(tmp_path) == set()


def test_another_definition_is_refused_in_words(done: Done) -> None:
    """Fixing a searched key of a begun study is refused with the keys and the way out, and changes nothing."""
    before = find_search("tiny", done.root).trials()
    printed = call_command("tune", "--study", "tiny", "--seed", 4, "xgb.max_depth=3", cwd=done.root)
    assert printed.status == 2
    assert printed.err.startswith("ERROR: study 'tiny' was begun with another definition:\n")
    assert "  xgb.max_depth: {low: 2, high: 3} before, 3 now\n" in printed.err
    assert "  seed: 3 before, 4 now\n" in printed.err
    assert "--fresh" in printed.err
    assert find_search("tiny", done.root).trials() == before


# -- what goes wrong before anything begins -------------------------------------------------------------------------


WRONG = {
    "no study": (["--study", "tini"], "unknown study 'tini'; known: tiny, a9a_5"),
    "no file": (["--study", "studies/x.yaml"], "no study file studies/x.yaml; give an existing file"),
    "no such data set": (
        ["--study", "no_data"],
        "studies/no_data.yaml: unknown data set 'breast_canser'; known: breast",
    ),
    "no such key": (["--study", "tiny", "xgb.max_dept=3"], "unknown key 'xgb.max_dept'; known: xgb.max_depth"),
    "no value": (["--study", "tiny", "seed"], "'seed' has no value; write KEY=VALUE"),
    "impossible value": (["--study", "tiny", "CNN.lr=-1"], "CNN.lr is -1; allowed: a number above 0"),
    "given twice": (["--study", "tiny", "--seed", "1", "seed=2"], "seed is given twice"),
    "no trials": (["--study", "tiny", "--trials", "0"], "argument --trials: 0 is not at least 1"),
    "no time": (["--study", "tiny", "--timeout", "-5"], "argument --timeout: -5 is not a finite number above 0"),
    "nothing published": (["--study", "tiny", "start_from=published"], "nothing is published for breast_cancer"),
    "no storage": (["--study", "tiny", "--storage", "studies"], "storage 'studies' is no address of a store"),
    "no data folder": (["--study", "a9a_5", "--data-dir", "nowhere"], "the data folder 'nowhere' is no folder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_words_cost_nothing(tmp_path: Path, case: str) -> None:
    """A wrong name, key or value is one clear line and exit status 2, and nothing was created before it."""
    write_study(tmp_path)
    write_study(tmp_path, "no_data", dataset="breast_canser")
    before = files(tmp_path)
    arguments, said = WRONG[case]
    printed = call_command("tune", "-q", *arguments, cwd=tmp_path)
    assert printed.status == 2
    assert printed.out == ""
    assert printed.err.startswith("ERROR: ")
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert files(tmp_path) == before


def test_wrong_words_as_a_process(tmp_path: Path) -> None:
    """The same from a shell: one line on stderr, exit status 2, an empty folder as before."""
    printed = run_command("tune", "--study", "nope", cwd=tmp_path)
    assert printed == Finished(2, "", "ERROR: unknown study 'nope'; known: a9a_5\n")
    assert files(tmp_path) == set()


def test_a_download_that_fails_comes_before_the_stores(tmp_path: Path) -> None:
    """Data that cannot be had is one error of one process, not of every client, and no study was begun for it."""
    write_study(tmp_path, dataset="abalone", client_num=2)
    before = files(tmp_path)
    away = {"FEDLIGHTNING_DATA_URL": "http://127.0.0.1:9/", "FEDLIGHTNING_CACHE_DIR": str(tmp_path / "cache")}
    printed = call_command("tune", "--study", "tiny", "-q", cwd=tmp_path, env=away)
    assert printed.status == 1
    assert printed.out == ""
    assert "abalone_scale: fetching http://127.0.0.1:9/regression/abalone_scale failed" in printed.err
    assert {name for name in files(tmp_path) if not name.startswith("cache")} == before


def unwritable(tmp_path: Path) -> Path:
    """Return a folder in which nobody, not even the system's administrator, can make another."""
    if os.geteuid() == 0:
        return Path("/proc")
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o500)
    return folder


def test_a_root_that_cannot_be_written(tmp_path: Path) -> None:
    """A read-only folder, or a file, in the root's place is named in one line that says what else to try."""
    path = write_study(tmp_path)
    for root in (path, unwritable(tmp_path)):
        printed = call_command("tune", "--root", root, "--study", path, "-q", cwd=tmp_path)
        assert printed.status == 1
        assert printed.err.startswith(f"ERROR: cannot write the folder {root.absolute()}/mlruns: ")
        assert printed.err.endswith("; choose another --root\n")
        assert printed.err.count("\n") == 1


def test_a_client_that_raises(tmp_path: Path) -> None:
    """A client's error ends the command with its traceback and a status of its own; it is FAILED in the stores."""
    write_study(tmp_path)
    printed = call_command("tune", "--study", "tiny", "client_num=300", "--json", cwd=tmp_path)
    assert (printed.status, printed.out) == (1, "")
    message = printed.err[printed.err.index("ERROR: ") :]
    assert re.match(
        r"ERROR: (the )?client .* failed in 'query\.describe':\nTraceback \(most recent call last\):\n", message
    )
    assert re.search(r"\nValueError: .*use fewer clients or another val_ratio\n$", message)
    stores = Stores.read(tmp_path)
    assert stores.states == ["failed"]
    assert (stores.statuses("trial"), stores.statuses("study")) == (["FAILED"], ["FAILED"])


# -- rude ends ------------------------------------------------------------------------------------------------------


def wait_for_trial(search: StudySearch, number: int) -> None:
    """Wait until a trial has begun and reported a round."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        trials = search.optuna_study().get_trials(deepcopy=False)
        if len(trials) > number and trials[number].intermediate_values:
            return
        time.sleep(0.05)
    raise AssertionError(f"trial {number} did not begin")


def clients_of(process: subprocess.Popen[str]) -> set[int]:
    """Return the processes of a command's group besides its own."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            group = int((folder / "stat").read_text().rpartition(")")[2].split()[2])
        except (OSError, IndexError):
            continue
        if group == process.pid and int(folder.name) != process.pid:
            found.add(int(folder.name))
    return found


def wait_for_nobody(process: subprocess.Popen[str]) -> None:
    """Wait until no process of a command's group is left."""
    limit = time.monotonic() + 60
    while clients_of(process):
        assert time.monotonic() < limit, f"still there: {clients_of(process)}"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("kind", ["ctrl-c", "sigterm"])
def test_stopped_in_the_middle(tmp_path: Path, kind: str, jobs: int) -> None:
    """Ctrl-C and SIGTERM end a search with one line; its trials fail, their runs are killed, all else is intact."""
    write_study(tmp_path, space=LONG, trials=9)
    with started_command("tune", "--study", "tiny", "--jobs", jobs, cwd=tmp_path) as process:
        before = read_until(process, "[1/9] trial ")
        wait_for_trial(find_search("tiny", tmp_path), jobs)
        assert clients_of(process)
        if kind == "ctrl-c":
            press_ctrl_c(process)
        else:
            process.send_signal(signal.SIGTERM)
        ended = rest_of(process)
        wait_for_nobody(process)
    assert ended.status == {"ctrl-c": 130, "sigterm": 143}[kind]
    assert "Traceback" not in before + ended.out
    word = {"ctrl-c": "interrupted", "sigterm": "terminated"}[kind]
    assert ended.out.splitlines()[-1] == f"ERROR: {word}; {WHAT_IS_LEFT}"
    stores = Stores.read(tmp_path)
    complete = stores.states.count("complete")
    assert complete >= 1
    assert stores.states.count("failed") == jobs
    assert stores.states.count("waiting") == jobs
    assert "running" not in stores.states
    assert sorted(stores.statuses("trial")) == ["FINISHED"] * complete + ["KILLED"] * jobs
    assert stores.statuses("study") == ["KILLED"]
    assert list(owners_folder(tmp_path).iterdir()) == []
    # What was broken off is what comes next.
    failed = [trial.values for trial in stores.trials if trial.state == "failed"]
    study = find_search("tiny", tmp_path).optuna_study()
    waiting = [trial.system_attrs["fixed_params"] for trial in study.trials if trial.state.name == "WAITING"]
    assert sorted(map(str, failed)) == sorted(map(str, waiting))


@pytest.mark.slow
def test_interrupted_while_it_starts(tmp_path: Path) -> None:
    """Ctrl-C during the imports ends the command as it does later, without a traceback of any process."""
    with started_command("tune", "--study", "a9a_5", cwd=tmp_path) as process:
        read_until(process, "study a9a_5: ")
        press_ctrl_c(process)
        ended = rest_of(process)
    assert ended.status == 130
    assert "Traceback" not in ended.out
    assert ended.out.splitlines()[-1] == f"ERROR: interrupted; {WHAT_IS_LEFT}"


@pytest.mark.slow
def test_killed_and_called_again(tmp_path: Path) -> None:
    """After kill -9 the same command brings the study to exactly its trials; nothing seems to run for ever."""
    write_study(tmp_path, space=LONG, trials=3)
    with started_command("tune", "--study", "tiny", cwd=tmp_path) as process:
        read_until(process, "[1/3] trial ")
        wait_for_trial(find_search("tiny", tmp_path), 1)
        process.kill()
        rest_of(process)
        # Its clients notice by themselves that nobody asks them any more.
        wait_for_nobody(process)
    stores = Stores.read(tmp_path)
    assert stores.states == ["complete", "running"]
    assert stores.statuses("trial") == ["FINISHED", "RUNNING"]
    assert stores.statuses("study") == ["RUNNING"]
    again = run_command("tune", "--study", "tiny", "--json", cwd=tmp_path)
    assert again.status == 0
    assert again.json_lines()[0]["trials"] == {"complete": 3, "pruned": 0, "failed": 1}
    assert "trial 1 was left unfinished by a process that is gone" in again.err
    stores = Stores.read(tmp_path)
    assert stores.states == ["complete", "failed", "complete", "complete"]
    assert stores.trials[2].values == stores.trials[1].values
    assert stores.statuses("trial") == ["FINISHED", "FAILED", "FINISHED", "FINISHED"]
    assert stores.statuses("study") == ["FINISHED"]
    assert "RUNNING" not in {run.info.status for run in stores.runs}
    assert list(owners_folder(tmp_path).iterdir()) == []


@pytest.mark.slow
def test_side_by_side(tmp_path: Path) -> None:
    """Two trials at a time do exactly the trials that were asked for, each once, and end in one refit."""
    write_study(tmp_path, trials=7)
    printed = run_command("tune", "--study", "tiny", "--jobs", 2, "--json", cwd=tmp_path)
    assert printed.status == 0
    assert printed.json_lines()[0]["trials"] == {"complete": 7, "pruned": 0, "failed": 0}
    stores = Stores.read(tmp_path)
    assert stores.states == ["complete"] * 7
    assert stores.statuses("trial") == ["FINISHED"] * 7
    assert stores.statuses("refit") == ["FINISHED"]
    assert len({trial.values["CNN.lr"] for trial in stores.trials}) == 7
    lines = [line for line in printed.err.splitlines() if line.startswith("[")]
    assert sorted(line[:5] for line in lines) == [f"[{n}/7]" for n in range(1, 8)]


@pytest.mark.slow
def test_one_worker_leaves_the_others_trials_alone(tmp_path: Path) -> None:
    """A second call on a study that is being searched neither fails the first one's trial nor begins anew over it."""
    write_study(tmp_path, space=LONG, trials=2)
    with started_command("tune", "--study", "tiny", cwd=tmp_path) as first:
        read_until(first, "[1/2] trial ")
        wait_for_trial(find_search("tiny", tmp_path), 1)
        first.send_signal(signal.SIGSTOP)
        fresh = run_command("tune", "--study", "tiny", "--fresh", "-q", cwd=tmp_path)
        assert (fresh.status, fresh.out) == (2, "")
        assert "is being worked on; wait for it or stop it before --fresh" in fresh.err
        with started_command("tune", "--study", "tiny", "--json", cwd=tmp_path) as beside:
            said = read_until(beside, "waiting for trial 1 of other workers")
            assert "left unfinished" not in said
            assert Stores.read(tmp_path).states == ["complete", "running"]
            first.send_signal(signal.SIGCONT)
            assert rest_of(first).status == 0
            assert rest_of(beside).status == 0
    stores = Stores.read(tmp_path)
    assert stores.states == ["complete"] * 2
    assert stores.statuses("trial") == ["FINISHED"] * 2
    assert stores.statuses("refit") == ["FINISHED"]
    assert stores.statuses("comparator") == ["FINISHED"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("in_journal", [False, True])
def test_one_of_two_is_killed(tmp_path: Path, in_journal: bool) -> None:
    """Of two processes on one study one dies: the other does its trial once more, and all else that is missing."""
    write_study(tmp_path, space=LONG, trials=5)
    storage = f"journal://{tmp_path}/studies.log" if in_journal else None
    words = ("--study", "tiny", "--json", *(("--storage", storage) if storage else ()))
    with (
        started_command("tune", *words, cwd=tmp_path) as survivor,
        started_command("tune", *words, cwd=tmp_path) as victim,
    ):
        read_until(victim, "] trial ")
        search = find_search("tiny", tmp_path, storage)
        owner, limit = owner_of(victim, tmp_path), time.monotonic() + PATIENCE

        def is_at_work() -> bool:
            # A trial that dies before it has drawn its values and begun its run leaves less behind.
            running = [trial.attributes for trial in search.trials() if trial.state == "running"]
            return any(known.get(OWNER) == owner and "run_id" in known for known in running)

        # It has just ended a trial: the next one is killed at its very beginning.
        while not is_at_work():
            assert time.monotonic() < limit
            time.sleep(0.02)
        victim.kill()
        rest_of(victim)
        wait_for_nobody(victim)
        ended = rest_of(survivor)
    assert ended.status == 0
    assert "was left unfinished by a process that is gone" in ended.out
    trials = search.trials()
    assert sorted(trial.state for trial in trials) == ["complete"] * 5 + ["failed"]
    (failed,) = [trial for trial in trials if trial.state == "failed"]
    (again,) = [trial for trial in trials if trial.attributes.get(RETRY_OF) == failed.number]
    assert again.values == failed.values
    runs = Stores.runs_of(tmp_path)
    assert runs["trial"].count("FINISHED") == 5
    assert sorted(runs["trial"])[0] == "FAILED"
    assert (runs["study"], runs["refit"], runs["comparator"]) == (["FINISHED"], ["FINISHED"], ["FINISHED"] * 3)


@pytest.mark.slow
def test_the_refit_is_taken_over(tmp_path: Path) -> None:
    """A worker that is killed while it refits is followed by the one that waited; a third only reports the same."""
    write_study(tmp_path, space=LONG, trials=5)
    with (
        started_command("tune", "--study", "tiny", "--json", cwd=tmp_path) as one,
        started_command("tune", "--study", "tiny", "--json", cwd=tmp_path) as two,
    ):
        for process in (one, two):
            read_until(process, "searching: ")
        limit = time.monotonic() + PATIENCE
        while not (holder := refitting(tmp_path)):
            assert time.monotonic() < limit
            time.sleep(0.05)
        # Stopped, a process is still alive: nobody takes over.
        for process in (one, two):
            process.send_signal(signal.SIGSTOP)
        running = {name: process for process in (one, two) if (name := owner_of(process, tmp_path))}
        assert len(running) == 2
        refits, waits = running.pop(holder), next(iter(running.values()))
        refits.kill()
        waits.send_signal(signal.SIGCONT)
        rest_of(refits)
        ended = rest_of(waits)
    assert ended.status == 0
    third = run_command("tune", "--study", "tiny", "--json", "-q", cwd=tmp_path)
    answer = json.loads(ended.out.splitlines()[-1])
    assert third.json_lines()[0]["test"] == answer["test"]
    runs = Stores.runs_of(tmp_path)
    assert runs["refit"] == ["FAILED", "FINISHED"]
    assert runs["comparator"] == ["FINISHED"] * 3
    assert runs["study"] == ["FINISHED"]


def refitting(root: Path) -> str | None:
    """Return the worker whose refit has begun, or None."""
    try:
        runs = Stores.read(root).runs
    except (LookupError, AttributeError):  # nothing is there yet
        return None
    return next((run.data.tags[OWNER] for run in runs if run.data.tags["kind"] == "refit"), None)


def owner_of(process: "subprocess.Popen[str]", root: Path) -> str | None:
    """Return the name of the lock that a process holds, by the files that it has open."""
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        target = descriptor.readlink()
        if target.parent == owners_folder(root).resolve():
            return target.stem
    return None


# -- terminals and pipes --------------------------------------------------------------------------------------------


@contextmanager
def in_terminal(*arguments: object, cwd: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start tune in a terminal of its own; yields the process and the terminal's other end."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command_line("tune", *arguments),
        cwd=cwd,
        env=command_environment({"TERM": "xterm", "COLUMNS": "200", "LINES": "40", "NO_COLOR": "1"}),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        kill_group(process)  # type: ignore[arg-type]
        process.wait()
        os.close(ours)


def read_terminal(descriptor: int, text: str | None = None) -> str:
    """Return what a terminal shows up to a text, or to its end."""
    seen = b""
    while text is None or text.encode() not in seen:
        try:
            part = os.read(descriptor, 65_536)
        except OSError:  # how Linux says that the other end is closed
            part = b""
        if not part:
            assert text is None, f"{text!r} did not come; the terminal showed:\n{seen.decode()}"
            break
        seen += part
    return seen.decode()


@pytest.mark.slow
def test_a_live_line_in_a_terminal(tmp_path: Path) -> None:
    """In a terminal a line below the others tells how far each trial is; Ctrl-C leaves the terminal as it was."""
    write_study(tmp_path, space=LONG, trials=2)
    with in_terminal("--study", "tiny", cwd=tmp_path) as (process, terminal):
        shown = read_terminal(terminal, "0/2 trials | trial 0 round ")
        shown += read_terminal(terminal, "[1/2] trial 0: loss ")
        shown += read_terminal(terminal, "1/2 trials | trial 1 round ")
        os.killpg(process.pid, signal.SIGINT)
        shown += read_terminal(terminal)
        assert process.wait(60) == 130
    assert re.search(r"round \d+/40 loss 0\.\d+ \| best so far: trial 0, loss 0\.\d+ .* \| about \d:\d\d left", shown)
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is back
    assert shown.rstrip().endswith(f"ERROR: interrupted; {WHAT_IS_LEFT}")


@pytest.mark.slow
def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """`tune | head -1` ends quietly, and the study can be gone on with."""
    write_study(tmp_path, trials=2)
    process = subprocess.Popen(
        command_line("tune", "--study", "tiny"),
        cwd=tmp_path,
        env=command_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("study tiny: ")
    process.stdout.close()
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (1, "")
    printed = call_command("tune", "--study", "tiny", "--json", cwd=tmp_path)
    assert printed.json_lines()[0]["trials"] == {"complete": 2, "pruned": 0, "failed": 0}


@pytest.mark.slow
@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"PYTHONIOENCODING": "latin-1"}], ids=str)
def test_any_locale(done: Done, tmp_path: Path, locale: dict[str, str]) -> None:
    """Names beyond ASCII work, and are shown as well as it goes, whatever language the system speaks."""
    root = tmp_path / "Köln 東京"
    shutil.copytree(done.root, root)
    write_study(root, "größe", trials=1)
    printed = run_command("tune", "--root", root, "--study", "größe", cwd=tmp_path, env=locale)
    assert printed.status == 0
    assert printed.err == ""
    assert "best is trial 0" in printed.out
    assert load_clients("größe_clients", root=root).num_rounds <= 3


def test_paths_that_are_no_text(tmp_path: Path) -> None:
    """Where the system has no characters but ASCII, a folder beyond them is refused in a line that helps."""
    root = tmp_path / "Köln"
    write_study(root)
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    printed = run_command("tune", "--root", root, "--study", "tiny", cwd=tmp_path, env=locale)
    assert (printed.status, printed.out) == (2, "")
    assert "is not text in the character set ascii; set PYTHONUTF8=1" in printed.err
    assert files(root) == {"studies", "studies/tiny.yaml"}


@pytest.mark.slow
def test_as_json_from_a_shell(done: Done, tmp_path: Path) -> None:
    """From a shell, too, stdout holds the object and nothing else, and the libraries write nothing of their own."""
    root = tmp_path / "copy"
    shutil.copytree(done.root, root)
    printed = run_command("tune", "--root", root, "--study", "tiny", "--json", "-q", "--trials", 4, cwd=tmp_path)
    assert (printed.status, printed.err) == (0, "")
    (answer,) = printed.json_lines()
    assert answer["trials"] == {"complete": 4, "pruned": 0, "failed": 0}
