"""Time one optimizer step: everything that a client's training does, against a plain PyTorch loop.

Both train the same network on rows of the same shape in one process, in turn, and the ratio is taken pair by pair;
the machine's other work then falls on both.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlightning.model import CHANNELS, initial_network, one_thread
from fedlightning.tasks import Scaling, find_task
from fedlightning.training import ADAM_BETAS, batch_order, fit

ROWS, BATCH_SIZE, ITERATIONS, REPEATS, LR = 5_861, 32, 500, 5, 5e-4
SHAPES = ((5, 100), (2, 250), (10, 50))


def plain(tree_outputs: Tensor, targets: Tensor, clients: int, trees: int) -> None:
    """Train as a tutorial would: Conv1d, ReLU, Linear, Adam, batches sliced from a permutation."""
    convolution, linear = nn.Conv1d(1, CHANNELS, trees, stride=trees), nn.Linear(CHANNELS * clients, 1)
    parameters = [*convolution.parameters(), *linear.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=LR, betas=ADAM_BETAS)
    order, start = torch.randperm(ROWS), 0
    for _ in range(ITERATIONS):
        if start + BATCH_SIZE > ROWS:
            order, start = torch.randperm(ROWS), 0
        batch = order[start : start + BATCH_SIZE]
        start += BATCH_SIZE
        logits = linear(F.relu(convolution(tree_outputs[batch]).flatten(1)))[:, 0]
        loss = F.binary_cross_entropy_with_logits(logits, targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def ours(tree_outputs: Tensor, targets: Tensor, clients: int, trees: int) -> None:
    """Train as a client does: LightningModule, Trainer, loader, optimizer, tally."""
    fit(
        initial_network(clients, trees, seed=0),
        tree_outputs,
        targets,
        task=find_task("binary"),
        scaling=Scaling(),
        order=batch_order(ROWS, ITERATIONS, BATCH_SIZE, seed=0),
        lr=LR,
    )


def main() -> None:
    """Print a row per shape."""
    print("| K x T | plain loop, us/step | ours, us/step | ratio |\n| --- | ---: | ---: | ---: |")
    for clients, trees in SHAPES:
        torch.manual_seed(0)
        tree_outputs = 0.1 * torch.randn(ROWS, 1, clients * trees)
        targets = (torch.rand(ROWS) > 0.75).float()
        with one_thread():
            times = [
                [_seconds(train, tree_outputs, targets, clients, trees) for train in (plain, ours)]
                for _ in range(REPEATS + 1)
            ][1:]
        medians = [statistics.median(column) / ITERATIONS * 1e6 for column in zip(*times, strict=True)]
        ratio = statistics.median(own / plain_loop for plain_loop, own in times)
        print(f"| {clients} x {trees} | {medians[0]:.0f} | {medians[1]:.0f} | {ratio:.2f} |")


def _seconds(train: Callable[..., None], *arguments: object) -> float:
    start = time.perf_counter()
    train(*arguments)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
