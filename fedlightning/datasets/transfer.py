"""Bring one file from a web server, and try again where that may help."""

import errno
import http.client
import logging
import os
import shutil
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[str, int, int | None], None]
"""Called as `progress(name, done_bytes, total_bytes)`; the total is None if the server does not tell it."""

_CHUNK = 1 << 18
_PAUSES = (1.0, 3.0)
"""Seconds before the second and the third attempt."""
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Answers that say that it may work later."""

logger = logging.getLogger(__name__)


class TransferError(OSError):
    """A file did not come, or not whole; failures to write it are any other OSError."""

    def __init__(self, message: str, *, may_pass: bool) -> None:
        super().__init__(message)
        self.may_pass = may_pass
        """Whether another attempt may succeed."""


@dataclass(frozen=True)
class Answer:
    """What a server said about the file that it sent."""

    url: str
    """Where the file came from in the end, behind all redirects."""
    content_type: str


def transfer(url: str, path: Path, *, name: str, progress: Progress | None, timeout: float) -> Answer:
    """Write what a server sends to a file, in up to three attempts; HTTP_PROXY and its like are respected.

    A server in trouble, a broken connection, a silence of `timeout` seconds and a body that ends early
    are worth another attempt, a refusal is not. Each starts from the first byte: nothing tells that a
    server still sends the same file, and half a file of each would be found out only at the end.
    """
    for pause in _PAUSES:
        try:
            return _attempt(url, path, name=name, progress=progress, timeout=timeout)
        except TransferError as error:
            if not error.may_pass:
                raise
            logger.warning("%s: %s; trying again in %g s", name, error, pause)
        time.sleep(pause)
    return _attempt(url, path, name=name, progress=progress, timeout=timeout)


def _attempt(url: str, path: Path, *, name: str, progress: Progress | None, timeout: float) -> Answer:
    request = urllib.request.Request(url, headers={"User-Agent": "fedlightning"})
    with _failures_named(url, timeout):
        # An opener of its own: the shared one keeps the proxies that were set when it was first used.
        response = urllib.request.build_opener().open(request, timeout=timeout)
    with response, path.open("wb") as target:
        length = response.headers.get("Content-Length")
        total = int(length) if length and length.isdecimal() else None
        done = 0
        with _need_told(total):
            if total is not None and total > shutil.disk_usage(path.parent).free:
                # Told before the last free byte is taken from everybody else.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            while True:
                if progress is not None:
                    progress(name, done, total)
                with _failures_named(url, timeout):
                    chunk = response.read(_CHUNK)
                if not chunk:
                    break
                target.write(chunk)
                done += len(chunk)
            target.flush()
            os.fsync(target.fileno())
        # http.client takes a connection that closes early for the end of the body.
        if total is not None and done != total:
            raise TransferError(f"fetching {url} failed ({done:,} of {total:,} bytes arrived)", may_pass=True)
        return Answer(response.url, response.headers.get_content_type())


@contextmanager
def _failures_named(url: str, timeout: float) -> Iterator[None]:
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        raise TransferError(f"{url} answered {error.code} {error.reason}", may_pass=error.code in _PASSING) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        said = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        if isinstance(reason, TimeoutError):
            said = f"timed out, nothing came for {timeout:g} s"
        # A wrong certificate and a name that nobody knows stay as they are.
        unknown = isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME
        may_pass = not unknown and not isinstance(reason, ssl.SSLCertVerificationError)
        raise TransferError(f"fetching {url} failed ({said})", may_pass=may_pass) from error


@contextmanager
def _need_told(total: int | None) -> Iterator[None]:
    """Add to a failure to write how large the file is."""
    try:
        yield
    except TransferError:
        raise
    except OSError as error:
        if total is None:
            raise
        raise OSError(error.errno, f"{error.strerror or error}; the file has {total:,} bytes") from error
