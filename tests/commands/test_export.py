"""The best trial of a stored study becomes a client config, whatever has become of the study's file."""

import errno
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from run_command import Finished, run_command

from fedlightning import __version__
from fedlightning.config import (
    ClientsConfig,
    StudyConfig,
    fingerprint,
    flatten,
    load_clients,
    load_study,
    override_study,
    parse_clients,
)
from fedlightning.jobs.refit import REFIT
from fedlightning.jobs.trial import BEST_ROUND, RUN_ID, VALIDATION
from fedlightning.owners import Owner
from fedlightning.search import Proposal, Pruned, StudySearch
from fedlightning.storages import open_storage
from fedlightning.workers import owners_folder

Call = Callable[..., Finished]

STUDY = """\
dataset: wine
client_num: 3
trials: 4
seed: 5
space:
  n_estimators_client: {choices: [3, 5, 8]}
  num_iterations: 20
  num_rounds: 9
  xgb.max_depth: {low: 2, high: 6}
  xgb.subsample: 0.9
  CNN.lr: {low: 1.0e-4, high: 1.0e-2, log: true}
"""


@dataclass(frozen=True)
class Outcome:
    """How a trial ends: its loss, or None if it is pruned, and its best round."""

    loss: float | None
    best_round: int = 4


@pytest.fixture
def study(call: Call) -> StudyConfig:
    """A study whose file lies in the folder that commands are called in."""
    Path("studies").mkdir()
    Path("studies/vines.yaml").write_text(STUDY)
    return load_study("vines", root=Path())


def search_through(
    study: StudyConfig, outcomes: Sequence[Outcome], name: str = "vines", url: str | None = None
) -> list[dict[str, Any]]:
    """Search a study in the real store, with outcomes in place of trainings; return what each trial ran with."""
    search = StudySearch(name, study, Path(), open_storage(Path(), url))
    search.open()
    ran: list[dict[str, Any]] = []
    ends = iter(outcomes)

    def evaluate(proposal: Proposal) -> float:
        ran.append(flatten(proposal.clients))
        outcome = next(ends)
        if outcome.loss is None:
            raise Pruned("not worth going on with")
        scores = {"loss": outcome.loss, "metric": 0.875, "examples": 26}
        proposal.note(BEST_ROUND, outcome.best_round)
        proposal.note(
            VALIDATION, {"network": scores, "mean_margin": scores, "local_only": [scores], "centralized": None}
        )
        return outcome.loss

    done = search.counts().finished
    with Owner(owners_folder(Path())) as owner:
        search.run(evaluate, total=done + len(outcomes), owner=owner.name)
    return ran


def test_the_best_trial_is_exported(call: Call, study: StudyConfig) -> None:
    """The file holds all that the best trial ran with and its best round; pruned and worse trials do not count."""
    ran = search_through(study, [Outcome(0.5), Outcome(None), Outcome(0.25, best_round=7), Outcome(0.75)])
    done = call("export", "--study", "vines")
    path = Path("studies/clients/vines_clients.yaml")
    assert done == Finished(
        0,
        f"client config: {path} (trial 2)\n"
        "use it:        python -m fedlightning.run --dataset wine --clients vines_clients\n",
        "",
    )
    assert flatten(load_clients("vines_clients", root=Path())) == {**ran[2], "num_rounds": 7}
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert header == [
        f"# Exported by fedlightning {__version__} from study vines ({fingerprint(study)[:12]}), seed 5:",
        "# trial 2, the best of 3 complete and 1 pruned ones,",
        "# validation loss 0.2500, accuracy 87.50 % in round 7; num_rounds is that round.",
        "# hfedxgboost ignores: xgb.subsample",
    ]


def test_a_study_in_another_store_is_found_by_its_url(call: Call, study: StudyConfig) -> None:
    """--storage leads to a study that lies elsewhere; without it there is none, and nothing is made."""
    (ran,) = search_through(study, [Outcome(0.5)], url="vines.log")
    missing = call("export", "--study", "vines")
    assert (missing.status, missing.out) == (2, "")
    assert "no study 'vines' in mlruns/optuna.db; stored: none" in missing.err
    assert not Path("mlruns/optuna.db").exists()
    assert call("export", "--study", "vines", "--storage", "vines.log").status == 0
    assert flatten(load_clients("vines_clients", root=Path())) == {**ran, "num_rounds": 4}
    other = call("export", "--study", "vines", "--storage", "sqlite:///other.db")
    assert other.status == 2
    assert "no study 'vines' in sqlite:///other.db; stored: none" in other.err
    assert not Path("other.db").exists()


