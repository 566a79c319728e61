"""Fit the federated model once, and hold it beside its rivals on the same rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedlightning.config import CentralizedConfig, DatasetConfig, RunConfig, XgbConfig
from fedlightning.datasets import load_table
from fedlightning.datasets.catalogue import find_dataset
from fedlightning.datasets.table import Table
from fedlightning.federation import records
from fedlightning.federation.exchange import Traffic
from fedlightning.federation.memory import Memory, default_capacity
from fedlightning.federation.rounds import RoundReport, rounds
from fedlightning.federation.shard import Silo, load_shard
from fedlightning.federation.strategy import FedXgbLlr, NetworkSettings, TreeSettings
from fedlightning.model import TreeCNN, evaluate, load_arrays
from fedlightning.partition import hold_out
from fedlightning.seeds import derive_seed
from fedlightning.tasks import Scaling, Scores, Tally, TargetStatistics, Task, add_tallies, find_task
from fedlightning.trees import Ensemble, Forest, ensemble_margins, grow_ensemble

BLOCK_ROWS = 16_384
"""Rows of the test set looked at together, to bound memory."""

Observer = Callable[[RoundReport], None]


@dataclass(frozen=True)
class Comparison:
    """The network and its rivals on the same rows."""

    network: Scores
    mean_margin: Scores
    """Average of the ensembles' margins: the same forest, without a network and without rounds."""
    local_only: tuple[Scores, ...]
    """Each client's own ensemble."""
    centralized: Scores | None = None
    """XGBoost on the union of the clients' training rows; None where nobody may see that union."""

    @property
    def local_only_mean(self) -> Scores:
        """Mean over clients, each counting the same."""
        return Scores(
            float(np.mean([scores.loss for scores in self.local_only])),
            float(np.mean([scores.metric for scores in self.local_only])),
            self.local_only[0].examples,
        )


@dataclass(frozen=True)
class FederatedModel:
    """Everything that predicts: the forest, the network and the scaling between them."""

    task: Task
    forest: Forest
    network: TreeCNN
    scaling: Scaling

    def compare(self, rows: Table, centralized: Ensemble | None = None) -> Comparison:
        """Return the scores of the network and its rivals over rows, block by block."""
        blocks = [
            self._tallies(rows.take(np.arange(start, min(start + BLOCK_ROWS, len(rows)))), centralized)
            for start in range(0, len(rows), BLOCK_ROWS)
        ]
        network, mean_margin, *others = (add_tallies(tallies).scores() for tallies in zip(*blocks, strict=True))
        clients = len(self.forest.ensembles)
        return Comparison(network, mean_margin, tuple(others[:clients]), others[clients] if centralized else None)

    def _tallies(self, rows: Table, centralized: Ensemble | None) -> list[Tally]:
        outputs = self.forest.tree_outputs(rows.x)
        margins = ensemble_margins(outputs, self.forest.intercept, len(self.forest.ensembles))
        targets = torch.from_numpy(rows.y)
        scaled = torch.from_numpy(outputs / np.float32(self.scaling.std))
        tallies = [
            evaluate(self.network, scaled, targets, task=self.task, scaling=self.scaling),
            tally_margins(self.task, margins.mean(axis=2), targets, self.scaling),
            *(
                tally_margins(self.task, margins[:, :, client], targets, self.scaling)
                for client in range(margins.shape[2])
            ),
        ]
        if centralized is not None:
            tallies.append(
                tally_margins(self.task, centralized.margins(rows.x).astype(np.float64), targets, self.scaling)
            )
        return tallies


@dataclass(frozen=True)
class FederatedFit:
    """One federated training and what it took."""

    model: FederatedModel
    reports: tuple[RoundReport, ...]
    """All rounds; only the chosen one still holds its network."""
    best: RoundReport
    """The round whose network the model has."""
    mean_margin: Scores | None
    """On the validation rows; None where there are none."""
    local_only: tuple[Scores, ...]
    """Each client's own ensemble on its own validation rows."""
    training_rows: int
    fits: int
    """Ensembles fitted for this training; the others were already there."""
    preparation: Traffic
    """What a federation that has not seen these trees sends before the rounds: descriptions, ensembles, forest."""
    sent_before: Traffic
    """What was really sent before the rounds: nothing that an earlier run on the same federation left, but perhaps
    more trees than this run uses, for those after it."""
    test: Comparison | None = None
    """On the test rows that the clients hold, if they do and were asked."""

    @property
    def traffic(self) -> Traffic:
        """Everything that such a training sends, up to the last round; asking how the rivals do is not part of it."""
        return self._traffic_until(len(self.reports))

    @property
    def traffic_to_best(self) -> Traffic:
        """Everything that such a training sends, up to the chosen round."""
        return self._traffic_until(self.best.number)

    @property
    def traffic_sent(self) -> Traffic:
        """Everything that was really sent, up to the last round."""
        return self.traffic + Traffic(
            self.sent_before.up - self.preparation.up, self.sent_before.down - self.preparation.down
        )

    @property
    def validation(self) -> Comparison | None:
        """The chosen round and its rivals on the validation rows."""
        if self.best.validation is None or self.mean_margin is None:
            return None
        return Comparison(self.best.validation, self.mean_margin, self.local_only)

    def _traffic_until(self, number: int) -> Traffic:
        done = self.reports[:number]
        return self.preparation + Traffic(sum(r.bytes_up for r in done), sum(r.bytes_down for r in done))


