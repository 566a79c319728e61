"""What the tests' HTTP server is told to answer."""

from dataclasses import dataclass, field


@dataclass
class Reply:
    """What the server answers on one path."""

    body: bytes = b""
    status: int = 200
    length: int | None = None
    """The Content-Length that is claimed, if it is not that of the body."""
    tells_length: bool = True
    stalls: bool = False
    """Whether the answer never comes (until the server is closed)."""


@dataclass
class DataServer:
    """A local stand-in for LIBSVM Data: replies by path, and what was asked for."""

    url: str
    replies: dict[str, Reply] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
