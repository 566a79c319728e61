"""A Flower grid that is asked for replies often enough."""

import logging
import threading
import time
from collections.abc import Iterable

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

SHORTEST_SECONDS, LONGEST_SECONDS = 0.02, 0.3
"""Between two looks: short at first, longer the longer it takes, so that looking costs little where work is long."""

logger = logging.getLogger(__name__)


class PromptGrid(Grid):
    """Pass everything on to another grid, but do not sleep for seconds between two looks at the replies.

    Args:
        grid: The federation.
        stopping: Once set, whoever waits for replies is interrupted.
    """

    def __init__(self, grid: Grid, stopping: threading.Event | None = None) -> None:
        self._grid = grid
        self._stopping = stopping or threading.Event()

    def set_run(self, run: Run) -> None:
        """Set the run that messages belong to."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run that messages belong to."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message to a node."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes, one per client."""
        return self._grid.get_node_ids()

    def wait_for_nodes(self, count: int, *, timeout: float) -> None:
        """Wait until as many nodes are connected, or ``timeout`` seconds have passed."""
        deadline = time.monotonic() + timeout
        if len(list(self.get_node_ids())) < count:
            logger.info("waiting for %d nodes", count)
        while len(list(self.get_node_ids())) < count and time.monotonic() < deadline:
            if self._stopping.wait(SHORTEST_SECONDS):
                raise KeyboardInterrupt

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, and return their ids."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have come, without waiting."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push messages and return their replies, as many as come within ``timeout`` seconds."""
        open_ids = set(self.push_messages(messages))
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        pause = SHORTEST_SECONDS
        while open_ids and (deadline is None or time.monotonic() < deadline):
            if self._stopping.wait(pause):
                raise KeyboardInterrupt
            pause = min(pause * 1.25, LONGEST_SECONDS)
            come = list(self.pull_messages(open_ids))
            open_ids -= {reply.metadata.reply_to_message_id for reply in come}
            replies += come
        return replies
