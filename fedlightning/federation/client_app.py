"""The client: describe its rows, grow its trees, hold the forest, train and evaluate the network."""

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedlightning.datasets.catalogue import find_dataset
from fedlightning.federation import records
from fedlightning.federation.memory import Memory, default_capacity
from fedlightning.federation.shard import Shard, ShardKey, load_shard
from fedlightning.model import TreeCNN
from fedlightning.seeds import derive_seed
from fedlightning.tasks import Scaling, Tally, TargetStatistics, find_task
from fedlightning.training import evaluate, fit
from fedlightning.trees import Ensemble, Forest, ensemble_margins, grow_ensemble

app = ClientApp()

# The one thing that outlives a message: a client may be called in this process again.
memory = Memory(default_capacity())


class _ForestLost(Exception):
    """The forest is no longer in this process's memory; the server plants it again."""


@app.query("describe")
def describe(message: Message, context: Context) -> Message:
    """Tell how many rows this client holds, and its part of the target statistics."""
    request = records.DescribeRequest.from_content(message.content)
    if request.protocol != records.PROTOCOL:
        raise ValueError(f"server speaks protocol {request.protocol}, this client {records.PROTOCOL}; update the older")
    key = ShardKey.of(context)
    shard = load_shard(key, task=request.task, val_ratio=request.val_ratio, seed=request.seed, memory=memory)
    statistics = TargetStatistics.of(shard.train.y)
    description = records.Description(
        partition=key.partition,
        train_rows=len(shard.train),
        validation_rows=len(shard.validation),
        features=shard.train.x.shape[1],
        classes=find_dataset(key.dataset).classes,
        target_sum=statistics.target_sum,
        target_sum_of_squares=statistics.target_sum_of_squares,
    )
    return Message(description.to_content(), reply_to=message)


@app.train("grow")
def grow(message: Message, context: Context) -> Message:
    """Grow this client's ensemble, or take it from a longer one of the same settings."""
    request = records.GrowRequest.from_content(message.content)
    key = ShardKey.of(context)
    shard = load_shard(key, task=request.task, val_ratio=request.val_ratio, seed=request.seed, memory=memory)
    task = find_task(request.task)
    params = request.xgb_params
    settings = (
        "grown",
        key,
        request.val_ratio,
        request.seed,
        request.base_score,
        tuple(sorted(params.items())),
    )
    grown: Ensemble | None = memory.get(settings)
    fitted = grown is None or len(grown) < request.n_estimators
    if grown is None or fitted:
        grown = grow_ensemble(
            shard.train.x,
            shard.train.y,
            objective=task.objective,
            outputs=task.outputs(request.classes),
            n_estimators=request.n_estimators,
            base_score=request.base_score,
            intercept=request.intercept,
            xgb_params=params,
            seed=derive_seed(request.seed, "trees", key.partition),
        )
        memory.keep(settings, grown, grown.nbytes)
    ensemble = grown.prefix(request.n_estimators)
    memory.keep(("own", key, ensemble.digest), ensemble, ensemble.nbytes)
    reply = records.Grown(
        partition=key.partition, examples=len(shard.train), fitted=fitted, ensemble=ensemble.to_bytes()
    )
    return Message(reply.to_content(), reply_to=message)


