"""The only spelling of record keys: domain objects to Flower records and back."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedlightning.tasks import Tally, TargetStatistics

PROTOCOL = 2
"""Raised when a message changes its meaning; both sides must agree."""

DESCRIBE = "query.describe"
GROW = "train.grow"
PLANT = "query.plant"
TRAIN = "train"
COMPARE = "evaluate.compare"
EVALUATE = "evaluate"

_REQUEST = "request"
_REPLY = "reply"
_XGB = "xgb"
_METRICS = "metrics"
NETWORK = "network"
"""Record of the network's arrays, the one that mods and Flower's own strategies look for."""


class NotFiniteError(ValueError):
    """A number or an array holds NaN or infinity: the training diverged."""


R = TypeVar("R")
Arrays = Mapping[str, NDArray[np.float32]]


class _Record:
    """A frozen dataclass of scalars, bytes and lists that travels as one ConfigRecord."""

    _name = _REQUEST

    def to_content(self) -> RecordDict:
        """Return the content of a message."""
        values = {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}
        return RecordDict({self._name: ConfigRecord(values)})

    @classmethod
    def from_content(cls, content: RecordDict) -> Self:
        """Read a message's content, which a stranger may have written.

        Raises:
            ValueError: A field is missing, has another type, or is not finite.
        """
        record = _find(content.config_records, cls._name)
        values = {}
        for field in fields(cast(Any, cls)):
            value = record.get(field.name)
            wanted = cast(type, field.type)
            # list[bytes] and the like are checked by their container, then entry by entry.
            container = getattr(wanted, "__origin__", wanted)
            entry_types = getattr(wanted, "__args__", (wanted,))
            if type(value) is not container or any(type(entry) not in entry_types for entry in _entries(value)):
                raise ValueError(f"{cls.__name__}.{field.name} is {str(value)[:60]!r}, expected {wanted}")
            if not all(math.isfinite(entry) for entry in _entries(value) if type(entry) is float):
                raise ValueError(f"{cls.__name__}.{field.name} is {str(value)[:60]}, expected finite numbers")
            values[field.name] = value
        return cls(**values)


def content(*parts: _Record, network: ArrayRecord | None = None) -> RecordDict:
    """Return the content of a message: each part's record, and the network's arrays if there is one."""
    merged = RecordDict()
    for part in parts:
        merged.update(part.to_content())
    if network is not None:
        merged[NETWORK] = network
    return merged


def _find(records: Mapping[str, R], name: str) -> R:
    record = records.get(name)
    if record is None:
        raise ValueError(f"message has no record {name!r}")
    return record


def _entries(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else (value,)


class _Reply(_Record):
    _name = _REPLY


@dataclass(frozen=True)
class RowsRequest(_Record):
    """Which rows of its own a client is to use, and how they are cut; part of every request."""

    _name = "rows"

    dataset: str
    task: str
    train_ratio: float
    split_seed: int
    """Of the test rows and the shards."""
    val_ratio: float
    seed: int
    """Of the run: the validation rows, the trees, the batches."""


@dataclass(frozen=True)
class DescribeRequest(_Record):
    """Ask how many rows a client holds, and what the global prior and scaling need."""

    protocol: int


@dataclass(frozen=True)
class Description(_Reply):
    """What a client tells about its rows."""

    partition: int
    train_rows: int
    validation_rows: int
    test_rows: int
    """0 where the test rows lie with the server."""
    features: int
    classes: int
    target_sum: float
    target_sum_of_squares: float

    @property
    def statistics(self) -> TargetStatistics:
        """The client's part of the global target statistics."""
        return TargetStatistics(self.train_rows, self.target_sum, self.target_sum_of_squares)


@dataclass(frozen=True)
class GrowRequest(_Record):
    """Ask for an ensemble of ``n_estimators`` boosting rounds."""

    classes: int
    n_estimators: int
    base_score: float
    intercept: float
    xgb_keys: list[str]
    xgb_values: list[float]

    @property
    def xgb_params(self) -> dict[str, float | int]:
        """XGBoost's parameters; whole numbers come back as integers."""
        pairs = zip(self.xgb_keys, self.xgb_values, strict=True)
        return {key: int(value) if value.is_integer() else value for key, value in pairs}

    @staticmethod
    def split_params(params: Mapping[str, float | int]) -> tuple[list[str], list[float]]:
        """Return keys and values as the record's two lists."""
        return list(params), [float(value) for value in params.values()]


@dataclass(frozen=True)
class Grown(_Reply):
    """One client's ensemble as bytes."""

    partition: int
    examples: int
    fitted: bool
    """False if the client already held these trees, or more of the same."""
    ensemble: bytes


@dataclass(frozen=True)
class PlantRequest(_Record):
    """Give a client the ensembles that it lacks; its own stays where it grew."""

    digest: str
    own_digest: str
    client_num: int
    features: int
    outputs: int
    n_estimators: int
    max_depth: int
    partitions: list[int]
    ensembles: list[bytes]


@dataclass(frozen=True)
class Planted(_Reply):
    """A client's word that it now holds the forest."""

    partition: int
    digest: str


@dataclass(frozen=True)
class LostForest(_Record):
    """A client's word that it no longer holds the forest it was asked to use."""

    _name = "lost"

    partition: int
    digest: str


def is_lost(content: RecordDict) -> bool:
    """Return whether a reply says that the client lost the forest."""
    return LostForest._name in content.config_records


