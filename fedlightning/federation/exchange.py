"""Send messages and insist on every reply."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedlightning.federation.records import NotFiniteError, count_bytes

T = TypeVar("T")


class ClientError(RuntimeError):
    """A client failed, did not answer, or sent something that is not what was asked for."""


class DivergedError(ClientError):
    """A client's training left the finite numbers; a smaller learning rate may not."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of all records sent up (to the server) and down (to the clients)."""

    up: int = 0
    down: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.up + other.up, self.down + other.down)


def exchange(
    grid: Grid, messages: Sequence[Message], *, names: Callable[[int], str], timeout: float | None = None
) -> tuple[list[Message], Traffic]:
    """Send messages, wait for all replies, and return them in the order of the messages.

    Args:
        grid: The federation.
        messages: One per client.
        names: What to call the client of a node in errors.
        timeout: Seconds to wait for the slowest client; None waits for ever.

    Raises:
        ClientError: A client raised (its own traceback is part of the message), or did not answer in time.
    """
    # Flower goes on without those that fail; here an average that lacks a client is never silent.
    replies = list(grid.send_and_receive(messages, timeout=timeout))
    by_node = {reply.metadata.src_node_id: reply for reply in replies}
    ordered = []
    for message in messages:
        node, action = message.metadata.dst_node_id, message.metadata.message_type
        reply = by_node.get(node)
        if reply is None:
            within = "" if timeout is None else f" within {timeout:g} seconds"
            raise ClientError(f"{names(node)} did not answer {action!r}{within}")
        _check_error(reply, names)
        ordered.append(reply)
    return ordered, Traffic(
        up=count_bytes(reply.content for reply in ordered), down=count_bytes(message.content for message in messages)
    )


def read_reply(reply: Message, read: Callable[[RecordDict], T], *, names: Callable[[int], str]) -> T:
    """Return what a reply says.

    Raises:
        DivergedError: It holds numbers that are not finite.
        ClientError: It is an error, lacks something, or is not what was asked for.
    """
    _check_error(reply, names)
    try:
        return read(reply.content)
    except NotFiniteError as error:
        raise DivergedError(
            f"{names(reply.metadata.src_node_id)} diverged ({error}); choose a smaller CNN.lr"
        ) from error
    except (ValueError, KeyError) as error:
        client, action = names(reply.metadata.src_node_id), reply.metadata.message_type
        raise ClientError(f"{client} sent an unusable reply to {action!r}: {error}") from error


def _check_error(reply: Message, names: Callable[[int], str]) -> None:
    if reply.has_error():
        client, action = names(reply.metadata.src_node_id), reply.metadata.message_type
        reason = (reply.error.reason or f"error code {reply.error.code}").rstrip()
        raise ClientError(f"{client} failed in {action!r}:\n{reason}")
