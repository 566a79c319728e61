"""Tests of what travels: every record through Flower's own serialisation, and what is refused on arrival."""

import math
import types
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from federations import through_objects, through_proto
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedlightning.federation import records
from fedlightning.federation.local_grid import LocalGrid
from fedlightning.model import TreeCNN, load_arrays, network_arrays, network_shapes
from fedlightning.tasks import Tally

RECORDS = (
    records.RowsRequest,
    records.DescribeRequest,
    records.Description,
    records.GrowRequest,
    records.Grown,
    records.PlantRequest,
    records.Planted,
    records.LostForest,
    records.TrainRequest,
)
INT64 = st.integers(-(2**63), 2**63 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: INT64,
    float: FINITE,
    str: st.text(),
    bytes: st.binary(),
    bool: st.booleans(),
    list[str]: st.lists(st.text(), max_size=3),
    list[int]: st.lists(INT64, max_size=3),
    list[float]: st.lists(FINITE, max_size=3),
    list[bytes]: st.lists(st.binary(), max_size=3),
}
ANY_RECORD = st.one_of(
    *(st.builds(record, **{field.name: VALUES[field.type] for field in fields(record)}) for record in RECORDS)
)
TALLIES = st.builds(Tally, FINITE, FINITE, st.integers(0, 2**62))
SHAPES = {"conv.weight": (2, 1, 3), "conv.bias": (2,)}


WIRES = pytest.mark.parametrize("carry", [through_proto, through_objects])


def wire(carry: Callable[[Message], Message], content: RecordDict) -> RecordDict:
    """Return what arrives of a content."""
    with LocalGrid(1) as grid:
        return carry(grid.create_message(content, "train", 2, "1")).content


def an_example(record: type[Any]) -> Any:
    """Return some instance of a record class."""
    examples: dict[Any, object] = {int: 3, float: 0.5, str: "some", bytes: b"some", bool: True}
    return record(
        **{
            field.name: [examples[field.type.__args__[0]]]
            if isinstance(field.type, types.GenericAlias)
            else examples[field.type]
            for field in fields(record)
        }
    )


def arrays(**changes: NDArray[Any]) -> ArrayRecord:
    """Return the arrays of a small network, some of them changed."""
    whole = {name: np.arange(math.prod(shape), dtype=np.float32).reshape(shape) for name, shape in SHAPES.items()}
    return records.to_array_record(whole | {name.replace("_", "."): array for name, array in changes.items()})


@WIRES
@given(record=ANY_RECORD)
@settings(deadline=None)
def test_records_survive_the_wire(carry: Callable[[Message], Message], record: Any) -> None:
    """Every request and reply is the same after a trip through Flower's serialisation."""
    assert type(record).from_content(wire(carry, record.to_content())) == record


@pytest.mark.parametrize("record", RECORDS)
def test_a_missing_field_is_named(record: type[Any]) -> None:
    """A record without one of its fields is refused by the field's name."""
    for field in fields(record):
        content = an_example(record).to_content()
        (only,) = content.values()
        del only[field.name]
        with pytest.raises(ValueError, match=rf"{record.__name__}\.{field.name} is 'None'"):
            record.from_content(content)


@pytest.mark.parametrize("record", RECORDS)
def test_a_field_of_another_type_is_named(record: type[Any]) -> None:
    """A field of a similar but different type is refused: no bool for an int, no int for a float, no str for bytes."""
    others: dict[Any, Any] = {int: True, float: 1, str: b"some", bytes: "some", bool: 1}
    for field in fields(record):
        listed = isinstance(field.type, types.GenericAlias)
        entry = others[field.type.__args__[0] if listed else field.type]
        for wrong in ([entry], entry) if listed else (entry, [an_example(record).__dict__[field.name]]):
            content = an_example(record).to_content()
            (only,) = content.values()
            only[field.name] = wrong
            with pytest.raises(ValueError, match=rf"{record.__name__}\.{field.name} is .*, expected"):
                record.from_content(content)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("record", RECORDS)
def test_numbers_that_are_not_finite_are_named(record: type[Any], value: float) -> None:
    """NaN or infinity in any field is refused by the field's name, and is no sign of a diverged training."""
    for field in fields(record):
        if field.type not in (float, list[float]):
            continue
        wrong = value if field.type is float else [1.0, value]
        content = replace(an_example(record), **{field.name: wrong}).to_content()
        with pytest.raises(ValueError, match=rf"{record.__name__}\.{field.name} .*finite") as caught:
            record.from_content(content)
        assert not isinstance(caught.value, records.NotFiniteError)


@pytest.mark.parametrize("record", RECORDS)
def test_a_content_without_the_record_is_refused(record: type[Any]) -> None:
    """A content that holds something else says which record is missing."""
    with pytest.raises(ValueError, match="message has no record"):
        record.from_content(RecordDict({"stranger": ConfigRecord({"partition": 1})}))


