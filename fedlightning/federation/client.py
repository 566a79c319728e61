"""What a client does with one message."""

import json
from collections.abc import Callable, Iterator
from functools import cached_property, wraps
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedlightning.datasets.catalogue import find_dataset
from fedlightning.datasets.table import Table
from fedlightning.federation import records
from fedlightning.federation.cache import FolderCache, folder_capacity, trees_folder
from fedlightning.federation.memory import Memory
from fedlightning.federation.shard import Shard, Silo, load_shard
from fedlightning.seeds import derive_seed
from fedlightning.tasks import Scaling, Tally, TargetStatistics, Task, find_task

if TYPE_CHECKING:
    from fedlightning.federation.outputs import TreeOutputs
    from fedlightning.federation.tree_store import TreeStore
    from fedlightning.model import TreeCNN
    from fedlightning.trees import Ensemble, Forest


class _ForestLost(Exception):
    """The forest is neither in memory nor in the cache folder any more; the server plants it again."""


def _answers(handler: "Callable[[Client], RecordDict]") -> "Callable[[Client], Message]":
    """Make the content that a handler returns the reply to the client's message."""

    @wraps(handler)
    def answer(client: "Client") -> Message:
        try:
            content = handler(client)
        except _ForestLost as lost:
            content = records.LostForest(client.silo.partition, str(lost)).to_content()
        return Message(content, reply_to=client.message)

    return answer


