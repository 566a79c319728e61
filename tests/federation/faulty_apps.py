"""A client app that answers, remembers, changes what it got, fails, waits and dies on request."""

import os
import signal
import time
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from fedlightning.federation.shard import PARTITION_ID

app = ClientApp()


@app.query("whoami")
def whoami(message: Message, context: Context) -> Message:
    """Tell who answers, and in which process."""
    who = {
        "node": context.node_id,
        "partition": int(context.node_config[PARTITION_ID]),
        "identity": TaskIdentity.node_id,
        "pid": os.getpid(),
        "greeting": str(context.node_config.get("greeting", "")),
    }
    return Message(RecordDict({"who": ConfigRecord(who)}), reply_to=message)


@app.query("change")
def change(message: Message, context: Context) -> Message:
    """Write into the records that came, as a mod may, and return them."""
    record = message.content.config_records["letter"]
    record["readers"] = [*record["readers"], context.node_id]
    record["seal"] = "broken"
    message.content["postscript"] = MetricRecord({"partition": int(context.node_config[PARTITION_ID])})
    return Message(message.content, reply_to=message)


@app.query("count")
def count(message: Message, context: Context) -> Message:
    """Count this client's messages in its state."""
    before = context.state.metric_records.get("count", {"messages": 0})["messages"]
    context.state["count"] = MetricRecord({"messages": before + 1})
    return Message(RecordDict({"count": MetricRecord({"messages": before + 1})}), reply_to=message)


@app.query("fail")
def fail(message: Message, context: Context) -> Message:
    """Raise, with this client's partition in the text."""
    raise RuntimeError(f"partition {context.node_config[PARTITION_ID]} has no rows today")


@app.query("die")
def die(message: Message, context: Context) -> Message:
    """End this process as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process does not go on")


@app.query("wait")
def wait(message: Message, context: Context) -> Message:
    """Answer when a file is there."""
    path = Path(str(message.content.config_records["wait"]["path"]))
    while not path.exists():
        time.sleep(0.01)
    return Message(RecordDict({"waited": ConfigRecord({"path": str(path)})}), reply_to=message)


@app.train("weigh")
def weigh(message: Message, context: Context) -> Message:
    """Tell how many bytes came, and send as many back."""
    load = message.content.config_records["load"]["bytes"]
    assert isinstance(load, bytes)
    return Message(RecordDict({"load": ConfigRecord({"bytes": load[::-1]})}), reply_to=message)