def test_only_the_lost_forest_is_lost() -> None:
    """No other record is taken for the word that a forest is lost."""
    assert [record for record in RECORDS if records.is_lost(an_example(record).to_content())] == [records.LostForest]


@WIRES
def test_xgboost_parameters_keep_their_numbers(carry: Callable[[Message], Message]) -> None:
    """XGBoost gets the parameters that were sent, whole numbers as integers."""
    params = {"max_depth": 6, "learning_rate": 0.1, "gamma": 5.0, "lambda": 1}
    keys, values = records.GrowRequest.split_params(params)
    request = replace(an_example(records.GrowRequest), xgb_keys=keys, xgb_values=values)
    arrived = records.GrowRequest.from_content(wire(carry, request.to_content())).xgb_params
    assert arrived == params
    assert [type(value) for value in arrived.values()] == [int, float, int, int]


@WIRES
@given(partition=INT64, tally=TALLIES, own=TALLIES, rows=st.integers(0, 2**62))
@settings(deadline=None)
def test_tallies_survive_the_wire(
    carry: Callable[[Message], Message], partition: int, tally: Tally, own: Tally, rows: int
) -> None:
    """Evaluate, compare and train replies say the same after a trip through Flower's serialisation."""
    evaluated = wire(carry, records.evaluate_reply(partition, tally))
    assert records.read_evaluate_reply(evaluated) == (partition, tally)
    compared = wire(carry, records.compare_reply(partition, tally, own))
    assert records.read_compare_reply(compared) == (partition, tally, own)
    seen = replace(tally, examples=tally.examples + 1)
    sent = wire(carry, records.train_reply(arrays(), partition, rows, seen))
    assert sent.metric_records["metrics"]["num-examples"] == rows
    arrived_partition, arrived, arrived_tally = records.read_train_reply(sent)
    assert (arrived_partition, arrived_tally) == (partition, seen)
    assert {name: array.tobytes() for name, array in records.read_arrays(arrived, SHAPES).items()} == {
        name: array.numpy().tobytes() for name, array in arrays().items()
    }


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("partition", 1.0, ValueError),
        ("num-examples", 3.0, ValueError),
        ("num-examples", -1, ValueError),
        ("loss_sum", 3, ValueError),
        ("loss_sum", math.nan, records.NotFiniteError),
        ("metric_sum", math.inf, records.NotFiniteError),
        ("metric_sum", [1.0], ValueError),
        ("loss_sum", None, ValueError),
    ],
)
def test_a_wrong_tally_is_named(key: str, value: Any, error: type[Exception]) -> None:
    """A tally with a missing, wrong or non-finite number is refused by its key or by its number of examples."""
    record = records.tally_record(0, Tally(1.0, 2.0, 3))
    if value is None:
        del record[key]
    else:
        record[key] = value
    with pytest.raises(error, match=key.removeprefix("num-")) as caught:
        records.read_tally(record)
    assert type(caught.value) is error


@pytest.mark.parametrize("seen", [None, 0, -3, 2.0])
def test_a_training_that_saw_no_rows_is_refused(seen: float | None) -> None:
    """A train reply must count the rows that its iterations visited."""
    content = records.train_reply(arrays(), 0, 10, Tally(1.0, 2.0, 3))
    metrics = content.metric_records["metrics"]
    if seen is None:
        del metrics["seen"]
    else:
        metrics["seen"] = seen
    with pytest.raises(ValueError, match="rows seen in training"):
        records.read_train_reply(content)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (RecordDict(), "metrics"),
        (RecordDict({"metrics": ConfigRecord({"partition": 0})}), "metrics"),
        (RecordDict({"metrics": MetricRecord({**records.tally_record(0, Tally(1.0, 1.0, 1)), "seen": 1})}), "network"),
    ],
)
def test_a_reply_without_a_record_says_which(content: RecordDict, name: str) -> None:
    """A train reply without metrics or without a network names what it lacks."""
    with pytest.raises(ValueError, match=f"message has no record '{name}'"):
        records.read_train_reply(content)


def test_compare_replies_need_both_tallies() -> None:
    """A compare reply without one of its tallies names it."""
    for name in ("mean_margin", "local_only"):
        content = records.compare_reply(0, Tally(1.0, 1.0, 1), Tally(1.0, 1.0, 1))
        del content[name]
        with pytest.raises(ValueError, match=f"message has no record '{name}'"):
            records.read_compare_reply(content)


@WIRES
def test_networks_survive_the_wire_to_the_bit(carry: Callable[[Message], Message]) -> None:
    """A network that is sent and loaded elsewhere has the same parameters, bit for bit."""
    network, other = TreeCNN(3, 4, 2, 5), TreeCNN(3, 4, 2, 5)
    request = an_example(records.TrainRequest)
    content = wire(carry, records.content(request, network=records.to_array_record(network_arrays(network))))
    assert records.TrainRequest.from_content(content) == request
    load_arrays(other, records.read_arrays(content.array_records[records.NETWORK], network_shapes(other)))
    for name, value in network.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