@dataclass(frozen=True)
class RunResult:
    """What a federated run ends with."""

    task: str
    metric: str
    fit: FederatedFit
    validation: Comparison | None
    test: Comparison


def fit_federated(
    grid: Grid,
    config: RunConfig,
    *,
    observers: Sequence[Observer] = (),
    accelerator: str = "cpu",
    memory: Memory | None = None,
    grow_at_least: int = 1,
    test: bool = False,
    timeout: float | None = None,
) -> FederatedFit:
    """Grow, plant and train on a federation, and keep the best round's network.

    With validation rows the round is picked by ``config.objective``, and training stops after ``dataset.patience``
    rounds without a better one. Without (``val_ratio`` 0) all ``num_rounds`` rounds are done and the last one counts.

    Args:
        grid: The federation.
        config: Everything that decides the result.
        observers: Called with each round's report; one that raises ends the run.
        accelerator: Lightning's device for the clients.
        memory: What earlier runs on the same federation left; trees in it are neither grown nor sent again.
        grow_at_least: Trees per client that later runs of the same tree settings will want.
        test: Ask the clients for their test rows' scores, at the end, if the test rows lie with them.
        timeout: Seconds to wait for the slowest client in each exchange.
    """
    task = task_of(config.dataset)
    clients = config.clients
    strategy = FedXgbLlr(
        rows=rows_request(config),
        client_num=clients.client_num,
        trees=TreeSettings(clients.n_estimators_client, clients.xgb.max_depth, xgb_params(clients.xgb), grow_at_least),
        network=NetworkSettings(
            clients.num_iterations, clients.CNN.batch_size, clients.CNN.lr, clients.CNN.channels, accelerator
        ),
        memory=memory,
        timeout=timeout,
    )
    forest = strategy.prepare(grid)
    mean_margin: Scores | None = None
    local_only: tuple[Scores, ...] = ()
    sent_before = strategy.traffic
    if config.val_ratio:
        mean_margin, local_only = strategy.compare(grid)
    best: RoundReport | None = None
    reports: list[RoundReport] = []
    for report in rounds(grid, strategy, clients.num_rounds):
        reports.append(replace(report, network={}))
        if best is None or is_better(report, best, config.objective, task):
            best = report
        for observe in observers:
            observe(report)
        if report.number - best.number >= config.dataset.patience:
            break
    assert best is not None, "a configuration has at least one round"
    network = TreeCNN(clients.client_num, forest.trees, forest.outputs, clients.CNN.channels)
    load_arrays(network, best.network)
    on_test = None
    if test and strategy.clients_hold_test_rows:
        on_test = Comparison(strategy.test(grid, best.network), *strategy.compare(grid, "test"))
    return FederatedFit(
        model=FederatedModel(task, forest, network, strategy.scaling),
        reports=tuple(reports),
        best=best,
        mean_margin=mean_margin,
        local_only=local_only,
        training_rows=sum(description.train_rows for description in strategy.descriptions),
        fits=strategy.fits,
        preparation=strategy.preparation(),
        sent_before=sent_before,
        test=on_test,
    )


def rows_request(config: RunConfig) -> records.RowsRequest:
    """Return which rows the clients of a run use."""
    return records.RowsRequest(
        dataset=config.dataset.name,
        task=task_of(config.dataset).name,
        train_ratio=float(config.dataset.train_ratio),
        split_seed=config.dataset.split_seed,
        val_ratio=float(config.val_ratio),
        seed=config.seed,
    )


def task_of(dataset: DatasetConfig) -> Task:
    """Return the kind of target that a data set has."""
    return find_task(find_dataset(dataset.name).task)


def is_better(report: RoundReport, best: RoundReport, objective: str, task: Task) -> bool:
    """Return whether a round beats the best so far; without validation rows the later one does."""
    if report.validation is None or best.validation is None:
        return True
    if objective == "loss":
        return report.validation.loss < best.validation.loss
    if task.higher_is_better:
        return report.validation.metric > best.validation.metric
    return report.validation.metric < best.validation.metric


def objective_value(scores: Scores, objective: str, task: Task) -> float:
    """Return what a study minimises: the loss, or the metric turned so that less is better."""
    if objective == "loss":
        return scores.loss
    return -scores.metric if task.higher_is_better else scores.metric


def held_out(dataset: DatasetConfig, data_dir: Path | None = None) -> tuple[Table, Table]:
    """Return training and test rows of a data set."""
    table = load_table(dataset.name, data_dir=data_dir)
    return hold_out(table, train_ratio=dataset.train_ratio, split_seed=dataset.split_seed)