@app.query("plant")
def plant(message: Message, context: Context) -> Message:
    """Hold the forest that all clients agree on."""
    request = records.PlantRequest.from_content(message.content)
    key = ShardKey.of(context)
    ensembles = {
        partition: Ensemble.from_bytes(
            data,
            features=request.features,
            outputs=request.outputs,
            n_estimators=request.n_estimators,
            max_depth=request.max_depth,
        )
        for partition, data in zip(request.partitions, request.ensembles, strict=True)
    }
    if key.partition not in ensembles:
        own: Ensemble | None = memory.get(("own", key, request.own_digest))
        if own is None:
            return _lost(message, key, request.digest)
        ensembles[key.partition] = own
    if sorted(ensembles) != list(range(request.client_num)):
        raise ValueError(f"forest has the clients {sorted(ensembles)}, expected 0 to {request.client_num - 1}")
    forest = Forest(tuple(ensembles[partition] for partition in range(request.client_num)))
    if forest.digest != request.digest:
        raise ValueError(f"forest has the digest {forest.digest[:12]}, the server's is {request.digest[:12]}")
    _hold(forest)
    return Message(records.Planted(key.partition, forest.digest).to_content(), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the global network on this client's rows for an exact number of iterations."""
    request = records.TrainRequest.from_content(message.content)
    key = ShardKey.of(context)
    try:
        forest, shard = _forest(request), _shard(key, request)
    except _ForestLost:
        return _lost(message, key, request.digest)
    network = _network(message, request, forest)
    tally = fit(
        network,
        _tree_outputs(key, request, forest, shard, "train"),
        torch.from_numpy(shard.train.y),
        task=find_task(request.task),
        scaling=_scaling(request),
        num_iterations=request.num_iterations,
        batch_size=request.batch_size,
        lr=request.lr,
        seed=derive_seed(request.seed, "batches", key.partition, request.round),
        accelerator=request.accelerator,
    )
    arrays = records.to_array_record(records.network_arrays(network))
    return Message(records.train_reply(arrays, key.partition, len(shard.train), tally), reply_to=message)


@app.evaluate()
def evaluate_network(message: Message, context: Context) -> Message:
    """Tally the global network over this client's validation rows."""
    request = records.TrainRequest.from_content(message.content)
    key = ShardKey.of(context)
    try:
        forest, shard = _forest(request), _shard(key, request)
    except _ForestLost:
        return _lost(message, key, request.digest)
    tally = evaluate(
        _network(message, request, forest),
        _tree_outputs(key, request, forest, shard, "validation"),
        torch.from_numpy(shard.validation.y),
        task=find_task(request.task),
        scaling=_scaling(request),
    )
    return Message(records.evaluate_reply(key.partition, tally), reply_to=message)


@app.evaluate("compare")
def compare(message: Message, context: Context) -> Message:
    """Tally what needs no network, over this client's validation rows: mean margin and its own ensemble."""
    request = records.TrainRequest.from_content(message.content)
    key = ShardKey.of(context)
    try:
        forest, shard = _forest(request), _shard(key, request)
    except _ForestLost:
        return _lost(message, key, request.digest)
    margins = ensemble_margins(forest.tree_outputs(shard.validation.x), forest.intercept, len(forest.ensembles))
    targets = torch.from_numpy(shard.validation.y)

    def tally(margin: np.ndarray) -> Tally:
        scaling = _scaling(request)
        return find_task(request.task).tally(scaling.standardize(torch.from_numpy(margin)), targets, scaling)

    _hold(forest)
    reply = records.compare_reply(key.partition, tally(margins.mean(axis=2)), tally(margins[:, :, key.partition]))
    return Message(reply, reply_to=message)


def _forest(request: records.TrainRequest) -> Forest:
    forest: Forest | None = memory.get(("forest", request.digest))
    if forest is None:
        raise _ForestLost
    return forest


def _hold(forest: Forest) -> None:
    memory.keep(("forest", forest.digest), forest, forest.nbytes)


def _lost(message: Message, key: ShardKey, digest: str) -> Message:
    return Message(records.LostForest(key.partition, digest).to_content(), reply_to=message)


def _shard(key: ShardKey, request: records.TrainRequest) -> Shard:
    return load_shard(key, task=request.task, val_ratio=request.val_ratio, seed=request.seed, memory=memory)


def _scaling(request: records.TrainRequest) -> Scaling:
    return Scaling(request.scaling_mean, request.scaling_std)


def _network(message: Message, request: records.TrainRequest, forest: Forest) -> TreeCNN:
    network = TreeCNN(len(forest.ensembles), forest.trees, forest.outputs, request.channels)
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    content: RecordDict = message.content
    records.load_arrays(network, records.read_arrays(content.array_records[records.NETWORK], shapes))
    return network


def _tree_outputs(key: ShardKey, request: records.TrainRequest, forest: Forest, shard: Shard, part: str) -> Tensor:
    """Return scaled tree outputs of the shard's training or validation rows, shape ``(rows, outputs, K*T)``."""
    rows = shard.train if part == "train" else shard.validation

    def compute() -> Tensor:
        return torch.from_numpy(forest.tree_outputs(rows.x) / np.float32(request.scaling_std))

    kept = ("outputs", part, key, request.val_ratio, request.seed, request.digest, request.scaling_std)
    outputs = memory.recall(kept, compute, lambda outputs: outputs.nbytes)
    # Rows and their outputs can be made again here, the forest only by asking for it: it is the last to be forgotten.
    _hold(forest)
    return outputs
