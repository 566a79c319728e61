"""What the reference implementation, Flower's baseline hfedxgboost, gets wrong: one test for each of its defects."""

import json
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xgboost as xgb
from flwr.app import Message
from flwr.common.serde import message_to_proto
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny_runs import fit_once, open_federation, tiny_config
from torch.optim.optimizer import register_optimizer_step_post_hook

from fedlightning import datasets, experiment, training, trees
from fedlightning.config import RunConfig
from fedlightning.datasets.table import Table
from fedlightning.experiment import FederatedFit, compare_with_centralized, fit_federated, union_of_shards
from fedlightning.federation import client_app, shard
from fedlightning.federation.client import Client
from fedlightning.federation.exchange import ClientError
from fedlightning.federation.memory import Memory
from fedlightning.federation.strategy import weighted_mean
from fedlightning.tasks import Scaling, add_tallies, find_task
from fedlightning.trees import Forest, grow_ensemble


@pytest.fixture(autouse=True)
def client_memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Give in-process clients an empty memory."""
    memory = Memory(2**30)
    monkeypatch.setattr(client_app, "memory", memory)
    return memory


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[tuple[tuple[Any, ...], Any]]:
    """Let a function do its work, and return a list that grows by arguments and result of every call."""
    calls: list[tuple[tuple[Any, ...], Any]] = []
    original: Callable[..., Any] = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls.append((args, result))
        return result

    monkeypatch.setattr(owner, name, counted)
    return calls


def outcome(fit: FederatedFit) -> list[Any]:
    """Return all that a training is judged by, without the time that it took."""
    reports = [replace(report, seconds=0.0) for report in fit.reports]
    network = {name: array.tobytes() for name, array in fit.best.network.items()}
    return [reports, fit.best.number, network, fit.mean_margin, fit.local_only, fit.model.forest.digest]


# Defect: trees are fitted again in every round, on reshuffled rows.


def test_trees_are_grown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of several rounds fits each client's trees once, and a second run of the same settings not at all."""
    grown = count_calls(monkeypatch, trees, "grow_ensemble")
    config = tiny_config(client_num=3, num_rounds=4)
    with open_federation(config) as grid:
        first = fit_federated(grid, config)
        assert (len(grown), first.fits) == (3, 3)
        second = fit_federated(grid, config)
        other = fit_federated(grid, tiny_config(client_num=3, num_rounds=2, num_iterations=3, lr=0.001))
    assert (len(grown), second.fits, other.fits) == (3, 0, 0)
    assert outcome(first) == outcome(second)


def test_the_network_sees_the_same_features_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the trees say of a client's rows does not move between rounds, nor does the order of the rows."""
    given_to_fit = []
    original = training.fit

    def watch(network: Any, outputs: torch.Tensor, targets: torch.Tensor, **options: Any) -> Any:
        given_to_fit.append((outputs.clone(), targets.clone()))
        return original(network, outputs, targets, **options)

    monkeypatch.setattr(training, "fit", watch)
    # 11 batches of 16 visit all of the 170 and 171 training rows.
    fit_once(tiny_config(client_num=2, num_rounds=3, num_iterations=11))
    assert len(given_to_fit) == 6
    for client in range(2):
        first, *others = given_to_fit[client::2]
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


# Defect: num_iterations ends with the first pass over the rows.


@pytest.mark.parametrize("num_iterations", [1, 7, 61])
def test_every_fit_takes_exactly_num_iterations_steps(num_iterations: int) -> None:
    """Clients take as many optimizer steps as were asked for, also when that is many passes over few rows."""
    steps: list[torch.optim.Optimizer] = []
    hook = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: steps.append(optimizer))
    try:
        # 88 training rows in batches of 16: a pass is 6 batches.
        fit = fit_once(tiny_config("diabetes", client_num=3, num_rounds=2, num_iterations=num_iterations))
    finally:
        hook.remove()
    assert len(steps) == num_iterations * 3 * 2
    assert [report.train.examples for report in fit.reports] == [num_iterations * 3 * 16] * 2


# Defect: every tree's output includes the base score.


