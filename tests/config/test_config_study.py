"""A study file is checked as a whole, completed from published values, and identified by what it defines."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlightning.config import (
    Choices,
    DatasetConfig,
    Fixed,
    Range,
    StudyConfig,
    definition,
    differences,
    effectless,
    fingerprint,
    flatten,
    known_studies,
    load_clients,
    load_study,
    override_study,
    published_clients,
    start_values,
    study_name,
    to_yaml,
    trial_clients,
    widen,
)
from fedlightning.config.distributions import SPACE_KEYS, check_value
from fedlightning.config.documents import parse_mapping
from fedlightning.config.study_files import study_from_document

SPACE: dict[str, Any] = {
    "n_estimators_client": {"choices": [25, 50]},
    "num_iterations": 100,
    "xgb.max_depth": {"low": 4, "high": 8, "step": 2},
    "CNN.lr": {"low": 1e-5, "high": 1e-2, "log": True},
    "num_rounds": {"low": 5, "high": 10},
}


def study(root: Path | None = None, **settings: Any) -> StudyConfig:
    """A small study on a9a with other settings in place of its own."""
    document = {"dataset": "a9a", "client_num": 5, "trials": 3, "space": SPACE, **settings}
    return study_from_document(document, source="study.yaml", root=root)


def test_the_shipped_study_of_a9a_is_complete() -> None:
    """It holds the design's space, starts from the published values, and these lie inside."""
    config = load_study("a9a_5")
    assert config.dataset == DatasetConfig(name="a9a", patience=10)
    assert (config.client_num, config.trials, config.timeout, config.seed) == (5, 60, 480.0, 0)
    assert (config.sampler, config.pruner, config.objective, config.val_ratio) == (
        "tpe",
        "median",
        "loss",
        0.2,
    )
    assert config.space == {
        "n_estimators_client": Choices((25, 50, 100, 150, 200, 250)),
        "num_iterations": Choices((100, 250, 500)),
        "xgb.max_depth": Range(4, 8, kind="int"),
        "CNN.lr": Range(1e-5, 1e-2, log=True, kind="float"),
        "xgb.gamma": Choices((0.0, 1.0, 5.0)),
        "xgb.alpha": Choices((0.0, 1.0, 5.0)),
        "num_rounds": Fixed(30),
    }
    values = start_values(config)
    assert values is not None
    assert trial_clients(config, values) == published_clients("a9a", 5)
    assert widen(config, values) == (config, [])


def test_a_study_is_found_by_name_or_path(tmp_path: Path) -> None:
    """The user's folder wins over what ships, and a path is read as it is."""
    folder = tmp_path / "studies"
    folder.mkdir()
    text = to_yaml(study(trials=7))
    (folder / "a9a_5.yaml").write_text(text)
    (folder / "mine.yaml").write_text(text)
    assert load_study("a9a_5", root=tmp_path).trials == 7
    assert load_study("mine", root=tmp_path) == load_study(folder / "mine.yaml") == study(trials=7)
    assert set(known_studies(tmp_path)) == {"mine", *known_studies()}
    assert study_name("mine") == study_name(folder / "mine.yaml") == study_name("a/b/mine.yaml") == "mine"
    with pytest.raises(LookupError, match="unknown study 'mina'; known: mine, "):
        load_study("mina", root=tmp_path)
    with pytest.raises(LookupError, match=r"no study file .*none\.yaml"):
        load_study(tmp_path / "none.yaml")


