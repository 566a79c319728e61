"""What the tests' HTTP server is told to answer."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Reply:
    """What the server answers on one path."""

    body: bytes = b""
    status: int = 200
    length: int | None = None
    """The Content-Length that is claimed, if it is not that of the body."""
    tells_length: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    stalls: bool = False
    """Whether the answer never comes (until the server is closed)."""
    resets: bool = False
    """Whether the connection is reset after half of the body."""
    hold: threading.Event | None = None
    """What the second half of the body waits for (until the server is closed)."""


@dataclass
class DataServer:
    """A local stand-in for LIBSVM Data: replies by path, and what was asked for."""

    url: str
    replies: dict[str, Reply | list[Reply]] = field(default_factory=dict)
    """Of a list each reply is given once, and the last one from then on."""
    requests: list[str] = field(default_factory=list)

    def next_reply(self, path: str) -> Reply:
        """Note a request and return its reply."""
        self.requests.append(path)
        reply = self.replies.get(path, Reply(status=404))
        if isinstance(reply, Reply):
            return reply
        return reply.pop(0) if len(reply) > 1 else reply[0]
