"""Tests of what happens once per run: who takes part, whose trees are where, and what a server refuses."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
from federations import (
    DEPTH,
    TREES,
    XGB,
    WatchedGrid,
    bits,
    count_messages,
    open_federation,
    open_machines,
    run_rounds,
    small_rows,
    small_strategy,
    with_values,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from machines import app as machines

from fedlightning.federation import client_app, records
from fedlightning.federation.cache import trees_folder
from fedlightning.federation.exchange import ClientError, DivergedError, Traffic, exchange
from fedlightning.federation.memory import Memory
from fedlightning.federation.rounds import RoundReport, rounds
from fedlightning.federation.shard import Silo, load_shard
from fedlightning.federation.strategy import weighted_mean
from fedlightning.seeds import derive_seed
from fedlightning.tasks import Tally, TargetStatistics, find_task
from fedlightning.trees import Ensemble, grow_ensemble

Change = Callable[[Message, Message], RecordDict | Error | None]


def tampered(action: str, change: Change) -> WatchedGrid:
    """Return a federation of three in which client 1's replies to an action are changed on the way."""

    def interfere(message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type != action or message.metadata.dst_node_id != 3:
            return reply
        changed = change(message, reply)
        return None if changed is None else Message(changed, reply_to=message)  # type: ignore[call-overload]

    return WatchedGrid(open_federation(client_num=3), change=interfere)


def own_ensembles(dataset: str, client_num: int, *, seed: int = 0, val_ratio: float = 0.2) -> list[Ensemble]:
    """Grow every client's ensemble directly, from the federation's prior."""
    task = {"breast_cancer": "binary", "diabetes": "regression"}[dataset]
    rows = small_rows(dataset, val_ratio=val_ratio, seed=seed)
    shards = [load_shard(Silo(partition, client_num), rows, Memory(2**30)) for partition in range(client_num)]
    base_score = find_task(task).base_score(TargetStatistics.of(np.concatenate([shard.train.y for shard in shards])))
    return [
        grow_ensemble(
            shard.train.x,
            shard.train.y,
            objective=find_task(task).objective,
            outputs=1,
            n_estimators=TREES,
            base_score=base_score,
            intercept=find_task(task).intercept(base_score),
            xgb_params=XGB,
            seed=derive_seed(seed, "trees", partition),
        )
        for partition, shard in enumerate(shards)
    ]


# -- slots ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", ["breast_cancer", "diabetes"])
def test_slots_hold_each_clients_own_trees(dataset: str) -> None:
    """Slot k of the forest is what client k grows on its own rows, from the prior of all clients' targets."""
    with open_federation() as grid:
        forest = small_strategy(dataset).prepare(grid)
    direct = own_ensembles(dataset, 3)
    assert [ensemble.digest for ensemble in forest.ensembles] == [ensemble.digest for ensemble in direct]
    assert len({ensemble.digest for ensemble in direct}) == 3


class RenumberedGrid(WatchedGrid):
    """A federation whose node numbers run against its partitions, as they may in a deployment."""

    def __init__(self, client_num: int) -> None:
        super().__init__(open_federation(client_num=client_num))
        inner = list(self.grid.get_node_ids())
        self.inner = dict(zip((900 - node for node in inner), inner, strict=True))

    def get_node_ids(self) -> list[int]:
        """Return the outer numbers."""
        return list(self.inner)

    def send_and_receive(self, messages: object, *, timeout: float | None = None) -> list[Message]:
        """Translate the numbers on the way in and out."""
        by_inner = {self.inner[message.metadata.dst_node_id]: message for message in messages}  # type: ignore[attr-defined]
        inner = [
            Message(message.content, node, message.metadata.message_type, group_id=message.metadata.group_id)
            for node, message in by_inner.items()
        ]
        return [
            Message(reply.content, reply_to=by_inner[reply.metadata.src_node_id])
            for reply in super().send_and_receive(inner, timeout=timeout)
        ]


def test_slots_follow_partitions_and_not_node_numbers() -> None:
    """Nodes that are numbered the other way round change nothing, to the bit."""
    with open_federation() as grid:
        plain = run_rounds(grid, small_strategy())
    strategy = small_strategy()
    renumbered = run_rounds(RenumberedGrid(3), strategy)
    assert [description.partition for description in strategy.descriptions] == [0, 1, 2]
    assert bits(renumbered) == bits(plain)


def test_the_server_sets_the_intercept() -> None:
    """Where margins start is the server's word, whatever a client writes into its ensemble."""

    def boast(message: Message, reply: Message) -> RecordDict:
        data = reply.content.config_records["reply"]["ensemble"]
        assert isinstance(data, bytes)
        honest = Ensemble.from_bytes(data, features=30, outputs=1, n_estimators=TREES, max_depth=DEPTH)
        return with_values(reply, ensemble=replace(honest, intercept=5.0).to_bytes())

    strategy = small_strategy()
    # The client itself grew from the right prior, so its forest is the server's.
    forest = strategy.prepare(tampered(records.GROW, boast))
    assert {ensemble.intercept for ensemble in forest.ensembles} == {own_ensembles("breast_cancer", 3)[0].intercept}


def test_trees_without_a_split_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """An ensemble that says the same of every row is a warning that names the client and what to lower."""
    with open_federation(client_num=2) as grid, caplog.at_level(logging.WARNING, "fedlightning"):
        small_strategy(client_num=2, xgb=XGB | {"gamma": 1e6}).prepare(grid)
    (text,) = [record.getMessage() for record in caplog.records]
    assert "client(s) 0, 1 have no split" in text
    assert "xgb.gamma" in text


def test_a_longer_ensemble_is_not_grown_again() -> None:
    """Fewer trees of the same settings are the first of those already there; more are grown."""
    with open_federation() as grid:
        strategies = [small_strategy(n_estimators=n_estimators) for n_estimators in (4, 2, 4, 6)]
        forests = [strategy.prepare(grid) for strategy in strategies]
    assert [strategy.fits for strategy in strategies] == [3, 0, 0, 3]
    for client in range(3):
        whole = forests[3].ensembles[client]
        assert forests[1].ensembles[client].digest == whole.prefix(2).digest
        assert forests[0].ensembles[client].digest == whole.prefix(4).digest


@pytest.mark.parametrize("other", [{"seed": 1}, {"val_ratio": 0.4}, {"xgb": XGB | {"learning_rate": 0.1}}])
def test_other_settings_are_grown_anew(other: dict[str, object]) -> None:
    """Another seed, other rows or another parameter never finds the trees of before."""
    with open_federation() as grid:
        small_strategy().prepare(grid)
        strategy = small_strategy(**other)  # type: ignore[arg-type]
        strategy.prepare(grid)
        again = small_strategy(**other)  # type: ignore[arg-type]
        again.prepare(grid)
    assert (strategy.fits, again.fits) == (3, 0)


# -- who is missing or wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("client_num", [2, 4])
def test_another_number_of_nodes_is_an_error(client_num: int) -> None:
    """A federation with fewer or more nodes than clients is refused before anything is asked."""
    with (
        open_federation(client_num=3) as grid,
        pytest.raises(ClientError, match=f"3 nodes, the configuration says client_num {client_num}"),
    ):
        small_strategy(client_num=client_num).prepare(grid)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"partition": 0}, r"nodes \[2, 3, 4\] hold the partitions \[0, 0, 2\], expected \[0, 1, 2\]"),
        ({"partition": 7}, r"nodes \[2, 4, 3\] hold the partitions \[0, 2, 7\]"),
        ({"features": 29}, r"differ in features: \{0: 30, 1: 29, 2: 30\}"),
        ({"classes": 3}, r"differ in classes: \{0: 2, 1: 3, 2: 2\}"),
        ({"train_rows": 0}, "client 1 has 0 training and"),
        ({"test_rows": 5}, r"only the clients \[1\] hold test rows of their own.*data-file"),
        ({"validation_rows": 0}, "client 1 has .* training and 0 validation rows"),
        ({"target_sum": float("nan")}, "client on node 3 .*target_sum is nan"),
        ({"target_sum": float("inf")}, "client on node 3 .*target_sum is inf"),
        ({"train_rows": "many"}, "client on node 3 .*train_rows is 'many'"),
    ],
)
def test_a_wrong_description_names_the_client(values: dict[str, object], text: str) -> None:
    """Whoever describes an impossible part of the federation is named, and nothing is grown."""
    grid = tampered(records.DESCRIBE, lambda message, reply: with_values(reply, **values))
    with pytest.raises(ClientError, match=text):
        small_strategy().prepare(grid)
    assert {message.metadata.message_type for message in grid.sent} == {records.DESCRIBE}


