"""Every setting of a run can be given on the command line, and a wrong one is explained."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlightning.config import (
    DatasetConfig,
    RunConfig,
    effectless,
    explicit_keys,
    flatten,
    load_centralized,
    parse_clients,
    resolve_centralized,
    resolve_run,
    to_yaml,
)
from fedlightning.config.documents import parse_mapping
from fedlightning.config.problems import validate

CLIENTS = parse_clients(
    "n_estimators_client: 100\nnum_rounds: 30\nclient_num: 5\nnum_iterations: 500\n"
    "xgb: {max_depth: 8}\nCNN: {lr: 0.0005}\n",
    source="test",
)


def run(*overrides: str, seed: int | None = None) -> RunConfig:
    """A run on a9a with five clients and 30 rounds."""
    return resolve_run("a9a", CLIENTS, overrides, seed=seed)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("num_rounds=5", "num_rounds", 5),
        ("clients.num_rounds=5", "num_rounds", 5),
        ("xgb.subsample=0.9", "xgb.subsample", 0.9),
        ("clients.xgb.max_depth=3", "xgb.max_depth", 3),
        ("xgb.lambda=2", "xgb.lambda", 2.0),
        ("xgb.gamma=0", "xgb.gamma", 0.0),
        ("CNN.lr=1e-4", "CNN.lr", 1e-4),
        ("dataset.train_ratio=.80", "dataset.train_ratio", 0.8),
        ("dataset.patience=7", "dataset.patience", 7),
        ("dataset.split_seed=2024", "dataset.split_seed", 2024),
        ("val_ratio=0", "val_ratio", 0.0),
        ("batch_size=64", "CNN.batch_size", 64),
        ("CNN.batch_size=64", "CNN.batch_size", 64),
        ("seed=3", "seed", 3),
        ("objective=metric", "objective", "metric"),
        (" client_num = 2 ", "client_num", 2),
    ],
)
def test_an_override_changes_its_key_and_nothing_else(override: str, key: str, value: object) -> None:
    """Client keys go bare or with their section, numbers may be spelled as Python or YAML spells them."""
    before, after = flatten(run()), flatten(run(override))
    assert after == {**before, key: value}
    assert type(after[key]) is type(value)
    assert explicit_keys([override]) == {key}


def test_defaults_come_from_the_catalogue() -> None:
    """Patience and train ratio are the data set's, the alias of a name is resolved."""
    assert run().dataset == DatasetConfig(name="a9a", train_ratio=0.75, patience=10, split_seed=2023)
    assert resolve_run("cod-rna", CLIENTS).dataset.name == "cod_rna"
    assert resolve_run("cpusmall", CLIENTS).dataset.patience == 100
    own = DatasetConfig(name="mine", patience=3)
    assert resolve_run("mine", CLIENTS, dataset_defaults=own).dataset == own
    with pytest.raises(LookupError, match="a9b"):
        resolve_run("a9b", CLIENTS)


def test_the_seed_is_an_argument_or_an_override() -> None:
    """Both give the same run, and giving both is an error."""
    assert run(seed=3) == run("seed=3")
    with pytest.raises(ValueError, match="seed is given twice: 3 and 4"):
        run("seed=4", seed=3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["num_rounds=5", "clients.num_rounds=5"],
            "num_rounds is given twice: num_rounds=5 and clients.num_rounds=5",
        ),
        (["batch_size=5", "CNN.batch_size=5"], "CNN.batch_size is given twice"),
        (["num_rounds"], "'num_rounds' has no value; write KEY=VALUE"),
        (["num_rounds="], "num_rounds is null; allowed: a whole number from 1 to 100000"),
        (["num_rounds=3.0"], "num_rounds is 3.0; allowed: a whole number"),
        (["num_rounds=yes"], "num_rounds is 'yes'; allowed: a whole number"),
        (["num_rounds=true"], "num_rounds is true; allowed: a whole number"),
        (
            ["num_rounds=1000000000000"],
            "num_rounds is 1000000000000; allowed: a whole number from 1 to 100000",
        ),
        (["num_rounds=[1,2]"], "num_rounds: '[1,2]' is not a single value"),
        (["num_rounds={low: 1, high: 2}"], "is not a single value"),
        (["num_rounds=*x"], "num_rounds: line 1, column 1: aliases (*name) are not allowed"),
        (
            ["num_rounds=!!python/name:os.system x"],
            "the tag 'tag:yaml.org,2002:python/name:os.system' is not allowed",
        ),
        (["num_rounds=" + "[" * 10_000], "nested deeper than 16 levels"),
        (["num_rounds=\0"], "character U+0000"),
        (["num_rounds=" + "9" * 10_000], "has more than 400 digits"),
        (["xgb.max_dept=3"], "unknown key 'xgb.max_dept'; known: xgb.max_depth, "),
        (["max_depth=3"], "unknown key 'max_depth'; known: xgb.max_depth, "),
        (["xgb.lambda_=3"], "unknown key 'xgb.lambda_'; known: xgb.lambda, "),
        (["=3"], "unknown key ''; known: "),
        (["+num_rounds=3"], "known: num_rounds, "),
        (["+num_rounds=3"], "keys are written without + or ~"),
        (["dataset.name=abalone"], "dataset.name cannot be overridden; choose another data set instead"),
        (["xgb.max_depth=31"], "xgb.max_depth is 31; allowed: a whole number from 1 to 30"),
        (["CNN.lr=.nan"], "CNN.lr is nan; allowed: a number above 0 and at most 10"),
        (["val_ratio=1"], "val_ratio is 1; allowed: a number at least 0 and below 1"),
        (["dataset.train_ratio=1"], "dataset.train_ratio is 1; allowed: a number above 0 and below 1"),
        (["seed=-1"], "seed is -1; allowed: a whole number from 0 to 4294967295"),
        (["objective=accuracy"], "objective is 'accuracy'; allowed: loss or metric"),
    ],
)
def test_a_wrong_override_is_explained(overrides: list[str], message: str) -> None:
    """The error has the key, the value and what is allowed, or what was probably meant."""
    with pytest.raises(ValueError, match=r"^command line: ") as raised:
        run(*overrides)
    assert message in str(raised.value)


