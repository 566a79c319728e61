"""Tests for the combiner network: it is the plain convolution that it stands for, and can be the mean of ensembles."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedlightning.datasets import load_table
from fedlightning.model import CHANNELS, TreeCNN, initial_network
from fedlightning.tasks import TASKS, TargetStatistics
from fedlightning.trees import Forest, ensemble_margins, grow_ensemble

SHAPES = [(1, 1, 1), (1, 7, 1), (5, 3, 1), (2, 1, 4), (3, 6, 3)]
"""Clients K, trees T, outputs C."""
every_shape = pytest.mark.parametrize(("client_num", "n_estimators", "outputs"), SHAPES)


def plain_network(network: TreeCNN) -> nn.Module:
    """Return the same network out of PyTorch's own layers, with the same weights."""
    outputs, channels = network.conv.in_channels, network.conv.out_channels
    plain = nn.Sequential(
        nn.Conv1d(outputs, channels, kernel_size=network.trees, stride=network.trees),
        nn.Flatten(),
        nn.ReLU(),
        nn.Linear(channels * network.client_num, outputs),
    ).to(network.conv.weight.dtype)
    names = {"conv.weight": "0.weight", "conv.bias": "0.bias", "linear.weight": "3.weight", "linear.bias": "3.bias"}
    plain.load_state_dict({names[name]: value for name, value in network.state_dict().items()})
    return plain


@every_shape
def test_parameters_are_those_of_a_convolution_and_a_linear_layer(
    client_num: int, n_estimators: int, outputs: int
) -> None:
    """Names and shapes are Conv1d's and Linear's, so that the network can be exported and read by others."""
    shapes = {name: tuple(value.shape) for name, value in TreeCNN(client_num, n_estimators, outputs).named_parameters()}
    assert shapes == {
        "conv.weight": (64, outputs, n_estimators),
        "conv.bias": (64,),
        "linear.weight": (outputs, 64 * client_num),
        "linear.bias": (outputs,),
    }
    assert list(TreeCNN(client_num, n_estimators, outputs).state_dict()) == list(shapes)
    assert CHANNELS == 64


@settings(deadline=None, max_examples=40)
@given(
    client_num=st.integers(1, 6),
    n_estimators=st.integers(1, 9),
    outputs=st.integers(1, 4),
    channels=st.sampled_from([1, 3, 64]),
    rows=st.integers(1, 12),
    seed=st.integers(0, 2**31),
)
def test_forward_equals_the_plain_convolution(
    client_num: int, n_estimators: int, outputs: int, channels: int, rows: int, seed: int
) -> None:
    """The matrix product gives what Conv1d with kernel = stride, flatten, ReLU and Linear give, gradients too."""
    network = initial_network(client_num, n_estimators, outputs=outputs, channels=channels, seed=seed).double()
    plain = plain_network(network)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, outputs, client_num * n_estimators, generator=generator, dtype=torch.float64)
    found, expected = network(x), plain(x)
    assert found.shape == (rows, outputs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    found.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip(network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", TASKS)
@settings(deadline=None, max_examples=30)
@given(
    client_num=st.integers(1, 5),
    n_estimators=st.integers(1, 6),
    channels=st.sampled_from([1, 5, 64]),
    rows=st.integers(1, 12),
    seed=st.integers(0, 2**31),
)
def test_written_gradients_are_those_of_autograd(
    name: str, client_num: int, n_estimators: int, channels: int, rows: int, seed: int
) -> None:
    """The chain rule by hand gives what backward gives for the mean loss of a batch, and the same logits."""
    task = TASKS[name]
    outputs = task.outputs(3)
    network = initial_network(client_num, n_estimators, outputs=outputs, channels=channels, seed=seed).double()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, outputs, client_num * n_estimators, generator=generator, dtype=torch.float64)
    if name == "regression":
        targets = torch.randn(rows, generator=generator, dtype=torch.float64)
    else:
        targets = torch.randint(0, max(2, outputs), (rows,), generator=generator)
        targets = targets.double() if name == "binary" else targets
    # Hidden values of exactly zero, where the ReLU's slope is a matter of convention.
    with torch.no_grad():
        network.conv.weight[0] = 0
        network.conv.bias[0] = 0
    logits = network.set_gradients(x, lambda predicted: task.row_gradients(predicted, targets) / rows)
    plain = plain_network(network)
    expected = plain(x)
    task.row_losses(expected, targets).mean().backward()
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def test_forward_reads_a_slice_of_wider_outputs() -> None:
    """The columns of fewer trees may be a view into those of more."""
    network = initial_network(2, 3, outputs=3, seed=0)
    wide = torch.randn(5, 3, 10, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(network(wide[:, :, :6]), network(wide[:, :, :6].contiguous()))


@pytest.mark.parametrize("data", ["breast_cancer", "wine", "diabetes"])
def test_a_hand_set_network_is_the_mean_of_the_ensembles(data: str) -> None:
    """With every tree weighed 1 and every client 1/K the network gives the mean margin of the ensembles."""
    table = load_table(data)
    clients, rounds = 3, 4
    kind = {"breast_cancer": "binary", "wine": "multiclass", "diabetes": "regression"}[data]
    task = TASKS[kind]
    statistics = TargetStatistics.of(table.y)
    base_score = task.base_score(statistics)
    outputs = task.outputs(3)
    forest = Forest(
        tuple(
            grow_ensemble(
                table.x[client::clients],
                table.y[client::clients],
                objective=task.objective,
                outputs=outputs,
                n_estimators=rounds,
                base_score=base_score,
                intercept=task.intercept(base_score),
                xgb_params={"max_depth": 3},
                seed=client,
            )
            for client in range(clients)
        )
    )
    scaling = task.scaling(statistics)
    tree_outputs = forest.tree_outputs(table.x)
    network = TreeCNN(clients, rounds, outputs).double()
    lift = 1e3  # keeps the sums positive through the ReLU
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        for output in range(outputs):
            network.conv.weight[output, output] = 1.0
            network.conv.bias[output] = lift
            network.linear.weight.view(outputs, CHANNELS, clients)[output, output] = 1 / clients
            network.linear.bias[output] = (forest.intercept - scaling.mean) / scaling.std - lift
        predicted = scaling.restore(network(torch.from_numpy(tree_outputs).double() / scaling.std))
    margins = np.mean([ensemble.margins(table.x) for ensemble in forest.ensembles], axis=0)
    np.testing.assert_allclose(predicted, margins, rtol=1e-5, atol=1e-5)
    exact = ensemble_margins(tree_outputs, forest.intercept, clients).mean(axis=2)
    np.testing.assert_allclose(predicted, exact, rtol=1e-9, atol=1e-9)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    """Whatever was drawn before, a seed gives the same weights; another seed gives others."""
    torch.manual_seed(1)
    first = initial_network(2, 5, seed=7)
    torch.manual_seed(2)
    torch.randn(10)
    second = initial_network(2, 5, seed=7)
    other = initial_network(2, 5, seed=8)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
        assert not torch.equal(value, other.state_dict()[name])


def test_initial_weights_leave_the_global_generator_alone() -> None:
    """Making a network draws nothing from the state that others draw from."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    initial_network(2, 5, seed=7)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_linear_layer_is_initialised_for_its_relu() -> None:
    """Kaiming's uniform bound for a ReLU over the fan-in, sqrt(6 / (64 K)), is filled and not passed."""
    weight = initial_network(10, 3, outputs=4, seed=0).linear.weight
    bound = (6 / 640) ** 0.5
    assert 0.98 * bound < weight.abs().max() <= bound
    assert weight.mean().abs() < 0.1 * bound
