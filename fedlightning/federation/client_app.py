"""The client: describe its rows, grow its trees, hold the forest, train and evaluate the network.

Where clients live in processes that go on, what they hold stays in memory. Where every message is a process of its own
(SuperNodes), trees are found again in the node's cache folder; and each handler imports only what it needs, because
there it pays for it every time.
"""

from typing import TYPE_CHECKING

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedlightning.federation.memory import Memory, default_capacity

if TYPE_CHECKING:
    from fedlightning.federation.client import Client

app = ClientApp()

# The one thing that outlives a message: a client may be called in this process again.
memory = Memory(default_capacity())


@app.query("describe")
def describe(message: Message, context: Context) -> Message:
    """Tell how many rows this client holds, and its part of the target statistics."""
    return _client(message, context).describe()


@app.train("grow")
def grow(message: Message, context: Context) -> Message:
    """Grow this client's ensemble, or take it from a longer one of the same settings."""
    return _client(message, context).grow()


@app.query("plant")
def plant(message: Message, context: Context) -> Message:
    """Hold the forest that all clients agree on."""
    return _client(message, context).plant()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the global network on this client's rows for an exact number of iterations."""
    return _client(message, context).train()


@app.evaluate()
def evaluate_network(message: Message, context: Context) -> Message:
    """Tally the global network over rows that this client held back."""
    return _client(message, context).evaluate()


@app.evaluate("compare")
def compare(message: Message, context: Context) -> Message:
    """Tally what needs no network, over rows that this client held back: mean margin and its own ensemble."""
    return _client(message, context).compare()


def _client(message: Message, context: Context) -> "Client":
    # Imported here: the app itself is loaded in places that never handle a message.
    from fedlightning.federation.client import Client

    return Client(message, context, memory)
