"""The task table: what binary, multiclass and regression problems differ in, in one place."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics.functional import mean_squared_error
from torchmetrics.functional.classification import binary_stat_scores, multiclass_stat_scores


@dataclass(frozen=True)
class Scores:
    """Mean loss and metric over a number of rows."""

    loss: float
    metric: float
    examples: int


@dataclass(frozen=True)
class Tally:
    """Sums over rows, from which the exact scores of any union of rows follow."""

    loss_sum: float
    metric_sum: float
    examples: int

    def scores(self) -> Scores:
        """Return the means over all counted rows."""
        if self.examples < 1:
            raise ValueError("no rows were counted, so there is no mean loss or metric")
        return Scores(self.loss_sum / self.examples, self.metric_sum / self.examples, self.examples)


def add_tallies(tallies: Iterable[Tally]) -> Tally:
    """Return the tally of the union of disjoint rows."""
    loss, metric, examples = 0.0, 0.0, 0
    for tally in tallies:
        loss += tally.loss_sum
        metric += tally.metric_sum
        examples += tally.examples
    return Tally(loss, metric, examples)


@dataclass(frozen=True)
class Scaling:
    """Federated mean and standard deviation of a regression target; (0, 1) for classes."""

    mean: float = 0.0
    std: float = 1.0

    def standardize(self, values: Tensor) -> Tensor:
        """Map original units to what the network sees."""
        return (values - self.mean) / self.std

    def restore(self, values: Tensor) -> Tensor:
        """Map the network's output to original units."""
        return values * self.std + self.mean


@dataclass(frozen=True)
class TargetStatistics:
    """What clients tell about their training targets: enough for the global prior, mean and deviation."""

    examples: int
    target_sum: float
    target_sum_of_squares: float

    @classmethod
    def of(cls, targets: NDArray[np.float64]) -> "TargetStatistics":
        """Count one client's targets in double precision."""
        return cls(len(targets), math.fsum(targets), math.fsum(targets * targets))

    @property
    def mean(self) -> float:
        """Mean target; for a binary task the share of positives."""
        return self.target_sum / self.examples

    @property
    def std(self) -> float:
        """Population standard deviation; 1 if the target is constant, so that scaling stays defined."""
        variance = self.target_sum_of_squares / self.examples - self.mean**2
        # Cancellation leaves rounding noise of this size where every target is the same.
        noise = 1e-14 * self.target_sum_of_squares / self.examples
        return math.sqrt(variance) if variance > noise else 1.0


def add_statistics(statistics: Sequence[TargetStatistics]) -> TargetStatistics:
    """Return the statistics of all clients' targets together."""
    return TargetStatistics(
        sum(s.examples for s in statistics),
        math.fsum(s.target_sum for s in statistics),
        math.fsum(s.target_sum_of_squares for s in statistics),
    )


@dataclass(frozen=True)
class Task:
    """A kind of target: its XGBoost objective, the network's loss and the reported metric."""

    name: str
    objective: str
    """XGBoost's name of the objective."""
    metric: str
    """``accuracy`` (a fraction) or ``mse`` (in squared units of the target)."""
    higher_is_better: bool
    is_classification: bool
    target_dtype: torch.dtype
    """What the loss expects of a target."""
    row_losses: Callable[[Tensor, Tensor], Tensor]
    """(logits ``(rows, outputs)``, standardized targets ``(rows,)``) -> loss of each row."""
    row_gradients: Callable[[Tensor, Tensor], Tensor]
    """Same arguments -> derivative of each row's loss by its logits, shape ``(rows, outputs)``."""
    metric_sum: Callable[[Tensor, Tensor], Tensor]
    """(outputs in original units ``(rows, outputs)``, targets) -> sum of the metric over the rows."""

    base_score: Callable[[TargetStatistics], float]
    """Prediction that every client's trees start from, in the target's units."""
    intercept: Callable[[float], float]
    """Link from ``base_score`` to the margin that the trees add to."""
    scaling: Callable[[TargetStatistics], Scaling]
    """How the network sees targets and tree outputs."""

    def outputs(self, classes: int) -> int:
        """Return how many numbers the model gives per row: one, or one per class."""
        return classes if self.name == "multiclass" else 1

    def tally(self, logits: Tensor, targets: Tensor, scaling: Scaling) -> Tally:
        """Count loss and metric in double precision.

        Args:
            logits: The network's outputs, shape ``(rows, outputs)``; for regression in standardized units.
            targets: Class indices or original target values, shape ``(rows,)``.
            scaling: The federation's scaling of the target.
        """
        logits, targets = logits.detach().double(), targets.double()
        standardized = scaling.standardize(targets)
        if self.target_dtype is torch.int64:
            standardized, targets = standardized.long(), targets.long()
        losses = self.row_losses(logits, standardized)
        metric = self.metric_sum(scaling.restore(logits), targets)
        return Tally(float(losses.sum()), float(metric), len(targets))


