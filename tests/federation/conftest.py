"""What the federation's tests share: a client memory of their own, and client processes that start quickly."""

import pytest
from machines import app as machines

from fedlightning.federation import client_app
from fedlightning.federation.local_grid import warm_up
from fedlightning.federation.memory import Memory


@pytest.fixture(autouse=True)
def client_memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Give in-process clients an empty memory, and return it."""
    machines.reset()
    memory = Memory(2**30)
    monkeypatch.setattr(client_app, "memory", memory)
    return memory


@pytest.fixture(scope="session")
def warm_processes() -> None:
    """Import once what all client processes need."""
    warm_up()
