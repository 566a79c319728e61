"""One suite for every engine: what a grid promises, wherever its clients run."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedlightning.federation.local_grid import LocalGrid
from fedlightning.federation.prompt_grid import PromptGrid

pytestmark = pytest.mark.usefixtures("warm_processes")

CLIENTS = 3
FAULTY = "faulty_apps:app"
Open = Callable[..., Grid]


def open_local(
    stack: ExitStack,
    *,
    processes: int,
    client_num: int = CLIENTS,
    client_app: str = FAULTY,
    node_config: Mapping[str, str] | None = None,
) -> Grid:
    """Open a grid of this machine until the test ends."""
    return stack.enter_context(
        LocalGrid(client_num, processes=processes, node_configs=[node_config or {}] * client_num, client_app=client_app)
    )


def open_prompt(stack: ExitStack, **options: Any) -> Grid:
    """Open a grid of this machine that is asked for replies as a SuperLink's is."""
    return PromptGrid(open_local(stack, **options))


INLINE = pytest.param(partial(open_local, processes=0), id="in-process")
CHILDREN = [
    pytest.param(partial(open_local, processes=1), id="one-process"),
    pytest.param(partial(open_local, processes=2), id="two-processes"),
]


PROMPT = pytest.param(partial(open_prompt, processes=2), id="prompt")


