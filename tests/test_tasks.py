"""Tests for the task table: losses, metrics and statistics equal those of scikit-learn and numpy."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import expit, softmax
from sklearn.metrics import accuracy_score, log_loss, mean_squared_error

from fedlightning.datasets import load_table
from fedlightning.tasks import (
    TASKS,
    Scaling,
    Scores,
    Tally,
    TargetStatistics,
    add_statistics,
    add_tallies,
    find_task,
)

quick = settings(deadline=None, max_examples=50)
seeds = st.integers(0, 2**32 - 1)
rows = st.integers(1, 60)
CLASSES = 4
SCALING = Scaling(mean=-3.25, std=0.4)
every_task = pytest.mark.parametrize("name", TASKS)


def draw_problem(name: str, size: int, seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64], Scaling]:
    """Return random logits ``(rows, outputs)``, targets and scaling of a task; the last class may be missing."""
    rng = np.random.default_rng(seed)
    if name == "regression":
        return rng.normal(size=(size, 1)), rng.normal(-3, 0.5, size), SCALING
    outputs = find_task(name).outputs(CLASSES)
    targets = rng.integers(0, 2 if name == "binary" else CLASSES, size)
    return rng.normal(scale=2, size=(size, outputs)), targets.astype(np.float64), Scaling()


def tally(name: str, logits: NDArray[np.float64], targets: NDArray[np.float64], scaling: Scaling) -> Tally:
    """Count what the task counts."""
    return find_task(name).tally(torch.from_numpy(logits), torch.from_numpy(targets), scaling)


# -- losses and metrics --------------------------------------------------------------------------------------------


@quick
@given(rows, seeds)
def test_binary_scores_equal_scikit_learns(size: int, seed: int) -> None:
    """Loss is the log loss of the sigmoid, metric the accuracy of deciding at one half."""
    logits, targets, scaling = draw_problem("binary", size, seed)
    scores = tally("binary", logits, targets, scaling).scores()
    probability = expit(logits[:, 0])
    assert scores.loss == pytest.approx(log_loss(targets, probability, labels=[0, 1]), rel=1e-9)
    assert scores.metric == pytest.approx(accuracy_score(targets, probability > 0.5), rel=1e-12)
    assert scores.examples == size


@quick
@given(rows, seeds)
def test_multiclass_scores_equal_scikit_learns(size: int, seed: int) -> None:
    """Loss is the log loss of the softmax, metric the accuracy of the largest logit."""
    logits, targets, scaling = draw_problem("multiclass", size, seed)
    scores = tally("multiclass", logits, targets, scaling).scores()
    expected = log_loss(targets, softmax(logits, axis=1), labels=list(range(CLASSES)))
    assert scores.loss == pytest.approx(expected, rel=1e-9)
    assert scores.metric == pytest.approx(accuracy_score(targets, logits.argmax(axis=1)), rel=1e-12)
    assert scores.examples == size


@quick
@given(rows, seeds)
def test_regression_scores_equal_scikit_learns(size: int, seed: int) -> None:
    """The metric is the squared error in original units, the loss that in standardized ones."""
    logits, targets, scaling = draw_problem("regression", size, seed)
    scores = tally("regression", logits, targets, scaling).scores()
    predicted = logits[:, 0] * 0.4 - 3.25
    assert scores.metric == pytest.approx(mean_squared_error(targets, predicted), rel=1e-9)
    assert scores.loss == pytest.approx(mean_squared_error((targets + 3.25) / 0.4, logits[:, 0]), rel=1e-9)
    assert scores.examples == size


def test_logits_between_zero_and_one_are_positive() -> None:
    """A logit is no probability: 0.2 means the positive class although it is below one half."""
    logits = np.asarray([[0.2], [0.4], [0.01], [-0.01]])
    assert tally("binary", logits, np.asarray([1.0, 1.0, 1.0, 0.0]), Scaling()).metric_sum == 4
    assert tally("binary", logits, np.asarray([0.0, 0.0, 0.0, 1.0]), Scaling()).metric_sum == 0


@every_task
@quick
@given(sizes=st.lists(st.integers(1, 15), min_size=1, max_size=5), seed=seeds)
def test_tallies_of_parts_add_up_to_the_whole(name: str, sizes: list[int], seed: int) -> None:
    """However rows are divided, the sum of the parts' tallies is the tally of all rows."""
    logits, targets, scaling = draw_problem(name, sum(sizes), seed)
    cuts = np.cumsum(sizes)[:-1]
    parts = zip(np.split(logits, cuts), np.split(targets, cuts), strict=True)
    added = add_tallies(tally(name, part, wanted, scaling) for part, wanted in parts)
    whole = tally(name, logits, targets, scaling)
    assert added.examples == whole.examples == sum(sizes)
    assert added.loss_sum == pytest.approx(whole.loss_sum, rel=1e-12)
    assert added.metric_sum == pytest.approx(whole.metric_sum, rel=1e-12)


