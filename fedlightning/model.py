"""The combiner network: a one-layer CNN over tree outputs, and how it is evaluated."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlightning.tasks import Scaling, Tally, Task

CHANNELS = 64
EVALUATION_ROWS = 8192
"""Rows evaluated at a time, to bound memory."""


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


def evaluate(network: TreeCNN, tree_outputs: Tensor, targets: Tensor, *, task: Task, scaling: Scaling) -> Tally:
    """Return the network's tally over rows, in double precision.

    Args:
        network: The network to evaluate.
        tree_outputs: Scaled tree outputs, shape ``(rows, outputs, K*T)``.
        targets: Class indices or original targets, shape ``(rows,)``.
        task: Loss and metric.
        scaling: The federation's scaling of the target.
    """
    return evaluate_blocks(network, torch.split(tree_outputs, EVALUATION_ROWS), targets, task=task, scaling=scaling)


@torch.no_grad()
def evaluate_blocks(
    network: TreeCNN, blocks: Iterable[Tensor], targets: Tensor, *, task: Task, scaling: Scaling
) -> Tally:
    """Return the network's tally over rows whose tree outputs come block by block, none of which is kept."""
    with one_thread():
        return task.tally(torch.cat([network(block) for block in blocks]), targets, scaling)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one torch thread: the products are too small to share, and sums keep their order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def network_arrays(network: TreeCNN) -> dict[str, NDArray[np.float32]]:
    """Return a copy of a network's parameters by name."""
    return {name: value.detach().cpu().numpy().copy() for name, value in network.state_dict().items()}


def load_arrays(network: TreeCNN, arrays: Mapping[str, NDArray[np.float32]]) -> None:
    """Set a network's parameters by name."""
    network.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})


def network_shapes(network: TreeCNN) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a network's parameters by name."""
    return {name: tuple(value.shape) for name, value in network.state_dict().items()}
