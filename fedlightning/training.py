"""Fit a client's network for an exact number of iterations: its LightningModule and the Trainer around it."""

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning
import torch
from torch import Tensor

from fedlightning.model import TreeCNN, one_thread
from fedlightning.tasks import Scaling, Tally, Task, add_tallies

CHUNK = 50
"""Iterations that share one call of the Trainer's loop."""
ADAM_BETAS = (0.5, 0.999)


class TreeCNNModule(lightning.LightningModule):
    """Train a TreeCNN by batches that arrive several iterations at a time.

    A training step receives a chunk of iterations, so that the Trainer's overhead is paid per chunk; every optimizer
    step still goes through Lightning's optimizer and counts in ``global_step``. Callbacks fire once per chunk.

    Args:
        network: The network to train in place.
        task: Loss and metric.
        scaling: The federation's scaling of the target.
        lr: Adam's learning rate.
    """

    def __init__(self, network: TreeCNN, *, task: Task, scaling: Scaling, lr: float) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.network = network
        self.task = task
        self.scaling = scaling
        self.lr = lr
        self._tallies: list[Tally] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Take one optimizer step per iteration of the chunk.

        Args:
            batch: Tree outputs ``(iterations, batch_size, outputs, K*T)`` and targets in original units
                ``(iterations, batch_size)``.
            batch_idx: Number of the chunk.
        """
        optimizer = self.optimizers()
        assert isinstance(optimizer, lightning.pytorch.core.optimizer.LightningOptimizer)
        tree_outputs, targets = batch
        standardized = self.scaling.standardize(targets).to(self.task.target_dtype)
        logits = []
        for inputs, wanted in zip(tree_outputs, standardized, strict=True):

            def by_logits(predicted: Tensor, wanted: Tensor = wanted) -> Tensor:
                return self.task.row_gradients(predicted, wanted) / len(wanted)

            logits.append(self.network.set_gradients(inputs, by_logits))
            optimizer.step()
        self._tallies.append(self.task.tally(torch.cat(logits), targets.flatten(), self.scaling))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam with the paper's betas."""
        return torch.optim.Adam(self.network.parameters(), lr=self.lr, betas=ADAM_BETAS, fused=True)

    def training_tally(self) -> Tally:
        """Return loss and metric over all rows seen in training, each as it was before its step."""
        return add_tallies(self._tallies)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse: the federation keeps the network, a client's Trainer never does."""
        raise RuntimeError("a client's training is not checkpointed; the global network is the federation's")


def batch_order(rows: int, num_iterations: int, batch_size: int, *, seed: int) -> Tensor:
    """Return the rows of each iteration's batch, shape ``(num_iterations, batch_size)``, int64.

    The rows form an endless stream of permutations, cut into batches of equal size: every row is seen equally often,
    and a batch may span the end of one pass and the start of the next.
    """
    generator = torch.Generator().manual_seed(seed)
    batch_size = min(batch_size, rows)
    needed = num_iterations * batch_size
    stream = [torch.randperm(rows, generator=generator) for _ in range(-(-needed // rows))]
    return torch.cat(stream)[:needed].view(num_iterations, batch_size)


@dataclass(frozen=True)
class IterationLoader:
    """Serve batches in a given order, several iterations at a time."""

    tree_outputs: Tensor
    """Shape ``(rows, outputs, K*T)``."""
    targets: Tensor
    """Shape ``(rows,)``, original units."""
    order: Tensor
    """Rows of each iteration's batch, shape ``(num_iterations, batch_size)``."""

    def __len__(self) -> int:
        """Return the number of chunks."""
        return math.ceil(len(self.order) / CHUNK)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield chunks of up to ``CHUNK`` iterations."""
        for chosen in torch.split(self.order, CHUNK):
            yield self.tree_outputs[chosen], self.targets[chosen]


def fit(
    network: TreeCNN,
    tree_outputs: Tensor,
    targets: Tensor,
    *,
    task: Task,
    scaling: Scaling,
    order: Tensor,
    lr: float,
    accelerator: str = "cpu",
) -> Tally:
    """Take one optimizer step per batch of ``order``, in place, and return the training tally.

    Args:
        network: Changed in place.
        tree_outputs: Scaled tree outputs, shape ``(rows, outputs, K*T)``.
        targets: Class indices or original targets, shape ``(rows,)``.
        task: Loss and metric.
        scaling: The federation's scaling of the target.
        order: Rows of each iteration's batch, shape ``(num_iterations, batch_size)``; see ``batch_order``.
        lr: Adam's learning rate.
        accelerator: Lightning's name of the device to use: ``cpu`` or ``auto``.
    """
    module = TreeCNNModule(network, task=task, scaling=scaling, lr=lr)
    num_iterations = len(order)
    loader = IterationLoader(tree_outputs, targets, order)
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
