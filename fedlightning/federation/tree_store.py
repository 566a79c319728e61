"""The trees that a client holds: in this process's memory, and in a folder for the processes after it."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from fedlightning.federation.cache import FolderCache
from fedlightning.federation.memory import Memory
from fedlightning.trees import Ensemble, Forest

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class EnsembleShape:
    """What an ensemble has to be like to be read."""

    features: int
    outputs: int
    n_estimators: int
    max_depth: int

    def read(self, data: bytes) -> Ensemble:
        """Read an ensemble that somebody else wrote.

        Raises:
            ValueError: It is not a well-formed ensemble of this shape.
        """
        return Ensemble.from_bytes(data, **asdict(self))


class TreeStore:
    """Find ensembles and forests by digest, and grown ensembles by their settings.

    Args:
        memory: What this process remembers.
        cache: What the machine's processes share.
    """

    def __init__(self, memory: Memory, cache: FolderCache) -> None:
        self._memory = memory
        self._cache = cache

    def ensemble(self, digest: str, shape: EnsembleShape) -> Ensemble | None:
        """Return a kept ensemble, or None."""
        kept: Ensemble | None = self._memory.get(("ensemble", digest))
        if kept is not None:
            return kept
        name = _name(digest, "ensemble")
        data = self._cache.read(name)
        if data is None:
            return None
        try:
            ensemble = shape.read(data)
        except ValueError:
            ensemble = None
        if ensemble is None or ensemble.digest != digest:
            # Somebody else wrote into the folder: what is not what its name says is as good as lost.
            self._cache.forget(name)
            return None
        return ensemble

    def keep_ensemble(self, ensemble: Ensemble, packed: bytes | None = None) -> bytes:
        """Keep an ensemble, and return it packed."""
        name = _name(ensemble.digest, "ensemble")
        self._memory.keep(("ensemble", ensemble.digest), ensemble, ensemble.nbytes)
        packed = packed or ensemble.to_bytes()
        # What lies there under this name may be damaged, or somebody else's.
        if self._cache.read(name) != packed:
            self._cache.keep(name, packed)
        return packed

    def grown(
        self, settings: str, n_estimators: int, *, shape: EnsembleShape, fit: Callable[[], Ensemble]
    ) -> tuple[Ensemble, bool]:
        """Return an ensemble of these settings with at least so many trees, and whether it had to be fitted.

        Args:
            settings: Digest of everything but their number that the trees depend on.
            n_estimators: Trees that are needed.
            shape: Of an ensemble with as many trees as are needed.
            fit: Grows it.
        """
        kept: Ensemble | None = self._memory.get(("grown", settings))
        if kept is not None and len(kept) >= n_estimators:
            return kept, False
        name = _name(settings, "grown")
        # Another worker may be growing the very same trees: wait for them.
        with self._cache.lock(name):
            grown = self._earlier(name, n_estimators, shape)
            fitted = grown is None
            if grown is None:
                grown = fit()
                self.keep_ensemble(grown)
                self._write(name, {"ensemble": grown.digest, "n_estimators": len(grown)})
        return self._memory.keep(("grown", settings), grown, grown.nbytes), fitted

    def forest(self, digest: str) -> Forest | None:
        """Return a kept forest, or None."""
        kept: Forest | None = self._memory.get(("forest", digest))
        if kept is not None:
            return kept
        document = self._read(_name(digest, "forest"))
        try:
            shape = EnsembleShape(**document["shape"])
            found = [self.ensemble(name, shape) for name in document["ensembles"]]
        except (KeyError, TypeError, ValueError):
            return None
        ensembles = tuple(ensemble for ensemble in found if ensemble is not None)
        if not ensembles or len(ensembles) < len(found):
            return None
        forest = Forest(ensembles)
        if forest.digest != digest:
            return None
        self.hold(forest)
        return forest

    def keep_forest(self, forest: Forest, shape: EnsembleShape) -> None:
        """Keep a forest whose ensembles are kept."""
        digests = [ensemble.digest for ensemble in forest.ensembles]
        self._write(_name(forest.digest, "forest"), {"shape": asdict(shape), "ensembles": digests})
        self.hold(forest)

    def hold(self, forest: Forest) -> None:
        """Make a forest the last thing that memory forgets."""
        self._memory.keep(("forest", forest.digest), forest, forest.nbytes)

    def _earlier(self, name: str, n_estimators: int, shape: EnsembleShape) -> Ensemble | None:
        document = self._read(name)
        digest, trees = document.get("ensemble"), document.get("n_estimators")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            return None
        if not isinstance(trees, int) or trees < n_estimators:
            return None
        return self.ensemble(digest, EnsembleShape(shape.features, shape.outputs, trees, shape.max_depth))

    def _read(self, name: str) -> dict[str, Any]:
        data = self._cache.read(name)
        try:
            document = json.loads(data or b"{}")
        except (ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}

    def _write(self, name: str, document: dict[str, Any]) -> None:
        self._cache.keep(name, json.dumps(document).encode())


def _name(digest: str, kind: str) -> str:
    # Digests come from peers, and become names of files.
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{digest[:80]!r} is no sha256")
    return f"{digest}.{kind}"