def test_the_best_so_far_is_exported(call: Call, study: StudyConfig) -> None:
    """An export in between is replaced by that of a better trial."""
    first = search_through(study, [Outcome(0.5)])
    assert call("export", "--study", "vines").status == 0
    assert load_clients("vines_clients", root=Path()).CNN.lr == first[0]["CNN.lr"]
    second = search_through(study, [Outcome(0.4)])
    assert call("export", "--study", "vines").status == 0
    assert load_clients("vines_clients", root=Path()).CNN.lr == second[0]["CNN.lr"]
    assert [path.name for path in Path("studies/clients").iterdir()] == ["vines_clients.yaml"]


def test_values_are_those_of_the_trial_not_of_the_file(call: Call, study: StudyConfig) -> None:
    """Keys that were fixed on the command line are exported as they ran, also when the file is changed or gone."""
    (ran,) = search_through(override_study(study, ["num_iterations=33", "xgb.max_depth=3", "seed=6"]), [Outcome(0.5)])
    assert (ran["num_iterations"], ran["xgb.max_depth"]) == (33, 3)
    expected = {**ran, "num_rounds": 4}
    assert flatten(exported(call)) == expected
    Path("studies/vines.yaml").write_text(STUDY.replace("num_iterations: 20", "num_iterations: 99"))
    assert flatten(exported(call)) == expected
    Path("studies/vines.yaml").unlink()
    assert flatten(exported(call)) == expected


def exported(call: Call) -> ClientsConfig:
    """Return the client config that goes to stdout."""
    done = call("export", "--study", "vines", "--out", "-")
    assert (done.status, done.err) == (0, "")
    return parse_clients(done.out, source="stdout")


def test_a_study_is_named_by_its_file_too(call: Call, study: StudyConfig) -> None:
    """What `tune` was given as a path can be given to `export` in the same way."""
    search_through(study, [Outcome(0.5)])
    by_name = call("export", "--study", "vines", "--out", "-")
    assert call("export", "--study", "studies/vines.yaml", "--out", "-") == by_name


def test_an_archived_study_can_be_exported(call: Call, study: StudyConfig) -> None:
    """What --fresh has put aside is still there under its other name."""
    ran = search_through(study, [Outcome(0.5)])
    search = StudySearch("vines", study, Path(), open_storage(Path()))
    (notice,) = search.open(fresh=True)
    kept = notice.rpartition(" as ")[2].strip("'")
    assert call("export", "--study", "vines").status == 2
    assert call("export", "--study", kept, "--out", "old.yaml").status == 0
    assert load_clients("old.yaml").CNN.lr == ran[0]["CNN.lr"]


def test_a_refit_is_named_only_if_it_is_the_winners(call: Call, study: StudyConfig) -> None:
    """The header leads to the tracking store while the stored refit is that of the best trial."""
    search_through(study, [Outcome(0.5)])
    search = StudySearch("vines", study, Path(), open_storage(Path()))
    scores = {"loss": 0.5, "metric": 0.875, "examples": 26}
    comparison = {"network": scores, "mean_margin": scores, "local_only": [scores], "centralized": scores}
    search.set_attribute(RUN_ID, "0123abc")
    search.set_attribute(REFIT, {"trial": 0, "run_id": "4567def", "validation": comparison, "test": comparison})
    assert "# Refitted in MLflow run 0123abc.\n" in call("export", "--study", "vines", "--out", "-").out
    search_through(study, [Outcome(0.4)])
    assert "Refitted" not in call("export", "--study", "vines", "--out", "-").out


@pytest.mark.parametrize("out", ["best.yaml", "deep/er/best.yaml", "best.txt"])
def test_the_next_command_finds_the_file(call: Call, study: StudyConfig, out: str) -> None:
    """The file is where it was asked for, and the line to copy reads it."""
    search_through(study, [Outcome(0.5)])
    done = call("export", "--study", "vines", "--out", out)
    assert done.status == 0
    assert done.out.startswith(f"client config: {out} (trial 0)\n")
    (named,) = re.findall(r"--clients (\S+)$", done.out)
    if out.endswith(".yaml"):
        assert load_clients(named) == load_clients(out)
    assert Path(named) == Path(out)
    assert "/" in named or named.endswith(".yaml")