def union_of_shards(config: RunConfig, data_dir: Path | None = None) -> tuple[Table, Table]:
    """Return the union of the clients' training rows and of their validation rows.

    No party of a federation can do this; it is what the centralized rival needs where the rows are in one place.
    """
    memory = Memory(default_capacity())
    clients, folder = config.clients.client_num, str(data_dir.resolve()) if data_dir else ""
    silos = [Silo(partition, clients, data_dir=folder) for partition in range(clients)]
    shards = [load_shard(silo, rows_request(config), memory) for silo in silos]
    return _union([shard.train for shard in shards]), _union([shard.validation for shard in shards])


def centralized_rival(
    config: RunConfig, *, data_dir: Path | None = None, threads: int = 1
) -> tuple[Ensemble, Scores | None]:
    """Fit the centralized rival of a run, and score it on the validation rows if there are any.

    It has the run's tree parameters, as many trees as the forest, and the union of the clients' training rows.
    """
    train, validation = union_of_shards(config, data_dir)
    task, clients = task_of(config.dataset), config.clients
    trees = CentralizedConfig(n_estimators=clients.client_num * clients.n_estimators_client, xgb=clients.xgb)
    classes = find_dataset(config.dataset.name).classes
    ensemble = grow_centralized(task, classes, train, trees, seed=config.seed, threads=threads)
    if not len(validation):
        return ensemble, None
    scaling = task.scaling(TargetStatistics.of(train.y))
    return ensemble, score_ensemble(ensemble, validation, task, scaling, threads=threads)


def compare_with_centralized(
    fit: FederatedFit, config: RunConfig, *, data_dir: Path | None = None, threads: int = 1
) -> RunResult:
    """Read the test set, once, and hold the network beside all its rivals.

    Where the clients hold the test rows, they were read by them, and nobody can have centralized XGBoost.
    """
    task = fit.model.task
    if fit.test is not None:
        return RunResult(task.name, task.metric, fit, fit.validation, fit.test)
    _, test = held_out(config.dataset, data_dir)
    centralized, on_validation = centralized_rival(config, data_dir=data_dir, threads=threads)
    validation = fit.validation
    if validation is not None:
        validation = replace(validation, centralized=on_validation)
    return RunResult(task.name, task.metric, fit, validation, fit.model.compare(test, centralized))


@dataclass(frozen=True)
class CentralizedResult:
    """One XGBoost model on all training rows."""

    task: str
    metric: str
    train: Scores
    test: Scores
    splits: int


def run_centralized(
    dataset: DatasetConfig,
    config: CentralizedConfig,
    *,
    seed: int,
    data_dir: Path | None = None,
    threads: int = 1,
) -> CentralizedResult:
    """Fit XGBoost on all training rows and score it on them and on the test rows."""
    entry = find_dataset(dataset.name)
    task = find_task(entry.task)
    train, test = held_out(dataset, data_dir)
    ensemble = grow_centralized(task, entry.classes, train, config, seed=seed, threads=threads)
    scaling = task.scaling(TargetStatistics.of(train.y))
    on_train = score_ensemble(ensemble, train, task, scaling, threads=threads)
    on_test = score_ensemble(ensemble, test, task, scaling, threads=threads)
    return CentralizedResult(task.name, task.metric, on_train, on_test, ensemble.splits)


def score_ensemble(ensemble: Ensemble, rows: Table, task: Task, scaling: Scaling, *, threads: int = 1) -> Scores:
    """Return the scores of one ensemble on its own."""
    margins = ensemble.margins(rows.x, threads=threads).astype(np.float64)
    return tally_margins(task, margins, torch.from_numpy(rows.y), scaling).scores()


def grow_centralized(
    task: Task, classes: int, train: Table, config: CentralizedConfig, *, seed: int, threads: int
) -> Ensemble:
    """Fit one ensemble on rows that are all in one place, from the same prior as the clients' ensembles."""
    base_score = task.base_score(TargetStatistics.of(train.y))
    return grow_ensemble(
        train.x,
        train.y,
        objective=task.objective,
        outputs=task.outputs(classes),
        n_estimators=config.n_estimators,
        base_score=base_score,
        intercept=task.intercept(base_score),
        xgb_params=xgb_params(config.xgb),
        seed=derive_seed(seed, "trees", "centralized"),
        threads=threads,
    )


def tally_margins(task: Task, margins: NDArray[np.float64], targets: torch.Tensor, scaling: Scaling) -> Tally:
    """Return the tally of margins in original units, shape ``(rows, outputs)``."""
    return task.tally(scaling.standardize(torch.from_numpy(margins)), targets, scaling)


def xgb_params(config: XgbConfig) -> dict[str, float | int]:
    """Return XGBoost's own parameters."""
    return dict(config.model_dump(by_alias=True))


def _union(tables: Sequence[Table]) -> Table:
    return Table(np.concatenate([table.x for table in tables]), np.concatenate([table.y for table in tables]))
