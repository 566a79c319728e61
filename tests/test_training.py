"""Tests for training an exact number of iterations: the batches, the steps, the tally, and what is left behind."""

import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import lightning
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedlightning import model, training
from fedlightning.model import TreeCNN, evaluate, initial_network, one_thread
from fedlightning.tasks import TASKS, Scaling, Tally
from fedlightning.training import ADAM_BETAS, CHUNK, IterationLoader, TreeCNNModule, batch_order, fit

CLIENTS, TREES = 3, 4
SCALING = Scaling(mean=2.5, std=0.5)
every_task = pytest.mark.parametrize("name", TASKS)


def problem(name: str, rows: int, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random tree outputs ``(rows, outputs, K*T)`` and targets that depend on them."""
    generator = torch.Generator().manual_seed(seed)
    outputs = TASKS[name].outputs(3)
    tree_outputs = torch.randn(rows, outputs, CLIENTS * TREES, generator=generator, dtype=torch.float64)
    signal_ = tree_outputs.sum(dim=2)
    if name == "binary":
        targets = (signal_[:, 0] > 0).double()
    elif name == "multiclass":
        targets = signal_.argmax(dim=1).double()
    else:
        targets = 2.5 + 0.1 * signal_[:, 0] + 0.1 * torch.randn(rows, generator=generator, dtype=torch.float64)
    return tree_outputs.to(dtype), targets


def network_of(name: str, seed: int = 1, channels: int = 8) -> TreeCNN:
    """Return a small network for a task."""
    return initial_network(CLIENTS, TREES, outputs=TASKS[name].outputs(3), channels=channels, seed=seed)


def scaling_of(name: str) -> Scaling:
    """Return the scaling of a task's targets."""
    return SCALING if name == "regression" else Scaling()


def train(
    network: TreeCNN,
    name: str = "binary",
    *,
    rows: int = 40,
    num_iterations: int = 10,
    batch_size: int = 8,
    seed: int = 0,
    accelerator: str = "cpu",
) -> Tally:
    """Fit a network on the task's problem."""
    tree_outputs, targets = problem(name, rows)
    return fit(
        network,
        tree_outputs,
        targets,
        task=TASKS[name],
        scaling=scaling_of(name),
        order=batch_order(rows, num_iterations, batch_size, seed=seed),
        lr=0.01,
        accelerator=accelerator,
    )


def same(first: nn.Module, second: nn.Module) -> bool:
    """Return whether two networks are equal to the bit."""
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


# -- batches -------------------------------------------------------------------------------------------------------


def served_rows(loader: IterationLoader) -> list[list[int]]:
    """Return the row numbers of every batch; targets are row numbers."""
    batches = []
    chunks = list(loader)
    assert len(chunks) == len(loader)
    for tree_outputs, targets in chunks:
        assert tree_outputs.shape[:2] == targets.shape
        # Rows and targets stay together.
        assert torch.equal(tree_outputs[:, :, 0, 0].double(), targets)
        batches += [[int(row) for row in batch] for batch in targets]
    return batches


def numbered_loader(rows: int, num_iterations: int, batch_size: int, seed: int = 0) -> IterationLoader:
    """Return a loader whose targets and tree outputs are the row numbers."""
    numbers = torch.arange(rows, dtype=torch.float64)
    order = batch_order(rows, num_iterations, batch_size, seed=seed)
    return IterationLoader(numbers.float().view(rows, 1, 1), numbers, order)


@settings(deadline=None, max_examples=150)
@given(
    rows=st.integers(1, 70),
    num_iterations=st.integers(1, 3 * CHUNK + 5),
    batch_size=st.integers(1, 90),
    seed=st.integers(0, 2**31),
)
@example(rows=7, num_iterations=CHUNK, batch_size=32, seed=0)
@example(rows=100, num_iterations=2 * CHUNK, batch_size=10, seed=0)
@example(rows=33, num_iterations=CHUNK + 1, batch_size=32, seed=0)
def test_every_batch_is_full_and_every_row_is_seen_equally_often(
    rows: int, num_iterations: int, batch_size: int, seed: int
) -> None:
    """Exactly the asked number of batches, all of one size, cut from an endless stream of whole shuffled passes."""
    batches = served_rows(numbered_loader(rows, num_iterations, batch_size, seed))
    assert len(batches) == num_iterations
    size = min(rows, batch_size)
    assert {len(batch) for batch in batches} == {size}
    stream = [row for batch in batches for row in batch]
    for start in range(0, len(stream), rows):
        whole_pass = stream[start : start + rows]
        assert len(set(whole_pass)) == len(whole_pass)
    counts = [stream.count(row) for row in range(rows)]
    assert max(counts) - min(counts) <= 1


def test_passes_are_shuffled_anew() -> None:
    """No two passes have the same order, nor two seeds; the same seed gives the same batches."""
    first = served_rows(numbered_loader(20, 8, 10))
    passes = [first[start] + first[start + 1] for start in range(0, 8, 2)]
    assert len({tuple(one) for one in passes}) == 4
    assert all(sorted(one) == list(range(20)) for one in passes)
    assert served_rows(numbered_loader(20, 8, 10)) == first
    assert served_rows(numbered_loader(20, 8, 10, seed=1)) != first


def test_batches_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many iterations share a chunk decides nothing but speed."""
    expected = served_rows(numbered_loader(13, 57, 5))
    for chunk in (1, 4, 57, 100):
        monkeypatch.setattr(training, "CHUNK", chunk)
        assert served_rows(numbered_loader(13, 57, 5)) == expected


def test_batches_leave_the_global_generator_alone() -> None:
    """Shuffling draws nothing from the state that others draw from."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    list(numbered_loader(13, 57, 5))
    assert torch.equal(torch.get_rng_state(), before)


# -- steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_iterations",
    [1, 4, 5, 6, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 13],
    ids=lambda n: f"{n} iterations",
)
def test_exactly_the_asked_number_of_steps_is_taken(num_iterations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than, equal to and more than one pass of five batches, with and without a full last chunk."""
    steps, trainers = [], []
    step, fit_trainer = torch.optim.Adam.step, lightning.Trainer.fit

    def count_step(self: torch.optim.Adam, closure: Callable[[], float] | None = None) -> object:
        steps.append(1)
        return step(self, closure)

    def keep_trainer(self: lightning.Trainer, *args: object, **kwargs: object) -> None:
        trainers.append(self)
        fit_trainer(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.optim.Adam, "step", count_step)
    monkeypatch.setattr(lightning.Trainer, "fit", keep_trainer)
    tally = train(network_of("binary"), rows=40, batch_size=8, num_iterations=num_iterations)
    assert len(steps) == num_iterations
    assert [trainer.global_step for trainer in trainers] == [num_iterations]
    assert tally.examples == 8 * num_iterations


def plain_loop(
    name: str, network: TreeCNN, batches: list[tuple[Tensor, Tensor]], lr: float
) -> tuple[nn.Module, list[float], float]:
    """Train PyTorch's own layers on the batches with PyTorch's own losses and Adam.

    Returns:
        The trained layers, each batch's mean loss before its step, and the sum of the metric over all rows.
    """
    outputs, channels = network.conv.in_channels, network.conv.out_channels
    conv = nn.Conv1d(outputs, channels, kernel_size=TREES, stride=TREES)
    linear = nn.Linear(channels * CLIENTS, outputs)
    plain = nn.ModuleDict({"conv": conv, "linear": linear}).double()
    plain.load_state_dict(network.state_dict())
    adam = torch.optim.Adam(plain.parameters(), lr=lr, betas=(0.5, 0.999), fused=False, foreach=False)
    losses, metric = [], 0.0
    for tree_outputs, targets in batches:
        adam.zero_grad()
        predicted = linear(torch.relu(conv(tree_outputs).flatten(1)))
        if name == "binary":
            loss = nn.BCEWithLogitsLoss()(predicted.squeeze(1), targets)
            metric += float(((predicted.squeeze(1) > 0) == (targets > 0.5)).sum())
        elif name == "multiclass":
            loss = nn.CrossEntropyLoss()(predicted, targets.long())
            metric += float((predicted.argmax(dim=1) == targets.long()).sum())
        else:
            # The targets that the network sees are in single precision.
            loss = nn.MSELoss()(predicted.squeeze(1), ((targets - 2.5) / 0.5).float().double())
            metric += float((predicted.detach().squeeze(1) * 0.5 + 2.5 - targets).square().sum())
        loss.backward()
        adam.step()
        losses.append(float(loss.detach()))
    return plain, losses, metric


@every_task
def test_fit_equals_a_plain_pytorch_loop(name: str) -> None:
    """Chunks, manual optimization and the matrix product change nothing: same weights, same training tally."""
    tree_outputs, targets = problem(name, 70, dtype=torch.float64)
    iterations, batch_size, lr = CHUNK + 7, 16, 0.01
    order = batch_order(70, iterations, batch_size, seed=4)
    loader = IterationLoader(tree_outputs, targets, order)
    batches = [batch for chunk in loader for batch in zip(*chunk, strict=True)]
    network = network_of(name).double()
    plain, losses, metric = plain_loop(name, network, batches, lr)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    tally = fit(
        network,
        tree_outputs,
        targets,
        task=TASKS[name],
        scaling=scaling_of(name),
        order=order,
        lr=lr,
    )
    for key, expected in plain.state_dict().items():
        torch.testing.assert_close(network.state_dict()[key], expected, rtol=1e-8, atol=1e-12)
        assert not torch.equal(expected, before[key])
    assert tally.examples == iterations * batch_size
    # Regression: the tally counts the exact targets, the loss those rounded to single precision.
    assert tally.loss_sum == pytest.approx(batch_size * sum(losses), rel=1e-5 if name == "regression" else 1e-8)
    assert tally.metric_sum == pytest.approx(metric, rel=1e-8)


@every_task
def test_training_learns(name: str) -> None:
    """A few passes make the loss on the training rows much smaller, in single precision as clients train."""
    network = network_of(name)
    tree_outputs, targets = problem(name, 200)
    task, scaling = TASKS[name], scaling_of(name)
    before = evaluate(network, tree_outputs, targets, task=task, scaling=scaling).scores()
    train(network, name, rows=200, num_iterations=400, batch_size=32)
    after = evaluate(network, tree_outputs, targets, task=task, scaling=scaling).scores()
    assert after.loss < 0.5 * before.loss
    assert (after.metric > 0.9) if task.higher_is_better else (after.metric < 0.5 * before.metric)


@pytest.mark.parametrize("batch_size", [41, 500])
def test_batches_larger_than_the_shard_are_the_whole_shard(batch_size: int) -> None:
    """With fewer rows than the batch size every step sees all rows."""
    whole, larger = network_of("binary"), network_of("binary")
    assert train(whole, rows=40, batch_size=40).examples == 400
    assert train(larger, rows=40, batch_size=batch_size).examples == 400
    assert same(whole, larger)


@every_task
def test_the_same_seed_trains_the_same_network_to_the_bit(name: str) -> None:
    """The seed decides the batches, and nothing else decides anything."""
    networks = [network_of(name) for _ in range(3)]
    tallies = []
    for network, seed, noise in zip(networks, (5, 5, 6), (0, 1, 2), strict=True):
        torch.manual_seed(noise)
        tallies.append(train(network, name, seed=seed))
    assert same(networks[0], networks[1])
    assert tallies[0] == tallies[1]
    assert not same(networks[0], networks[2])


def test_results_do_not_depend_on_torchs_threads() -> None:
    """However many threads torch has, training and evaluation use one and give the same bits."""
    tree_outputs, targets = problem("binary", 3000)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            network = network_of("binary", channels=64)
            tally = train(network, rows=3000, batch_size=1500, num_iterations=3)
            found.append(
                (network, tally, evaluate(network, tree_outputs, targets, task=TASKS["binary"], scaling=Scaling()))
            )
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert same(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


def test_one_thread_is_for_as_long_as_it_is_needed() -> None:
    """Inside there is one torch thread; outside what was there before, after an error too."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with pytest.raises(ZeroDivisionError), one_thread():
            raise ZeroDivisionError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# -- evaluation ----------------------------------------------------------------------------------------------------


@every_task
def test_evaluation_in_blocks_is_that_of_all_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are looked at a few at a time, which changes nothing, and nothing is kept for gradients."""
    tree_outputs, targets = problem(name, 50, dtype=torch.float64)
    network, task, scaling = network_of(name).double(), TASKS[name], scaling_of(name)
    expected = task.tally(network(tree_outputs), targets, scaling)
    sizes = []

    def watch(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        sizes.append(len(output))
        assert not output.requires_grad

    network.register_forward_hook(watch)
    monkeypatch.setattr(model, "EVALUATION_ROWS", 16)
    found = evaluate(network, tree_outputs, targets, task=task, scaling=scaling)
    assert sizes == [16, 16, 16, 2]
    assert found.examples == 50
    assert found.loss_sum == pytest.approx(expected.loss_sum, rel=1e-12)
    assert found.metric_sum == pytest.approx(expected.metric_sum, rel=1e-12)


def test_evaluation_changes_nothing() -> None:
    """The network that is evaluated stays as it was."""
    network, untouched = network_of("binary"), network_of("binary")
    tree_outputs, targets = problem("binary", 20)
    evaluate(network, tree_outputs, targets, task=TASKS["binary"], scaling=Scaling())
    assert same(network, untouched)


# -- what is left behind -------------------------------------------------------------------------------------------

_ALONE = """
import logging, signal, sys, threading
import torch
from fedlightning.model import initial_network
from fedlightning.tasks import TASKS, Scaling
from fedlightning.training import batch_order, fit

torch.set_num_threads(2)
levels = {name: logging.getLogger(name).level for name in ("lightning", "lightning.pytorch", "lightning.fabric")}
handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
gradients = torch.is_grad_enabled()
for _ in range(2):
    fit(initial_network(2, 3, channels=4, seed=0), torch.randn(30, 1, 6), torch.ones(30, dtype=torch.float64),
        task=TASKS["binary"], scaling=Scaling(), order=batch_order(30, 60, 8, seed=0), lr=0.01)
assert torch.get_num_threads() == 2
assert {name: logging.getLogger(name).level for name in levels} == levels
assert {number: signal.getsignal(number) for number in handlers} == handlers
assert torch.is_grad_enabled() == gradients
assert threading.active_count() == 1, threading.enumerate()
"""


def test_fit_says_nothing_writes_nothing_and_restores_what_it_changed(tmp_path: Path) -> None:
    """In a process of its own: no line, no file; threads, log levels and signal handlers are as before."""
    done = subprocess.run(
        [sys.executable, "-c", _ALONE], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def on_step(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something in the middle of training, at each of the optimizer's steps."""
    step = torch.optim.Adam.step

    def acting(self: torch.optim.Adam, closure: Callable[[], float] | None = None) -> object:
        act()
        return step(self, closure)

    monkeypatch.setattr(torch.optim.Adam, "step", acting)


def test_logging_and_threads_are_restored_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that fails leaves the log level and the threads as they were, and its own error."""
    on_step(monkeypatch, lambda: 1 / 0)
    logger = logging.getLogger("lightning.pytorch")
    level, threads = logger.level, torch.get_num_threads()
    logger.setLevel(logging.WARNING)
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError):
            train(network_of("binary"))
        assert (logger.level, torch.get_num_threads()) == (logging.WARNING, 2)
    finally:
        logger.setLevel(level)
        torch.set_num_threads(threads)


def test_debugging_hears_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for debug messages gets Lightning's too."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    heard: list[int] = []
    on_step(monkeypatch, lambda: heard.append(logger.getEffectiveLevel()))
    try:
        for asked in (logging.INFO, logging.DEBUG):
            logger.setLevel(asked)
            train(network_of("binary"), num_iterations=1)
            assert logger.level == asked
    finally:
        logger.setLevel(level)
    assert heard == [logging.ERROR, logging.DEBUG]


def test_an_interrupt_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during training is a KeyboardInterrupt for the caller, not the end of the process, and works again."""
    on_step(monkeypatch, lambda: signal.raise_signal(signal.SIGINT))
    handler = signal.getsignal(signal.SIGINT)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train(network_of("binary"))
        assert signal.getsignal(signal.SIGINT) is handler


def test_a_termination_keeps_its_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler of SIGTERM that ends the process does so during training too, with its own status."""

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(143)

    on_step(monkeypatch, lambda: signal.raise_signal(signal.SIGTERM))
    handler = signal.signal(signal.SIGTERM, terminate)
    try:
        with pytest.raises(SystemExit) as ended:
            train(network_of("binary"))
        assert ended.value.code == 143
        assert signal.getsignal(signal.SIGTERM) is terminate
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_training_works_in_a_thread() -> None:
    """Outside of the main thread, where no signal handler can be set, training gives the same network."""
    expected, network = network_of("binary"), network_of("binary")
    train(expected)
    thread = threading.Thread(target=train, args=(network,))
    thread.start()
    thread.join()
    assert same(network, expected)


def test_the_network_comes_back_to_the_cpu() -> None:
    """Whatever device Lightning picks, the trained network is where the federation reads it."""
    network = network_of("binary")
    train(network, accelerator="auto")
    assert {parameter.device.type for parameter in network.parameters()} == {"cpu"}
    assert all(parameter.isfinite().all() for parameter in network.parameters())
    assert not same(network, network_of("binary"))


def test_the_optimizer_is_the_papers() -> None:
    """Adam with betas 0.5 and 0.999 over all parameters."""
    module = TreeCNNModule(TreeCNN(2, 3), task=TASKS["binary"], scaling=Scaling(), lr=0.02)
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, torch.optim.Adam)
    assert (optimizer.defaults["betas"], optimizer.defaults["lr"]) == ((0.5, 0.999), 0.02)
    assert ADAM_BETAS == (0.5, 0.999)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in module.network.parameters()]


def test_a_clients_training_is_not_checkpointed() -> None:
    """The network belongs to the federation; a Trainer's checkpoint of it is refused."""
    module = TreeCNNModule(TreeCNN(1, 1), task=TASKS["binary"], scaling=Scaling(), lr=0.02)
    assert isinstance(module, lightning.LightningModule)
    with pytest.raises(RuntimeError, match="a client's training is not checkpointed"):
        module.on_save_checkpoint({})
