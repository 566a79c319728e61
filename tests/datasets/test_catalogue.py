"""The catalogue says what the reference uses, and finds a data set by what people type."""

import dataclasses

import pytest

from fedlightning.datasets import CATALOGUE, find_dataset


def test_files_are_those_of_the_reference_in_its_order() -> None:
    """Each of the reference's data sets is made of the reference's files, in its order."""
    files = {name: [file.name for file in entry.files] for name, entry in CATALOGUE.items() if entry.files}
    assert files == {
        "a9a": ["a9a", "a9a.t"],
        "cod_rna": ["cod-rna.t", "cod-rna.r"],
        "ijcnn1": ["ijcnn1.t", "ijcnn1.tr"],
        "abalone": ["abalone_scale"],
        "cpusmall": ["cpusmall_scale"],
        "space_ga": ["space_ga_scale"],
        "YearPredictionMSD": ["YearPredictionMSD", "YearPredictionMSD.t"],
    }


def test_patience_and_train_ratio_are_those_of_the_reference() -> None:
    """Early stopping waits as long as in the reference, and 75 % of the rows train."""
    patience = {name: entry.patience for name, entry in CATALOGUE.items() if entry.files}
    assert patience == {
        "a9a": 10,
        "cod_rna": 10,
        "ijcnn1": 10,
        "abalone": 30,
        "cpusmall": 100,
        "space_ga": 50,
        "YearPredictionMSD": 50,
    }
    assert {entry.train_ratio for entry in CATALOGUE.values()} == {0.75}


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda entry: entry.name)
def test_entry_agrees_with_itself(entry) -> None:
    """Rows add up over the files, classes fit the task, and an entry cannot be changed."""
    if entry.files:
        assert sum(file.rows for file in entry.files) == entry.rows
    assert {"binary": entry.classes == 2, "multiclass": entry.classes > 2, "regression": entry.classes == 0}[entry.task]
    for file in entry.files:
        assert file.sha256 is None or len(file.sha256) == 64
        assert file.url_path.split("/")[1].removesuffix(".bz2") == file.name
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.rows = 0


def test_alias_finds_the_same_entry() -> None:
    """The name with a hyphen, as LIBSVM Data writes it, is accepted."""
    assert find_dataset("cod-rna") is find_dataset("cod_rna") is CATALOGUE["cod_rna"]


@pytest.mark.parametrize(
    ("typed", "first"), [("a9b", "a9a"), ("IJCNN", "ijcnn1"), ("yearprediction", "YearPredictionMSD")]
)
def test_unknown_name_is_answered_with_the_nearest(typed: str, first: str) -> None:
    """A typing error is answered with all known names, the nearest first."""
    with pytest.raises(LookupError) as caught:
        find_dataset(typed)
    message = str(caught.value)
    assert message.startswith(f"unknown data set {typed!r}; known: {first}, ")
    assert sorted(message.split("known: ")[1].split(", ")) == sorted(CATALOGUE)