def test_sent_arrays_are_copies() -> None:
    """Training on does not change what was read from the network before."""
    network = TreeCNN(2, 3)
    before = network_arrays(network)
    kept = {name: array.copy() for name, array in before.items()}
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1)
    assert all((before[name] == kept[name]).all() for name in kept)


@pytest.mark.parametrize(
    ("record", "error", "text"),
    [
        (arrays(extra=np.zeros(1, np.float32)), ValueError, "expected .*conv.bias"),
        (records.to_array_record({"conv.bias": np.zeros(2, np.float32)}), ValueError, "has the arrays"),
        (arrays(conv_bias=np.zeros(3, np.float32)), ValueError, r"conv.bias is float32 \(3,\)"),
        (arrays(conv_bias=np.zeros((2, 1), np.float32)), ValueError, r"conv.bias is float32 \(2, 1\)"),
        (arrays(conv_bias=np.zeros(2, np.float64)), ValueError, "conv.bias is float64"),
        (arrays(conv_bias=np.zeros(2, ">f4")), ValueError, "conv.bias is >f4"),
        (arrays(conv_bias=np.zeros(2, np.int32)), ValueError, "conv.bias is int32"),
        (arrays(conv_bias=np.array([0, np.nan], np.float32)), records.NotFiniteError, "conv.bias"),
        (arrays(conv_weight=np.full((2, 1, 3), -np.inf, np.float32)), records.NotFiniteError, "conv.weight"),
    ],
)
def test_other_arrays_are_refused(record: ArrayRecord, error: type[Exception], text: str) -> None:
    """Wrong names, shapes, types and values that are not finite are refused by the array's name."""
    with pytest.raises(error, match=text) as caught:
        records.read_arrays(record, SHAPES)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("stype", "data"),
    [
        ("pickle", b"cos\nsystem\n(S'true'\ntR."),
        ("numpy.ndarray", b"cos\nsystem\n(S'true'\ntR."),
        ("numpy.ndarray", b""),
    ],
)
def test_nothing_but_numpy_is_read(stype: str, data: bytes) -> None:
    """An array whose bytes are something else, a pickle too, is refused and not loaded."""
    record = arrays()
    record["conv.bias"] = Array("float32", (2,), stype, data)
    with pytest.raises(ValueError, match=r"conv\.bias is not an array"):
        records.read_arrays(record, SHAPES)


@given(
    position=st.integers(0, 135),
    byte=st.integers(0, 255),
    end=st.integers(0, 136),
    cut=st.booleans(),
)
@settings(deadline=None)
def test_damaged_arrays_are_refused_or_read(position: int, byte: int, end: int, cut: bool) -> None:
    """Whatever happens to an array's bytes, reading them ends in arrays of the right shape or in a ValueError."""
    record = arrays()
    data = bytearray(record["conv.bias"].data)
    assert len(data) == 136
    data[position] = byte
    record["conv.bias"] = Array("float32", (2,), "numpy.ndarray", bytes(data[:end] if cut else data))
    try:
        read = records.read_arrays(record, SHAPES)
    except ValueError:
        return
    assert {name: array.shape for name, array in read.items()} == SHAPES


def counted(content: RecordDict) -> int:
    """Count a content's records by hand: keys, texts, bytes, 8 per number, 1 per truth value."""

    def size(value: Any) -> int:
        if isinstance(value, list):
            return sum(size(entry) for entry in value)
        if isinstance(value, str | bytes):
            return len(value)
        return 1 if isinstance(value, bool) else 8

    total = 0
    for record in content.values():
        for key, value in record.items():
            total += len(key) + (len(value.data) if isinstance(value, Array) else size(value))
    return total


@given(contents=st.lists(ANY_RECORD.map(lambda record: record.to_content()), max_size=3))
@settings(deadline=None)
def test_bytes_are_counted_from_the_records(contents: list[RecordDict]) -> None:
    """The count is the sum over all values and keys of all contents, empty lists and texts included."""
    assert records.count_bytes(contents) == sum(counted(content) for content in contents)


@given(
    numbers=st.lists(st.integers(0, 9) | FINITE, max_size=3),
    text=st.text(min_size=1),
    network=st.dictionaries(st.text(min_size=1), st.lists(FINITE, max_size=4), max_size=3),
)
@settings(deadline=None)
def test_bytes_agree_with_flower(numbers: list[float], text: str, network: dict[str, list[float]]) -> None:
    """Wherever Flower can count a record itself, the count is the same."""
    content = RecordDict(
        {
            "a": ConfigRecord({"text": text, "numbers": [1.5, 2.5], "yes": True, "data": b"1234"}),
            "b": MetricRecord({str(index): number for index, number in enumerate(numbers)} | {"list": [1, 2, 3]}),
            "c": ArrayRecord({name: Array(np.asarray(values)) for name, values in network.items()}),
        }
    )
    assert records.count_bytes([content]) == sum(record.count_bytes() for record in content.values())
