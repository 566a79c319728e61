"""A Flower Grid over this machine's processes: the ClientApp itself, without Ray and without a network."""

import contextlib
import copy
import importlib
import itertools
import multiprocessing
import signal
import time
import traceback
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Self

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedlightning.federation.shard import NUM_PARTITIONS, PARTITION_ID

CLIENT_APP = "fedlightning.federation.client_app:app"
_RUN_ID = 1
_SERVER_NODE = 1
_FIRST_NODE = 2
_CLIENT_RAISED = 2
"""Flower's error code of a ClientApp that raised."""

_PRELOADED = (
    CLIENT_APP.partition(":")[0],
    "fedlightning.federation.client",
    "fedlightning.federation.outputs",
    "fedlightning.federation.tree_store",
    "fedlightning.training",
)
"""What a client imports while it answers; processes that are forked have it already."""

_processes = multiprocessing.get_context("forkserver")


def warm_up() -> None:
    """Begin to import what client processes need, in the background, while this process imports its own."""
    _processes.set_forkserver_preload(list(_PRELOADED))
    # Ctrl-C reaches the whole terminal, and would end the imports with a traceback of their own; what is blocked
    # here stays blocked there.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LocalGrid(Grid):
    """Call the ClientApp for ``client_num`` clients in this machine's processes.

    A client always runs in the same process, one message at a time, so what it keeps in memory stays useful, and
    results do not depend on the number of processes.

    Args:
        client_num: Clients, each a node of its own.
        processes: Child processes to share the clients between; 0 calls them in this process.
        node_configs: What each node's configuration has beside its partition, one per client; nothing if empty.
        client_app: ``module:attribute`` of the ClientApp.
    """

    def __init__(
        self,
        client_num: int,
        *,
        processes: int = 0,
        node_configs: Sequence[Mapping[str, str]] = (),
        client_app: str = CLIENT_APP,
    ) -> None:
        self._run = Run.create_empty(_RUN_ID)
        self._ids = itertools.count(1)
        self._replies: dict[str, Message] = {}
        _set_identity(_SERVER_NODE)
        configs = node_configs or [{}] * client_num
        contexts = [_context(partition, config, client_num) for partition, config in enumerate(configs)]
        assert len(contexts) == client_num, "one configuration per client"
        self._nodes = [context.node_id for context in contexts]
        self._workers: list[_InlineWorker | _ProcessWorker]
        if processes:
            count = min(processes, client_num)
            self._workers = [_ProcessWorker(contexts[first::count], client_app) for first in range(count)]
        else:
            self._workers = [_InlineWorker(contexts, client_app)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the client processes; a closed grid has no nodes."""
        self._nodes = []
        while self._workers:
            self._workers.pop().close()

    def set_run(self, run: Run) -> None:
        """Set the run that messages belong to."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run that messages belong to."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes, one per client."""
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand messages to the processes of their nodes, and return the messages' ids."""
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            if node not in self._nodes:
                raise ValueError(f"there is no node {node}; the federation has {self._nodes}")
            identified = copy.copy(message)
            identified.__dict__["_metadata"] = copy.copy(message.metadata)
            identified.metadata.__dict__["_message_id"] = str(next(self._ids))
            self._workers[self._nodes.index(node) % len(self._workers)].push(identified)
            ids.append(identified.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have come, without waiting."""
        self._collect(timeout=0)
        return [self._replies.pop(message) for message in list(message_ids) if message in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push messages and return their replies, as many as come within ``timeout`` seconds."""
        open_ids = list(self.push_messages(messages))
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        while True:
            replies += self.pull_messages(open_ids)
            answered = {reply.metadata.reply_to_message_id for reply in replies}
            open_ids = [message for message in open_ids if message not in answered]
            left = None if deadline is None else deadline - time.monotonic()
            if not open_ids or (left is not None and left <= 0):
                return replies
            self._collect(timeout=left)

    def _collect(self, timeout: float | None) -> None:
        waiting = [connection for worker in self._workers if (connection := worker.connection) is not None]
        if waiting:
            wait(waiting, timeout)
        for worker in self._workers:
            for reply in worker.pull():
                self._replies[reply.metadata.reply_to_message_id] = reply


class _InlineWorker:
    """Answer messages in this process, when they are pulled."""

    connection: Connection | None = None

    def __init__(self, contexts: Sequence[Context], client_app: str) -> None:
        self._contexts = {context.node_id: context for context in contexts}
        self._client_app = client_app
        self._queue: deque[Message] = deque()

    def push(self, message: Message) -> None:
        self._queue.append(message)

    def pull(self) -> list[Message]:
        replies = []
        while self._queue:
            # Nodes may share one content, and a client may change what it receives.
            message = copy.deepcopy(self._queue.popleft())
            replies.append(_answer(message, self._contexts[message.metadata.dst_node_id], self._client_app))
        _set_identity(_SERVER_NODE)
        return replies

    def close(self) -> None:
        self._queue.clear()


class _ProcessWorker:
    """Answer messages in a child process, one at a time; start it again if it died."""

    def __init__(self, contexts: Sequence[Context], client_app: str) -> None:
        self._contexts = contexts
        self._client_app = client_app
        self._queue: deque[Message] = deque()
        self._asked: Message | None = None
        self._start()

    @property
    def connection(self) -> Connection | None:
        """Where to wait for a reply; None if nothing was asked."""
        return self._connection if self._asked else None

    def push(self, message: Message) -> None:
        self._queue.append(message)
        self._ask()

    def pull(self) -> list[Message]:
        if self._asked is None or not self._connection.poll():
            return []
        try:
            reply: Message = self._connection.recv()
        except (EOFError, ConnectionError):
            reply = self._died()
        self._asked = None
        self._ask()
        return [reply]

    def close(self) -> None:
        self._queue.clear()
        self._connection.close()
        # An idle child ends by itself when its pipe closes; one that computes is not waited for.
        self._process.join(0.5 if self._asked is None else 0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    def _start(self) -> None:
        self._connection, theirs = _processes.Pipe()
        self._process: ForkServerProcess = _processes.Process(
            target=_serve,
            args=(theirs, list(self._contexts), self._client_app),
            daemon=True,
            name="fedlightning client",
        )
        self._process.start()
        theirs.close()

    def _ask(self) -> None:
        # The next message goes out when the last reply is in: two full pipes would wait for each other.
        if self._queue and self._asked is None:
            self._asked = self._queue.popleft()
            try:
                self._connection.send(self._asked)
            except ConnectionError:
                # It died while nobody asked it anything, so the message is for its successor.
                self._died()
                with contextlib.suppress(ConnectionError):  # if that one is gone too, the next pull says so
                    self._connection.send(self._asked)

    def _died(self) -> Message:
        self._connection.close()
        self._process.join(5)
        reason = f"its process ended with exit code {self._process.exitcode}"
        self._process.close()
        self._start()
        assert self._asked is not None
        return Message(Error(_CLIENT_RAISED, reason), reply_to=self._asked)


def _serve(connection: Connection, contexts: Sequence[Context], client_app: str) -> None:
    """Answer messages until the other end closes; runs in a child process."""
    # Ctrl-C reaches the whole terminal; the parent decides what becomes of its clients.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    by_node = {context.node_id: context for context in contexts}
    try:
        while True:
            message: Message = connection.recv()
            connection.send(_answer(message, by_node[message.metadata.dst_node_id], client_app))
    except (EOFError, ConnectionError):
        return


def _answer(message: Message, context: Context, client_app: str) -> Message:
    _set_identity(context.node_id)
    try:
        return _load(client_app)(message, context)
    except Exception:
        return Message(Error(_CLIENT_RAISED, traceback.format_exc()), reply_to=message)


def _load(client_app: str) -> ClientApp:
    module, _, attribute = client_app.partition(":")
    app = getattr(importlib.import_module(module), attribute)
    assert isinstance(app, ClientApp)
    return app


def _context(partition: int, node_config: Mapping[str, str], partitions: int) -> Context:
    return Context(
        run_id=_RUN_ID,
        node_id=_FIRST_NODE + partition,
        node_config={**node_config, PARTITION_ID: partition, NUM_PARTITIONS: partitions},
        state=RecordDict(),
        run_config={},
    )


def _set_identity(node: int) -> None:
    # Flower reads the sender of a message from these process-wide fields.
    TaskIdentity.run_id = _RUN_ID
    TaskIdentity.node_id = node
    TaskIdentity.task_id = 1
