"""Client configs keep the reference's schema and values, and survive being written and read."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fedlightning.config import (
    CentralizedConfig,
    ClientsConfig,
    CnnConfig,
    XgbConfig,
    dump_clients,
    flatten,
    known_clients,
    load_centralized,
    load_clients,
    parse_clients,
    published_clients,
)
from fedlightning.config.distributions import check_value
from fedlightning.config.documents import read_mapping
from fedlightning.config.files import PUBLISHED as PUBLISHED_FOLDER

# name: n_estimators_client, num_rounds, client_num, num_iterations, xgb.max_depth, CNN.lr
PUBLISHED = {
    "YearPredictionMSD_10_clients": (50, 200, 10, 100, 8, 0.0001),
    "YearPredictionMSD_2_clients": (250, 200, 2, 100, 8, 0.0001),
    "YearPredictionMSD_5_clients": (100, 200, 5, 100, 8, 0.0001),
    "a9a_10_clients": (100, 30, 10, 500, 8, 0.001),
    "a9a_2_clients": (250, 15, 2, 500, 8, 0.0001),
    "a9a_5_clients": (100, 30, 5, 500, 8, 0.0005),
    "abalone_10_clients": (25, 200, 10, 100, 6, 0.0006301009302952918),
    "abalone_2_clients": (50, 100, 2, 100, 6, 0.0028231080803766),
    "abalone_5_clients": (50, 200, 5, 500, 6, 0.0004549072000953885),
    "cod_rna_10_clients": (100, 30, 10, 500, 8, 0.001),
    "cod_rna_2_clients": (250, 30, 2, 500, 8, 0.0001),
    "cod_rna_5_clients": (100, 30, 5, 100, 8, 0.001),
    "cpusmall_10_clients": (50, 1000, 10, 500, 8, 0.0001),
    "cpusmall_2_clients": (100, 1000, 2, 500, 8, 0.0001),
    "cpusmall_5_clients": (25, 500, 5, 100, 6, 0.000457414512764587),
    "ijcnn1_10_clients": (100, 30, 10, 500, 8, 0.0005),
    "ijcnn1_2_clients": (250, 50, 2, 500, 8, 0.0001),
    "ijcnn1_5_clients": (100, 30, 5, 500, 8, 0.0001),
    "paper_10_clients": (50, 100, 10, 100, 8, 0.0001),
    "paper_2_clients": (250, 100, 2, 100, 8, 0.0001),
    "paper_5_clients": (100, 100, 5, 100, 8, 0.0001),
    "space_ga_10_clients": (100, 50, 10, 500, 4, 1e-05),
    "space_ga_2_clients": (100, 50, 2, 500, 4, 1e-05),
    "space_ga_5_clients": (100, 200, 5, 500, 4, 1e-06),
}
PAPER = {
    "learning_rate": 0.1,
    "subsample": 0.8,
    "colsample_bytree": 1,
    "colsample_bylevel": 1,
    "colsample_bynode": 1,
    "alpha": 5,
    "gamma": 5,
    "num_parallel_tree": 1,
    "min_child_weight": 1,
    "lambda": 1,
}
TEXT = (
    "n_estimators_client: 100\nnum_rounds: 30\nclient_num: 5\nnum_iterations: 500\n"
    "xgb: {max_depth: 8}\nCNN: {lr: 1e-05}\n"
)

ratio = st.floats(0, 1, exclude_min=True)
penalty = st.floats(0, 1e9)
xgb_configs = st.builds(
    XgbConfig,
    max_depth=st.integers(1, 30),
    learning_rate=ratio,
    subsample=ratio,
    colsample_bytree=ratio,
    colsample_bylevel=ratio,
    colsample_bynode=ratio,
    alpha=penalty,
    gamma=penalty,
    min_child_weight=penalty,
    lambda_=penalty,
)
cnn_configs = st.builds(
    CnnConfig,
    lr=st.floats(0, 10, exclude_min=True),
    batch_size=st.integers(1, 65_536),
    channels=st.integers(1, 4_096),
)
clients_configs = st.builds(
    ClientsConfig,
    n_estimators_client=st.integers(1, 10_000),
    num_rounds=st.integers(1, 100_000),
    client_num=st.integers(1, 1_000),
    num_iterations=st.integers(1, 1_000_000),
    xgb=st.one_of(st.builds(XgbConfig), xgb_configs),
    CNN=cnn_configs,
)


def test_the_published_configs_are_the_reference_s() -> None:
    """All 24 are there, with the reference's six values and the paper's values for the rest."""
    assert sorted(read_mapping(PUBLISHED_FOLDER / "clients.yaml")) == sorted(PUBLISHED)
    for name, (trees, rounds, clients, iterations, depth, lr) in PUBLISHED.items():
        config = published_clients(name.removesuffix(f"_{clients}_clients"), clients)
        assert config is not None
        assert config.model_dump() == {
            "n_estimators_client": trees,
            "num_rounds": rounds,
            "client_num": clients,
            "num_iterations": iterations,
            "xgb": {"max_depth": depth, **PAPER},
            "CNN": {"lr": lr, "batch_size": 32, "channels": 64},
        }


@given(clients_configs, st.lists(st.text(), max_size=3))
def test_a_written_config_is_read_back(config: ClientsConfig, header: list[str]) -> None:
    """Writing and reading changes nothing, whatever the header and however small the learning rate."""
    assert parse_clients(dump_clients(config, header=header), source="test") == config


@given(clients_configs)
def test_a_plain_yaml_reader_sees_the_same_numbers(config: ClientsConfig) -> None:
    """YAML 1.1, which hfedxgboost reads, finds the same values of the same types."""
    document = yaml.safe_load(dump_clients(config, header=["title"]))
    whole = config.model_dump()
    assert list(document) == list(whole)
    for section in ("xgb", "CNN"):
        assert document[section].items() <= whole[section].items()
        assert all(type(value) is type(whole[section][key]) for key, value in document[section].items())
    assert {**document, "xgb": 0, "CNN": 0} == {**whole, "xgb": 0, "CNN": 0}


def test_the_six_keys_are_written_as_the_reference_writes_them() -> None:
    """Defaults are left out, the order is the reference's, and a small float keeps its dot."""
    config = published_clients("space_ga", 5)
    assert config is not None
    assert dump_clients(config, header=["first", "second\nthird"]) == (
        "# first\n# second\n# third\n"
        "n_estimators_client: 100\nnum_rounds: 200\nclient_num: 5\nnum_iterations: 500\n"
        "xgb:\n  max_depth: 4\nCNN:\n  lr: 1.0e-06\n"
    )