def test_the_data_set_is_a_name_or_a_mapping() -> None:
    """Settings that the mapping leaves out are the data set's own."""
    assert study(dataset="cod-rna", start_from=None).dataset.name == "cod_rna"
    mapped = study(dataset={"name": "cpusmall", "split_seed": 2024})
    assert mapped.dataset == DatasetConfig(name="cpusmall", patience=100, split_seed=2024)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"xgb.max_depth": {"low": 0, "high": 8}},
            "xgb.max_depth at its low end is 0; allowed: a whole number from 1 to 30",
        ),
        ({"xgb.max_depth": {"low": 1, "high": 31}}, "xgb.max_depth at its high end is 31; allowed"),
        (
            {"xgb.max_depth": {"low": 9, "high": 8}},
            "xgb.max_depth: low is 9 and high is 8; low must not be above high",
        ),
        (
            {"xgb.max_depth": {"low": 4.0, "high": 8}},
            "xgb.max_depth at its low end is 4.0; allowed: a whole number",
        ),
        (
            {"xgb.max_depth": {"low": 4, "high": 8, "step": 1.0}},
            "step is 1.0; allowed: a whole number above 0",
        ),
        (
            {"xgb.max_depth": {"low": 4, "high": 8, "step": 3}},
            "high is 8, which 4 does not reach in whole steps of 3",
        ),
        ({"xgb.subsample": {"low": 0.1, "high": 0.35, "step": 0.1}}, "does not reach in whole steps of 0.1"),
        ({"xgb.subsample": {"low": 0.1, "high": 0.3, "step": 0}}, "step is 0; allowed: a number above 0"),
        (
            {"xgb.subsample": {"low": 0.1, "high": 0.3, "step": True}},
            "step is true; allowed: a number above 0",
        ),
        (
            {"xgb.gamma": {"low": 0, "high": 5, "log": True}},
            "xgb.gamma: low is 0.0; a log range starts above 0",
        ),
        (
            {"xgb.gamma": {"low": 1, "high": 5, "log": True, "step": 1}},
            "step is 1 in a log range; give either",
        ),
        ({"xgb.gamma": {"low": 1, "high": 5, "log": 1}}, "xgb.gamma: log is 1; allowed: true or false"),
        (
            {"xgb.gamma": {"low": 1}},
            "xgb.gamma is {'low': 1}; allowed: a value, {choices: [...]} or {low, high, step, log}",
        ),
        ({"xgb.gamma": {"low": 1, "high": 5, "choices": [1]}}, "allowed: a value, {choices: [...]}"),
        ({"xgb.gamma": {}}, "xgb.gamma is {}; allowed: a value, {choices: [...]}"),
        ({"xgb.gamma": {"choices": []}}, "xgb.gamma: choices is []; allowed: a list of 1 to 1000 values"),
        ({"xgb.gamma": {"choices": 5}}, "xgb.gamma: choices is 5; allowed: a list"),
        ({"xgb.gamma": {"choices": list(range(1001))}}, "allowed: a list of 1 to 1000 values"),
        ({"xgb.gamma": {"choices": [0, 1, 0.0]}}, "xgb.gamma: the choice 0.0 is given twice"),
        ({"xgb.gamma": {"choices": [0, -1]}}, "xgb.gamma among the choices is -1; allowed: a number from 0"),
        ({"xgb.gamma": {"choices": [True]}}, "xgb.gamma among the choices is true; allowed: a number"),
        ({"xgb.gamma": {"choices": [[1]]}}, "xgb.gamma among the choices is [1]; allowed: a number"),
        ({"xgb.gamma": [0, 1]}, "xgb.gamma is a list; write {choices: [0, 1]}"),
        ({"xgb.gamma": None}, "xgb.gamma is null; allowed: a number"),
        ({"xgb.gamma": float("nan")}, "xgb.gamma is nan; allowed: a number"),
        ({"client_num": {"choices": [2, 5]}}, "client_num is not searched; it is the study's own key"),
        ({"xgb": {"max_depth": 5}}, "write its keys with a dot, such as xgb.max_depth"),
        ({"xgb.max_dept": 5}, "unknown key 'xgb.max_dept'; known: xgb.max_depth, "),
        ({"batch_size": 8, "CNN.batch_size": 8}, "CNN.batch_size is given twice"),
        ({"val_ratio": 0.3}, "unknown key 'val_ratio'; known: "),
    ],
)
def test_a_wrong_entry_of_the_space_is_explained(entry: dict[str, Any], message: str) -> None:
    """Every corner of the space has to be a value that the setting can take."""
    with pytest.raises(ValueError, match=r"^study\.yaml: space: ") as raised:
        study(space={**SPACE, **entry})
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trials": 0}, "trials is 0; allowed: a whole number from 1 to 100000"),
        ({"timeout": -1}, "timeout is -1; allowed: a number above 0 and at most 1000000000 or null"),
        ({"seed": True}, "seed is true; allowed: a whole number from 0"),
        ({"val_ratio": 0}, "val_ratio is 0; allowed: a number above 0 and below 1"),
        ({"sampler": "cma"}, "sampler is 'cma'; allowed: tpe or random or gp"),
        ({"pruner": None}, "pruner is null; allowed: median or none"),
        ({"start_from": 5}, "start_from is 5; allowed: text"),
        ({"space": [1]}, "space is [1]; allowed: a mapping of keys to values, choices or ranges"),
        (
            {"dataset": None},
            "dataset is null; allowed: the name of a data set, or a mapping with name, train_ratio",
        ),
        (
            {"dataset": {"name": "a9a", "splitseed": 1}},
            "unknown key 'dataset.splitseed'; known: dataset.split_seed, ",
        ),
        (
            {"dataset": {"name": "a9a", "patience": 0}},
            "dataset.patience is 0; allowed: a whole number from 1",
        ),
        ({"base": {}}, "unknown key 'base'; known: "),
        ({"trails": 5}, "unknown key 'trails'; known: trials, "),
        (
            {"client_num": 7, "space": {"num_rounds": 3}},
            "space: n_estimators_client, num_iterations, xgb.max_depth, CNN.lr missing",
        ),
    ],
)
def test_a_wrong_setting_of_a_study_is_explained(settings: dict[str, Any], message: str) -> None:
    """The error has the file, the key, the value and what is allowed."""
    with pytest.raises(ValueError, match=r"^study\.yaml: ") as raised:
        study(**settings)
    assert message in str(raised.value)