def shorter(message: Message, reply: Message) -> RecordDict:
    """Return an ensemble with a tree less."""
    data = reply.content.config_records["reply"]["ensemble"]
    assert isinstance(data, bytes)
    whole = Ensemble.from_bytes(data, features=30, outputs=1, n_estimators=TREES, max_depth=DEPTH)
    return with_values(reply, ensemble=whole.prefix(TREES - 1).to_bytes())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (shorter, f"ensemble has {TREES - 1} trees, expected {TREES}"),
        (lambda message, reply: with_values(reply, ensemble=b"\x80\x04K\x01."), "ensemble is not compressed JSON"),
        (lambda message, reply: with_values(reply, ensemble="text"), r"Grown\.ensemble is 'text'"),
        (lambda message, reply: with_values(reply, partition=2), "as partition 2"),
        (lambda message, reply: RecordDict(), "no record 'reply'"),
        (lambda message, reply: RecordDict({"reply": ConfigRecord({"": "", "list": []})}), "Grown.partition"),
    ],
)
def test_a_wrong_ensemble_names_the_client(change: Change, text: str) -> None:
    """Trees that are not what was asked for stop the run by the client's name, before others get them."""
    grid = tampered(records.GROW, change)
    with pytest.raises(ClientError, match=f"client 1 .*{text}"):
        small_strategy().prepare(grid)
    assert records.PLANT not in {message.metadata.message_type for message in grid.sent}