def test_the_header_names_what_hfedxgboost_ignores() -> None:
    """Keys beyond the six are announced where a user of hfedxgboost sees them."""
    config = parse_clients(TEXT, source="test")
    further = config.model_copy(update={"xgb": XgbConfig(gamma=0, lambda_=2), "CNN": CnnConfig(lr=0.1, batch_size=64)})
    written = dump_clients(further)
    assert written.startswith("# hfedxgboost ignores: xgb.gamma, xgb.lambda, CNN.batch_size\n")
    assert "  lambda: 2.0\n" in written


def test_a_file_of_the_user_wins_over_a_published_name(tmp_path: Path) -> None:
    """An export in studies/clients is found by name, before the published config of that name."""
    folder = tmp_path / "studies" / "clients"
    folder.mkdir(parents=True)
    (folder / "a9a_5_clients.yaml").write_text(TEXT)
    (folder / "mine.yaml").write_text(TEXT)
    assert load_clients("a9a_5_clients", root=tmp_path).CNN.lr == 1e-05
    assert load_clients("mine", root=tmp_path) == load_clients(folder / "mine.yaml", root=tmp_path)
    assert load_clients(str(folder / "mine.yaml"), root=tmp_path).num_rounds == 30
    assert {"mine", "a9a_2_clients"} <= set(known_clients(tmp_path))
    published = published_clients("a9a", 5)
    assert published is not None
    assert published.CNN.lr == 0.0005
    assert published_clients("a9a", 3) is None