@pytest.mark.parametrize("key", ["client_num", "trials", "space"])
def test_a_missing_setting_is_named(key: str) -> None:
    """What has no default has to stand in the file."""
    document = {"dataset": "a9a", "client_num": 5, "trials": 3, "space": SPACE}
    del document[key]
    with pytest.raises(ValueError, match=f"study.yaml: {key} is missing; allowed: "):
        study_from_document(document, source="study.yaml")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "a9b"}, "study.yaml: unknown data set 'a9b'; known: a9a"),
        (
            {"start_from": "a9a_5_client"},
            "study.yaml: start_from: unknown client config 'a9a_5_client'; known: a9a_5_clients",
        ),
        (
            {"start_from": "published", "client_num": 7},
            "nothing is published for a9a with 7 clients; name a client config",
        ),
    ],
)
def test_an_unknown_name_in_a_study_is_explained(settings: dict[str, Any], message: str) -> None:
    """Data sets and client configs that a study names have to exist."""
    with pytest.raises(LookupError) as raised:
        study(**settings)
    assert message in str(raised.value)


def test_what_the_space_leaves_out_comes_from_the_start(tmp_path: Path) -> None:
    """A study that starts from a config keeps its further values; else the published one fills in."""
    folder = tmp_path / "studies" / "clients"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(
        "n_estimators_client: 7\nnum_rounds: 8\nclient_num: 2\nnum_iterations: 9\n"
        "xgb: {max_depth: 3, gamma: 0}\nCNN: {lr: 0.1}\n"
    )
    mine = study(tmp_path, start_from="mine", space={"CNN.lr": {"low": 0.01, "high": 0.1}})
    expected = load_clients("mine", root=tmp_path).model_copy(update={"client_num": 5})
    values = start_values(mine)
    assert values == {"CNN.lr": 0.1}
    assert trial_clients(mine, values) == expected
    published = study(space={"CNN.lr": {"low": 1e-4, "high": 0.1}})
    assert start_values(published) is None
    assert trial_clients(published, {"CNN.lr": 0.0005}) == published_clients("a9a", 5)


