"""What all tests share: nothing of what they keep lands in the user's own cache."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest


@pytest.fixture(scope="session", autouse=True)
def _shared_cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Point the cache of what several tests share at a folder of this session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDLIGHTNING_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "shared-cache"))
        yield


@pytest.fixture(autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point the cache at a folder of this test, which is not there yet, and return it."""
    folder = tmp_path_factory.getbasetemp() / "caches" / uuid4().hex
    monkeypatch.setenv("FEDLIGHTNING_CACHE_DIR", str(folder))
    return folder