@pytest.mark.parametrize(
    ("values", "text"),
    [({"digest": "0" * 64}, "client 1 holds another forest"), ({"partition": 0}, "client 1 answered .* partition 0")],
)
def test_another_forest_names_the_client(values: dict[str, object], text: str) -> None:
    """A client that does not acknowledge the very forest that was sent is named."""
    grid = tampered(records.PLANT, lambda message, reply: with_values(reply, **values))
    with pytest.raises(ClientError, match=text):
        small_strategy().prepare(grid)


def network_with(reply: Message, name: str, array: np.ndarray | None) -> RecordDict:
    """Return a train reply with one array replaced or left out."""
    arrays = dict(reply.content.array_records["network"])
    if array is None:
        del arrays[name]
    else:
        arrays[name] = Array(array)
    return RecordDict({"network": ArrayRecord(arrays), "metrics": reply.content.metric_records["metrics"]})


def metrics_with(reply: Message, **values: float) -> RecordDict:
    """Return a train or evaluate reply with other numbers."""
    content = RecordDict(dict(reply.content))
    content["metrics"] = MetricRecord({**content.metric_records["metrics"], **values})
    return content


BIAS = np.array([0.0], dtype=np.float32)
NOT_FINITE = np.array([np.nan], dtype=np.float32)