def test_published_means_the_reference_s_values_even_after_an_export(tmp_path: Path) -> None:
    """An export under the published name does not change what a resumed study starts from."""
    folder = tmp_path / "studies" / "clients"
    folder.mkdir(parents=True)
    (folder / "a9a_5_clients.yaml").write_text(
        "n_estimators_client: 7\nnum_rounds: 8\nclient_num: 5\nnum_iterations: 9\nxgb: {max_depth: 3}\nCNN: {lr: 0.1}\n"
    )
    assert load_study("a9a_5", root=tmp_path) == load_study("a9a_5")


def test_a_trial_has_the_drawn_and_the_fixed_values() -> None:
    """The config of a trial is the space with one value for each searched key."""
    drawn = {"n_estimators_client": 25, "xgb.max_depth": 6, "CNN.lr": 1e-3, "num_rounds": 5}
    config = trial_clients(study(space={**SPACE, "batch_size": 64, "xgb.lambda": 2}), drawn)
    expected = {**drawn, "num_iterations": 100, "client_num": 5, "CNN.batch_size": 64, "xgb.lambda": 2.0}
    assert flatten(config).items() >= expected.items()
    with pytest.raises(ValueError, match=r"differ in CNN\.lr, num_iterations"):
        trial_clients(study(), {**{key: drawn[key] for key in drawn if key != "CNN.lr"}, "num_iterations": 5})
    with pytest.raises(ValueError, match="trial: num_rounds is 0"):
        trial_clients(study(), {**drawn, "num_rounds": 0})


@pytest.mark.parametrize(
    ("entry", "value", "expected"),
    [
        ({"choices": [4, 8]}, 6, Choices((4, 6, 8))),
        ({"low": 4, "high": 6}, 8, Range(4, 8, kind="int")),
        ({"low": 4, "high": 6}, 2, Range(2, 6, kind="int")),
        ({"low": 4, "high": 8, "step": 2}, 10, Range(4, 10, 2, kind="int")),
        ({"low": 4, "high": 8, "step": 2}, 5, Range(4, 8, 1, kind="int")),
        ({"low": 4, "high": 10, "step": 6}, 1, Range(1, 10, 3, kind="int")),
    ],
)
def test_a_start_outside_the_space_widens_it(entry: dict[str, Any], value: int, expected: object) -> None:
    """The space then holds the start and all that it held before, and a notice says so."""
    before = study(space={**SPACE, "xgb.max_depth": entry})
    after, notices = widen(before, {"xgb.max_depth": value, "num_rounds": 7})
    assert after.space == {**before.space, "xgb.max_depth": expected}
    assert len(notices) == 1
    assert notices[0].startswith(f"start value xgb.max_depth={value} lies outside the space {{")
    assert widen(after, {"xgb.max_depth": value}) == (after, [])


def test_a_float_off_the_steps_loses_the_steps() -> None:
    """Where no common step exists the range becomes continuous."""
    before = study(space={**SPACE, "xgb.subsample": {"low": 0.1, "high": 0.3, "step": 0.1}})
    assert widen(before, {"xgb.subsample": 0.3}) == (before, [])
    after, notices = widen(before, {"xgb.subsample": 0.25})
    assert after.space["xgb.subsample"] == Range(0.1, 0.3)
    assert len(notices) == 1


def test_a_log_range_cannot_hold_zero() -> None:
    """The error says how to go on."""
    before = study(space={**SPACE, "xgb.gamma": {"low": 0.1, "high": 5, "log": True}})
    with pytest.raises(ValueError, match=r"a log range holds no 0\.0; drop `log` or set start_from: null"):
        widen(before, {"xgb.gamma": 0.0})


