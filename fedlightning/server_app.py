"""The ServerApp for `flwr run`: a command, run in a federation that Flower opened."""

import importlib
import shlex

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedlightning.cli import TRAINING_COMMANDS
from fedlightning.federation.engines import OpenedFederation

COMMAND = "command"
"""Key of the run's configuration: what would follow `python -m fedlightning`."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Do what the run's configuration says, with the nodes of this federation as clients.

    Relative paths are seen from where the SuperLink was started.

    Raises:
        ValueError: There is no such command.
        RuntimeError: The command failed; it has said why.
    """
    line = str(context.run_config.get(COMMAND, ""))
    name, *arguments = shlex.split(line) or [""]
    if name not in TRAINING_COMMANDS:
        raise ValueError(f"{COMMAND} is {line!r}; it begins with one of {', '.join(TRAINING_COMMANDS)}")
    try:
        status = importlib.import_module(f"fedlightning.{name}").main(arguments, engine=OpenedFederation(grid))
    except SystemExit as stop:
        # What argparse has to say about arguments ends a process; here it ends a run.
        status = stop.code
    if status:
        raise RuntimeError(f"{line!r} ended with exit status {status}")
