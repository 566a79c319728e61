"""Tests of what a client keeps between messages."""

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from fedlightning.federation.memory import Memory, default_capacity

KEYS = st.sampled_from("abcde")
SIZES = st.integers(0, 12)
STEPS = st.lists(
    st.tuples(st.just("keep"), KEYS, SIZES)
    | st.tuples(st.just("recall"), KEYS, SIZES)
    | st.tuples(st.just("get"), KEYS, st.just(0)),
    max_size=40,
)


@given(capacity=st.integers(0, 20), steps=STEPS)
@settings(deadline=None)
def test_memory_is_bounded_and_forgets_the_least_recently_used(
    capacity: int, steps: list[tuple[str, str, int]]
) -> None:
    """Any history leaves what a plain list of entries in order of use would hold."""
    memory = Memory(capacity)
    entries: list[tuple[str, int, int]] = []  # key, value, size; the least recently used first
    evictions = 0
    for value, (step, key, size) in enumerate(steps):
        held = next((entry for entry in entries if entry[0] == key), None)
        if step == "get" or (step == "recall" and held):
            found = memory.get(key) if step == "get" else memory.recall(key, lambda: -1, lambda _: 0)
            assert found == (held[1] if held else None)
            if held:
                entries.remove(held)
                entries.append(held)
        else:
            if step == "keep":
                assert memory.keep(key, value, size) == value
            else:
                assert memory.recall(key, lambda value=value: value, lambda _, size=size: size) == value  # type: ignore[misc]
            if held:
                entries.remove(held)
            if size <= capacity:
                entries.append((key, value, size))
            while sum(entry[2] for entry in entries) > capacity:
                entries.pop(0)
                evictions += 1
        assert memory.nbytes == sum(entry[2] for entry in entries) <= capacity
        assert len(memory) == len(entries)
        assert memory.evictions == evictions
    for key, value, _ in entries:
        assert memory.get(key) == value


def test_a_value_that_is_too_large_is_returned_but_not_kept() -> None:
    """A single value above the capacity displaces nothing but its own predecessor."""
    memory = Memory(10)
    memory.keep("small", "s", 4)
    memory.keep("grows", "g", 4)
    assert memory.keep("grows", "G", 11) == "G"
    assert memory.get("grows") is None
    assert memory.get("small") == "s"
    assert (memory.nbytes, memory.evictions) == (4, 0)


def test_what_is_kept_is_made_once() -> None:
    """A value is made when it is missing, and again only when it was forgotten."""
    memory, made = Memory(10), []

    def make() -> str:
        made.append("made")
        return "value"

    for _ in range(3):
        assert memory.recall("key", make, len) == "value"
    assert len(made) == 1
    memory.keep("other", "o", 10)
    assert memory.recall("key", make, len) == "value"
    assert len(made) == 2


def test_the_default_is_a_quarter_of_the_machine() -> None:
    """The default capacity is a quarter of the physical memory."""
    assert default_capacity() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4 // (os.cpu_count() or 1)
