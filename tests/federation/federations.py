"""Small federations, and grids that watch, change or lose what passes through them."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run

from fedlightning.datasets.catalogue import find_dataset
from fedlightning.federation.local_grid import LocalGrid
from fedlightning.federation.rounds import RoundReport, rounds
from fedlightning.federation.shard import run_config
from fedlightning.federation.strategy import FedXgbLlr, NetworkSettings, TreeSettings
from fedlightning.tasks import find_task

TREES = 4
DEPTH = 3
XGB = {"max_depth": DEPTH, "learning_rate": 0.3, "subsample": 0.8, "gamma": 0.0, "alpha": 0.0}


def open_federation(dataset: str = "breast_cancer", client_num: int = 3, *, processes: int = 0) -> LocalGrid:
    """Return a grid of this machine over a small data set."""
    config = run_config(dataset=dataset, train_ratio=0.75, split_seed=2023, data_dir=None)
    return LocalGrid(config, client_num, processes=processes)


def small_strategy(
    dataset: str = "breast_cancer",
    client_num: int = 3,
    *,
    seed: int = 0,
    val_ratio: float = 0.2,
    n_estimators: int = TREES,
    lr: float = 0.01,
    xgb: Mapping[str, float | int] = XGB,
    timeout: float | None = None,
) -> FedXgbLlr:
    """Return a strategy that is quick to run."""
    return FedXgbLlr(
        task=find_task(find_dataset(dataset).task),
        client_num=client_num,
        trees=TreeSettings(n_estimators, DEPTH, xgb),
        network=NetworkSettings(num_iterations=8, batch_size=16, lr=lr, channels=4),
        val_ratio=val_ratio,
        seed=seed,
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
