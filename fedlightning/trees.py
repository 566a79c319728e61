"""Grow each client's trees once, carry them as checked bytes, and read what every tree says about a row."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, Self

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

FORMAT = "fedlightning.ensemble/1"
MAX_ENSEMBLE_BYTES = 256 * 2**20
"""Largest decompressed ensemble that is read from a peer."""
# The largest single-precision number as it is written: its shortest decimal is a little above it.
_LARGEST = float(str(np.finfo(np.float32).max))
_LEAF = -1
_NO_PARENT = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Ensemble:
    """One client's boosted trees, each in breadth-first order, all in flat arrays.

    The children of a tree's j-th inner node are its nodes ``2j + 1`` and ``2j + 2``, so that a well-formed tree needs
    no child indices: every node is reached once, and children come after parents.
    """

    features: int
    """Columns of the rows it was grown on."""
    outputs: int
    """Numbers per row: 1, or one per class; tree ``i`` belongs to output ``i % outputs``."""
    intercept: float
    """Margin that every row starts from; added once per ensemble, not once per tree."""
    nodes: NDArray[np.int32]
    """Nodes of each tree, shape ``(trees,)``."""
    split_feature: NDArray[np.int32]
    """Column that an inner node splits on, -1 at a leaf; shape ``(all nodes,)``."""
    value: NDArray[np.float32]
    """Threshold of an inner node, output of a leaf; shape ``(all nodes,)``."""
    default_left: NDArray[np.bool_]
    """Where an inner node sends a missing value; False at a leaf."""

    def __len__(self) -> int:
        """Return the number of boosting rounds T (for several outputs a round grows one tree each)."""
        return len(self.nodes) // self.outputs

    def __repr__(self) -> str:
        return f"Ensemble({len(self)} trees, {self.splits} splits, {self.features} features, {self.outputs} outputs)"

    @property
    def splits(self) -> int:
        """Inner nodes of all trees; 0 means that the ensemble says the same of every row."""
        return int((self.split_feature != _LEAF).sum())

    @property
    def nbytes(self) -> int:
        """Memory of the arrays in bytes."""
        return self.nodes.nbytes + self.split_feature.nbytes + self.value.nbytes + self.default_left.nbytes

    @cached_property
    def digest(self) -> str:
        """Sha256 over everything that prediction depends on."""
        digest = sha256(f"{FORMAT} {self.features} {self.outputs} {self.intercept!r} {len(self.nodes)}".encode())
        for array in (self.nodes, self.split_feature, self.value, self.default_left):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def prefix(self, n_estimators: int) -> "Ensemble":
        """Return the first boosting rounds, which are exactly what growing fewer rounds would have given."""
        if not 1 <= n_estimators <= len(self):
            raise ValueError(f"cannot take the first {n_estimators} of {len(self)} trees")
        trees = n_estimators * self.outputs
        end = int(self.nodes[:trees].sum())
        return Ensemble(
            self.features,
            self.outputs,
            self.intercept,
            self.nodes[:trees],
            self.split_feature[:end],
            self.value[:end],
            self.default_left[:end],
        )

    def tree_outputs(self, x: NDArray[np.float32], *, threads: int = 1) -> NDArray[np.float32]:
        """Return the leaf value of every tree for every row, shape ``(rows, outputs, T)``."""
        # One pass for all trees; predicting tree by tree would be slower and add the intercept to each.
        matrix = xgb.DMatrix(self._checked_rows(x), nthread=threads)
        leaves = self._booster.predict(matrix, pred_leaf=True, strict_shape=True)
        leaves = leaves.reshape(len(x), len(self.nodes)).astype(np.int64)
        values = self.value[leaves + self._tree_starts]
        return np.ascontiguousarray(values.reshape(len(x), len(self), self.outputs).transpose(0, 2, 1))

    def margins(self, x: NDArray[np.float32], *, threads: int = 1) -> NDArray[np.float32]:
        """Return intercept plus the sum over all trees, shape ``(rows, outputs)``."""
        matrix = xgb.DMatrix(self._checked_rows(x), nthread=threads)
        margins: NDArray[np.float32] = self._booster.predict(matrix, output_margin=True)
        return margins.reshape(len(x), self.outputs)

    def to_bytes(self) -> bytes:
        """Return compressed JSON with what prediction needs, and no statistics of the training rows."""
        inner = self.split_feature != _LEAF
        document = {
            "format": FORMAT,
            "features": self.features,
            "outputs": self.outputs,
            "intercept": self.intercept,
            "nodes": self.nodes.tolist(),
            "split_feature": self.split_feature.tolist(),
            # The shortest decimal that reads back to the same float32.
            "value": [float(str(value)) for value in self.value],
            "default_left": "".join("01"[int(left)] for left in self.default_left[inner]),
        }
        return zlib.compress(json.dumps(document, separators=(",", ":")).encode(), level=9)

    @classmethod
    def from_bytes(cls, data: bytes, *, features: int, outputs: int, n_estimators: int, max_depth: int) -> Self:
        """Read an ensemble that somebody sent, trusting none of it.

        Raises:
            ValueError: Anything differs from what was asked for, or is not a well-formed tree.
        """
        document = _parse(data, _size_limit(features=features, trees=n_estimators * outputs, max_depth=max_depth))
        for key, expected in (("format", FORMAT), ("features", features), ("outputs", outputs)):
            found = document.get(key)
            # Python takes True for 1 and 5.0 for 5; here they are no numbers of columns.
            if type(found) is not type(expected) or found != expected:
                raise ValueError(f"ensemble has {key} {str(found)[:60]!r}, expected {expected!r}")
        intercept = document.get("intercept")
        if not isinstance(intercept, float) or not abs(intercept) <= _LARGEST:
            raise ValueError(
                f"ensemble has the intercept {str(intercept)[:60]!r}, expected a finite single-precision number"
            )
        nodes = _integers(document, "nodes", low=1, high=2 ** (max_depth + 1) - 1)
        if len(nodes) != n_estimators * outputs:
            raise ValueError(f"ensemble has {len(nodes)} trees, expected {n_estimators * outputs}")
        split_feature = _integers(document, "split_feature", low=_LEAF, high=features - 1)
        value = _finite_floats(document, "value")
        total = int(nodes.sum(dtype=np.int64))
        for name, array in (("split_feature", split_feature), ("value", value)):
            if len(array) != total:
                raise ValueError(f"ensemble has {len(array)} entries in {name}, expected {total}, one per node")
        inner = split_feature != _LEAF
        default_left = np.zeros(total, dtype=np.bool_)
        default_left[inner] = _bits(document, "default_left", count=int(inner.sum()))
        ensemble = cls(features, outputs, intercept, nodes, split_feature, value, default_left)
        for tree in range(len(nodes)):
            _check_shape(split_feature[ensemble._tree(tree)], tree, max_depth)
        return ensemble

    @classmethod
    def from_booster(cls, booster: xgb.Booster, *, features: int, outputs: int, intercept: float) -> Self:
        """Read the trees of a fitted booster, renumbered breadth first."""
        model = json.loads(bytes(booster.save_raw("json")))["learner"]["gradient_booster"]["model"]
        nodes: list[int] = []
        split_feature: list[int] = []
        value: list[float] = []
        default_left: list[bool] = []
        for tree in model["trees"]:
            left, right = tree["left_children"], tree["right_children"]
            order = [0]
            for node in order:  # grows while it is walked
                if left[node] != -1:
                    order += [left[node], right[node]]
            nodes.append(len(order))
            split_feature += [_LEAF if left[n] == -1 else tree["split_indices"][n] for n in order]
            value += [tree["split_conditions"][n] for n in order]
            default_left += [left[n] != -1 and bool(tree["default_left"][n]) for n in order]
        return cls(
            features,
            outputs,
            float(intercept),
            np.asarray(nodes, dtype=np.int32),
            np.asarray(split_feature, dtype=np.int32),
            np.asarray(value, dtype=np.float32),
            np.asarray(default_left, dtype=np.bool_),
        )

    def _tree(self, tree: int) -> slice:
        start = int(self._tree_starts[tree])
        return slice(start, start + int(self.nodes[tree]))

    def _checked_rows(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        if x.ndim != 2 or x.shape[1] != self.features:
            raise ValueError(f"rows have the shape {x.shape}, expected (rows, {self.features})")
        return x

    @cached_property
    def _tree_starts(self) -> NDArray[np.int64]:
        ends = np.cumsum(self.nodes, dtype=np.int64)
        return ends - self.nodes

    @cached_property
    def _booster(self) -> xgb.Booster:
        # XGBoost's loader is not memory-safe, so it only ever sees a document made here from checked arrays.
        booster = xgb.Booster({"nthread": 1})
        booster.load_model(bytearray(json.dumps(self._xgboost_document()).encode()))
        return booster

    def _xgboost_document(self) -> dict[str, Any]:
        trees = [self._xgboost_tree(tree) for tree in range(len(self.nodes))]
        classes = self.outputs if self.outputs > 1 else 0
        model = {
            "cats": {"enc": [], "feature_segments": [], "sorted_idx": []},
            "gbtree_model_param": {"num_parallel_tree": "1", "num_trees": str(len(trees))},
            "iteration_indptr": list(range(0, len(trees) + 1, self.outputs)),
            "tree_info": [tree % self.outputs for tree in range(len(trees))],
            "trees": trees,
        }
        learner = {
            "attributes": {},
            "feature_names": [],
            "feature_types": [],
            "gradient_booster": {"model": model, "name": "gbtree"},
            "learner_model_param": {
                # Squared error has the identity link, so that the margin is stored as it is.
                "base_score": json.dumps([self.intercept] * self.outputs),
                "boost_from_average": "0",
                "num_class": str(classes),
                "num_feature": str(self.features),
                "num_target": "1",
            },
            "objective": {"name": "multi:softprob", "softmax_multiclass_param": {"num_class": str(classes)}}
            if classes
            else {"name": "reg:squarederror", "reg_loss_param": {"scale_pos_weight": "1"}},
        }
        return {"learner": learner, "version": [int(part) for part in xgb.__version__.split(".")[:3]]}

    def _xgboost_tree(self, tree: int) -> dict[str, Any]:
        part = self._tree(tree)
        feature = self.split_feature[part]
        count = len(feature)
        left = np.full(count, -1)
        inner = np.flatnonzero(feature != _LEAF)
        left[inner] = 1 + 2 * np.arange(len(inner))
        right = np.where(left == -1, -1, left + 1)
        parents = np.full(count, _NO_PARENT)
        parents[left[inner]] = inner
        parents[right[inner]] = inner
        zeros = [0.0] * count
        return {
            "base_weights": zeros,
            "categories": [],
            "categories_nodes": [],
            "categories_segments": [],
            "categories_sizes": [],
            "default_left": self.default_left[part].astype(int).tolist(),
            "id": tree,
            "left_children": left.tolist(),
            "loss_changes": zeros,
            "parents": parents.tolist(),
            "right_children": right.tolist(),
            "split_conditions": [float(str(value)) for value in self.value[part]],
            "split_indices": np.maximum(feature, 0).tolist(),
            "split_type": [0] * count,
            "sum_hessian": zeros,
            "tree_param": {
                "num_deleted": "0",
                "num_feature": str(self.features),
                "num_nodes": str(count),
                "size_leaf_vector": "1",
            },
        }


@dataclass(frozen=True, eq=False)
class Forest:
    """All clients' ensembles, in client order."""

    ensembles: tuple[Ensemble, ...]

    def __post_init__(self) -> None:
        if not self.ensembles:
            raise ValueError("a forest needs at least one ensemble")
        for name in ("features", "outputs", "intercept"):
            found = {getattr(ensemble, name) for ensemble in self.ensembles}
            if len(found) > 1:
                raise ValueError(f"the ensembles of a forest differ in {name}: {sorted(found)}")
        if len({len(ensemble) for ensemble in self.ensembles}) > 1:
            lengths = [len(ensemble) for ensemble in self.ensembles]
            raise ValueError(f"the ensembles of a forest differ in their number of trees: {lengths}")

    @property
    def trees(self) -> int:
        """Trees per client, T."""
        return len(self.ensembles[0])

    @property
    def outputs(self) -> int:
        """Numbers per row: 1, or one per class."""
        return self.ensembles[0].outputs

    @property
    def intercept(self) -> float:
        """Margin that all ensembles start from."""
        return self.ensembles[0].intercept

    @cached_property
    def digest(self) -> str:
        """Sha256 over the ensembles' digests in client order."""
        return sha256("".join(ensemble.digest for ensemble in self.ensembles).encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Memory of the arrays in bytes."""
        return sum(ensemble.nbytes for ensemble in self.ensembles)

    def prefix(self, n_estimators: int) -> "Forest":
        """Return the forest of each ensemble's first boosting rounds; all of them are this forest itself."""
        if n_estimators == self.trees:
            return self
        return Forest(tuple(ensemble.prefix(n_estimators) for ensemble in self.ensembles))

    def tree_outputs(self, x: NDArray[np.float32], *, threads: int = 1) -> NDArray[np.float32]:
        """Return what every tree of every client says about every row, shape ``(rows, outputs, K*T)``."""
        outputs = np.empty((len(x), self.outputs, len(self.ensembles) * self.trees), dtype=np.float32)
        for client, ensemble in enumerate(self.ensembles):
            start = client * self.trees
            outputs[:, :, start : start + self.trees] = ensemble.tree_outputs(x, threads=threads)
        return outputs


def ensemble_margins(tree_outputs: NDArray[np.float32], intercept: float, client_num: int) -> NDArray[np.float64]:
    """Return each ensemble's margin from its trees' outputs.

    Args:
        tree_outputs: Shape ``(rows, outputs, K*T)``.
        intercept: What each ensemble starts from.
        client_num: K.

    Returns:
        Shape ``(rows, outputs, K)``. The mean over the last axis is the mean margin.
    """
    rows, outputs, total = tree_outputs.shape
    per_client = tree_outputs.reshape(rows, outputs, client_num, total // client_num)
    margins: NDArray[np.float64] = intercept + per_client.sum(axis=3, dtype=np.float64)
    return margins


def grow_ensemble(
    x: NDArray[np.float32],
    y: NDArray[np.float64],
    *,
    objective: str,
    outputs: int,
    n_estimators: int,
    base_score: float,
    intercept: float,
    xgb_params: Mapping[str, float | int],
    seed: int,
    threads: int = 1,
) -> Ensemble:
    """Fit ``n_estimators`` boosting rounds on the given rows.

    Args:
        x: Rows, shape ``(rows, features)``; NaN is a missing value.
        y: Class indices or targets in original units, shape ``(rows,)``.
        objective: XGBoost's name of the objective.
        outputs: 1, or the number of classes.
        n_estimators: T.
        base_score: Prediction to start from, in the target's units; the same for all clients.
        intercept: The same as a margin.
        xgb_params: XGBoost's own parameter names.
        seed: Seed of row and column sampling.
        threads: XGBoost's threads; the trees do not depend on it.
    """
    params: dict[str, Any] = {
        **xgb_params,
        "objective": objective,
        "base_score": base_score,
        "seed": seed,
        "nthread": threads,
        "tree_method": "hist",
        "verbosity": 0,
    }
    if outputs > 1:
        params["num_class"] = outputs
    booster = xgb.train(params, xgb.DMatrix(x, label=y, nthread=threads), n_estimators)
    return Ensemble.from_booster(booster, features=x.shape[1], outputs=outputs, intercept=intercept)


def _size_limit(*, features: int, trees: int, max_depth: int) -> int:
    """Return the bytes that the JSON of so many full trees fills at most."""
    # A split's column, a number (19 characters in single precision) and a direction, with commas.
    node = len(str(features)) + 1 + 20 + 1
    return min(MAX_ENSEMBLE_BYTES, 1024 + trees * (12 + ((2 << max_depth) - 1) * node))


def _parse(data: bytes, limit: int) -> Mapping[str, Any]:
    decompressor = zlib.decompressobj()
    try:
        text = decompressor.decompress(data, limit)
    except zlib.error as error:
        raise ValueError(f"ensemble is not compressed JSON: {error}") from None
    if not decompressor.eof:
        raise ValueError(f"ensemble is cut short, or holds more than the {limit} bytes that its trees can fill")
    if decompressor.unused_data:
        raise ValueError(f"ensemble is followed by {len(decompressor.unused_data)} bytes that do not belong to it")
    # One object with three lists. Nested containers take the parser many times the memory of their text.
    if text.count(b"{") > 1 or text.count(b"[") > 3:
        raise ValueError("ensemble is nested, expected one flat object")
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"ensemble is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"ensemble is a JSON {type(document).__name__}, expected an object")
    return document


def _entries(document: Mapping[str, Any], key: str, types: Sequence[type]) -> list[Any]:
    entries = document.get(key)
    if not isinstance(entries, list) or not set(map(type, entries)) <= set(types):
        raise ValueError(f"ensemble needs a list of numbers as {key}")
    return entries


def _integers(document: Mapping[str, Any], key: str, *, low: int, high: int) -> NDArray[np.int32]:
    entries = _entries(document, key, (int,))
    if entries and not low <= min(entries) <= max(entries) <= high:
        raise ValueError(f"ensemble has {key} in {min(entries)}..{max(entries)}, allowed are {low}..{high}")
    return np.asarray(entries, dtype=np.int32)


def _finite_floats(document: Mapping[str, Any], key: str) -> NDArray[np.float32]:
    entries = _entries(document, key, (int, float))
    # Compared in Python: an integer may be too long for a float, and NaN fails every comparison.
    wrong = next((entry for entry in entries if not -_LARGEST <= entry <= _LARGEST), None)
    if wrong is not None:
        raise ValueError(f"ensemble has {str(wrong)[:40]} in {key}, expected finite single-precision numbers")
    return np.asarray(entries, dtype=np.float32)


def _bits(document: Mapping[str, Any], key: str, *, count: int) -> NDArray[np.bool_]:
    text = document.get(key)
    if not isinstance(text, str) or len(text) != count or not set(text) <= {"0", "1"}:
        raise ValueError(f"ensemble needs {count} digits 0 or 1 as {key}, one per split")
    return np.asarray([digit == "1" for digit in text], dtype=np.bool_)


def _check_shape(split_feature: NDArray[np.int32], tree: int, max_depth: int) -> None:
    """Check that breadth-first levels fill exactly the nodes that are there."""
    start, width, depth = 0, 1, -1
    while width:
        level = split_feature[start : start + width]
        if len(level) < width:
            raise ValueError(f"tree {tree} of the ensemble ends in the middle of a level")
        start, width, depth = start + width, 2 * int((level != _LEAF).sum()), depth + 1
        if depth > max_depth:
            raise ValueError(f"tree {tree} of the ensemble is deeper than max_depth {max_depth}")
    if start != len(split_feature):
        raise ValueError(f"tree {tree} of the ensemble has {len(split_feature) - start} nodes that nothing leads to")