def test_another_root_is_in_the_line_to_copy(call: Call, study: StudyConfig, tmp_path: Path) -> None:
    """From another folder, `run` is told the root where it finds the file by name; --quiet prints the path alone."""
    search_through(study, [Outcome(0.5)])
    root = Path.cwd()
    done = call("export", "--study", "vines", "--root", root)
    assert done.out.splitlines()[1].endswith(f"--dataset wine --clients vines_clients --root {root}")
    quiet = call("export", "--study", "vines", "--root", root, "-q")
    assert quiet.out == f"{root}/studies/clients/vines_clients.yaml\n"


def test_somebodys_own_file_is_kept(call: Call, study: StudyConfig) -> None:
    """A file of that name that was not exported is put beside it, and that is said."""
    search_through(study, [Outcome(0.5)])
    own = Path("own.yaml")
    own.write_text("mine: 1\n")
    done = call("export", "--study", "vines", "--out", own)
    assert done.status == 0
    assert "WARNING: own.yaml was not an exported file; it is kept as own.yaml.kept" in done.err
    assert Path("own.yaml.kept").read_text() == "mine: 1\n"
    assert own.read_text().startswith("# Exported by fedlightning")


def test_without_a_store_nothing_is_made(call: Call) -> None:
    """Who has not tuned yet is told how, and no folder appears."""
    done = call("export", "--study", "a9a_5")
    assert (done.status, done.out) == (2, "")
    assert "no study 'a9a_5' in mlruns/optuna.db; stored: none; begin it with `python -m fedlightning.tune" in done.err
    assert list(Path().iterdir()) == []


def test_an_unknown_study_is_an_error(call: Call, study: StudyConfig) -> None:
    """The stored studies are named, the closest first."""
    search_through(study, [Outcome(0.5)], name="zebras")
    search_through(study, [Outcome(0.5)], name="apples")
    done = call("export", "--study", "zebra")
    assert done.status == 2
    assert "no study 'zebra' in mlruns/optuna.db; stored: zebras, apples;" in done.err


def test_a_study_without_a_complete_trial_is_an_error(call: Call, study: StudyConfig) -> None:
    """Pruned trials have nothing to export."""
    search_through(study, [Outcome(None)])
    done = call("export", "--study", "vines")
    assert (done.status, done.out) == (2, "")
    assert "study 'vines' has no complete trial" in done.err
    assert not Path("studies/clients").exists()


@pytest.mark.parametrize("out", ["folder", "studies/vines.yaml/below.yaml", "/proc/no.yaml"])
def test_an_unwritable_place_is_an_error(call: Call, study: StudyConfig, out: str) -> None:
    """The file and the reason are named, and nothing is left behind."""
    search_through(study, [Outcome(0.5)])
    Path("folder").mkdir()
    before = sorted(Path().rglob("*"))
    done = call("export", "--study", "vines", "--out", out)
    assert (done.status, done.out) == (1, "")
    assert f"cannot write {out}: " in done.err
    assert "--out FILE" in done.err
    assert sorted(Path().rglob("*")) == before


def test_a_full_disk_leaves_the_earlier_file(call: Call, study: StudyConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the new file cannot take its place, the old one stays whole and nothing lies beside it."""
    search_through(study, [Outcome(0.5)])
    assert call("export", "--study", "vines", "--out", "best.yaml").status == 0
    before = {path: path.read_bytes() for path in Path().glob("*.yaml*")}

    def refuse(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", refuse)
    done = call("export", "--study", "vines", "--out", "best.yaml")
    assert done.status == 1
    assert "cannot write best.yaml: No space left on device" in done.err
    assert {path: path.read_bytes() for path in Path().glob("*.yaml*")} == before
    assert list(Path().glob(".best*")) == []


@pytest.mark.slow
def test_export_repeats_what_tune_exported(call: Call, study: StudyConfig) -> None:
    """For a finished study both write the same bytes, and `run` takes them."""
    arguments = ("--study", "vines", "--trials", "2", "num_rounds=2", "num_iterations=5")
    assert run_command("tune", *arguments, cwd=Path()).status == 0
    path = Path("studies/clients/vines_clients.yaml")
    exported = path.read_bytes()
    path.unlink()
    assert run_command("export", "--study", "vines", cwd=Path()).status == 0
    assert path.read_bytes() == exported
    assert b"# Refitted in MLflow run " in exported
    done = run_command("run", "--dataset", "wine", "--clients", "vines_clients", "--json", cwd=Path())
    assert done.status == 0
    assert done.json_lines()[0]["clients"] == "vines_clients"