class Client:
    """One client, for as long as it takes to answer one message.

    Libraries that not every message needs are imported where they are used: in a deployment every message is a process
    of its own.

    Args:
        message: What the server asks.
        context: The node that the client runs on.
        memory: What earlier messages left in this process.
    """

    def __init__(self, message: Message, context: Context, memory: Memory) -> None:
        self.message = message
        self.silo = Silo.of(context)
        self.rows = records.RowsRequest.from_content(message.content)
        self.memory = memory

    @property
    def task(self) -> Task:
        """Kind of target."""
        return find_task(self.rows.task)

    @cached_property
    def shard(self) -> Shard:
        """This client's rows."""
        return load_shard(self.silo, self.rows, self.memory)

    @cached_property
    def trees(self) -> "TreeStore":
        """The trees that this client holds."""
        from fedlightning.federation.tree_store import TreeStore

        folder = Path(self.silo.cache_dir) if self.silo.cache_dir else trees_folder()
        return TreeStore(self.memory, FolderCache(folder, folder_capacity()))

    @_answers
    def describe(self) -> RecordDict:
        """Tell how many rows this client holds, and its part of the target statistics."""
        request = records.DescribeRequest.from_content(self.message.content)
        if request.protocol != records.PROTOCOL:
            raise ValueError(
                f"server speaks protocol {request.protocol}, this client {records.PROTOCOL}; update the older"
            )
        shard = self.shard
        statistics = TargetStatistics.of(shard.train.y)
        return records.Description(
            partition=self.silo.partition,
            train_rows=len(shard.train),
            validation_rows=len(shard.validation),
            test_rows=len(shard.test),
            features=shard.train.x.shape[1],
            classes=find_dataset(self.rows.dataset).classes,
            target_sum=statistics.target_sum,
            target_sum_of_squares=statistics.target_sum_of_squares,
        ).to_content()

    @_answers
    def grow(self) -> RecordDict:
        """Grow this client's ensemble, or take it from a longer one of the same settings."""
        from fedlightning.federation.tree_store import EnsembleShape

        request = records.GrowRequest.from_content(self.message.content)
        shape = EnsembleShape(
            self.shard.train.x.shape[1],
            self.task.outputs(request.classes),
            request.n_estimators,
            int(request.xgb_params["max_depth"]),
        )
        grown, fitted = self.trees.grown(
            self._tree_settings(request), request.n_estimators, shape=shape, fit=lambda: self._fit(request)
        )
        packed = self.trees.keep_ensemble(grown.prefix(request.n_estimators))
        return records.Grown(self.silo.partition, len(self.shard.train), fitted, packed).to_content()

    @_answers
    def plant(self) -> RecordDict:
        """Hold the forest that all clients agree on."""
        from fedlightning.federation.tree_store import EnsembleShape
        from fedlightning.trees import Forest

        request = records.PlantRequest.from_content(self.message.content)
        shape = EnsembleShape(request.features, request.outputs, request.n_estimators, request.max_depth)
        packed = dict(zip(request.partitions, request.ensembles, strict=True))
        ensembles = {partition: shape.read(data) for partition, data in packed.items()}
        if self.silo.partition not in ensembles:
            own = self.trees.ensemble(request.own_digest, shape)
            if own is None:
                raise _ForestLost(request.digest)
            ensembles[self.silo.partition] = own
        if sorted(ensembles) != list(range(request.client_num)):
            raise ValueError(f"forest has the clients {sorted(ensembles)}, expected 0 to {request.client_num - 1}")
        forest = Forest(tuple(ensembles[partition] for partition in range(request.client_num)))
        if forest.digest != request.digest:
            raise ValueError(f"forest has the digest {forest.digest[:12]}, the server's is {request.digest[:12]}")
        for partition, data in packed.items():
            self.trees.keep_ensemble(ensembles[partition], data)
        self.trees.keep_forest(forest, shape)
        return records.Planted(self.silo.partition, forest.digest).to_content()

    @_answers
    def train(self) -> RecordDict:
        """Train the global network on this client's rows for an exact number of iterations."""
        from fedlightning.model import network_arrays
        from fedlightning.training import batch_order, fit

        request = records.TrainRequest.from_content(self.message.content)
        forest = self._forest(request.digest)
        network = self._network(request, forest)
        order = batch_order(
            len(self.shard.train),
            request.num_iterations,
            request.batch_size,
            seed=derive_seed(self.rows.seed, "batches", self.silo.partition, request.round),
        )
        tree_outputs, targets, order = self._visited(request, forest, order)
        tally = fit(
            network,
            tree_outputs,
            targets,
            task=self.task,
            scaling=_scaling(request),
            order=order,
            lr=request.lr,
            accelerator=request.accelerator,
        )
        arrays = records.to_array_record(network_arrays(network))
        return records.train_reply(arrays, self.silo.partition, len(self.shard.train), tally)

    @_answers
    def evaluate(self) -> RecordDict:
        """Tally the global network over rows that this client held back."""
        from fedlightning.model import evaluate_blocks

        request = records.TrainRequest.from_content(self.message.content)
        forest = self._forest(request.digest)
        rows = self._held_back(request)
        tally = evaluate_blocks(
            self._network(request, forest),
            (_scaled(block, request) for block in self._blocks(request, forest, rows)),
            torch.from_numpy(rows.y),
            task=self.task,
            scaling=_scaling(request),
        )
        return records.evaluate_reply(self.silo.partition, tally)

    @_answers
    def compare(self) -> RecordDict:
        """Tally what needs no network, over rows that this client held back: mean margin and its own ensemble."""
        from fedlightning.trees import ensemble_margins

        request = records.TrainRequest.from_content(self.message.content)
        forest = self._forest(request.digest)
        rows, clients = self._held_back(request), len(forest.ensembles)
        blocks = self._blocks(request, forest, rows)
        margins = np.concatenate([ensemble_margins(block, forest.intercept, clients) for block in blocks])
        targets, scaling = torch.from_numpy(rows.y), _scaling(request)

        def tally(margin: NDArray[np.float64]) -> Tally:
            return self.task.tally(scaling.standardize(torch.from_numpy(margin)), targets, scaling)

        mean_margin, own = margins.mean(axis=2), margins[:, :, self.silo.partition]
        return records.compare_reply(self.silo.partition, tally(mean_margin), tally(own))

    def _fit(self, request: records.GrowRequest) -> "Ensemble":
        from fedlightning.trees import grow_ensemble

        return grow_ensemble(
            self.shard.train.x,
            self.shard.train.y,
            objective=self.task.objective,
            outputs=self.task.outputs(request.classes),
            n_estimators=request.n_estimators,
            base_score=request.base_score,
            intercept=request.intercept,
            xgb_params=request.xgb_params,
            seed=self._tree_seed,
        )

    @property
    def _tree_seed(self) -> int:
        return derive_seed(self.rows.seed, "trees", self.silo.partition)

    def _tree_settings(self, request: records.GrowRequest) -> str:
        """Return a digest of everything but their number that the trees depend on."""
        settings = {
            # Versions grow different trees.
            "xgboost": version("xgboost"),
            "rows": self.shard.digest,
            "objective": self.task.objective,
            "outputs": self.task.outputs(request.classes),
            "base_score": request.base_score,
            "intercept": request.intercept,
            "params": sorted(request.xgb_params.items()),
            "seed": self._tree_seed,
        }
        return sha256(json.dumps(settings).encode()).hexdigest()

    def _forest(self, digest: str) -> "Forest":
        forest = self.trees.forest(digest)
        if forest is None:
            raise _ForestLost(digest)
        return forest

    def _network(self, request: records.TrainRequest, forest: "Forest") -> "TreeCNN":
        from fedlightning.model import TreeCNN, load_arrays, network_shapes

        network = TreeCNN(len(forest.ensembles), request.n_estimators, forest.outputs, request.channels)
        arrays = self.message.content.array_records[records.NETWORK]
        load_arrays(network, records.read_arrays(arrays, network_shapes(network)))
        return network

    def _outputs(self, forest: "Forest", part: str, table: Table) -> "TreeOutputs":
        from fedlightning.federation.outputs import TreeOutputs

        key = ("outputs", part, self.silo, self.rows, forest.digest)
        outputs = self.memory.recall(key, lambda: TreeOutputs(forest, table.x), lambda outputs: outputs.nbytes)
        # Rows and their outputs can be made again here, the forest perhaps only by asking for it: it goes last.
        self.trees.hold(forest)
        return outputs

    def _visited(self, request: records.TrainRequest, forest: "Forest", order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scaled outputs and targets of the rows that a fit visits, and its order in terms of these rows."""
        outputs, targets = self._outputs(forest, "train", self.shard.train), torch.from_numpy(self.shard.train.y)
        visited, positions = torch.unique(order, return_inverse=True)

        def choose() -> Tensor:
            return _scaled(outputs.of(visited.numpy(), request.n_estimators), request)

        if len(visited) < len(targets):
            return choose(), targets[visited], positions
        if request.n_estimators == forest.trees and request.scaling_std == 1:
            return torch.from_numpy(outputs.all()), targets, order
        key = ("visited", self.silo, self.rows, forest.digest, request.n_estimators, request.scaling_std)
        chosen = self.memory.recall(key, choose, lambda tensor: tensor.nbytes)
        self.trees.hold(forest)
        return chosen, targets, order

    def _blocks(self, request: records.TrainRequest, forest: "Forest", rows: Table) -> Iterator[NDArray[np.float32]]:
        """Yield tree outputs of rows that were held back, shape ``(rows, outputs, K*T)``."""
        return self._outputs(forest, request.part, rows).blocks(request.n_estimators)

    def _held_back(self, request: records.TrainRequest) -> Table:
        held_back = {"validation": self.shard.validation, "test": self.shard.test}
        if request.part not in held_back:
            raise ValueError(f"part is {request.part!r}, allowed: {', '.join(held_back)}")
        return held_back[request.part]


def _scaled(outputs: NDArray[np.float32], request: records.TrainRequest) -> Tensor:
    return torch.from_numpy(outputs / np.float32(request.scaling_std) if request.scaling_std != 1 else outputs)


def _scaling(request: records.TrainRequest) -> Scaling:
    return Scaling(request.scaling_mean, request.scaling_std)