@pytest.mark.parametrize(
    ("action", "change", "error", "text"),
    [
        (records.TRAIN, lambda m, r: network_with(r, "linear.bias", NOT_FINITE), DivergedError, r"smaller CNN\.lr"),
        (records.TRAIN, lambda m, r: metrics_with(r, loss_sum=np.inf), DivergedError, "loss_sum"),
        (records.TRAIN, lambda m, r: network_with(r, "linear.bias", None), ClientError, "expected .*linear.bias"),
        (records.TRAIN, lambda m, r: network_with(r, "more", BIAS), ClientError, "has the arrays .*more"),
        (records.TRAIN, lambda m, r: network_with(r, "linear.bias", BIAS[:0]), ClientError, "linear.bias is float32"),
        (records.TRAIN, lambda m, r: network_with(r, "linear.bias", np.zeros(1)), ClientError, "is float64"),
        (records.TRAIN, lambda m, r: metrics_with(r, partition=0), ClientError, "as partition 0"),
        (records.TRAIN, lambda m, r: RecordDict(), ClientError, "no record 'metrics'"),
        (records.EVALUATE, lambda m, r: metrics_with(r, loss_sum=np.nan), DivergedError, "loss_sum"),
        (records.EVALUATE, lambda m, r: metrics_with(r, metric_sum=1), ClientError, "metric_sum 1"),
        (records.EVALUATE, lambda m, r: metrics_with(r, partition=2), ClientError, "as partition 2"),
        (records.EVALUATE, lambda m, r: RecordDict(), ClientError, "no record 'metrics'"),
        (
            records.EVALUATE,
            lambda m, r: metrics_with(r, **{"num-examples": 1_000_000}),
            ClientError,
            "evaluated 1000000 rows, but described 2",
        ),
        (
            records.COMPARE,
            lambda m, r: records.compare_reply(1, Tally(1.0, 1.0, 90), Tally(1.0, 1.0, 90)),
            ClientError,
            "evaluated 90 rows, but described 2",
        ),
        (records.COMPARE, lambda m, r: RecordDict(), ClientError, "no record 'mean_margin'"),
        (
            records.COMPARE,
            lambda m, r: records.compare_reply(0, Tally(1.0, 1.0, 1), Tally(1.0, 1.0, 1)),
            ClientError,
            "as partition 0",
        ),
    ],
)
def test_a_wrong_reply_in_a_round_names_the_client(
    action: str, change: Change, error: type[Exception], text: str
) -> None:
    """Garbage is named with its client and action; only numbers that are not finite count as diverged."""
    grid, strategy = tampered(action, change), small_strategy()
    strategy.prepare(grid)
    with pytest.raises(error, match=f"client 1 .*{text}") as caught:
        strategy.compare(grid) if action == records.COMPARE else list(rounds(grid, strategy, 1))
    assert type(caught.value) is error


@pytest.mark.parametrize("action", [records.DESCRIBE, records.GROW, records.PLANT, records.TRAIN, records.EVALUATE])
def test_a_missing_client_is_an_error(action: str) -> None:
    """A client that does not answer stops the run by its name; nobody averages without it."""
    name = "the client on node 3" if action == records.DESCRIBE else "client 1"
    with pytest.raises(ClientError, match=f"^{name} did not answer '{action}'$"):
        run_rounds(tampered(action, lambda message, reply: None), small_strategy())
    with pytest.raises(ClientError, match=f"^{name} did not answer '{action}' within 60 seconds$"):
        run_rounds(tampered(action, lambda message, reply: None), small_strategy(timeout=60))


@pytest.mark.parametrize("action", [records.DESCRIBE, records.GROW, records.PLANT, records.TRAIN, records.EVALUATE])
def test_a_failing_client_is_named_with_its_traceback(action: str) -> None:
    """A client that raises stops the run by its name, and its own traceback is part of the message."""
    failed = Error(2, "Traceback (most recent call last):\n  ...\nOSError: disk full")
    name = "the client on node 3" if action == records.DESCRIBE else "client 1"
    with pytest.raises(ClientError, match=f"{name} failed in '{action}':\n(.*\n)*OSError: disk full$"):
        run_rounds(tampered(action, lambda message, reply: failed), small_strategy())


def test_an_error_without_a_reason_shows_its_code() -> None:
    """An error reply that says nothing else is named by its code."""
    with pytest.raises(ClientError, match="client 1 failed in 'train':\nerror code 7"):
        run_rounds(tampered(records.TRAIN, lambda message, reply: Error(7)), small_strategy())