def test_an_override_fixes_a_searched_key_or_replaces_a_setting() -> None:
    """The command line has the last word over the study file."""
    changed = override_study(
        load_study("a9a_5"),
        [
            "num_rounds=5",
            "xgb.max_depth=3",
            "batch_size=16",
            "trials=2",
            "timeout=null",
            "dataset.split_seed=7",
            "sampler=random",
        ],
    )
    assert changed.space["num_rounds"] == Fixed(5)
    assert changed.space["xgb.max_depth"] == Fixed(3)
    assert changed.space["CNN.batch_size"] == Fixed(16)
    assert "xgb.max_depth" not in changed.searched
    assert (changed.trials, changed.timeout, changed.dataset.split_seed, changed.sampler) == (
        2,
        None,
        7,
        "random",
    )
    assert override_study(changed, []) == changed


def test_an_override_of_the_start_is_looked_up_anew(tmp_path: Path) -> None:
    """Published values follow the number of clients, and another config can be named."""
    before = load_study("a9a_5")
    assert override_study(before, ["client_num=2"]).base == published_clients("a9a", 2)
    assert override_study(before, ["start_from=a9a_10_clients"], root=tmp_path).base == load_clients("a9a_10_clients")
    assert start_values(override_study(before, ["start_from=null"])) is None
    with pytest.raises(LookupError, match="nothing is published for a9a with 3 clients"):
        override_study(before, ["client_num=3"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("xgb.max_depth=0", "command line: space: xgb.max_depth is 0; allowed: a whole number from 1 to 30"),
        ("trials=1.5", "command line: trials is 1.5; allowed: a whole number"),
        ("trails=1", "command line: unknown key 'trails'; known: trials, "),
        ("xgb.max_depth={low: 1, high: 2}", "is not a single value"),
        ("dataset.name=abalone", "dataset.name cannot be overridden"),
        ("space=5", "unknown key 'space'"),
    ],
)
def test_a_wrong_override_of_a_study_is_explained(override: str, message: str) -> None:
    """The error has the key, the value and what is allowed."""
    with pytest.raises(ValueError, match=r"^command line: ") as raised:
        override_study(load_study("a9a_5"), [override])
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("dataset.split_seed=7", "dataset.split_seed"),
        ("dataset.patience=7", "dataset.patience"),
        ("client_num=2", "client_num"),
        ("seed=1", "seed"),
        ("val_ratio=0.3", "val_ratio"),
        ("objective=metric", "objective"),
        ("xgb.max_depth=8", "xgb.max_depth"),
        ("xgb.subsample=1", "xgb.subsample"),
    ],
)
def test_what_defines_a_study_changes_its_fingerprint(override: str, key: str) -> None:
    """Trials of different definitions are not comparable, and the key that differs is named."""
    before = load_study("a9a_5")
    after = override_study(before, [override])
    assert fingerprint(after) != fingerprint(before)
    (difference,) = differences(definition(before), definition(after))
    assert difference.startswith(f"{key}: ")
    assert difference == f"{key}: {definition(before)[key]} before, {definition(after)[key]} now"


@pytest.mark.parametrize("override", ["trials=1", "timeout=null", "sampler=random", "pruner=none", "xgb.subsample=0.8"])
def test_what_may_change_on_resume_leaves_the_fingerprint(override: str) -> None:
    """Budget and search method may change, and a default spelled out is the same definition."""
    before = load_study("a9a_5")
    after = override_study(before, [override])
    assert fingerprint(after) == fingerprint(before)
    assert differences(definition(before), definition(after)) == []


