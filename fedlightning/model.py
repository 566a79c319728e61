"""The combiner network: a one-layer CNN over tree outputs, and its LightningModule."""

from collections.abc import Callable
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlightning.tasks import Scaling, Tally, Task, add_tallies

CHANNELS = 64
ADAM_BETAS = (0.5, 0.999)


class TreeCNN(nn.Module):
    """Weigh every tree of every client: one convolution step per client, then one linear layer.

    The kernel is as long as a client's ensemble and moves by its own length, so its weights are the learnable
    learning rates of the trees, shared by all clients (Ma et al., arXiv 2304.07537, section 3).

    Args:
        client_num: Clients K.
        trees: Trees per client T.
        outputs: 1, or the number of classes.
        channels: Filters of the convolution.
    """

    def __init__(self, client_num: int, trees: int, outputs: int = 1, channels: int = CHANNELS) -> None:
        super().__init__()
        self.client_num = client_num
        self.trees = trees
        self.conv = nn.Conv1d(outputs, channels, kernel_size=trees, stride=trees)
        self.linear = nn.Linear(channels * client_num, outputs)
        nn.init.kaiming_uniform_(self.linear.weight, mode="fan_in", nonlinearity="relu")

    def forward(self, tree_outputs: Tensor) -> Tensor:
        """Return logits, or a standardized prediction.

        Args:
            tree_outputs: Shape ``(rows, outputs, K*T)``.

        Returns:
            Shape ``(rows, outputs)``.
        """
        windows = self._windows(tree_outputs)
        hidden = self._hidden(windows, len(tree_outputs))
        logits: Tensor = self.linear(hidden)
        return logits

    @torch.no_grad()
    def set_gradients(self, tree_outputs: Tensor, by_logits: Callable[[Tensor], Tensor]) -> Tensor:
        """Set every parameter's gradient as ``backward`` would, and return the logits.

        The chain rule written out for two layers: autograd's own bookkeeping costs more than these products.

        Args:
            tree_outputs: Shape ``(rows, outputs, K*T)``.
            by_logits: Logits -> derivative of the loss by them; both have the shape ``(rows, outputs)``.
        """
        windows = self._windows(tree_outputs)
        hidden = self._hidden(windows, len(tree_outputs))
        logits: Tensor = self.linear(hidden)
        by_logit = by_logits(logits)
        by_hidden = torch.ops.aten.threshold_backward(by_logit @ self.linear.weight, hidden, 0)
        by_filter = by_hidden.view(len(tree_outputs), -1, self.client_num).transpose(1, 2).reshape(len(windows), -1)
        assert self.conv.bias is not None, "a network has biases"
        self.conv.weight.grad = (by_filter.t() @ windows).view(self.conv.weight.shape)
        self.conv.bias.grad = by_filter.sum(0)
        self.linear.weight.grad = by_logit.t() @ hidden
        self.linear.bias.grad = by_logit.sum(0)
        return logits

    def _windows(self, tree_outputs: Tensor) -> Tensor:
        """Return what the kernel sees at each of its positions, shape ``(rows * K, outputs * T)``."""
        rows, outputs, _ = tree_outputs.shape
        windows = tree_outputs.view(rows, outputs, self.client_num, self.trees)
        return windows.transpose(1, 2).reshape(rows * self.client_num, outputs * self.trees)

    def _hidden(self, windows: Tensor, rows: int) -> Tensor:
        """Return the rectified filters in the order of ``flatten``, shape ``(rows, channels * K)``."""
        # A kernel that moves by its own length sees each client once: the convolution is a matrix product,
        # which costs half of what the general routine does.
        filtered = F.linear(windows, self.conv.weight.flatten(1), self.conv.bias)
        return F.relu(filtered).view(rows, self.client_num, -1).transpose(1, 2).flatten(1)


def initial_network(client_num: int, trees: int, *, outputs: int = 1, channels: int = CHANNELS, seed: int) -> TreeCNN:
    """Return a freshly initialised network that depends on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TreeCNN(client_num, trees, outputs, channels)


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