def test_another_protocol_is_refused_by_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that speaks another protocol says which, and which is the server's."""
    original = records.DescribeRequest.to_content

    def newer(request: records.DescribeRequest) -> RecordDict:
        return original(replace(request, protocol=records.PROTOCOL + 1))

    monkeypatch.setattr(records.DescribeRequest, "to_content", newer)
    with open_federation() as grid, pytest.raises(ClientError, match=r"protocol 3, this client 2"):
        small_strategy().prepare(grid)


def test_shards_too_small_to_cut_say_so() -> None:
    """More clients than rows allow is told by the first client, with the way out."""
    with open_federation(60) as grid, pytest.raises(ClientError, match=r"node 2 .*\n(.*\n)*.*fewer clients"):
        small_strategy("wine", 60).prepare(grid)


# -- a client that forgets ------------------------------------------------------------------------------------------


def forgetting(action: str, group: str = "0") -> WatchedGrid:
    """Return a federation whose clients lose memory and folder before they get an action, the first time."""
    forgotten: list[str] = []
    folder = trees_folder() / "lost"

    def forget(messages: object) -> None:
        metadata = messages[0].metadata  # type: ignore[index]
        if (metadata.message_type, metadata.group_id) == (action, group) and not forgotten:
            forgotten.append(action)
            client_app.memory = Memory(2**30)
            shutil.rmtree(folder)

    return WatchedGrid(open_federation(cache_dir=folder), before=forget)


@pytest.mark.parametrize(
    ("action", "group"),
    [(records.PLANT, "0"), (records.COMPARE, "0"), (records.TRAIN, "1"), (records.TRAIN, "2"), (records.EVALUATE, "2")],
)
def test_a_lost_forest_is_planted_again(action: str, group: str) -> None:
    """Clients that forget everything at any time get the whole forest again, and nothing else changes, to the bit."""
    outcomes, sent = [], []
    reports: list[RoundReport] = []
    for grid in (WatchedGrid(open_federation()), forgetting(action, group)):
        strategy = small_strategy()
        forest = strategy.prepare(grid)
        compared = strategy.compare(grid)
        reports = list(rounds(grid, strategy, 3))
        outcomes.append((forest.digest, compared, bits(reports)))
        # What is sent again is counted where it is sent.
        assert strategy.traffic.down + sum(r.bytes_down for r in reports) == count_messages(grid.sent)
        assert strategy.traffic.up + sum(r.bytes_up for r in reports) == count_messages(grid.received)
        sent.append([message.metadata.message_type for message in grid.sent])
    assert outcomes[0] == outcomes[1]
    again = 0 if action == records.PLANT else 3
    assert len(sent[1]) == len(sent[0]) + 3 + again
    assert sent[1].count(records.PLANT) == 6


def test_only_those_who_lost_it_get_the_forest_again(cache_dir: Path) -> None:
    """A single client that lost its own ensemble gets all of them; the others are not bothered."""

    def forget_client_1(messages: object) -> None:
        if messages[0].metadata.message_type == records.PLANT and len(messages) == 3:  # type: ignore[index, arg-type]
            del machines.memories[1]
            shutil.rmtree(cache_dir / "1")

    grid = WatchedGrid(open_machines(cache_dir), before=forget_client_1)
    small_strategy().prepare(grid)
    planted = [message for message in grid.sent if message.metadata.message_type == records.PLANT]
    assert [message.metadata.dst_node_id for message in planted] == [2, 3, 4, 3]
    partitions = [message.content.config_records["request"]["partitions"] for message in planted]
    assert partitions == [[1, 2], [0, 2], [0, 1], [0, 1, 2]]


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.parametrize("folder_is_lost", [False, True])
def test_a_killed_client_process_finds_or_gets_the_forest_again(folder_is_lost: bool, cache_dir: Path) -> None:
    """A client process that dies between two rounds finds its trees in the folder, or is served again if it is lost."""
    with open_federation() as grid:
        plain = run_rounds(grid, small_strategy(), 3)
    before = set(active_children())
    with open_federation(processes=1, cache_dir=cache_dir / "killed") as grid:
        strategy, reports = small_strategy(), []
        strategy.prepare(grid)
        for report in rounds(grid, strategy, 3):
            reports.append(report)
            if report.number == 1:
                (child,) = set(active_children()) - before
                child.kill()
                child.join()
                if folder_is_lost:
                    shutil.rmtree(cache_dir / "killed")
    assert bits(reports) == bits(plain)
    assert (reports[1].bytes_down > plain[1].bytes_down) == folder_is_lost
    assert [report.bytes_down for report in reports[::2]] == [report.bytes_down for report in plain[::2]]