def _binary_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits[:, 0], targets, reduction="none")


def _squared_errors(predictions: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(predictions[:, 0], targets, reduction="none")


def _class_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="none")


def _binary_gradients(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.sigmoid(logits) - targets.unsqueeze(1)


def _error_gradients(predictions: Tensor, targets: Tensor) -> Tensor:
    return 2 * (predictions - targets.unsqueeze(1))


def _class_gradients(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.softmax(logits, dim=1) - F.one_hot(targets, logits.shape[1])


def _binary_hits(logits: Tensor, targets: Tensor) -> Tensor:
    # A logit of 0 is a probability of one half. torchmetrics applies a sigmoid only to values outside 0..1,
    # so it gets the decided classes.
    true_positive, _, true_negative, _, _ = binary_stat_scores((logits[:, 0] > 0).long(), targets.long())
    hits: Tensor = true_positive + true_negative
    return hits


def _class_hits(logits: Tensor, targets: Tensor) -> Tensor:
    counts = multiclass_stat_scores(logits.argmax(1), targets, num_classes=logits.shape[1], average="micro")
    return counts[0]


def _squared_error_sum(predictions: Tensor, targets: Tensor) -> Tensor:
    return mean_squared_error(predictions[:, 0].contiguous(), targets) * len(targets)


def _positive_rate(statistics: TargetStatistics) -> float:
    # XGBoost refuses 0 and 1; half a row keeps the prior finite where only one class is there.
    edge = 0.5 / statistics.examples
    return min(max(statistics.mean, edge), 1 - edge)


def _logit(rate: float) -> float:
    return math.log(rate / (1 - rate))


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="binary",
            objective="binary:logistic",
            metric="accuracy",
            higher_is_better=True,
            is_classification=True,
            target_dtype=torch.float32,
            row_losses=_binary_losses,
            row_gradients=_binary_gradients,
            metric_sum=_binary_hits,
            base_score=_positive_rate,
            intercept=_logit,
            scaling=lambda statistics: Scaling(),
        ),
        Task(
            name="multiclass",
            objective="multi:softprob",
            metric="accuracy",
            higher_is_better=True,
            is_classification=True,
            target_dtype=torch.int64,
            row_losses=_class_losses,
            row_gradients=_class_gradients,
            metric_sum=_class_hits,
            # One number cannot be the prior of several classes, and softmax ignores a common shift.
            base_score=lambda statistics: 0.0,
            intercept=lambda base_score: base_score,
            scaling=lambda statistics: Scaling(),
        ),
        Task(
            name="regression",
            objective="reg:squarederror",
            metric="mse",
            higher_is_better=False,
            is_classification=False,
            target_dtype=torch.float32,
            row_losses=_squared_errors,
            row_gradients=_error_gradients,
            metric_sum=_squared_error_sum,
            base_score=lambda statistics: statistics.mean,
            intercept=lambda base_score: base_score,
            scaling=lambda statistics: Scaling(statistics.mean, statistics.std),
        ),
    )
}


def find_task(name: str) -> Task:
    """Return the task of a name.

    Raises:
        LookupError: The name is not in the table.
    """
    try:
        return TASKS[name]
    except KeyError:
        raise LookupError(f"unknown task {name!r}; known: {', '.join(TASKS)}") from None
