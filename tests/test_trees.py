"""Tests for growing ensembles, reading their trees' outputs, and carrying them as bytes that nobody has to trust."""

import copy
import json
import pickle
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import xgboost as xgb
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedlightning import trees
from fedlightning.datasets import load_table
from fedlightning.tasks import TASKS, TargetStatistics
from fedlightning.trees import FORMAT, Ensemble, Forest, ensemble_margins, grow_ensemble

quick = settings(deadline=None, max_examples=100)
KINDS = {"binary": "breast_cancer", "multiclass": "wine", "regression": "diabetes"}
DEPTH = 4
ROUNDS = 6


class Grown(NamedTuple):
    """An ensemble beside XGBoost's own booster of the same parameters, and rows to predict."""

    ensemble: Ensemble
    booster: xgb.Booster
    x: NDArray[np.float32]


def rows_of(kind: str, missing: bool) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Return small real rows, a tenth of their values missing if asked for."""
    table = load_table(KINDS[kind])
    x = table.x.copy()
    if missing:
        x[np.random.default_rng(0).random(x.shape) < 0.1] = np.nan
    return x, table.y


def grow_on(
    x: NDArray[np.float32],
    y: NDArray[np.float64],
    kind: str,
    *,
    n_estimators: int = ROUNDS,
    seed: int = 5,
    threads: int = 1,
    **xgb_params: float,
) -> Ensemble:
    """Grow an ensemble the way a lone client would."""
    task = TASKS[kind]
    base_score = task.base_score(TargetStatistics.of(y))
    return grow_ensemble(
        x,
        y,
        objective=task.objective,
        outputs=task.outputs(len(np.unique(y))),
        n_estimators=n_estimators,
        base_score=base_score,
        intercept=task.intercept(base_score),
        xgb_params={"max_depth": DEPTH, "learning_rate": 0.3, "subsample": 0.8, "colsample_bytree": 0.7, **xgb_params},
        seed=seed,
        threads=threads,
    )


@lru_cache
def grown(kind: str, missing: bool = False, penalty: float = 0.0) -> Grown:
    """Grow an ensemble and, with XGBoost alone, the booster that it must agree with."""
    x, y = rows_of(kind, missing)
    ensemble = grow_on(x, y, kind, gamma=penalty, alpha=penalty)
    task = TASKS[kind]
    params: dict[str, Any] = {
        "objective": task.objective,
        "base_score": task.base_score(TargetStatistics.of(y)),
        "max_depth": DEPTH,
        "learning_rate": 0.3,
        "subsample": 0.8,
        "colsample_bytree": 0.7,
        "gamma": penalty,
        "alpha": penalty,
        "seed": 5,
        "nthread": 1,
    }
    if kind == "multiclass":
        params["num_class"] = 3
    return Grown(ensemble, xgb.train(params, xgb.DMatrix(x, label=y), ROUNDS), x)


every_kind = pytest.mark.parametrize("kind", KINDS)
every_case = pytest.mark.parametrize(
    ("kind", "missing", "penalty"), [(kind, missing, p) for kind in KINDS for missing in (False, True) for p in (0, 5)]
)


# -- what trees say ------------------------------------------------------------------------------------------------


@every_case
def test_intercept_and_outputs_add_up_to_xgboosts_margin(kind: str, missing: bool, penalty: float) -> None:
    """The intercept, once, plus every tree's output is what XGBoost itself predicts before its link."""
    ensemble, booster, x = grown(kind, missing, penalty)
    margin = booster.predict(xgb.DMatrix(x), output_margin=True).reshape(len(x), -1)
    outputs = ensemble.tree_outputs(x)
    assert outputs.shape == (len(x), ensemble.outputs, ROUNDS)
    assert outputs.dtype == np.float32
    np.testing.assert_allclose(ensemble.intercept + outputs.sum(axis=2, dtype=np.float64), margin, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(ensemble.margins(x), margin, rtol=1e-6, atol=1e-6)
    assert ensemble.splits > 0


@every_kind
def test_each_output_is_one_trees_own(kind: str) -> None:
    """Column t is what XGBoost's t-th round alone adds to the intercept."""
    ensemble, booster, x = grown(kind, missing=True)
    outputs = ensemble.tree_outputs(x)
    for number in range(ROUNDS):
        alone = booster.predict(xgb.DMatrix(x), output_margin=True, iteration_range=(number, number + 1))
        alone = alone.reshape(len(x), -1).astype(np.float64) - ensemble.intercept
        np.testing.assert_allclose(outputs[:, :, number], alone, rtol=1e-5, atol=2e-5)


@every_kind
def test_ensembles_without_a_split_say_the_same_of_every_row(kind: str) -> None:
    """A gamma that no split survives leaves single leaves, which still add up."""
    ensemble, booster, x = grown(kind, penalty=1e9)
    outputs = ensemble.tree_outputs(x)
    assert ensemble.splits == 0
    assert (ensemble.nodes == 1).all()
    assert (outputs == outputs[:1]).all()
    margin = booster.predict(xgb.DMatrix(x), output_margin=True).reshape(len(x), -1)
    np.testing.assert_allclose(ensemble.intercept + outputs.sum(axis=2), margin, rtol=1e-6, atol=1e-6)


@every_kind
def test_a_prefix_is_what_fewer_rounds_would_have_grown(kind: str) -> None:
    """The first trees of an ensemble are those of a shorter one, to the bit."""
    x, y = rows_of(kind, missing=False)
    ensemble = grown(kind).ensemble
    for rounds in (1, 4, ROUNDS):
        prefix = ensemble.prefix(rounds)
        assert len(prefix) == rounds
        assert prefix.digest == grow_on(x, y, kind, n_estimators=rounds, gamma=0, alpha=0).digest
        np.testing.assert_array_equal(prefix.tree_outputs(x), ensemble.tree_outputs(x)[:, :, :rounds])


@pytest.mark.parametrize("rounds", [-1, 0, ROUNDS + 1])
def test_a_prefix_cannot_be_empty_or_longer_than_the_ensemble(rounds: int) -> None:
    """What is not there is refused, with both numbers."""
    with pytest.raises(ValueError, match=rf"cannot take the first {rounds} of {ROUNDS} trees"):
        grown("multiclass").ensemble.prefix(rounds)


def test_growing_depends_on_the_seed_and_not_on_threads() -> None:
    """The same seed gives the same trees with any number of threads, another seed gives others."""
    x, y = rows_of("binary", missing=False)
    ensemble = grow_on(x, y, "binary")
    assert grow_on(x, y, "binary", threads=2).digest == ensemble.digest
    assert grow_on(x, y, "binary", seed=6).digest != ensemble.digest
    np.testing.assert_array_equal(ensemble.tree_outputs(x, threads=2), ensemble.tree_outputs(x))


def test_a_client_of_one_class_grows_from_the_common_prior() -> None:
    """Rows of a single class, which XGBoost alone would start from 0, start from the given base score."""
    x, y = rows_of("binary", missing=False)
    ensemble = grow_ensemble(
        x[y == 1],
        y[y == 1],
        objective="binary:logistic",
        outputs=1,
        n_estimators=2,
        base_score=0.25,
        intercept=-np.log(3.0),
        xgb_params={"max_depth": 2, "alpha": 0, "learning_rate": 1.0},
        seed=0,
    )
    margins = ensemble.margins(x)
    assert (margins > 0).all()
    # A leaf is minus gradient over hessian (plus lambda), both known at the prior.
    count = (y == 1).sum()
    first = count * 0.75 / (count * 0.25 * 0.75 + 1)
    np.testing.assert_allclose(ensemble.tree_outputs(x)[:, 0, 0], first, rtol=1e-5)


def test_no_rows_have_no_outputs() -> None:
    """Zero rows give arrays of the right shape."""
    ensemble = grown("multiclass").ensemble
    x = np.empty((0, ensemble.features), dtype=np.float32)
    assert ensemble.tree_outputs(x).shape == (0, 3, ROUNDS)
    assert ensemble.margins(x).shape == (0, 3)


@pytest.mark.parametrize("shape", [(3, 12), (3, 14), (13,), (1, 3, 13)])
def test_rows_of_another_width_are_refused(shape: tuple[int, ...]) -> None:
    """XGBoost never sees rows of another shape; theirs and the expected one are named."""
    ensemble = grown("multiclass").ensemble
    x = np.zeros(shape, dtype=np.float32)
    for read in (ensemble.tree_outputs, ensemble.margins):
        with pytest.raises(ValueError, match=r"rows have the shape \(.*\), expected \(rows, 13\)"):
            read(x)


def test_an_ensemble_describes_itself() -> None:
    """Length, splits, memory and representation follow from the arrays."""
    ensemble = grown("multiclass").ensemble
    assert len(ensemble) == ROUNDS
    assert len(ensemble.nodes) == 3 * ROUNDS
    total = int(ensemble.nodes.sum())
    # A binary tree has one more leaf than it has splits.
    assert 2 * ensemble.splits == total - len(ensemble.nodes)
    assert ensemble.nbytes == 4 * len(ensemble.nodes) + 9 * total
    assert repr(ensemble) == f"Ensemble({ROUNDS} trees, {ensemble.splits} splits, 13 features, 3 outputs)"


def test_the_digest_covers_all_that_prediction_depends_on() -> None:
    """Any other number, direction, column, intercept or width gives another digest; a copy gives the same."""
    ensemble = grown("binary").ensemble
    inner = int(np.flatnonzero(ensemble.split_feature >= 0)[0])

    def changed(name: str, value: Any) -> Ensemble:
        array = getattr(ensemble, name).copy()
        array[inner] = value
        return replace(ensemble, **{name: array})

    others = [
        changed("split_feature", (ensemble.split_feature[inner] + 1) % ensemble.features),
        changed("value", np.nextafter(ensemble.value[inner], np.float32(np.inf))),
        changed("default_left", not ensemble.default_left[inner]),
        replace(ensemble, intercept=np.nextafter(ensemble.intercept, np.inf).item()),
        replace(ensemble, features=ensemble.features + 1),
        replace(ensemble, outputs=2),
        ensemble.prefix(ROUNDS - 1),
    ]
    assert replace(ensemble).digest == ensemble.digest
    assert len({ensemble.digest, *(other.digest for other in others)}) == 1 + len(others)


# -- any well-formed trees -----------------------------------------------------------------------------------------

float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
SHALLOW = 3


@st.composite
def ensembles(draw: st.DrawFn) -> Ensemble:
    """Draw well-formed trees of any shape with any finite numbers in them."""
    features, outputs, rounds = draw(st.integers(1, 12)), draw(st.sampled_from([1, 3])), draw(st.integers(1, 2))
    splits = draw(st.sampled_from([0.2, 0.6, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    nodes: list[int] = []
    split_feature: list[int] = []
    for _ in range(rounds * outputs):
        width, before = 1, len(split_feature)
        for depth in range(SHALLOW + 1):
            level = rng.integers(0, features, width)
            level[rng.random(width) >= (splits if depth < SHALLOW else 0)] = -1
            split_feature += level.tolist()
            width = 2 * int((level != -1).sum())
        nodes.append(len(split_feature) - before)
    inner = np.asarray(split_feature) != -1
    # Any bits: tiny, huge, denormal and negative zeros among them.
    value = rng.integers(-(2**31), 2**31, len(inner)).astype(np.int32).view(np.float32)
    value[~np.isfinite(value)] = -0.0
    value[: draw(st.integers(0, len(inner)))] = draw(float32s)
    return Ensemble(
        features,
        outputs,
        draw(float32s),
        np.asarray(nodes, dtype=np.int32),
        np.asarray(split_feature, dtype=np.int32),
        value,
        (rng.random(len(inner)) < 0.5) & inner,
    )


def walk(ensemble: Ensemble, tree: int, row: NDArray[np.float32]) -> np.float32:
    """Follow one row down one tree: the plain reading of the flat arrays."""
    start = int(ensemble.nodes[:tree].sum())
    feature = ensemble.split_feature[start : start + int(ensemble.nodes[tree])]
    node = 0
    while feature[node] != -1:
        seen = row[feature[node]]
        threshold = ensemble.value[start + node]
        left = bool(ensemble.default_left[start + node]) if np.isnan(seen) else bool(seen < threshold)
        node = 2 * int((feature[:node] != -1).sum()) + (1 if left else 2)
    return np.float32(ensemble.value[start + node])


def reread(ensemble: Ensemble, max_depth: int = DEPTH) -> Ensemble:
    """Send an ensemble to somebody who knows what to expect."""
    return Ensemble.from_bytes(
        ensemble.to_bytes(),
        features=ensemble.features,
        outputs=ensemble.outputs,
        n_estimators=len(ensemble),
        max_depth=max_depth,
    )


def assert_same_bits(found: Ensemble, expected: Ensemble) -> None:
    """Check every field, arrays with their types and to the bit (0.0 is not -0.0)."""
    assert (found.features, found.outputs, found.intercept) == (
        expected.features,
        expected.outputs,
        expected.intercept,
    )
    for name in ("nodes", "split_feature", "value", "default_left"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype
        assert ours.tobytes() == theirs.tobytes(), name
    assert found.digest == expected.digest


def full_tree(depth: int, features: int, value: float) -> Ensemble:
    """Return one tree with all the nodes that it can have, all with the same number."""
    inner = np.arange(2 ** (depth + 1) - 1) < 2**depth - 1
    return Ensemble(
        features,
        1,
        value,
        np.asarray([len(inner)], dtype=np.int32),
        np.where(inner, features - 1, -1).astype(np.int32),
        np.full(len(inner), value, dtype=np.float32),
        inner,
    )


FLOAT32 = np.finfo(np.float32)


@quick
@given(ensembles())
@example(full_tree(2, 3, float(str(FLOAT32.max))))
@example(full_tree(2, 3, float(str(FLOAT32.min))))
@example(full_tree(2, 3, float(str(FLOAT32.smallest_subnormal))))
def test_bytes_bring_back_every_bit(ensemble: Ensemble) -> None:
    """Whatever finite numbers the trees hold, what arrives is what was sent."""
    assert_same_bits(reread(ensemble), ensemble)


def test_the_largest_document_that_can_be_asked_for_is_read() -> None:
    """A full tree whose every number has the most digits is within the size that is read from a peer."""
    ensemble = full_tree(8, 1000, -1234567800000000.0)
    assert_same_bits(reread(ensemble, max_depth=8), ensemble)


@quick
@given(ensembles(), st.data())
def test_outputs_are_found_by_walking_down_the_trees(ensemble: Ensemble, data: st.DataObject) -> None:
    """XGBoost, given our arrays, leads every row to the leaf where a plain walk ends, missing values too."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    # Thresholds themselves, where < and <= differ, numbers on both sides, and missing values.
    numbers = np.concatenate([ensemble.value, -ensemble.value, [np.nan, 0, data.draw(float32s)]]).astype(np.float32)
    x = rng.choice(numbers, (5, ensemble.features))
    outputs = ensemble.tree_outputs(x)
    for row in range(len(x)):
        for tree in range(len(ensemble.nodes)):
            expected = walk(ensemble, tree, x[row])
            found = outputs[row, tree % ensemble.outputs, tree // ensemble.outputs]
            assert found.tobytes() == expected.tobytes(), (row, tree)


@every_case
def test_bytes_do_not_change_a_prediction(kind: str, missing: bool, penalty: float) -> None:
    """Sent and received, an ensemble gives the same margins and tree outputs through XGBoost, to the bit."""
    ensemble, _, x = grown(kind, missing, penalty)
    again = reread(ensemble)
    assert_same_bits(again, ensemble)
    np.testing.assert_array_equal(again.margins(x), ensemble.margins(x))
    np.testing.assert_array_equal(again.tree_outputs(x), ensemble.tree_outputs(x))
    assert again.to_bytes() == ensemble.to_bytes()


def test_bytes_hold_no_statistics_of_the_training_rows() -> None:
    """Only the form of the trees, thresholds, leaves and directions travel: no counts, gains or hessians."""
    ensemble = grown("binary").ensemble
    document = unpack(ensemble.to_bytes())
    total = int(ensemble.nodes.sum())
    sizes = {key: len(value) for key, value in document.items() if isinstance(value, list | str)}
    assert sizes == {
        "format": len(FORMAT),
        "nodes": ROUNDS,
        "split_feature": total,
        "value": total,
        "default_left": ensemble.splits,
    }
    assert set(document) - set(sizes) == {"features", "outputs", "intercept"}


# -- bytes of strangers --------------------------------------------------------------------------------------------


def unpack(data: bytes) -> dict[str, Any]:
    """Return the document inside valid bytes."""
    document: dict[str, Any] = json.loads(zlib.decompress(data))
    return document


def pack(document: object) -> bytes:
    """Return any document the way an ensemble travels."""
    return zlib.compress(json.dumps(document).encode())


SMALL = Ensemble(
    features=5,
    outputs=1,
    intercept=-0.5,
    nodes=np.asarray([3, 1, 7], dtype=np.int32),
    split_feature=np.asarray([4, -1, -1, -1, 0, 1, 2, -1, -1, -1, -1], dtype=np.int32),
    value=np.asarray([0.5, -1.0, 1.0, 0.25, 3.0, -2.0, 2.0, 0.1, 0.2, 0.3, 0.4], dtype=np.float32),
    default_left=np.asarray([1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0], dtype=np.bool_),
)
VALID = unpack(SMALL.to_bytes())


def receive(data: bytes, max_depth: int = 2) -> Ensemble:
    """Read bytes where an ensemble of ``SMALL``'s kind is expected."""
    return Ensemble.from_bytes(data, features=5, outputs=1, n_estimators=3, max_depth=max_depth)


def with_entry(key: str, index: int, value: object) -> list[object]:
    """Return one of the document's lists with another entry."""
    entries = list(VALID[key])
    entries[index] = value
    return entries


def refused(data: bytes, message: str, max_depth: int = 2) -> None:
    """Check that bytes are refused with a message."""
    with pytest.raises(ValueError, match=message):
        receive(data, max_depth)


def test_the_small_ensemble_is_accepted() -> None:
    """What the following tests damage is fine before."""
    assert_same_bits(receive(pack(VALID)), SMALL)
    assert_same_bits(receive(SMALL.to_bytes()), SMALL)


SINGLE = "expected finite single-precision numbers"
DAMAGES: dict[str, tuple[dict[str, object], str]] = {
    "another format": (
        {"format": "fedlightning.ensemble/2"},
        r"format 'fedlightning.ensemble/2', expected 'fedlightning.ensemble/1'",
    ),
    "no format": ({"format": None}, "format 'None', expected"),
    "fewer features": ({"features": 4}, "features '4', expected 5"),
    "features as a float": ({"features": 5.0}, r"features '5\.0', expected 5"),
    "features as text": ({"features": "5"}, "features '5', expected 5"),
    "more outputs": ({"outputs": 3}, "outputs '3', expected 1"),
    "outputs as a boolean": ({"outputs": True}, "outputs 'True', expected 1"),
    "intercept NaN": ({"intercept": float("nan")}, "intercept 'nan', expected a finite"),
    "intercept infinite": ({"intercept": float("-inf")}, "intercept '-inf', expected a finite"),
    "intercept beyond single precision": ({"intercept": 1e300}, r"intercept '1e\+300', expected a finite single"),
    "intercept as text": ({"intercept": "0.5"}, r"intercept '0\.5', expected a finite"),
    "intercept as a boolean": ({"intercept": True}, "intercept 'True', expected a finite"),
    "intercept as an integer": ({"intercept": 10**400}, "intercept '1000000"),
    "no intercept": ({"intercept": None}, "intercept 'None', expected a finite"),
    "no nodes": ({"nodes": None}, "needs a list of numbers as nodes"),
    "nodes as text": ({"nodes": "317"}, "needs a list of numbers as nodes"),
    "a node count as a float": ({"nodes": with_entry("nodes", 0, 3.0)}, "needs a list of numbers as nodes"),
    "a node count as a boolean": ({"nodes": with_entry("nodes", 1, True)}, "needs a list of numbers as nodes"),
    "a tree without nodes": ({"nodes": with_entry("nodes", 1, 0)}, r"nodes in 0\.\.7, allowed are 1\.\.7"),
    "a negative node count": ({"nodes": with_entry("nodes", 1, -1)}, r"nodes in -1\.\.7, allowed are 1\.\.7"),
    "a tree larger than its depth": ({"nodes": with_entry("nodes", 1, 8)}, r"nodes in 3\.\.8, allowed are 1\.\.7"),
    "a huge node count": ({"nodes": with_entry("nodes", 1, 2**64)}, r"nodes in 3\.\.18446744073709551616, allowed"),
    "fewer trees": ({"nodes": [3, 7]}, "2 trees, expected 3"),
    "more trees": ({"nodes": [3, 1, 7, 1]}, "4 trees, expected 3"),
    "no trees": ({"nodes": []}, "0 trees, expected 3"),
    "split_feature as an object": ({"split_feature": 0}, "needs a list of numbers as split_feature"),
    "a column as text": (
        {"split_feature": with_entry("split_feature", 0, "4")},
        "needs a list of numbers as split_feature",
    ),
    "a column as a float": (
        {"split_feature": with_entry("split_feature", 0, 4.0)},
        "needs a list of numbers as split_feature",
    ),
    "a column as a boolean": (
        {"split_feature": with_entry("split_feature", 0, True)},
        "needs a list of numbers as split_feature",
    ),
    "a column that is not there": (
        {"split_feature": with_entry("split_feature", 0, 5)},
        r"split_feature in -1\.\.5, allowed are -1\.\.4",
    ),
    "a negative column": (
        {"split_feature": with_entry("split_feature", 0, -2)},
        r"split_feature in -2\.\.2, allowed are -1\.\.4",
    ),
    "a huge column": (
        {"split_feature": with_entry("split_feature", 0, 2**33)},
        r"split_feature in -1\.\.8589934592, allowed are -1\.\.4",
    ),
    "too few columns": ({"split_feature": VALID["split_feature"][:-1]}, "10 entries in split_feature, expected 11"),
    "too many columns": ({"split_feature": [*VALID["split_feature"], -1]}, "12 entries in split_feature, expected 11"),
    "too few values": ({"value": VALID["value"][:-1]}, "10 entries in value, expected 11, one per node"),
    "too many values": ({"value": [*VALID["value"], 0.0]}, "12 entries in value, expected 11, one per node"),
    "value as an object": ({"value": None}, "needs a list of numbers as value"),
    "a leaf as text": ({"value": with_entry("value", 1, "1.0")}, "needs a list of numbers as value"),
    "a leaf as a boolean": ({"value": with_entry("value", 1, True)}, "needs a list of numbers as value"),
    "a leaf that is null": ({"value": with_entry("value", 1, None)}, "needs a list of numbers as value"),
    "a leaf NaN": ({"value": with_entry("value", 1, float("nan"))}, f"nan in value, {SINGLE}"),
    "a threshold infinite": ({"value": with_entry("value", 0, float("inf"))}, f"inf in value, {SINGLE}"),
    "a leaf beyond single precision": ({"value": with_entry("value", 1, -3.5e38)}, rf"-3\.5e\+38 in value, {SINGLE}"),
    "a leaf that is a huge integer": ({"value": with_entry("value", 1, 10**400)}, f"1000000.* in value, {SINGLE}"),
    "no directions": ({"default_left": None}, "needs 4 digits 0 or 1 as default_left, one per split"),
    "too few directions": ({"default_left": "110"}, "needs 4 digits 0 or 1 as default_left"),
    "too many directions": ({"default_left": "11011"}, "needs 4 digits 0 or 1 as default_left"),
    "another digit": ({"default_left": "1102"}, "needs 4 digits 0 or 1 as default_left"),
    "directions as a number": ({"default_left": 1101}, "needs 4 digits 0 or 1 as default_left"),
    "directions as a list": ({"default_left": ["1", "1", "0", "1"]}, "is nested, expected one flat object"),
    "a leaf that is a list": ({"value": with_entry("value", 1, [])}, "is nested, expected one flat object"),
    "a leaf that is an object": ({"value": with_entry("value", 1, {})}, "is nested, expected one flat object"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_field_is_checked(damage: str) -> None:
    """A field that is not what was asked for is named with what it holds."""
    changes, message = DAMAGES[damage]
    refused(pack({**VALID, **changes}), message)


@pytest.mark.parametrize("key", VALID)
def test_every_field_is_needed(key: str) -> None:
    """A missing field is named."""
    refused(pack({name: value for name, value in VALID.items() if name != key}), key)


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_none_are_refused_where_json_allows_them(number: str) -> None:
    """Python's reader takes 1e400 and NaN; an ensemble does not."""
    text = json.dumps(VALID)
    assert "0.25" in text
    refused(zlib.compress(text.replace("0.25", number).encode()), SINGLE)
    refused(zlib.compress(text.replace("-0.5", number).encode()), "expected a finite single-precision number")


STRUCTURES = {
    "children of the root are missing": ([1, 3, 7], "tree 0 of the ensemble ends in the middle of a level"),
    "a level is cut": ([3, 2, 6], "tree 1 of the ensemble has 1 nodes that nothing leads to"),
    "nodes follow a lone leaf": ([3, 3, 5], "tree 1 of the ensemble has 2 nodes that nothing leads to"),
    "the last tree is short": ([3, 5, 3], "tree 1 of the ensemble has 4 nodes that nothing leads to"),
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_tree_must_be_whole(structure: str) -> None:
    """Node counts that cut trees elsewhere leave broken levels, and the tree is named."""
    nodes, message = STRUCTURES[structure]
    assert sum(nodes) == 11
    refused(pack({**VALID, "nodes": nodes}), message)


def test_a_level_must_be_complete() -> None:
    """A split whose second child is missing is found, in whichever tree."""
    document = {
        **VALID,
        "nodes": [1, 1, 2],
        "split_feature": [-1, -1, 0, -1],
        "value": [0.0] * 4,
        "default_left": "0",
    }
    refused(pack(document), "tree 2 of the ensemble ends in the middle of a level")


def test_trees_must_not_be_deeper_than_asked_for() -> None:
    """A narrow tree may be too deep with few nodes; it is named with the limit."""
    document = {
        **VALID,
        "nodes": [1, 7, 1],
        "split_feature": [-1, 0, -1, 1, 2, -1, -1, -1, -1],
        "value": [0.5] * 9,
        "default_left": "000",
    }
    assert receive(pack(document), max_depth=3).splits == 3
    refused(pack(document), "tree 1 of the ensemble is deeper than max_depth 2")


def naively_well_formed(inner: list[bool], max_depth: int) -> bool:
    """Return whether breadth-first nodes make one tree: each has the parent that it must have, and all children."""
    depth: list[int] = []
    parents = [node for node, is_inner in enumerate(inner) if is_inner]
    for node in range(len(inner)):
        if node == 0:
            depth.append(0)
            continue
        if (node - 1) // 2 >= len(parents) or parents[(node - 1) // 2] >= node:
            return False
        depth.append(depth[parents[(node - 1) // 2]] + 1)
    return bool(inner) and len(inner) == 2 * len(parents) + 1 and max(depth) <= max_depth


@settings(deadline=None, max_examples=400)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=3, max_size=3))
@example([[True, False, False], [False], [True, True, True, False, False, False, False]])
@example([[True, False, True, True, False, False, False], [False], [False]])
def test_shapes_are_accepted_exactly_if_they_are_trees(shapes: list[list[bool]]) -> None:
    """Among all ways to mark nodes as splits, those pass in which every node has its one parent."""
    flat = [is_inner for shape in shapes for is_inner in shape]
    document = {
        **VALID,
        "nodes": [len(shape) for shape in shapes],
        "split_feature": [0 if is_inner else -1 for is_inner in flat],
        "value": [1.0] * len(flat),
        "default_left": "0" * sum(flat),
    }
    if all(naively_well_formed(shape, 2) for shape in shapes):
        assert receive(pack(document)).splits == sum(flat)
    else:
        refused(pack(document), r"tree \d of the ensemble|nodes in \d\.\.\d, allowed are 1\.\.7")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cut short"),
        (b"not zlib", "not compressed JSON"),
        (json.dumps(VALID).encode(), "not compressed JSON"),
        (SMALL.to_bytes()[:-1], "cut short"),
        (SMALL.to_bytes()[:20], "cut short"),
        (SMALL.to_bytes() + b"more", "followed by 4 bytes that do not belong to it"),
        (SMALL.to_bytes() + SMALL.to_bytes(), r"followed by \d+ bytes that do not belong to it"),
        (zlib.compress(b""), "not JSON"),
        (zlib.compress(json.dumps(VALID).encode()[:-1]), "not JSON"),
        (zlib.compress(json.dumps(VALID).encode() + b"1"), "not JSON"),
        (zlib.compress(b"\xff\xfe\xfd"), "not JSON"),
        (zlib.compress(b'{"value": [' + b"1" * 5000 + b"]}"), "not JSON|fill"),
        (pack([1, 2]), "is a JSON list, expected an object"),
        (pack(None), "is a JSON NoneType, expected an object"),
        (pack("{}"), "is a JSON str, expected an object"),
        (pack(7), "is a JSON int, expected an object"),
        (zlib.compress(b"[" * 1000), "is nested, expected one flat object"),
        (zlib.compress(b'{"a":' * 200), "is nested, expected one flat object"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value[:12]),
)
def test_bytes_that_hold_no_document_are_refused(data: bytes, message: str) -> None:
    """What does not decompress to one flat JSON object, and nothing after it, is refused."""
    refused(data, message)


def test_a_huge_integer_is_refused_by_its_length() -> None:
    """Python refuses to read integers of thousands of digits; that is a ValueError like any other."""
    document = zlib.compress(json.dumps(VALID).replace("0.25", "1" * 5000).encode())
    refused(document, "not JSON", max_depth=8)


def bomb(mebibytes: int) -> bytes:
    """Return few bytes that decompress to many."""
    compressor = zlib.compressobj(9)
    block = b" " * 2**20
    return b"".join([*(compressor.compress(block) for _ in range(mebibytes)), compressor.flush()])


@pytest.mark.parametrize("max_depth", [2, 30])
def test_a_bomb_is_bounded_by_what_was_asked_for(max_depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is decompressed than the expected trees can fill, and never more than the limit for all."""
    data = bomb(64)
    if max_depth == 30:
        monkeypatch.setattr(trees, "MAX_ENSEMBLE_BYTES", 2**20)
    tracemalloc.start()
    try:
        refused(data, r"holds more than the \d+ bytes that its trees can fill", max_depth)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (4 if max_depth == 30 else 1) * 2**20


@pytest.mark.parametrize("piece", [b"[],", b"{},", b'{"":', b"[[["])
def test_nested_containers_take_no_memory(piece: bytes) -> None:
    """Text of the allowed length full of containers, each many times its text's size, is never parsed."""
    text = b'{"value": [' + piece * 2**18
    tracemalloc.start()
    try:
        refused(zlib.compress(text), "is nested, expected one flat object", max_depth=14)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(text)


# Run in a process of its own: what XGBoost does to it shows in the exit status.
_PREDICT = """
import pickle, sys
import numpy as np
from fedlightning.trees import Ensemble

survivors, kind, x = pickle.loads(sys.stdin.buffer.read())
for data in survivors:
    ensemble = Ensemble.from_bytes(data, **kind)
    outputs, margins = ensemble.tree_outputs(x), ensemble.margins(x)
    assert outputs.shape == (len(x), kind["outputs"], kind["n_estimators"]), outputs.shape
    assert np.isfinite(outputs).all()
    assert margins.shape == (len(x), kind["outputs"]), margins.shape
print(len(survivors))
"""


def check_survivors(survivors: dict[str, bytes], kind: dict[str, int]) -> None:
    """Predict with every accepted ensemble, in one process that may crash."""
    rng = np.random.default_rng(1)
    x = rng.normal(scale=10, size=(20, kind["features"])).astype(np.float32)
    x[rng.random(x.shape) < 0.2] = np.nan
    x[0], x[1] = np.finfo(np.float32).max, np.finfo(np.float32).min
    done = subprocess.run(
        [sys.executable, "-c", _PREDICT],
        input=pickle.dumps((list(survivors.values()), kind, x)),
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr.decode()[-2000:])
    assert int(done.stdout) == len(survivors)


def paths(document: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return where every value of a document is."""
    found = [path] if path else []
    if isinstance(document, dict):
        for key, value in document.items():
            found += paths(value, (*path, key))
    elif isinstance(document, list):
        for index, value in enumerate(document):
            found += paths(value, (*path, index))
    return found


strange = (
    st.none()
    | st.booleans()
    | st.integers(-3, 8)
    | st.integers()
    | st.sampled_from([2**31 - 1, 2**31, -(2**31) - 1, 2**63, 10**300, -(10**300)])
    | st.floats()
    | float32s
    | st.text(alphabet="01-{}\u00e9", max_size=6)
    | st.lists(st.integers(-1, 4), max_size=4)
    | st.just({})
)


NUMERIC = ("value", "value", "value", "split_feature", "default_left", "intercept")


@st.composite
def mutated_documents(draw: st.DrawFn, valid: dict[str, Any]) -> bytes:
    """Draw a valid document with some of its values, lengths or keys changed."""
    document = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        # First a field, then a place in it, so that the long lists do not take all the changes.
        field = draw(st.sampled_from([*sorted(document), *(key for key in NUMERIC if key in document)]))
        place = draw(st.sampled_from([(field, *path) for path in paths(document[field])] or [(field,)]))
        parent: Any = document
        for step in place[:-1]:
            parent = parent[step]
        last = place[-1]
        change = draw(st.sampled_from(["replace", "nudge", "nudge", "copy", "copy", "delete", "insert", "swap"]))
        if change == "delete":
            del parent[last]
        elif change == "nudge" and isinstance(parent[last], int | float):
            parent[last] = parent[last] + draw(st.sampled_from([-1, 1, 2]))
        elif change == "nudge" and isinstance(parent[last], str):
            parent[last] = draw(st.text(alphabet="01", min_size=len(parent[last]), max_size=len(parent[last])))
        elif change == "insert" and isinstance(parent, list):
            parent.insert(last, draw(strange))
        elif change == "swap" and isinstance(parent, list):
            other = draw(st.integers(0, len(parent) - 1))
            parent[last], parent[other] = parent[other], parent[last]
        elif change == "copy" and isinstance(parent, list):
            parent[last] = parent[draw(st.integers(0, len(parent) - 1))]
        else:
            parent[last] = draw(strange)
        if not document:
            break
    return pack(document)


@st.composite
def flipped_bytes(draw: st.DrawFn, valid: bytes, *, inside: bool) -> bytes:
    """Draw valid bytes with some of them changed, as they travel or before they are compressed."""
    data = bytearray(zlib.decompress(valid) if inside else valid)
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.integers(0, len(data) - 1))
        if inside and draw(st.integers(0, 3)):
            # A digit for a digit mostly, so that some of it is still JSON.
            digits = [index for index, byte in enumerate(data) if byte in b"0123456789-."]
            where = draw(st.sampled_from(digits))
            data[where] = draw(st.sampled_from(b'01234567890123456789-.eE,"[]{}: '))
        else:
            data[where] ^= 1 << draw(st.integers(0, 7))
    return zlib.compress(bytes(data)) if inside else bytes(data)


HOSTILE: dict[str, Callable[[bytes], st.SearchStrategy[bytes]]] = {
    "values and structure": lambda valid: mutated_documents(unpack(valid)),
    "bytes of the text": lambda valid: flipped_bytes(valid, inside=True),
    "bytes on the way": lambda valid: flipped_bytes(valid, inside=False),
}


def attack(hostile: str, valid: Ensemble, *, examples: int, max_depth: int, derandomize: bool = False) -> int:
    """Damage an ensemble's bytes in many ways, and return how many were accepted, each of which must predict."""
    kind = {
        "features": valid.features,
        "outputs": valid.outputs,
        "n_estimators": len(valid),
        "max_depth": max_depth,
    }
    survivors: dict[str, bytes] = {}

    @settings(
        deadline=None,
        max_examples=examples,
        database=None,
        derandomize=derandomize,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large],
    )
    @given(HOSTILE[hostile](valid.to_bytes()))
    def damage(data: bytes) -> None:
        try:
            ensemble = Ensemble.from_bytes(data, **kind)
        except ValueError:
            return
        survivors[ensemble.digest] = data

    damage()
    survivors.pop(valid.digest, None)
    check_survivors(survivors, kind)
    return len(survivors)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_damaged_bytes_are_refused_or_harmless(hostile: str) -> None:
    """Damage gives a ValueError, or an ensemble of the right kind with which XGBoost predicts in peace."""
    accepted = attack(hostile, SMALL, examples=200, max_depth=3, derandomize=True)
    if hostile == "bytes on the way":
        assert accepted == 0, "zlib's checksum finds such damage"
    else:
        assert accepted >= 5, "the damage should reach prediction often enough to tell something"


@pytest.mark.slow
@pytest.mark.parametrize("hostile", HOSTILE)
@every_kind
def test_much_damage_to_grown_ensembles_is_refused_or_harmless(hostile: str, kind: str) -> None:
    """The same for ensembles grown on real rows, thousands of times."""
    attack(hostile, grown(kind, missing=True).ensemble.prefix(2), examples=2000, max_depth=DEPTH)


# -- forests -------------------------------------------------------------------------------------------------------


def client_ensemble(client: int, *, n_estimators: int = ROUNDS) -> Ensemble:
    """Grow one of three clients' ensembles on its third of the rows, all from the same prior."""
    x, y = rows_of("multiclass", missing=True)
    return grow_on(x[client::3], y[client::3], "multiclass", n_estimators=n_estimators, seed=client)


@lru_cache
def forest() -> Forest:
    """Return three clients' ensembles of three classes."""
    return Forest(tuple(client_ensemble(client) for client in range(3)))


def test_a_forest_keeps_the_clients_order() -> None:
    """Client k's trees are the k-th block of T columns."""
    x, _ = rows_of("multiclass", missing=True)
    outputs = forest().tree_outputs(x)
    assert outputs.shape == (len(x), 3, 3 * ROUNDS)
    for client, ensemble in enumerate(forest().ensembles):
        block = outputs[:, :, client * ROUNDS : (client + 1) * ROUNDS]
        np.testing.assert_array_equal(block, ensemble.tree_outputs(x))
    assert not np.array_equal(outputs[:, :, :ROUNDS], outputs[:, :, ROUNDS : 2 * ROUNDS])
    np.testing.assert_array_equal(forest().tree_outputs(x, threads=2), outputs)


def test_a_forest_tells_what_its_ensembles_share() -> None:
    """Trees per client, outputs, intercept and memory are the ensembles'."""
    assert (forest().trees, forest().outputs, forest().intercept) == (ROUNDS, 3, 0.0)
    assert forest().nbytes == sum(ensemble.nbytes for ensemble in forest().ensembles)


def test_a_forests_digest_depends_on_trees_and_order() -> None:
    """The same ensembles in the same order, and nothing else, have the same digest."""
    first, second, third = forest().ensembles
    assert Forest((first, second, third)).digest == forest().digest
    assert Forest((reread(first), reread(second), reread(third))).digest == forest().digest
    others = [(second, first, third), (first, second), (first, second, second), (first, second, third, third)]
    assert len({forest().digest, *(Forest(other).digest for other in others)}) == 1 + len(others)


def test_a_forest_needs_ensembles() -> None:
    """No ensemble at all is refused."""
    with pytest.raises(ValueError, match="a forest needs at least one ensemble"):
        Forest(())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: replace(e, features=14), r"differ in features: \[13, 14\]"),
        (lambda e: replace(e, outputs=1), r"differ in outputs: \[1, 3\]"),
        (lambda e: replace(e, intercept=0.5), r"differ in intercept: \[0\.0, 0\.5\]"),
        (lambda e: e.prefix(ROUNDS - 1), r"differ in their number of trees: \[6, 6, 5\]"),
    ],
    ids=["features", "outputs", "intercept", "trees"],
)
def test_ensembles_that_do_not_fit_together_are_named(change: Callable[[Ensemble], Ensemble], message: str) -> None:
    """What differs between ensembles is named with the values."""
    first, second, third = forest().ensembles
    with pytest.raises(ValueError, match=message):
        Forest((first, second, change(third)))


def test_ensemble_margins_are_each_ensembles_own() -> None:
    """Margins computed from a forest's tree outputs are what each ensemble predicts on its own."""
    x, _ = rows_of("multiclass", missing=True)
    shifted = Forest(tuple(replace(ensemble, intercept=0.75) for ensemble in forest().ensembles))
    margins = ensemble_margins(shifted.tree_outputs(x), shifted.intercept, 3)
    assert margins.shape == (len(x), 3, 3)
    assert margins.dtype == np.float64
    for client, ensemble in enumerate(shifted.ensembles):
        np.testing.assert_allclose(margins[:, :, client], ensemble.margins(x), rtol=1e-5, atol=1e-6)


def test_a_trees_file_needs_no_writable_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Growing, sending and predicting leave nothing in the working directory."""
    monkeypatch.chdir(tmp_path)
    x, y = rows_of("regression", missing=False)
    reread(grow_on(x, y, "regression", n_estimators=2)).margins(x)
    assert list(tmp_path.iterdir()) == []