@pytest.fixture(params=[INLINE, *CHILDREN, PROMPT])
def open_grid(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Return a factory of grids, one engine after the other."""
    with ExitStack() as stack:
        yield partial(request.param, stack)


@pytest.fixture(params=[*CHILDREN, PROMPT])
def open_children(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Return a factory of grids whose clients live in processes of their own."""
    with ExitStack() as stack:
        yield partial(request.param, stack)


@pytest.fixture(params=[INLINE, *CHILDREN])
def open_own(request: pytest.FixtureRequest) -> Iterator[Callable[..., LocalGrid]]:
    """Return a factory of grids of this machine, which can be closed."""
    with ExitStack() as stack:
        yield partial(request.param, stack)


def ask(grid: Grid, action: str, nodes: Sequence[int] | None = None, **records: ConfigRecord) -> list[Message]:
    """Send the same records to nodes, by default to all, and return the replies in the order of the nodes."""
    nodes = list(grid.get_node_ids()) if nodes is None else nodes
    messages = [grid.create_message(RecordDict(records), f"query.{action}", node, "7") for node in nodes]
    replies = {reply.metadata.src_node_id: reply for reply in grid.send_and_receive(messages)}
    assert sorted(replies) == sorted(nodes)
    return [replies[node] for node in nodes]


def who(reply: Message) -> ConfigRecord:
    """Return what a client tells about itself."""
    return reply.content.config_records["who"]


def pids(grid: Grid) -> set[int]:
    """Return the processes of a grid's clients."""
    return {int(str(who(reply)["pid"])) for reply in ask(grid, "whoami")}


def alive(pid: int) -> bool:
    """Return whether a process still runs; one that ended but was not collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(processes: set[int]) -> None:
    """Wait until none of the processes runs; the test's own time limit ends a wait in vain."""
    while any(alive(pid) for pid in processes):
        time.sleep(0.02)


# -- what every engine promises -----------------------------------------------------------------------------------


def test_every_node_answers_as_its_own_partition(open_grid: Open) -> None:
    """Each partition from 0 is one node, with what all nodes are configured with."""
    replies = ask(open_grid(node_config={"greeting": "good morning"}), "whoami")
    assert sorted(int(str(who(reply)["partition"])) for reply in replies) == list(range(CLIENTS))
    assert all(who(reply)["node"] == reply.metadata.src_node_id for reply in replies)
    assert {who(reply)["greeting"] for reply in replies} == {"good morning"}


def test_everybody_writes_under_its_own_name(open_grid: Open) -> None:
    """To Flower a client is its own node while it answers, and the server is the same before and after."""
    grid = open_grid()
    before = grid.create_message(RecordDict(), "query.whoami", 2, "7").metadata
    replies = ask(grid, "whoami")
    after = grid.create_message(RecordDict(), "query.whoami", 2, "7").metadata
    assert [who(reply)["identity"] for reply in replies] == list(grid.get_node_ids())
    assert (after.src_node_id, after.run_id) == (before.src_node_id, before.run_id)
    assert before.src_node_id not in list(grid.get_node_ids())


def test_nodes_keep_their_partitions(open_grid: Open) -> None:
    """The same node is the same partition in every message and in a second federation."""
    grid = open_grid()
    first = [who(reply)["partition"] for reply in ask(grid, "whoami")]
    assert [who(reply)["partition"] for reply in ask(grid, "whoami")] == first
    assert [who(reply)["partition"] for reply in ask(open_grid(), "whoami")] == first


def test_replies_belong_to_their_messages(open_grid: Open) -> None:
    """Pushed messages get ids of their own, and every reply names the id, the sender, the group and the action."""
    grid = open_grid()
    nodes = list(grid.get_node_ids())
    messages = [grid.create_message(RecordDict(), "query.whoami", node, "7") for node in [*nodes, *nodes]]
    ids = list(grid.push_messages(messages))
    assert len(set(ids)) == len(ids) == 2 * CLIENTS
    replies: list[Message] = []
    while len(replies) < len(ids):
        replies += grid.pull_messages(ids)
    by_id = {reply.metadata.reply_to_message_id: reply for reply in replies}
    assert sorted(by_id) == sorted(ids)
    for message, identifier in zip(messages, ids, strict=True):
        metadata = by_id[identifier].metadata
        assert metadata.src_node_id == message.metadata.dst_node_id
        assert metadata.dst_node_id == message.metadata.src_node_id
        assert (metadata.group_id, metadata.message_type) == ("7", "query.whoami")
    assert list(grid.pull_messages(ids)) == []


def test_only_the_replies_that_were_asked_for_are_pulled(open_grid: Open) -> None:
    """Replies to other messages wait for whoever asks for them; unknown ids have none."""
    grid = open_grid()
    nodes = list(grid.get_node_ids())
    ids = list(grid.push_messages(grid.create_message(RecordDict(), "query.whoami", node, "7") for node in nodes))
    ask(grid, "whoami")
    for identifier, node in zip(ids, nodes, strict=True):
        (reply,) = grid.pull_messages([identifier, "no such id"])
        assert reply.metadata.src_node_id == node


def test_messages_may_be_sent_again(open_grid: Open) -> None:
    """Sending leaves a message as it was, so that it can be sent a second time."""
    grid = open_grid()
    node = next(iter(grid.get_node_ids()))
    message = grid.create_message(RecordDict({"letter": ConfigRecord({"text": "hello"})}), "query.whoami", node, "7")
    for _ in range(2):
        (reply,) = grid.send_and_receive([message])
        assert who(reply)["node"] == node
    assert message.metadata.message_id == ""


def test_one_content_for_all_is_not_changed_by_any(open_grid: Open) -> None:
    """Clients that write into what they got change neither the sender's records nor each other's."""
    grid = open_grid()
    content = RecordDict({"letter": ConfigRecord({"readers": [1], "seal": "whole"})})
    nodes = list(grid.get_node_ids())
    replies = grid.send_and_receive([grid.create_message(content, "query.change", node, "7") for node in nodes])
    by_node = {reply.metadata.src_node_id: reply.content.config_records["letter"]["readers"] for reply in replies}
    assert by_node == {node: [1, node] for node in nodes}
    assert content == RecordDict({"letter": ConfigRecord({"readers": [1], "seal": "whole"})})


def test_large_messages_pass_both_ways(open_grid: Open) -> None:
    """More bytes than any pipe holds pass to every client and back, several messages to a client at once."""
    grid = open_grid()
    load = os.urandom(2**21)
    nodes = [node for node in grid.get_node_ids() for _ in range(2)]
    content = RecordDict({"load": ConfigRecord({"bytes": load})})
    replies = list(grid.send_and_receive([grid.create_message(content, "train.weigh", node, "7") for node in nodes]))
    assert len(replies) == len(nodes)
    assert all(reply.content.config_records["load"]["bytes"] == load[::-1] for reply in replies)


def test_a_client_that_raises_sends_its_own_traceback(open_grid: Open) -> None:
    """Every client's error carries its own text and place, and the client answers the next message."""
    grid = open_grid()
    partitions = [who(reply)["partition"] for reply in ask(grid, "whoami")]
    for reply, partition in zip(ask(grid, "fail"), partitions, strict=True):
        assert reply.has_error()
        assert not reply.has_content()
        assert f"RuntimeError: partition {partition} has no rows today" in str(reply.error.reason)
        assert "in fail" in str(reply.error.reason)
    assert [who(reply)["partition"] for reply in ask(grid, "whoami")] == partitions


def test_an_unknown_action_is_an_error_reply(open_grid: Open) -> None:
    """A client app without the asked function says so."""
    assert all("'dance'" in str(reply.error.reason) for reply in ask(open_grid(), "dance"))


@pytest.mark.parametrize(
    ("client_app", "text"), [("faulty_apps:nobody", "'nobody'"), ("no_such_module:app", "no_such_module")]
)
def test_a_client_app_that_is_not_there_is_an_error_reply(open_grid: Open, client_app: str, text: str) -> None:
    """A misspelt client app is named in every reply."""
    assert all(text in str(reply.error.reason) for reply in ask(open_grid(client_app=client_app), "whoami"))


def test_an_unknown_node_is_named(open_grid: Open) -> None:
    """A message to a node that is not there is refused by the node's number."""
    grid = open_grid()
    with pytest.raises(ValueError, match="no node 99"):
        grid.push_messages([grid.create_message(RecordDict(), "query.whoami", 99, "7")])


def test_state_persists_between_messages(open_grid: Open) -> None:
    """What a client writes into its context's state is there in its next message, and only there."""
    grid = open_grid()
    nodes = list(grid.get_node_ids())
    for expected in (1, 2, 3):
        replies = ask(grid, "count", nodes[:2])
        assert [reply.content.metric_records["count"]["messages"] for reply in replies] == [expected] * 2
    (reply,) = ask(grid, "count", nodes[2:])
    assert reply.content.metric_records["count"] == MetricRecord({"messages": 1})


def test_the_run_can_be_set(open_grid: Open) -> None:
    """A grid belongs to the run that it is given."""
    grid = open_grid()
    run = Run.create_empty(11)
    grid.set_run(run)
    assert grid.run is run


def test_a_closed_grid_stays_closed(open_own: Callable[..., LocalGrid]) -> None:
    """Closing a second time does nothing, and a closed grid has no nodes left to send to."""
    grid = open_own()
    node = ask(grid, "whoami")[0].metadata.src_node_id
    grid.close()
    grid.close()
    assert list(grid.get_node_ids()) == []
    with pytest.raises(ValueError, match=f"no node {node}"):
        grid.push_messages([grid.create_message(RecordDict(), "query.whoami", node, "7")])


# -- what engines with client processes promise ---------------------------------------------------------------------


def test_a_timeout_returns_what_has_come(open_children: Open, tmp_path: Path) -> None:
    """Replies that came in time are returned, and a late one is not taken for the reply to a later message."""
    grid = open_children()
    *quick, slow = grid.get_node_ids()
    ask(grid, "whoami")
    late = ConfigRecord({"path": str(tmp_path / "go on")})
    messages = [grid.create_message(RecordDict(), "query.whoami", node, "7") for node in quick]
    waiting = grid.create_message(RecordDict({"wait": late}), "query.wait", slow, "7")
    replies = list(grid.send_and_receive([*messages, waiting], timeout=2))
    assert sorted(reply.metadata.src_node_id for reply in replies) == quick
    (tmp_path / "go on").touch()
    (reply,) = ask(grid, "whoami", [slow])
    assert who(reply)["node"] == slow


def test_a_killed_child_is_an_error_reply(open_children: Open) -> None:
    """A process that is killed at work gives an error with its exit code, and the next message finds another one."""
    grid = open_children()
    nodes, before = list(grid.get_node_ids()), pids(grid)
    died, *others = ask(grid, "die", nodes[:1])
    assert others == []
    assert died.has_error()
    assert "exit code -9" in str(died.error.reason)
    assert len(pids(grid) - before) == 1


def test_a_killed_child_takes_no_other_message_along(open_children: Open) -> None:
    """Messages that wait behind the one that killed the process are answered by its successor."""
    grid = open_children()
    nodes = list(grid.get_node_ids())
    messages = [grid.create_message(RecordDict(), "query.whoami", node, "7") for node in nodes]
    replies = list(grid.send_and_receive([grid.create_message(RecordDict(), "query.die", nodes[0], "7"), *messages]))
    assert len(replies) == 1 + CLIENTS
    assert [reply.metadata.src_node_id for reply in replies if reply.has_error()] == nodes[:1]


def test_a_child_that_died_idle_is_started_again(open_children: Open) -> None:
    """A process that was killed between two messages is not missed."""
    grid = open_children()
    before = pids(grid)
    for process in active_children():
        if process.pid in before:
            process.kill()
            process.join()
    assert not before & pids(grid)


@pytest.mark.parametrize("processes", [1, 2])
def test_children_end_with_the_grid(processes: int, tmp_path: Path) -> None:
    """Closing ends all client processes, also one that is at work."""
    grid = LocalGrid(CLIENTS, processes=processes, client_app=FAULTY)
    children = pids(grid)
    assert os.getpid() not in children
    never = RecordDict({"wait": ConfigRecord({"path": str(tmp_path / "never")})})
    grid.push_messages([grid.create_message(never, "query.wait", next(iter(grid.get_node_ids())), "7")])
    grid.close()
    wait_until_gone(children)


def test_ctrl_c_does_not_reach_the_children(open_children: Open) -> None:
    """A terminal's interrupt, which every process of the group gets, leaves the clients to their parent."""
    grid = open_children()
    children = pids(grid)
    for pid in children:
        os.kill(pid, signal.SIGINT)
    assert pids(grid) == children


def test_processes_are_shared_evenly(open_children: Open) -> None:
    """A client always runs in the same process, and no process has two clients more than another."""
    grid = open_children(client_num=5)
    homes = [[who(reply)["pid"] for reply in ask(grid, "whoami")] for _ in range(2)]
    assert homes[0] == homes[1]
    sizes = [homes[0].count(pid) for pid in set(homes[0])]
    assert max(sizes) - min(sizes) <= 1


def test_no_more_processes_than_clients(warm_processes: None) -> None:
    """Processes beyond the number of clients are not started."""
    before = set(active_children())
    with LocalGrid(2, processes=8, client_app=FAULTY) as grid:
        assert len(pids(grid)) == 2
        assert len(set(active_children()) - before) == 2


# -- what a grid promises that asks another one for replies ---------------------------------------------------------


def test_nothing_is_waited_for_when_nothing_was_sent(open_grid: Open) -> None:
    """No messages have no replies, at once."""
    assert list(open_grid().send_and_receive([])) == []


def test_a_stop_interrupts_who_waits_for_replies(tmp_path: Path) -> None:
    """Once the event is set, waiting for a client that does not answer ends as Ctrl-C does."""
    stopping = threading.Event()
    with LocalGrid(1, processes=1, client_app=FAULTY) as local:
        grid = PromptGrid(local, stopping)
        assert len(ask(grid, "whoami")) == 1
        never = RecordDict({"wait": ConfigRecord({"path": str(tmp_path / "never")})})
        message = grid.create_message(never, "query.wait", 2, "7")
        timer = threading.Timer(0.1, stopping.set)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            grid.send_and_receive([message])
        timer.join()
        # It stays set: nobody waits any more.
        with pytest.raises(KeyboardInterrupt):
            grid.send_and_receive([message], timeout=60)


class GatheringGrid(LocalGrid):
    """A federation whose nodes connect one after the other, each time that somebody looks."""

    looks = 0

    def get_node_ids(self) -> list[int]:
        """Return the nodes that are connected by now."""
        self.looks += 1
        return list(super().get_node_ids())[: self.looks]


def test_nodes_are_waited_for_until_all_are_there() -> None:
    """Waiting ends with the last node that is missing, or in time without it, or with the stopping event."""
    with GatheringGrid(3, client_app=FAULTY) as local:
        PromptGrid(local).wait_for_nodes(3, timeout=60)
        assert len(local.get_node_ids()) == 3
        looks = local.looks
        PromptGrid(local).wait_for_nodes(2, timeout=60)
        # Who has nobody to wait for looks, and goes on.
        assert local.looks == looks + 2
        PromptGrid(local).wait_for_nodes(4, timeout=0.1)
        stopping = threading.Event()
        stopping.set()
        with pytest.raises(KeyboardInterrupt):
            PromptGrid(local, stopping).wait_for_nodes(4, timeout=60)


PARENT = """
import os, sys
from flwr.app import RecordDict
from fedlightning.federation.local_grid import LocalGrid

if __name__ == "__main__":
    grid = LocalGrid(2, processes=2, client_app="faulty_apps:app")
    messages = [grid.create_message(RecordDict(), "query.whoami", node, "1") for node in grid.get_node_ids()]
    replies = list(grid.send_and_receive(messages))
    print(*(reply.content.config_records["who"]["pid"] for reply in replies), flush=True)
    sys.stdin.read()
"""

UNGUARDED = """
from flwr.app import ConfigRecord, RecordDict
from fedlightning.federation.local_grid import LocalGrid

grid = LocalGrid(1, processes=1, client_app="faulty_apps:app")
load = RecordDict({"load": ConfigRecord({"bytes": bytes(2**21)})})
(reply,) = grid.send_and_receive([grid.create_message(load, "train.weigh", 2, "1")])
print("REPLY", reply.error.reason)
grid.close()
"""


def start_script(folder: Path, text: str) -> "subprocess.Popen[str]":
    """Start a script that finds the test's client app."""
    script = folder / "script.py"
    script.write_text(text)
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """A parent that has no time to close its grid leaves no client process behind."""
    with start_script(tmp_path, PARENT) as parent:
        assert parent.stdout is not None
        children = {int(pid) for pid in parent.stdout.readline().split()}
        assert len(children) == 2
        assert all(alive(pid) for pid in children)
        parent.kill()
    wait_until_gone(children)


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_an_error_reply(tmp_path: Path) -> None:
    """Children that die while they start, before they take a message, end in an error reply and not in a hang."""
    with start_script(tmp_path, UNGUARDED) as script:
        out, err = script.communicate()
    assert script.returncode == 0, err
    assert "REPLY its process ended with exit code 1" in out
    assert "bootstrapping phase" in err