@given(st.sampled_from(["num_rounds", "CNN.lr", "objective", "dataset.split_seed"]), st.text(max_size=40))
def test_no_value_fails_otherwise_than_with_a_value_error(key: str, text: str) -> None:
    """Whatever is typed, the answer is a run or a ValueError."""
    try:
        assert isinstance(run(f"{key}={text}"), RunConfig)
    except ValueError as error:
        assert str(error).startswith("command line: ")  # noqa: PT017


def test_the_resolved_run_is_printed_in_full() -> None:
    """What is printed is complete: reading it gives the same run."""
    config = run("CNN.lr=1e-6", "xgb.lambda=2", "objective=metric")
    assert validate(RunConfig, parse_mapping(to_yaml(config), source="printed"), source="printed") == config


def test_centralized_parameters_can_be_overridden() -> None:
    """Trees, XGBoost values, held-out rows and the seed follow the same rules as those of a run."""
    paper = load_centralized("paper")
    plain = flatten(resolve_centralized("a9a", paper))
    assert plain == {
        **flatten(paper),
        **{f"dataset.{key}": value for key, value in flatten(run().dataset).items()},
        "seed": 0,
    }
    given = ["n_estimators=50", "xgb.gamma=0", "dataset.train_ratio=.80", "dataset.split_seed=1", "seed=7"]
    changed = flatten(resolve_centralized("a9a", paper, given))
    expected = {"n_estimators": 50, "xgb.gamma": 0.0, "dataset.train_ratio": 0.8, "dataset.split_seed": 1, "seed": 7}
    assert changed == {**plain, **expected}
    assert resolve_centralized("a9a", paper, seed=7) == resolve_centralized("a9a", paper, ["seed=7"])
    assert resolve_centralized("cod-rna", paper).dataset.name == "cod_rna"
    own = DatasetConfig(name="mine", train_ratio=0.5)
    assert resolve_centralized("mine", paper, dataset_defaults=own).dataset == own


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["num_rounds=3"], "unknown key 'num_rounds'; known: "),
        (["CNN.lr=3"], "unknown key 'CNN.lr'; known: "),
        (["dataset.patience=3"], "unknown key 'dataset.patience'; known: "),
        (["dataset.name=abalone"], "dataset.name cannot be overridden"),
        (["xgb.max_depth=0"], "xgb.max_depth is 0; allowed: a whole number from 1 to 30"),
        (["dataset.train_ratio=1"], "dataset.train_ratio is 1; allowed: a number above 0 and below 1"),
        (["n_estimators=1", "n_estimators=2"], "n_estimators is given twice"),
        (["seed=4"], "seed is given twice: 3 and 4"),
    ],
)
def test_a_wrong_centralized_override_is_explained(overrides: list[str], message: str) -> None:
    """What a centralized run does not have is unknown to it, and impossible values are named with what is allowed."""
    with pytest.raises(ValueError, match=r"^command line: ") as raised:
        resolve_centralized("a9a", load_centralized("paper"), overrides, seed=3)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["dataset.patience=30"], ["dataset.patience"]),
        (["dataset.patience=29"], []),
        (["num_rounds=5"], []),
        (["num_rounds=5", "dataset.patience=10"], ["dataset.patience"]),
        (["val_ratio=0", "dataset.patience=3", "objective=metric"], ["dataset.patience", "objective"]),
        (["val_ratio=0"], []),
        (["num_rounds=1", "objective=loss"], ["objective"]),
        (["num_rounds=2", "objective=loss"], []),
    ],
)
def test_settings_without_effect_are_told(overrides: list[str], keys: list[str]) -> None:
    """Only what the user gave is warned about, and only when it changes nothing."""
    warnings = effectless(run(*overrides), explicit_keys(overrides))
    assert [warning.partition(" has no effect: ")[0] for warning in warnings] == keys
