"""Small federations, and grids that watch, change or lose what passes through them."""

import bz2
import gzip
import lzma
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from uuid import uuid4

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from machines import app as machines

from fedlightning.datasets.catalogue import find_dataset
from fedlightning.datasets.table import Table
from fedlightning.federation.cache import trees_folder
from fedlightning.federation.local_grid import CLIENT_APP, LocalGrid
from fedlightning.federation.memory import Memory
from fedlightning.federation.records import RowsRequest, count_bytes
from fedlightning.federation.rounds import RoundReport, rounds
from fedlightning.federation.shard import CACHE_DIR
from fedlightning.federation.strategy import FedXgbLlr, NetworkSettings, TreeSettings

TREES = 4
DEPTH = 3
XGB = {"max_depth": DEPTH, "learning_rate": 0.3, "subsample": 0.8, "gamma": 0.0, "alpha": 0.0}


def small_rows(dataset: str = "breast_cancer", *, val_ratio: float = 0.2, seed: int = 0) -> RowsRequest:
    """Return which rows the clients of a small federation use."""
    return RowsRequest(dataset, find_dataset(dataset).task, 0.75, 2023, val_ratio, seed)


def open_federation(
    client_num: int = 3,
    *,
    processes: int = 0,
    client_app: str = CLIENT_APP,
    cache_dir: Path | None = None,
) -> LocalGrid:
    """Return a grid of this machine; its clients find no trees in their folder if none is given."""
    # Told to each node: a process that is forked has the environment of the first test.
    node_config = {CACHE_DIR: str(cache_dir or trees_folder() / uuid4().hex)}
    return LocalGrid(
        client_num, processes=processes, node_configs=[node_config or {}] * client_num, client_app=client_app
    )


def small_strategy(
    dataset: str = "breast_cancer",
    client_num: int = 3,
    *,
    seed: int = 0,
    val_ratio: float = 0.2,
    n_estimators: int = TREES,
    num_iterations: int = 8,
    lr: float = 0.01,
    xgb: Mapping[str, float | int] = XGB,
    grow_at_least: int = 1,
    memory: Memory | None = None,
    timeout: float | None = None,
) -> FedXgbLlr:
    """Return a strategy that is quick to run."""
    return FedXgbLlr(
        rows=small_rows(dataset, val_ratio=val_ratio, seed=seed),
        client_num=client_num,
        trees=TreeSettings(n_estimators, DEPTH, xgb, grow_at_least),
        network=NetworkSettings(num_iterations=num_iterations, batch_size=16, lr=lr, channels=4),
        memory=memory,
        timeout=timeout,
    )


def run_rounds(grid: Grid, strategy: FedXgbLlr, num_rounds: int = 2) -> list[RoundReport]:
    """Do everything: describe, grow, plant, and the rounds."""
    strategy.prepare(grid)
    return list(rounds(grid, strategy, num_rounds))


def bits(reports: Iterable[RoundReport]) -> list[object]:
    """Return all that must not differ between equal runs: scores, and networks to the bit."""
    return [
        (r.number, r.train, r.validation, {name: array.tobytes() for name, array in r.network.items()}) for r in reports
    ]


def through_proto(message: Message) -> Message:
    """Send a message through the protocol buffer that Flower's servers exchange."""
    data = message_to_proto(message).SerializeToString()
    return message_from_proto(ProtoMessage.FromString(data))


def through_objects(message: Message) -> Message:
    """Send a message through the objects that Flower's object store holds."""
    contents = {object_id: item.deflate() for object_id, item in get_all_nested_objects(message).items()}
    inflated = inflate_object_from_contents(message.object_id, contents)
    assert isinstance(inflated, Message)
    return inflated


def open_machines(folder: Path, client_num: int = 3, *, stays: bool = True) -> LocalGrid:
    """Return a grid whose clients share nothing: each has a memory and a folder ``0``, ``1``, ... of its own.

    Args:
        folder: Where the clients' folders are.
        client_num: Clients.
        stays: Whether a client's process goes on after a message; else its memory is empty at the next.
    """
    machines.stays = stays
    for partition in range(client_num):
        machines.nodes.setdefault(partition, {})[CACHE_DIR] = str(folder / str(partition))
    return LocalGrid(client_num, client_app="machines:app")


def write_libsvm(path: Path, rows: Table) -> None:
    """Write rows as LIBSVM text, packed as the file's ending says; class 0 of two is written as -1."""
    binary = set(rows.y) <= {0.0, 1.0}
    lines = [
        " ".join([f"{2 * y - 1 if binary else y:.17g}", *(f"{i}:{v:.9g}" for i, v in enumerate(x, 1) if v)])
        for x, y in zip(rows.x, rows.y, strict=True)
    ]
    packers: dict[str, Callable[[bytes], bytes]] = {".xz": lzma.compress, ".bz2": bz2.compress, ".gz": gzip.compress}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packers.get(path.suffix, bytes)(("\n".join(lines) + "\n").encode()))


def count_messages(messages: Iterable[Message]) -> int:
    """Return the bytes of all records of messages."""
    return count_bytes(message.content for message in messages)


class WatchedGrid(Grid):
    """Pass everything on, remember it, and let a test interfere.

    Args:
        grid: The federation.
        before: Called with the messages of every exchange before they are sent.
        change: Called with every message and its reply; returns the reply to deliver, or None for none.
        arrange: Puts the replies of an exchange in the order in which they arrive.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        before: Callable[[Sequence[Message]], None] = lambda messages: None,
        change: Callable[[Message, Message], Message | None] = lambda message, reply: reply,
        arrange: Callable[[list[Message]], Iterable[Message]] = lambda replies: replies,
    ) -> None:
        self.grid = grid
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self._before = before
        self._change = change
        self._arrange = arrange

    def set_run(self, run: Run) -> None:
        """Set the run that messages belong to."""
        self.grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run that messages belong to."""
        return self.grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Create a message to a node."""
        return self.grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the federation's nodes."""
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages unseen."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull replies unseen."""
        return self.grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Exchange messages under the eyes of the test."""
        messages = list(messages)
        self.sent += messages
        self._before(messages)
        by_node = {message.metadata.dst_node_id: message for message in messages}
        changed = [
            self._change(by_node[reply.metadata.src_node_id], reply)
            for reply in self.grid.send_and_receive(messages, timeout=timeout)
        ]
        replies = list(self._arrange([reply for reply in changed if reply is not None]))
        self.received += replies
        return replies


def with_values(reply: Message, **values: object) -> RecordDict:
    """Return a copy of a reply's content with other values in its one configuration record."""
    record = dict(reply.content.config_records["reply"]) | values
    return RecordDict({"reply": ConfigRecord(record)})
