"""Derive one independent seed per purpose from the run's single seed."""

import hashlib


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return the seed for a purpose such as ``("trees", client)``, in 0 .. 2**31 - 1.

    Hashing the purpose, rather than counting spawns, keeps every seed the same when a new purpose is added.
    """
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1