def test_an_unknown_name_lists_the_known_ones_closest_first(tmp_path: Path) -> None:
    """A typo is answered with what was probably meant."""
    with pytest.raises(LookupError, match=r"unknown client config 'a9a_5_client'; known: a9a_5_clients, ") as raised:
        load_clients("a9a_5_client", root=tmp_path)
    assert all(name in str(raised.value) for name in PUBLISHED)


@pytest.mark.parametrize("name", ["", "\0", "a\nb", "x" * 10_000, "\ud800"])
def test_strange_names_are_unknown_names(tmp_path: Path, name: str) -> None:
    """No name reaches the file system, and the error stays one short line per name."""
    with pytest.raises(LookupError, match="unknown client config") as raised:
        load_clients(name, root=tmp_path)
    assert len(str(raised.value)) < 1_000
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("path", ["missing.yaml", "some/folder", "..", "../x"])
def test_a_path_without_a_file_is_named(tmp_path: Path, path: str) -> None:
    """What looks like a path is never looked up as a name."""
    with pytest.raises(LookupError, match=r"no client config file .*; give an existing file"):
        load_clients(tmp_path / path, root=tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_rounds: 30", "num_rounds: 0", "num_rounds is 0; allowed: a whole number from 1 to 100000"),
        ("num_rounds: 30", "num_rounds: true", "num_rounds is true; allowed: a whole number"),
        ("num_rounds: 30", "num_rounds: '30'", "num_rounds is '30'; allowed: a whole number"),
        ("num_rounds: 30", "num_rounds: 3.0", "num_rounds is 3.0; allowed: a whole number"),
        (
            "num_rounds: 30",
            "num_rounds: 1000000000000",
            "num_rounds is 1000000000000; allowed: a whole number",
        ),
        ("num_rounds: 30", "num_rounds: [30]", "num_rounds is [30]; allowed: a whole number"),
        ("num_rounds: 30\n", "", "num_rounds is missing; allowed: a whole number from 1 to 100000"),
        ("num_rounds: 30", "num_round: 30", "unknown key 'num_round'; known: num_rounds, "),
        ("max_depth: 8", "max_depth: 31", "xgb.max_depth is 31; allowed: a whole number from 1 to 30"),
        ("max_depth: 8", "max_depht: 8", "unknown key 'xgb.max_depht'; known: xgb.max_depth, "),
        ("max_depth: 8", "gamma: 5", "xgb.max_depth is missing"),
        (
            "max_depth: 8",
            "max_depth: 8, subsample: 1.01",
            "xgb.subsample is 1.01; allowed: a number above 0 and at most 1",
        ),
        (
            "max_depth: 8",
            "max_depth: 8, gamma: -1",
            "xgb.gamma is -1; allowed: a number from 0 to 1000000000",
        ),
        ("max_depth: 8", "max_depth: 8, alpha: true", "xgb.alpha is true; allowed: a number from 0"),
        ("max_depth: 8", "max_depth: 8, lambda_: 1", "unknown key 'xgb.lambda_'; known: xgb.lambda, "),
        (
            "max_depth: 8",
            "max_depth: 8, num_parallel_tree: 2",
            "xgb.num_parallel_tree is 2; allowed: only 1 (an ensemble",
        ),
        ("xgb: {max_depth: 8}", "xgb: 8", "xgb is 8; allowed: a mapping with max_depth, learning_rate"),
        (
            "xgb: {max_depth: 8}",
            "xgb.max_depth: 8",
            "xgb.max_depth is not understood with a dot; write max_depth below xgb:",
        ),
        ("1e-05", "0", "CNN.lr is 0; allowed: a number above 0 and at most 10"),
        ("1e-05", ".nan", "CNN.lr is nan; allowed: a number above 0"),
        ("1e-05", "1e999", "CNN.lr is inf; allowed: a number above 0"),
        ("1e-05", "9" + "0" * 390, "allowed: a number above 0"),
        ("1e-05", "small", "CNN.lr is 'small'; allowed: a number above 0"),
        ("1e-05", "null", "CNN.lr is null; allowed: a number above 0"),
    ],
)
def test_what_is_wrong_with_a_config_is_named(old: str, new: str, message: str) -> None:
    """The error has the file, the key, the value and what is allowed."""
    assert old in TEXT
    with pytest.raises(ValueError, match=r"^here\.yaml: ") as raised:
        parse_clients(TEXT.replace(old, new), source="here.yaml")
    assert message in str(raised.value)
    assert "pydantic" not in str(raised.value)


