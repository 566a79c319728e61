"""Fit a client's network for an exact number of iterations with a Lightning Trainer, and evaluate it."""

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import lightning
import torch
from torch import Tensor

from fedlightning.model import TreeCNN, TreeCNNModule
from fedlightning.tasks import Scaling, Tally, Task

CHUNK = 50
"""Iterations that share one call of the Trainer's loop."""
EVALUATION_ROWS = 8192
"""Rows evaluated at a time, to bound memory."""


@dataclass(frozen=True)
class IterationLoader:
    """Serve exactly ``num_iterations`` shuffled batches, starting again when the rows are exhausted.

    The rows form an endless stream of permutations, cut into batches of equal size: every row is seen equally often,
    and a batch may span the end of one pass and the start of the next.
    """

    tree_outputs: Tensor
    """Shape ``(rows, outputs, K*T)``."""
    targets: Tensor
    """Shape ``(rows,)``, original units."""
    num_iterations: int
    batch_size: int
    seed: int

    def __len__(self) -> int:
        """Return the number of chunks."""
        return math.ceil(self.num_iterations / CHUNK)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield chunks of up to ``CHUNK`` iterations."""
        generator = torch.Generator().manual_seed(self.seed)
        rows = len(self.targets)
        batch_size = min(self.batch_size, rows)
        stream = torch.empty(0, dtype=torch.int64)
        for start in range(0, self.num_iterations, CHUNK):
            iterations = min(CHUNK, self.num_iterations - start)
            needed = iterations * batch_size
            passes = -(-max(0, needed - len(stream)) // rows)
            stream = torch.cat([stream, *(torch.randperm(rows, generator=generator) for _ in range(passes))])
            chosen, stream = stream[:needed], stream[needed:]
            by_iteration = chosen.view(iterations, batch_size)
            yield self.tree_outputs[by_iteration], self.targets[by_iteration]


def fit(
    network: TreeCNN,
    tree_outputs: Tensor,
    targets: Tensor,
    *,
    task: Task,
    scaling: Scaling,
    num_iterations: int,
    batch_size: int,
    lr: float,
    seed: int,
    accelerator: str = "cpu",
) -> Tally:
    """Take exactly ``num_iterations`` optimizer steps, in place, and return the training tally.

    Args:
        network: Changed in place.
        tree_outputs: Scaled tree outputs, shape ``(rows, outputs, K*T)``.
        targets: Class indices or original targets, shape ``(rows,)``.
        task: Loss and metric.
        scaling: The federation's scaling of the target.
        num_iterations: Optimizer steps, however many passes over the rows that takes.
        batch_size: Rows per step.
        lr: Adam's learning rate.
        seed: Seed of the batches' order.
        accelerator: Lightning's name of the device to use: ``cpu`` or ``auto``.
    """
    module = TreeCNNModule(network, task=task, scaling=scaling, lr=lr)
    loader = IterationLoader(tree_outputs, targets, num_iterations, batch_size, seed)
    with one_thread(), _quiet_lightning():
        trainer = lightning.Trainer(
            accelerator=accelerator,
            devices=1,
            max_steps=num_iterations,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        with _own_interrupt():
            trainer.fit(module, loader)
    assert trainer.global_step == num_iterations, (trainer.global_step, num_iterations)
    module.cpu()
    return module.training_tally()


@torch.no_grad()
def evaluate(network: TreeCNN, tree_outputs: Tensor, targets: Tensor, *, task: Task, scaling: Scaling) -> Tally:
    """Return the network's tally over rows, in double precision.

    Args:
        network: The network to evaluate.
        tree_outputs: Scaled tree outputs, shape ``(rows, outputs, K*T)``.
        targets: Class indices or original targets, shape ``(rows,)``.
        task: Loss and metric.
        scaling: The federation's scaling of the target.
    """
    with one_thread():
        logits = [network(part) for part in torch.split(tree_outputs, EVALUATION_ROWS)]
        return task.tally(torch.cat(logits), targets, scaling)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one torch thread: the products are too small to share, and sums keep their order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _own_interrupt() -> Iterator[None]:
    """Let Ctrl-C stay a KeyboardInterrupt: Lightning makes it an exit of the process with status 1."""
    try:
        yield
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Keep one Trainer per client and round from announcing its devices every time."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    if logger.getEffectiveLevel() > logging.DEBUG:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # Says that a GPU is there but not used; the user chose so.
            warnings.filterwarnings("ignore", module=r"lightning\.pytorch.*")
            yield
    finally:
        logger.setLevel(level)