def test_a_perfect_regression_has_zero_error_on_targets_that_are_no_integers() -> None:
    """Targets between -0.5 and 0.5, which all become 0 as integers, are told apart."""
    targets = np.random.default_rng(0).uniform(-0.49, 0.49, 200)
    scaling = find_task("regression").scaling(TargetStatistics.of(targets))
    perfect = ((targets - targets.mean()) / targets.std())[:, np.newaxis]
    scores = tally("regression", perfect, targets, scaling).scores()
    assert scores.metric == pytest.approx(0, abs=1e-28)
    assert scores.loss == pytest.approx(0, abs=1e-28)
    nothing = tally("regression", np.full((200, 1), (0 - targets.mean()) / targets.std()), targets, scaling).scores()
    assert nothing.metric == pytest.approx((targets**2).mean(), rel=1e-9)


def test_a_perfect_classifier_is_always_right() -> None:
    """Sure and right logits give accuracy 1 and no loss, sure and wrong ones accuracy 0."""
    targets = np.asarray([0.0, 1.0, 1.0, 0.0])
    sure = (targets * 200 - 100)[:, np.newaxis]
    scores = tally("binary", sure, targets, Scaling()).scores()
    assert (scores.metric, scores.loss) == (1, pytest.approx(0, abs=1e-12))
    assert tally("binary", -sure, targets, Scaling()).scores() == Scores(pytest.approx(100), 0, 4)
    targets = np.asarray([0.0, 3.0, 2.0, 1.0, 1.0])
    sure = np.eye(CLASSES)[targets.astype(int)] * 100
    scores = tally("multiclass", sure, targets, Scaling()).scores()
    assert (scores.metric, scores.loss) == (1, pytest.approx(0, abs=1e-12))
    assert tally("multiclass", -sure, targets, Scaling()).scores().metric == 0


@every_task
def test_tallies_are_counted_in_double_precision(name: str) -> None:
    """Single-precision logits are counted as if they were double, so that sums over many rows stay exact."""
    logits, targets, scaling = draw_problem(name, 50_000, seed=1)
    single = logits.astype(np.float32)
    found = find_task(name).tally(torch.from_numpy(single), torch.from_numpy(targets), scaling)
    expected = tally(name, single.astype(np.float64), targets, scaling)
    assert found == expected


def test_a_tally_of_nothing_has_no_scores() -> None:
    """A mean over no rows is refused, not divided by zero."""
    assert add_tallies([]) == Tally(0.0, 0.0, 0)
    with pytest.raises(ValueError, match="no rows were counted, so there is no mean loss or metric"):
        add_tallies([]).scores()


@every_task
def test_row_losses_have_one_entry_per_row_and_a_gradient(name: str) -> None:
    """The training loss is the mean of the row losses, and each row pulls on its own logits."""
    logits, targets, _ = draw_problem(name, 9, seed=3)
    task = find_task(name)
    wanted = torch.from_numpy(targets).to(task.target_dtype)
    leaf = torch.from_numpy(logits).float().requires_grad_()
    losses = task.row_losses(leaf, wanted)
    assert losses.shape == (9,)
    losses[4].backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().sum(dim=1).nonzero().flatten().tolist() == [4]


@every_task
@quick
@given(size=rows, seed=seeds)
def test_row_gradients_are_the_derivatives_of_the_row_losses(name: str, size: int, seed: int) -> None:
    """What training steps along is what autograd finds for each row's loss."""
    logits, targets, _ = draw_problem(name, size, seed)
    task = find_task(name)
    wanted = torch.from_numpy(targets).to(task.target_dtype)
    leaf = torch.from_numpy(logits).requires_grad_()
    (expected,) = torch.autograd.grad(task.row_losses(leaf, wanted).sum(), leaf)
    found = task.row_gradients(leaf.detach(), wanted)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


# -- statistics ----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    seed=seeds,
    scale=st.sampled_from([1e-12, 1e-6, 1e-3, 1.0, 1e4, 1e9]),
    offset=st.sampled_from([0.0, 1.0, -7.5, 1000.0]),
)
@example(sizes=[3, 2], seed=0, scale=1e-9, offset=0.0)
def test_federated_statistics_equal_numpys_on_the_union(
    sizes: list[int], seed: int, scale: float, offset: float
) -> None:
    """From counts, sums and sums of squares follow mean and deviation of all targets, whatever their unit."""
    rng = np.random.default_rng(seed)
    clients = [scale * (offset + rng.normal(size=size)) for size in sizes]
    union = np.concatenate(clients)
    statistics = add_statistics([TargetStatistics.of(targets) for targets in clients])
    assert statistics.examples == len(union)
    assert statistics.mean == pytest.approx(union.mean(), rel=1e-9, abs=1e-12 * scale)
    # Sums of squares tell no deviation that is smaller than their own rounding.
    if union.var() > 1e-12 * (union**2).mean():
        assert statistics.std == pytest.approx(union.std(), rel=1e-6)