@pytest.mark.parametrize("dataset", ["breast_cancer", "wine", "diabetes"])
def test_tree_outputs_leave_the_intercept_out(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the network learns from are leaf values: the intercept plus their sum is XGBoost's margin, once."""
    seen = count_calls(monkeypatch, training, "fit")
    config = tiny_config(dataset, client_num=2, num_rounds=1, num_iterations=11)
    fit = fit_once(config)
    forest, scaling = fit.model.forest, fit.model.scaling
    shards = [
        shard.load_shard(shard.Silo(partition, 2), experiment.rows_request(config), Memory(0)) for partition in range(2)
    ]
    assert dataset == "wine" or abs(forest.intercept) > 0.1
    for client, ((_, outputs, *_), _) in enumerate(seen):
        rows = shards[client].train.x
        for other, ensemble in enumerate(forest.ensembles):
            own = outputs[:, :, other * forest.trees : (other + 1) * forest.trees].numpy()
            margins = forest.intercept + own.sum(axis=2, dtype=np.float64) * scaling.std
            direct = ensemble._booster.predict(xgb.DMatrix(rows), output_margin=True).reshape(margins.shape)
            np.testing.assert_allclose(margins, direct, rtol=1e-5, atol=1e-5)


# Defect: the test set drives early stopping, the best round and tuning.


def poison_test_rows(monkeypatch: pytest.MonkeyPatch, config: RunConfig) -> None:
    """Replace the test rows by garbage wherever rows are read; all others stay where they were."""

    def load(name: str, **options: Any) -> Table:
        table = datasets.load_table(name, **options)
        order = np.arange(len(table))
        np.random.RandomState(config.dataset.split_seed).shuffle(order)
        test = order[int(len(table) * config.dataset.train_ratio) :]
        x, y = table.x.copy(), table.y.copy()
        x[test] = np.random.default_rng(0).normal(scale=1e3, size=x[test].shape)
        y[test] = 1 - y[test]
        return Table(x, y)

    monkeypatch.setattr(shard, "load_table", load)
    monkeypatch.setattr(experiment, "load_table", load)


def test_the_test_rows_change_nothing_but_the_test_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """With garbage for test rows every report, the chosen round, the network and the validation scores are the same."""
    config = tiny_config(num_rounds=8, lr=0.3, patience=2)
    fit = fit_once(config)
    result = compare_with_centralized(fit, config)
    assert len(fit.reports) < 8, "the run must stop early, or stopping is not tested"
    poison_test_rows(monkeypatch, config)
    client_app.memory = Memory(2**30)
    poisoned = fit_once(config)
    compared = compare_with_centralized(poisoned, config)
    assert outcome(poisoned) == outcome(fit)
    assert compared.validation == result.validation
    assert compared.test != result.test
    assert compared.test.network.metric < 0.5 < result.test.network.metric


def test_the_test_rows_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and choosing do not read the test rows; the comparison at the end does, once."""
    config = tiny_config()
    read = count_calls(monkeypatch, experiment, "held_out")
    in_clients = count_calls(monkeypatch, shard, "hold_out")
    scored = count_calls(monkeypatch, experiment.FederatedModel, "compare")
    fit = fit_once(config)
    assert (len(read), len(scored)) == (0, 0)
    compare_with_centralized(fit, config)
    (_, (_, test)), ((_, rows, *_), _) = read[0], scored[0]
    assert (len(read), len(scored)) == (1, 1)
    assert rows is test
    # Clients split the table to find their training rows; what they leave out is never handed on.
    train_rows = {row.tobytes() for (_, (train, _)) in in_clients for row in train.x}
    assert not any(row.tobytes() in train_rows for row in test.x)


# Defect: labels become integers before the metric.


def test_fractional_targets_keep_their_fractions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets between 0 and 1 are scored as they are, in their own units, on validation and on test rows."""

    def load(name: str, **options: Any) -> Table:
        table = datasets.load_table(name, **options)
        return Table(table.x, table.y / 1000)

    monkeypatch.setattr(shard, "load_table", load)
    monkeypatch.setattr(experiment, "load_table", load)
    config = tiny_config("diabetes", num_rounds=4)
    fit = fit_once(config)
    result = compare_with_centralized(fit, config)
    _, validation = union_of_shards(config)
    _, test = experiment.held_out(config.dataset)
    assert 0 < test.y.min() < test.y.max() < 1
    for rows, comparison in ((validation, result.validation), (test, result.test)):
        assert comparison is not None
        model = fit.model
        with torch.no_grad():
            scaled = torch.from_numpy(model.forest.tree_outputs(rows.x) / np.float32(model.scaling.std))
            predictions = model.network(scaled).numpy()[:, 0] * model.scaling.std + model.scaling.mean
        assert comparison.network.metric == pytest.approx(np.mean((predictions - rows.y) ** 2), rel=1e-5)
        assert comparison.network.metric != pytest.approx(np.mean((predictions - rows.y.astype(int)) ** 2), rel=1e-2)


@pytest.mark.parametrize("name", ["binary", "multiclass", "regression"])
def test_a_perfect_prediction_has_no_error(name: str) -> None:
    """A model that is right about every row has accuracy 1 or squared error 0, whatever the targets look like."""
    task, scaling = find_task(name), Scaling()
    if name == "regression":
        targets, scaling = torch.tensor([0.2, -0.7, 0.999], dtype=torch.float64), Scaling(0.1, 0.3)
        logits = scaling.standardize(targets)[:, None]
    else:
        targets = torch.tensor([0.0, 1.0, 1.0] if name == "binary" else [0.0, 2.0, 1.0], dtype=torch.float64)
        logits = 60 * targets[:, None] - 30 if name == "binary" else 30 * torch.eye(3)[targets.long()]
    scores = task.tally(logits, targets, scaling).scores()
    assert scores.metric == pytest.approx(0 if name == "regression" else 1, abs=1e-12)
    assert scores.loss == pytest.approx(0, abs=1e-9)


# Defect: the first round fills all slots with one client's trees, and missing clients are padded.


def test_every_slot_holds_its_own_clients_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slot k is the ensemble that client k grew, on every client and from the first round on."""
    grown = count_calls(monkeypatch, trees, "grow_ensemble")
    planted = count_calls(monkeypatch, Client, "_forest")
    fit = fit_once(tiny_config(client_num=4, num_rounds=2))
    own = [ensemble.digest for _, ensemble in grown]
    assert len(set(own)) == 4
    assert [ensemble.digest for ensemble in fit.model.forest.ensembles] == own
    forests: list[Forest] = [forest for _, forest in planted]
    assert len(forests) >= 4 * 2 * 2
    assert all([ensemble.digest for ensemble in forest.ensembles] == own for forest in forests)


@pytest.mark.parametrize("action", ["query.describe", "train.grow", "query.plant", "train", "evaluate"])
def test_a_missing_client_is_an_error(action: str) -> None:
    """A client that does not answer ends the run with an error that names it; nobody stands in for it."""
    config = tiny_config(client_num=3)
    with open_federation(config) as grid:
        send = grid.send_and_receive

        def lose(messages: object, **options: float | None) -> list[Message]:
            replies = send(messages, **options)  # type: ignore[arg-type]
            return [r for r in replies if (r.metadata.message_type, r.metadata.src_node_id) != (action, 4)]

        grid.send_and_receive = lose  # type: ignore[method-assign, assignment]
        with pytest.raises(ClientError, match=r"client 2|node 4"):
            fit_federated(grid, config)


# Defect: means of batches are added and divided by the number of samples.


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    name=st.sampled_from(["binary", "multiclass", "regression"]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=40)
def test_pooled_scores_are_those_of_all_rows(sizes: list[int], name: str, seed: int) -> None:
    """However unequal the shards, the pooled loss and metric are the means over all rows."""
    generator = np.random.default_rng(seed)
    rows, task = sum(sizes), find_task(name)
    outputs = 3 if name == "multiclass" else 1
    logits = torch.from_numpy(generator.normal(size=(rows, outputs)))
    if name == "regression":
        targets: NDArray[np.float64] = generator.normal(5, 3, size=rows)
        scaling = Scaling(5.0, 3.0)
    else:
        targets, scaling = generator.integers(0, max(2, outputs), size=rows).astype(float), Scaling()
    whole = task.tally(logits, torch.from_numpy(targets), scaling).scores()
    parts = zip(torch.split(logits, sizes), torch.split(torch.from_numpy(targets), sizes), strict=True)
    pooled = add_tallies([task.tally(part, wanted, scaling) for part, wanted in parts]).scores()
    assert pooled.examples == rows
    assert pooled.loss == pytest.approx(whole.loss, rel=1e-12)
    assert pooled.metric == pytest.approx(whole.metric, rel=1e-12)


@given(rows=st.lists(st.integers(1, 1000), min_size=1, max_size=6), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_the_average_network_weighs_rows(rows: list[int], seed: int) -> None:
    """Averaging shards is the same as averaging rows: a client counts once for each of its rows."""
    values = np.random.default_rng(seed).normal(size=(len(rows), 3)).astype(np.float32)
    average = weighted_mean([{"w": value} for value in values], rows)["w"]
    by_row = np.repeat(values.astype(np.float64), rows, axis=0).mean(axis=0)
    np.testing.assert_allclose(average, by_row, rtol=1e-5, atol=1e-6)


# Defect: Python objects travel as parameters, so that only a simulation can run.


def test_only_bytes_and_numbers_travel() -> None:
    """Every message of a run serialises as Flower's servers do it, and nothing in it needs a pickle to be read."""
    passed: list[Message] = []
    config = tiny_config("wine", client_num=2, num_rounds=1)
    with open_federation(config) as grid:
        send = grid.send_and_receive

        def watch(messages: object, **options: float | None) -> list[Message]:
            messages = list(messages)  # type: ignore[call-overload]
            replies = list(send(messages, **options))
            passed.extend([*messages, *replies])
            return replies

        grid.send_and_receive = watch  # type: ignore[method-assign, assignment]
        fit_federated(grid, config)
    assert {message.metadata.message_type for message in passed} == {
        "query.describe",
        "train.grow",
        "query.plant",
        "train",
        "evaluate",
        "evaluate.compare",
    }
    blobs = [blob for message in passed for blob in bytes_in(message)]
    assert len(blobs) == 2 + 2
    for message in passed:
        assert message_to_proto(message).SerializeToString()
        for record in message.content.array_records.values():
            for array in record.values():
                assert (array.stype, array.dtype) == ("numpy.ndarray", "float32")
                assert array.data.startswith(b"\x93NUMPY")
    for blob in blobs:
        assert isinstance(json.loads(zlib.decompress(blob)), dict)


def bytes_in(message: Message) -> Iterator[bytes]:
    """Return everything in a message's configuration records that only a program can read."""
    for record in message.content.config_records.values():
        for value in record.values():
            yield from (entry for entry in (value if isinstance(value, list) else [value]) if isinstance(entry, bytes))


# Defect: one prediction per tree.


def test_tree_outputs_take_one_prediction_per_ensemble(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all trees say about all rows is read in one pass per client's ensemble, not per tree."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(200, 4)).astype(np.float32)
    forest = Forest(
        tuple(
            grow_ensemble(
                x,
                (x[:, client] > 0).astype(np.float64),
                objective="binary:logistic",
                outputs=1,
                n_estimators=20,
                base_score=0.5,
                intercept=0.0,
                xgb_params={"max_depth": 2},
                seed=client,
            )
            for client in range(3)
        )
    )
    calls = count_calls(monkeypatch, xgb.Booster, "predict")
    assert forest.tree_outputs(x).shape == (200, 1, 60)
    assert len(calls) == 3


# Defect: the process-wide generators are seeded, and decide.


def test_global_generators_decide_nothing() -> None:
    """Whatever state Python's, NumPy's and torch's own generators are in, a seed gives the same run."""
    outcomes = []
    for state in (1, 2):
        client_app.memory = Memory(2**30)
        random.seed(state)
        np.random.seed(state)
        torch.manual_seed(state)
        before = (random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tobytes())
        outcomes.append(outcome(fit_once(tiny_config())))
        assert (random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tobytes()) == before
    assert outcomes[0] == outcomes[1]


# Defect: data and results are looked for below the working directory.

ELSEWHERE = """
from tiny_runs import fit_once, tiny_config
from fedlightning.experiment import compare_with_centralized
config = tiny_config("a9a", client_num=2, n_estimators=2, num_rounds=1, num_iterations=2)
print(compare_with_centralized(fit_once(config), config).test.network.examples)
"""


@pytest.mark.slow
def test_a_run_works_from_any_directory_and_leaves_nothing_there(tmp_path: Path) -> None:
    """From an empty directory and with an empty home, a run finds its data and writes nothing but its cache."""
    empty, home = tmp_path / "empty", tmp_path / "home"
    empty.mkdir()
    home.mkdir()
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    hidden = {"FEDLIGHTNING_CACHE_DIR", "FEDLIGHTNING_DATA_DIR", "XDG_CACHE_HOME"}
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= {"HOME": str(home), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], cwd=empty, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["12211"]
    assert list(empty.iterdir()) == []
    left = {path.relative_to(home).as_posix() for path in home.glob("*/*")}
    assert left - {".cache/matplotlib", ".config/matplotlib"} == {".cache/fedlightning"}