@pytest.mark.parametrize("forests", [1, 2, 8, 27])
def test_a_memory_for_the_forest_is_enough(forests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that can keep few or none of its rows and tree outputs makes them again, and the result is the same."""
    (tmp_path / "no folder").touch()
    with open_federation(cache_dir=tmp_path / "no folder") as grid:
        strategy = small_strategy()
        plain = run_rounds(grid, strategy)
        assert strategy.forest is not None
        monkeypatch.setattr(client_app, "memory", Memory(forests * strategy.forest.nbytes))
        again = small_strategy()
        assert bits(run_rounds(grid, again)) == bits(plain)
        assert again.compare(grid) == strategy.compare(grid)
    assert client_app.memory.evictions > 0


def test_a_client_that_loses_every_forest_is_named() -> None:
    """A client that loses even the forest that was just planted again is not asked for ever."""
    lost = records.LostForest(1, "0" * 64).to_content()
    for action in (records.PLANT, records.TRAIN):
        with pytest.raises(ClientError, match=r"client.*1.* cannot keep the forest"):
            run_rounds(tampered(action, lambda message, reply: lost), small_strategy())


def test_a_client_without_room_for_the_forest_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory nor folder for the forest the run ends with who cannot keep it, and does not ask for ever."""
    (tmp_path / "no folder").touch()
    monkeypatch.setattr(client_app, "memory", Memory(0))
    with (
        open_federation(cache_dir=tmp_path / "no folder") as grid,
        pytest.raises(ClientError, match=r"client.* 0.* cannot keep the forest"),
    ):
        run_rounds(grid, small_strategy())


# -- exchanging and averaging ---------------------------------------------------------------------------------------


def test_replies_come_back_in_the_order_of_the_messages() -> None:
    """However replies arrive, they are returned in the order in which the messages were sent, with their bytes."""
    grid = WatchedGrid(open_federation(), arrange=lambda replies: replies[::-1])
    content = records.content(small_rows(), records.DescribeRequest(records.PROTOCOL))
    messages = [grid.create_message(content, records.DESCRIBE, node, "0") for node in (4, 2, 3)]
    replies, traffic = exchange(grid, messages, names=str)
    assert [reply.metadata.src_node_id for reply in replies] == [4, 2, 3]
    assert traffic == Traffic(up=count_messages(replies), down=count_messages(messages))
    assert traffic.up > 0
    assert traffic.down > 0
    assert Traffic(1, 2) + Traffic(10, 20) == Traffic(11, 22)


@given(data=st.data(), clients=st.integers(1, 5))
@settings(deadline=None)
def test_the_average_is_numpys_weighted_mean(data: st.DataObject, clients: int) -> None:
    """FedAvg is the mean weighted by training rows, in double precision, array by array."""
    shapes = {"conv.weight": (3, 1, 2), "linear.bias": (2,)}
    values = st.floats(-1e6, 1e6, width=32)
    networks = [
        {name: data.draw(st_numpy.arrays(np.float32, shape, elements=values)) for name, shape in shapes.items()}
        for _ in range(clients)
    ]
    weights = data.draw(st.lists(st.integers(1, 10**9), min_size=clients, max_size=clients))
    average = weighted_mean(networks, weights)
    for name in shapes:
        stacked = np.stack([network[name] for network in networks]).astype(np.float64)
        expected = np.average(stacked, axis=0, weights=weights)
        assert average[name].dtype == np.float32
        np.testing.assert_allclose(average[name], expected, rtol=1e-6, atol=1e-6 * np.abs(stacked).max())