def test_definitions_that_were_stored_as_text_compare_equal() -> None:
    """A tracking store returns text for numbers; a key that is absent on one side is named."""
    now = definition(load_study("a9a_5"))
    assert differences({key: str(value) for key, value in now.items()}, now) == []
    assert differences({"a": 1, "b": 2}, {"b": 2, "c": 3}) == [
        "a: 1 before, absent now",
        "c: absent before, 3 now",
    ]


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["dataset.patience=30"], ["dataset.patience"]),
        (["dataset.patience=29"], []),
        (["num_rounds=1", "pruner=median"], ["pruner"]),
        (["num_rounds=2", "pruner=median"], []),
        (["sampler=gp"], []),
    ],
)
def test_study_settings_without_effect_are_told(overrides: list[str], keys: list[str]) -> None:
    """Patience beyond the longest trial and a pruner of single rounds are pointed out."""
    warnings = effectless(override_study(load_study("a9a_5"), overrides), {o.partition("=")[0] for o in overrides})
    assert [warning.partition(" has no effect: ")[0] for warning in warnings] == keys


def test_a_study_that_searches_nothing_is_told() -> None:
    """The sampler has nothing to choose when every key is fixed."""
    fixed = study(space={"num_rounds": 3})
    (warning,) = effectless(fixed, {"sampler"})
    assert warning == "sampler has no effect: no key is searched, so every trial has the same values"


def test_patience_is_held_against_the_longest_trial() -> None:
    """Where the number of rounds is searched or left to the published config, its largest value counts."""
    for space, rounds in (
        (SPACE, 10),
        ({**SPACE, "num_rounds": {"choices": [12, 4]}}, 12),
        ({"CNN.lr": 0.1}, 30),
    ):
        for patience, count in ((rounds, 1), (rounds - 1, 0)):
            config = study(space=space, dataset={"name": "a9a", "patience": patience})
            assert len(effectless(config, {"dataset.patience"})) == count


numbers = st.one_of(st.integers(-2, 12), st.floats(-0.5, 12), st.sampled_from([True, None, "x", 10**12, float("nan")]))
entries = st.one_of(
    numbers,
    st.fixed_dictionaries({"choices": st.lists(numbers, max_size=4)}),
    st.fixed_dictionaries({"low": numbers, "high": numbers}, optional={"step": numbers, "log": st.booleans()}),
)
spaces = st.dictionaries(st.sampled_from(SPACE_KEYS), entries, max_size=3)


@given(spaces)
def test_an_accepted_space_is_written_read_and_drawn(space: dict[str, Any]) -> None:
    """A space is refused with a ValueError, or it survives its YAML and all its corners give configs."""
    try:
        config = study(space={**SPACE, **space})
    except ValueError as error:
        assert str(error).startswith("study.yaml: space: ")  # noqa: PT017
        return
    assert study_from_document(parse_mapping(to_yaml(config), source="again"), source="again") == config
    for corner in (0, -1):
        values = {
            key: entry.values[corner] if isinstance(entry, Choices) else (entry.low, entry.high)[corner]
            for key, entry in config.searched.items()
        }
        flat = flatten(trial_clients(config, values))
        assert flat.items() >= values.items()
        assert widen(config, values) == (config, [])


@given(
    st.sampled_from(["xgb.max_depth", "n_estimators_client"]),
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(1, 9),
)
def test_a_widened_range_keeps_what_it_had(key: str, low: int, high: int, value: int, step: int) -> None:
    """Every value of the range before, and the start, are values of the range after."""
    low, high = min(low, high), max(low, high)
    high -= (high - low) % step
    before = study(space={**SPACE, key: {"low": low, "high": high, "step": step}})
    after, _ = widen(before, {key: value})
    assert all(after.space[key].contains(old) for old in [*range(low, high + 1, step), value])


@given(st.sampled_from(SPACE_KEYS), numbers)
def test_a_checked_value_is_unchanged_but_for_its_type(key: str, value: object) -> None:
    """Checking never turns a value into another one."""
    try:
        checked = check_value(key, value)
    except ValueError as error:
        assert str(error).startswith(f"{key} is ")  # noqa: PT017
        return
    assert checked == value
    assert not isinstance(value, bool)