@dataclass(frozen=True)
class TrainRequest(_Record):
    """Everything but rows and network that a client needs to train or evaluate."""

    digest: str
    n_estimators: int
    """Trees to use of each ensemble of the forest, from its first on."""
    part: str
    """Rows to evaluate: ``validation`` or ``test``."""
    scaling_mean: float
    scaling_std: float
    round: int
    channels: int
    num_iterations: int
    batch_size: int
    lr: float
    accelerator: str


def tally_record(partition: int, tally: Tally) -> MetricRecord:
    """Return a client's tally; ``num-examples`` is Flower's own name of the weight."""
    return MetricRecord(
        {
            "partition": partition,
            "num-examples": tally.examples,
            "loss_sum": tally.loss_sum,
            "metric_sum": tally.metric_sum,
        }
    )


def read_tally(record: MetricRecord) -> tuple[int, Tally]:
    """Return partition and tally of a client's reply.

    Raises:
        ValueError: A number is missing or of another type.
        NotFiniteError: A number is not finite.
    """
    values = {}
    for key, wanted in (
        ("partition", int),
        ("num-examples", int),
        ("loss_sum", float),
        ("metric_sum", float),
    ):
        value = record.get(key)
        if type(value) is not wanted:
            raise ValueError(f"reply has {key} {value!r}, expected a {wanted.__name__}")
        if not np.isfinite(value):
            raise NotFiniteError(f"reply has {key} {value!r}")
        values[key] = value
    if values["num-examples"] < 0:
        raise ValueError(f"reply counts {values['num-examples']} examples")
    tally = Tally(float(values["loss_sum"]), float(values["metric_sum"]), int(values["num-examples"]))
    return int(values["partition"]), tally


def train_reply(network: ArrayRecord, partition: int, train_rows: int, tally: Tally) -> RecordDict:
    """Return a trained network and its training tally."""
    metrics = tally_record(partition, tally)
    # Flower's own strategies weigh a client by this key: its rows, not what its iterations happened to visit.
    metrics["num-examples"] = train_rows
    metrics["seen"] = tally.examples
    return RecordDict({NETWORK: network, _METRICS: metrics})


def read_train_reply(content: RecordDict) -> tuple[int, ArrayRecord, Tally]:
    """Return partition, network and training tally of a reply."""
    metrics = _find(content.metric_records, _METRICS)
    partition, tally = read_tally(metrics)
    seen = metrics.get("seen")
    if type(seen) is not int or seen < 1:
        raise ValueError(f"reply counts {seen!r} rows seen in training")
    return partition, _find(content.array_records, NETWORK), Tally(tally.loss_sum, tally.metric_sum, seen)


def evaluate_reply(partition: int, tally: Tally) -> RecordDict:
    """Return the tally of a client's validation rows."""
    return RecordDict({_METRICS: tally_record(partition, tally)})


def read_evaluate_reply(content: RecordDict) -> tuple[int, Tally]:
    """Return partition and tally of a reply."""
    return read_tally(_find(content.metric_records, _METRICS))


def compare_reply(partition: int, mean_margin: Tally, local_only: Tally) -> RecordDict:
    """Return what needs no network: the tallies of the mean margin and of the client's own ensemble."""
    return RecordDict(
        {
            "mean_margin": tally_record(partition, mean_margin),
            "local_only": tally_record(partition, local_only),
        }
    )


def read_compare_reply(content: RecordDict) -> tuple[int, Tally, Tally]:
    """Return partition, mean-margin tally and local-only tally of a reply."""
    partition, mean_margin = read_tally(_find(content.metric_records, "mean_margin"))
    _, local_only = read_tally(_find(content.metric_records, "local_only"))
    return partition, mean_margin, local_only


def to_array_record(arrays: Arrays) -> ArrayRecord:
    """Return named arrays as a record."""
    return ArrayRecord({name: Array(np.ascontiguousarray(array)) for name, array in arrays.items()})


def read_arrays(record: ArrayRecord, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
    """Return the arrays of a record whose names and shapes are known.

    Raises:
        ValueError: A name, shape or type differs.
        NotFiniteError: A value is not finite.
    """
    if set(record) != set(shapes):
        raise ValueError(f"network has the arrays {sorted(record)}, expected {sorted(shapes)}")
    arrays = {}
    for name, shape in shapes.items():
        array = _read_array(name, record[name])
        if array.dtype != np.float32 or array.shape != shape:
            raise ValueError(f"{name} is {array.dtype} {array.shape}, expected float32 {shape}")
        if not np.isfinite(array).all():
            raise NotFiniteError(f"{name} holds values that are not finite")
        arrays[name] = array
    return arrays


def _read_array(name: str, array: Array) -> NDArray[Any]:
    try:
        return array.numpy()
    except Exception as error:
        # NumPy parses the header as Python source: damage ends in whatever error the damaged text leads to.
        raise ValueError(f"{name} is not an array: {type(error).__name__}: {error}") from error


def count_bytes(contents: Iterable[RecordDict]) -> int:
    """Return the size of all records, keys included, numbers as 8 bytes."""
    return sum(_record_bytes(record) for content in contents for record in content.values())


def _record_bytes(record: ArrayRecord | ConfigRecord | MetricRecord) -> int:
    if isinstance(record, ArrayRecord):
        return record.count_bytes()
    # Flower's own count raises at an empty string or list, which a lone client's forest has and a stranger may send.
    return sum(len(key) + sum(map(_value_bytes, _entries(value))) for key, value in record.items())


def _value_bytes(value: object) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return 1 if isinstance(value, bool) else 8