@given(value=st.floats(-1e12, 1e12), sizes=st.lists(st.integers(1, 50), min_size=1, max_size=4))
@example(value=0.0, sizes=[1])
@example(value=0.1, sizes=[3, 7])
def test_a_constant_target_keeps_its_units(value: float, sizes: list[int]) -> None:
    """Where every target is the same the deviation is 1, so that nothing is divided by zero or by rounding noise."""
    statistics = add_statistics([TargetStatistics.of(np.full(size, value)) for size in sizes])
    assert statistics.std == 1.0
    assert statistics.mean == pytest.approx(value, rel=1e-12)


def test_statistics_of_real_targets() -> None:
    """On real shards of different sizes the federation knows the mean and deviation of the union."""
    targets = load_table("diabetes").y
    parts = np.split(targets, [10, 200])
    statistics = add_statistics([TargetStatistics.of(part) for part in parts])
    scaling = find_task("regression").scaling(statistics)
    assert (scaling.mean, scaling.std) == (pytest.approx(targets.mean()), pytest.approx(targets.std()))
    standardized = scaling.standardize(torch.from_numpy(targets))
    assert float(standardized.mean()) == pytest.approx(0, abs=1e-12)
    assert float(standardized.std(correction=0)) == pytest.approx(1)
    torch.testing.assert_close(scaling.restore(standardized), torch.from_numpy(targets))


@pytest.mark.parametrize("name", ["binary", "multiclass"])
def test_classes_are_not_scaled(name: str) -> None:
    """Only regression targets have units to scale."""
    assert find_task(name).scaling(TargetStatistics.of(np.asarray([0.0, 1.0, 1.0]))) == Scaling(0.0, 1.0)


# -- where trees start ---------------------------------------------------------------------------------------------


def test_the_binary_prior_is_the_share_of_positives() -> None:
    """The base score is the positive rate of all clients, its link the logit."""
    task = find_task("binary")
    statistics = add_statistics([TargetStatistics.of(np.asarray([0.0, 1.0])), TargetStatistics.of(np.zeros(2))])
    assert task.base_score(statistics) == 0.25
    assert expit(task.intercept(0.25)) == pytest.approx(0.25, rel=1e-12)


@pytest.mark.parametrize(("label", "rows"), [(0.0, 1), (1.0, 1), (0.0, 200), (1.0, 200)])
def test_the_binary_prior_of_one_class_stays_finite(label: float, rows: int) -> None:
    """Rows of a single class count half a row of the other, so that the logit is finite and leans the right way."""
    task = find_task("binary")
    prior = task.base_score(TargetStatistics.of(np.full(rows, label)))
    assert prior == pytest.approx(abs(label - 0.5 / rows))
    assert 0 < prior < 1
    intercept = task.intercept(prior)
    assert math.isfinite(intercept)
    assert intercept * (label - 0.5) >= 0


def test_the_regression_prior_is_the_mean() -> None:
    """Base score and intercept are the mean target, in its own units."""
    task = find_task("regression")
    statistics = TargetStatistics.of(np.asarray([1.5, 2.0, -0.5]))
    assert task.base_score(statistics) == pytest.approx(1.0)
    assert task.intercept(1.0) == 1.0


def test_classes_start_alike() -> None:
    """Several classes have no single prior; all margins start from 0."""
    task = find_task("multiclass")
    assert task.intercept(task.base_score(TargetStatistics.of(np.asarray([2.0, 2.0])))) == 0.0


# -- the table -----------------------------------------------------------------------------------------------------


def test_the_table_names_its_tasks() -> None:
    """Every task is found under its own name, and knows its metric, direction and outputs."""
    assert {name: find_task(name).name for name in TASKS} == {name: name for name in TASKS}
    facts: dict[str, tuple[Any, ...]] = {
        name: (task.objective, task.metric, task.higher_is_better, task.is_classification, task.outputs(3))
        for name, task in TASKS.items()
    }
    assert facts == {
        "binary": ("binary:logistic", "accuracy", True, True, 1),
        "multiclass": ("multi:softprob", "accuracy", True, True, 3),
        "regression": ("reg:squarederror", "mse", False, False, 1),
    }


def test_an_unknown_task_is_named() -> None:
    """A misspelt task is told with the known ones."""
    with pytest.raises(LookupError, match="unknown task 'ranking'; known: binary, multiclass, regression"):
        find_task("ranking")
