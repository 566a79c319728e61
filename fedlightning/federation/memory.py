"""What a client keeps between messages, bounded in bytes."""

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Memory:
    """Keep the most recently used values up to a number of bytes.

    Everything here can be made again: a lost value costs time, never a result.

    Args:
        capacity: Bytes to keep; a single larger value is returned but not kept.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nbytes = 0
        self.evictions = 0
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Any | None:
        """Return what is kept under a key, or None."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def keep(self, key: Hashable, value: T, nbytes: int) -> T:
        """Keep a value in the place of an older one of the same key, and return it."""
        if key in self._entries:
            self.nbytes -= self._entries.pop(key)[1]
        if nbytes <= self.capacity:
            self._entries[key] = (value, nbytes)
            self.nbytes += nbytes
        while self.nbytes > self.capacity:
            _, (_, freed) = self._entries.popitem(last=False)
            self.nbytes -= freed
            self.evictions += 1
        return value

    def recall(self, key: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
        """Return what is kept under a key; make and keep it if there is nothing."""
        kept: T | None = self.get(key)
        if kept is not None:
            return kept
        value = make()
        return self.keep(key, value, size(value))


def default_capacity() -> int:
    """Return this process's part of a quarter of the machine's memory, in bytes, with a client process per core."""
    return machine_memory() // 4 // (os.cpu_count() or 1)


def machine_memory() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
