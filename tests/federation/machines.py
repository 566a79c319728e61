"""The client app as on machines of their own: no shared memory, no shared folder, or not even a process that stays."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedlightning.federation import client_app
from fedlightning.federation.memory import Memory
from fedlightning.federation.shard import PARTITION_ID


class MachinesApp(ClientApp):
    """Answer as the client app does, each client with a memory and a configuration of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Forget all clients."""
        self.memories: dict[int, Memory] = {}
        self.nodes: dict[int, dict[str, str]] = {}
        """What a partition's node is configured with beside what all are."""
        self.stays = True
        """Whether a client's process goes on after a message."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer one message."""
        partition = int(context.node_config[PARTITION_ID])
        if not self.stays:
            self.memories.pop(partition, None)
        client_app.memory = self.memories.setdefault(partition, Memory(2**30))
        node = {**context.node_config, **self.nodes.get(partition, {})}
        own = Context(context.run_id, context.node_id, node, context.state, context.run_config)
        return client_app.app(message, own)


app = MachinesApp()