def test_every_problem_has_its_line_and_many_are_cut() -> None:
    """All mistakes of a file are told at once, up to a screenful."""
    with pytest.raises(ValueError, match="client_num") as raised:
        parse_clients(TEXT.replace("30", "x").replace("5\n", "y\n", 1), source="f")
    assert len(str(raised.value).splitlines()) == 2
    many = "".join(f"key{n}: 1\n" for n in range(500))
    with pytest.raises(ValueError, match="and 490 more problems"):
        parse_clients(TEXT + many, source="f")


def test_every_number_is_bounded() -> None:
    """No setting takes infinity or not-a-number, on which the models rely."""
    for key, value in flatten(parse_clients(TEXT, source="test")).items():
        for wrong in (math.inf, -math.inf, math.nan, 10**12, -(10**12)):
            with pytest.raises(ValueError, match=f"{key} is "):
                check_value(key, wrong)
        assert check_value(key, value) == value


def test_configs_cannot_be_changed() -> None:
    """A config that was checked stays as it was."""
    config = parse_clients(TEXT, source="test")
    with pytest.raises(ValueError, match="frozen"):
        config.num_rounds = 3
    with pytest.raises(ValueError, match="frozen"):
        config.xgb.alpha = 3.0


def test_flat_keys_are_the_dotted_paths() -> None:
    """The keys of MLflow's parameters are those that a user writes."""
    flat = flatten(parse_clients(TEXT, source="test"))
    assert flat.items() >= {"num_rounds": 30, "xgb.max_depth": 8, "xgb.lambda": 1.0, "CNN.lr": 1e-05}.items()
    assert list(flat)[:5] == [
        "n_estimators_client",
        "num_rounds",
        "client_num",
        "num_iterations",
        "xgb.max_depth",
    ]


def test_centralized_sets_are_the_paper_s_and_the_reference_s() -> None:
    """A data set has its own parameters where the reference has some, and the paper's otherwise."""
    special: dict[str, float] = {
        "max_depth": 3,
        "subsample": 0.4,
        "learning_rate": 0.05,
        "gamma": 10,
        "min_child_weight": 5,
    }
    expected: dict[str, tuple[int, dict[str, float]]] = {
        "paper": (500, {"max_depth": 8}),
        "abalone": (200, special),
        "cpusmall": (10_000, {**special, "colsample_bylevel": 0.5}),
        "YearPredictionMSD": (300, {"max_depth": 4}),
    }
    for name, (trees, values) in expected.items():
        config = CentralizedConfig.model_validate({"n_estimators": trees, "xgb": {**PAPER, **values}})
        assert load_centralized(name) == load_centralized(f"{name}_xgboost_centralized", "a9a") == config
        assert load_centralized(None, name) == config
    assert load_centralized(None, "a9a") == load_centralized() == load_centralized("paper", "abalone")
    with pytest.raises(LookupError, match="unknown centralized parameter set 'cpusmal'; known: cpusmall, "):
        load_centralized("cpusmal")


def test_importing_the_configuration_loads_no_heavy_library() -> None:
    """Commands that only read a file, or print help, start at once."""
    heavy = "{'torch', 'numpy', 'sklearn', 'xgboost', 'lightning', 'optuna', 'mlflow', 'flwr'}"
    code = f"import sys, fedlightning.config; sys.exit(str(sorted({heavy} & set(sys.modules)) or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
