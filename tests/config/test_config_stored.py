"""A study can be told from its stored definition alone."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlightning.config import (
    StudyConfig,
    default_centralized,
    definition,
    fingerprint,
    load_centralized,
    load_study,
    study_from_definition,
    trial_clients,
)
from fedlightning.config.study_files import study_from_document

ENTRIES: dict[str, st.SearchStrategy[Any]] = {
    "n_estimators_client": st.one_of(
        st.integers(1, 300), st.lists(st.integers(1, 300), min_size=1, unique=True).map(lambda v: {"choices": v})
    ),
    "num_iterations": st.integers(1, 500),
    "xgb.max_depth": st.one_of(
        st.integers(1, 30),
        st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 4)).map(
            lambda t: {"low": t[0], "high": t[0] + t[1] * t[2], "step": t[1]}
        ),
    ),
    "CNN.lr": st.one_of(
        st.floats(1e-12, 1.0),
        st.tuples(st.floats(1e-12, 1e-3), st.floats(1e-3, 1.0)).map(lambda t: {"low": t[0], "high": t[1], "log": True}),
        st.just({"low": 0.1, "high": 0.5, "step": 0.1}),
    ),
    "num_rounds": st.integers(1, 100),
    "xgb.gamma": st.one_of(st.integers(0, 9), st.just({"choices": [0, 1, 5.5]})),
}


@st.composite
def studies(draw: st.DrawFn) -> StudyConfig:
    """Studies on a9a with any entries in their space."""
    document = {
        "dataset": {"name": "a9a", "train_ratio": draw(st.floats(0.01, 0.99)), "split_seed": draw(st.integers(0, 9))},
        "client_num": draw(st.integers(1, 20)),
        "trials": draw(st.integers(1, 9)),
        "seed": draw(st.integers(0, 2**32 - 1)),
        "objective": draw(st.sampled_from(["loss", "metric"])),
        "val_ratio": draw(st.floats(0.01, 0.99)),
        "space": {key: draw(entry) for key, entry in ENTRIES.items()},
    }
    return study_from_document(document, source="study.yaml")


@given(studies())
def test_a_definition_gives_the_study_back(study: StudyConfig) -> None:
    """After a trip through the store, the same keys are searched in the same space, and the rest is as it was."""
    stored = json.loads(json.dumps(definition(study)))
    again = study_from_definition(stored, source="store")
    assert definition(again) == definition(study)
    assert fingerprint(again) == fingerprint(study)
    assert again.searched == study.searched
    assert again.dataset == study.dataset


def test_values_behind_a_study_come_along() -> None:
    """Keys that a study takes from a published config are part of its definition."""
    document = {"dataset": "a9a", "client_num": 5, "trials": 3, "space": {"CNN.lr": {"low": 0.1, "high": 0.2}}}
    study = study_from_document(document, source="study.yaml")
    again = study_from_definition(definition(study), source="store")
    assert again.base is None
    assert trial_clients(again, {"CNN.lr": 0.15}) == trial_clients(study, {"CNN.lr": 0.15})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"xgb.max_depth": 99}, "xgb.max_depth is 99; allowed: "),
        ({"xgb.max_depth": "{low: 9}"}, "xgb.max_depth is {'low': 9}; allowed: "),
        ({"xgb.max_depth": "deep"}, "xgb.max_depth: a mapping"),
        ({"seed": -1}, "seed is -1; allowed: "),
    ],
)
def test_a_foreign_definition_is_refused(change: dict[str, Any], message: str) -> None:
    """What is no definition of this version names where it was found and what is wrong with it."""
    with pytest.raises(ValueError, match=r"^store: ") as raised:
        study_from_definition({**definition(load_study("a9a_5")), **change}, source="store")
    assert message in str(raised.value)


def test_an_empty_definition_is_refused() -> None:
    """A study that something else has put into the store is none of ours."""
    with pytest.raises(ValueError, match=r"^store: "):
        study_from_definition({}, source="store")


def test_a_data_set_has_its_own_centralized_set_or_the_papers() -> None:
    """The name that is taken by default is the one whose values are taken by default."""
    assert default_centralized("abalone") == "abalone"
    assert default_centralized("a9a") == default_centralized(None) == "paper"
    for dataset in ("abalone", "cpusmall", "YearPredictionMSD", "a9a", "paper"):
        assert load_centralized(None, dataset) == load_centralized(default_centralized(dataset))
