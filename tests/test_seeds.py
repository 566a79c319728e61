"""Tests for seeds: one per purpose, the same everywhere and for ever."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from fedlightning.seeds import derive_seed

purposes = st.lists(st.text(alphabet="abcdefgh", min_size=1, max_size=4) | st.integers(0, 50), max_size=3)


@given(st.integers(0, 2**32 - 1), purposes)
def test_seeds_fit_every_library(seed: int, purpose: list[str | int]) -> None:
    """A seed lies in 0 .. 2**31 - 1, which numpy, torch, XGBoost and scikit-learn all take."""
    derived = derive_seed(seed, *purpose)
    assert type(derived) is int
    assert 0 <= derived < 2**31
    assert derive_seed(seed, *purpose) == derived


def test_each_purpose_and_each_seed_has_its_own() -> None:
    """Clients, rounds, purposes and neighbouring seeds do not share a seed."""
    derived = [
        derive_seed(seed, *purpose)
        for seed in range(20)
        for purpose in [
            (),
            ("network",),
            *(("trees", client) for client in range(10)),
            *(("validation", client) for client in range(10)),
            *(("batches", client, number) for client in range(10) for number in range(1, 6)),
        ]
    ]
    # Among 2**31 seeds so few meet by chance once in two thousand such sets.
    assert len(set(derived)) == len(derived)


def test_numbers_that_run_together_are_told_apart() -> None:
    """Client 1 in round 11 is not client 11 in round 1."""
    assert derive_seed(0, "batches", 1, 11) != derive_seed(0, "batches", 11, 1)
    assert derive_seed(1, 11, "x") != derive_seed(11, 1, "x")


def test_seeds_are_the_same_in_every_process() -> None:
    """A seed does not depend on Python's salted hashes; these values keep earlier results repeatable."""
    golden = ["155729609", "121404557"]
    assert [str(derive_seed(0, "trees", 3)), str(derive_seed(7, "network"))] == golden
    code = "from fedlightning.seeds import derive_seed as d; print(d(0, 'trees', 3), d(7, 'network'))"
    for salt in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": salt}, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == golden
