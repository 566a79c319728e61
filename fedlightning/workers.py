"""Tell which of the processes that work on a study live: by their locks, or by their heartbeats."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedlightning.owners import is_alive

PERIOD = 5.0
"""Seconds between a worker's heartbeats, and between its looks at the others."""
SILENCE = 45.0
"""Seconds without a new heartbeat after which a worker counts as dead."""

_PREFIX = "worker:"

logger = logging.getLogger(__name__)


def owners_folder(root: Path) -> Path:
    """Return where living workers keep their locks below a root."""
    return root / "mlruns" / "workers"


class Workers:
    """The workers of one study, each with a record among the study's attributes.

    A worker of the same folder is judged by its lock. Of any other only the heartbeat is seen: it lives as long as
    that changes. How long it did not is measured by this process's own clock, so that clocks may differ.

    Args:
        folder: Where workers of this machine and root keep their locks.
        attributes: Reads the study's attributes.
        write: Stores one of them.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        folder: Path,
        attributes: Callable[[], Mapping[str, Any]],
        write: Callable[[str, Any], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._attributes = attributes
        self._write = write
        self._clock = clock
        self._beats = 0
        self._seen: dict[str, tuple[object, float]] = {}

    def beat(self, owner: str) -> None:
        """Show that a worker of this folder lives; the first time this makes it known."""
        self._beats += 1
        self._write(_PREFIX + owner, {"place": self._place(), "beat": self._beats})

    def leave(self, owner: str) -> None:
        """Note that a worker has ended, so that nobody waits for its next heartbeat."""
        self._write(_PREFIX + owner, {"ended": True})

    def is_alive(self, owner: str) -> bool:
        """Return whether a worker lives, as far as one can tell."""
        return self._lives(owner, self._attributes().get(_PREFIX + owner))

    def living(self) -> list[str]:
        """Return the names of all workers that live, as far as one can tell."""
        return [owner for owner, record in self._records().items() if self._lives(owner, record)]

    def surely_living(self) -> list[str]:
        """Return workers that certainly live, or none; of workers elsewhere only a long look tells."""
        first = self._records()
        while living := self.living():
            records = self._records()
            sure = [owner for owner in living if self.is_near(owner) or records[owner] != first.get(owner)]
            if sure:
                return sure
            time.sleep(1)
        return []

    def is_near(self, owner: str) -> bool:
        """Return whether a worker shares this folder, and with it locks."""
        record = self._attributes().get(_PREFIX + owner)
        return record is None or record.get("place") == self._place()

    def keeps_still(self, what: str, state: object) -> bool:
        """Return whether something that others should change has been the same for too long."""
        now = self._clock()
        before, since = self._seen.get(what, (None, now))
        if what not in self._seen or before != state:
            self._seen[what] = state, now
            return False
        return now - since >= SILENCE

    def _records(self) -> dict[str, Mapping[str, Any]]:
        stored = self._attributes()
        return {key.removeprefix(_PREFIX): record for key, record in stored.items() if key.startswith(_PREFIX)}

    def _lives(self, owner: str, record: Mapping[str, Any] | None) -> bool:
        if record is None or record.get("place") == self._place():
            return is_alive(self._folder, owner)
        # Not dead for ever: a machine that slept wakes up and goes on.
        return not record.get("ended") and not self.keeps_still(owner, record["beat"])

    def _place(self) -> str:
        """Return what tells this folder from one of the same name elsewhere."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return f"{socket.gethostname()}:{self._folder.resolve()}:{self._folder.stat().st_ino}"


@contextmanager
def repeating(action: Callable[[], None], seconds: float = PERIOD) -> Iterator[None]:
    """Call something every few seconds, in a thread of its own, for as long as the block runs."""
    over = threading.Event()

    def repeat() -> None:
        failing = False
        while not over.wait(seconds):
            try:
                action()
                failing = False
            except Exception as error:
                # Stores fail in many ways, for a while; work that goes on is worth more than this look.
                if not failing:
                    logger.warning("cannot look after the other workers, trying on: %s", error)
                failing = True

    thread = threading.Thread(target=repeat, name="looks after workers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
