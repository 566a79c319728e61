"""Collect the clients' ensembles, plant the forest everywhere, and average the network."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedlightning.federation import records
from fedlightning.federation.exchange import ClientError, Traffic, exchange, read_reply
from fedlightning.federation.memory import Memory, default_capacity
from fedlightning.model import TreeCNN, initial_network, network_arrays, network_shapes
from fedlightning.seeds import derive_seed
from fedlightning.tasks import Scaling, Scores, Tally, add_statistics, add_tallies, find_task
from fedlightning.trees import Ensemble, Forest

logger = logging.getLogger(__name__)

T = TypeVar("T")
Answer = TypeVar("Answer", bound=tuple[Any, ...])


@dataclass(frozen=True)
class TreeSettings:
    """What a client needs to know to grow its ensemble."""

    n_estimators: int
    max_depth: int
    xgb_params: Mapping[str, float | int]
    grow_at_least: int = 1
    """Trees that other runs on this federation will want of the same settings; they are grown along with these."""


@dataclass(frozen=True)
class NetworkSettings:
    """What a client needs to know to train the network."""

    num_iterations: int
    batch_size: int
    lr: float
    channels: int
    accelerator: str = "cpu"


class FedXgbLlr(Strategy):
    """FedXGBllr's server: one forest of everybody's trees, and the average of everybody's network.

    Clients are bound to their partition id, never to the order in which they answer, and every sum is made in that
    order; the same seed gives the same result to the bit.

    Args:
        rows: Which rows the clients use.
        client_num: Clients that must take part; all of them.
        trees: How to grow the ensembles.
        network: How to train the network.
        memory: What earlier runs on the same federation left: trees that clients hold are not sent again.
        timeout: Seconds to wait for the slowest client in each exchange.
    """

    def __init__(
        self,
        *,
        rows: records.RowsRequest,
        client_num: int,
        trees: TreeSettings,
        network: NetworkSettings,
        memory: Memory | None = None,
        timeout: float | None = None,
    ) -> None:
        self.rows = rows
        self.task = find_task(rows.task)
        self.client_num = client_num
        self.trees = trees
        self.network = network
        self.timeout = timeout
        self.descriptions: tuple[records.Description, ...] = ()
        self.scaling = Scaling()
        self.traffic = Traffic()
        """Really sent, outside of the rounds."""
        self.fits = 0
        self.forest: Forest | None = None
        """The trees that this run uses; clients may hold more of the same."""
        self._memory = Memory(default_capacity()) if memory is None else memory
        self._planted: Forest | None = None
        self._described = Traffic()
        self._nodes: tuple[int, ...] = ()
        self._shapes: dict[str, tuple[int, ...]] = {}

    # -- before the rounds ------------------------------------------------------------------------------------------

    def prepare(self, grid: Grid) -> Forest:
        """Describe, grow and plant, as far as no earlier run did: everything that happens once per run.

        Raises:
            ClientError: A client is missing, fails, or sends an ensemble that is not what was asked for.
        """
        nodes = tuple(sorted(grid.get_node_ids()))
        if len(nodes) != self.client_num:
            raise ClientError(
                f"the federation has {len(nodes)} nodes, the configuration says client_num {self.client_num}"
            )
        described = ("described", nodes, self.rows)
        earlier: tuple[tuple[records.Description, ...], tuple[int, ...], Traffic] | None = self._memory.get(described)
        if earlier is None:
            self._describe(grid, nodes)
            self._described = self.traffic
            self._memory.keep(described, (self.descriptions, self._nodes, self._described), nbytes=len(nodes) * 200)
        else:
            self.descriptions, self._nodes, self._described = earlier
        self._scale()
        # In whatever order the parameters are given, they are the same trees.
        planted = ("planted", nodes, self.rows, self.trees.max_depth, tuple(sorted(self.trees.xgb_params.items())))
        self._planted = self._memory.get(planted)
        if self._planted is None or self._planted.trees < self.trees.n_estimators:
            self._planted = self._collect(grid, max(self.trees.n_estimators, self.trees.grow_at_least))
            self._plant(grid, self._partitions, complete=False)
            self._memory.keep(planted, self._planted, self._planted.nbytes)
        self.forest = self._planted.prefix(self.trees.n_estimators)
        self._shapes = network_shapes(
            TreeCNN(self.client_num, self.forest.trees, self.forest.outputs, self.network.channels)
        )
        return self.forest

    def preparation(self) -> Traffic:
        """Return what preparing this run sends in a federation that has not seen its trees before."""
        forest = self._own_forest()

        def count() -> Traffic:
            packed = [ensemble.to_bytes() for ensemble in forest.ensembles]
            replies = [
                records.Grown(partition, description.train_rows, True, data).to_content()
                for partition, (description, data) in enumerate(zip(self.descriptions, packed, strict=True))
            ]
            replies += [records.Planted(partition, forest.digest).to_content() for partition in self._partitions]
            requests = [self._grow_content(forest.trees)] * self.client_num
            requests += [self._plant_content(forest, packed, partition) for partition in self._partitions]
            return Traffic(up=records.count_bytes(replies), down=records.count_bytes(requests))

        # The same trees may be asked for with more words.
        key = ("preparation", self.rows, forest.digest, tuple(self.trees.xgb_params))
        return self._described + self._memory.recall(key, count, lambda _: 100)

    def initial_arrays(self) -> ArrayRecord:
        """Return the freshly initialised global network."""
        forest = self._own_forest()
        network = initial_network(
            self.client_num,
            forest.trees,
            outputs=forest.outputs,
            channels=self.network.channels,
            seed=derive_seed(self.rows.seed, "network"),
        )
        return records.to_array_record(network_arrays(network))

    def read_network(self, arrays: ArrayRecord) -> dict[str, NDArray[np.float32]]:
        """Return the checked arrays of a network of this run."""
        return records.read_arrays(arrays, self._shapes)

    @property
    def clients_hold_test_rows(self) -> bool:
        """Whether the clients keep the test rows themselves; else they lie with the server."""
        return any(description.test_rows for description in self.descriptions)

    def compare(self, grid: Grid, part: str = "validation") -> tuple[Scores, tuple[Scores, ...]]:
        """Return the scores of the mean margin over all clients' rows of a part, and each client's own on its own."""

        def ask() -> tuple[Scores, tuple[Scores, ...]]:
            request = records.content(self.rows, self._train_request(0, part))
            replies = self._exchange(grid, [(partition, request) for partition in self._partitions], records.COMPARE)
            answers = self._read_all(replies, records.read_compare_reply)
            self._check_counts([(partition, tally) for partition, tally, _ in answers], self._rows_of(part))
            mean_margin = add_tallies(tally for _, tally, _ in answers).scores()
            return mean_margin, tuple(own.scores() for _, _, own in answers)

        key = ("compare", part, self.rows, self._nodes, self._own_forest().digest)
        return self._memory.recall(key, ask, lambda _: self.client_num * 100)

    def test(self, grid: Grid, network: Mapping[str, NDArray[np.float32]]) -> Scores:
        """Return the scores of a network over the test rows that the clients hold."""
        content = records.content(self.rows, self._train_request(0, "test"), network=records.to_array_record(network))
        replies = self._exchange(grid, [(partition, content) for partition in self._partitions], records.EVALUATE)
        answers = self._read_all(replies, records.read_evaluate_reply)
        self._check_counts(answers, self._rows_of("test"))
        return add_tallies(tally for _, tally in answers).scores()

    def _describe(self, grid: Grid, nodes: Sequence[int]) -> None:
        request = records.content(self.rows, records.DescribeRequest(records.PROTOCOL))
        messages = [Message(request, node, records.DESCRIBE, group_id="0") for node in nodes]
        replies, traffic = exchange(grid, messages, names=self._name, timeout=self.timeout)
        self.traffic += traffic
        described = sorted(
            ((self._read(reply, records.Description.from_content), reply.metadata.src_node_id) for reply in replies),
            key=lambda pair: pair[0].partition,
        )
        self.descriptions = tuple(description for description, _ in described)
        partitions = [description.partition for description in self.descriptions]
        self._nodes = tuple(node for _, node in described)
        if partitions != list(self._partitions):
            raise ClientError(
                f"the nodes {list(self._nodes)} hold the partitions {partitions}, expected {list(self._partitions)}"
            )
        for name in ("features", "classes"):
            found = [getattr(description, name) for description in self.descriptions]
            if len(set(found)) > 1:
                raise ClientError(f"clients differ in {name}: {dict(enumerate(found))}")
        for description in self.descriptions:
            if description.train_rows < 1 or (self.rows.val_ratio and description.validation_rows < 1):
                raise ClientError(
                    f"client {description.partition} has {description.train_rows} training and "
                    f"{description.validation_rows} validation rows; it needs at least one of each"
                )

        holding = [description.partition for description in self.descriptions if description.test_rows]
        if 0 < len(holding) < self.client_num:
            raise ClientError(
                f"only the clients {holding} hold test rows of their own; give every node its data-file, or none"
            )

    def _scale(self) -> None:
        statistics = add_statistics([description.statistics for description in self.descriptions])
        self._base_score = float(self.task.base_score(statistics))
        self._intercept = float(self.task.intercept(self._base_score))
        self.scaling = self.task.scaling(statistics)

    def _grow_content(self, n_estimators: int) -> RecordDict:
        keys, values = records.GrowRequest.split_params(self.trees.xgb_params)
        request = records.GrowRequest(
            classes=self.descriptions[0].classes,
            n_estimators=n_estimators,
            base_score=self._base_score,
            intercept=self._intercept,
            xgb_keys=keys,
            xgb_values=values,
        )
        return records.content(self.rows, request)

    def _collect(self, grid: Grid, n_estimators: int) -> Forest:
        content = self._grow_content(n_estimators)
        replies = self._exchange(grid, [(partition, content) for partition in self._partitions], records.GROW)
        ensembles: dict[int, Ensemble] = {}
        for reply in replies:
            grown = self._read(reply, records.Grown.from_content)
            self._check_sender(reply, grown.partition)
            ensemble = self._read(reply, partial(self._read_ensemble, n_estimators=n_estimators))
            # The server says where all margins start; what a client writes there is not believed.
            ensembles[grown.partition] = replace(ensemble, intercept=self._intercept)
            self.fits += grown.fitted
        split_free = [partition for partition in self._partitions if not ensembles[partition].splits]
        if split_free:
            logger.warning(
                "the trees of client(s) %s have no split and say the same of every row; "
                "lower xgb.gamma, xgb.alpha or xgb.min_child_weight",
                ", ".join(map(str, split_free)),
            )
        return Forest(tuple(ensembles[partition] for partition in self._partitions))

    def _plant(self, grid: Grid, partitions: Iterable[int], *, complete: bool) -> None:
        """Send each client the ensembles it lacks; ``complete`` sends its own as well."""
        forest = self._planted_forest()
        packed = [ensemble.to_bytes() for ensemble in forest.ensembles]
        messages = [
            Message(
                self._plant_content(forest, packed, partition, complete=complete),
                self._nodes[partition],
                records.PLANT,
                group_id="0",
            )
            for partition in partitions
        ]
        replies, traffic = exchange(grid, messages, names=self._name, timeout=self.timeout)
        self.traffic += traffic
        lost = [self._partition(reply) for reply in replies if _lost_forest(reply)]
        if lost and complete:
            raise ClientError(f"clients {lost} cannot keep the forest")
        for reply in replies:
            if not _lost_forest(reply):
                planted = self._read(reply, records.Planted.from_content)
                self._check_sender(reply, planted.partition)
                if planted.digest != forest.digest:
                    raise ClientError(f"{self._name(reply.metadata.src_node_id)} holds another forest")
        if lost:
            self._plant(grid, lost, complete=True)

    def _plant_content(
        self, forest: Forest, packed: Sequence[bytes], partition: int, *, complete: bool = False
    ) -> RecordDict:
        sent = [other for other in self._partitions if complete or other != partition]
        request = records.PlantRequest(
            digest=forest.digest,
            own_digest=forest.ensembles[partition].digest,
            client_num=self.client_num,
            features=forest.ensembles[0].features,
            outputs=forest.outputs,
            n_estimators=forest.trees,
            max_depth=self.trees.max_depth,
            partitions=sent,
            ensembles=[packed[other] for other in sent],
        )
        return records.content(self.rows, request)

    # -- in the rounds ----------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the global network and the number of iterations to every client."""
        return self._network_messages(server_round, arrays, records.TRAIN)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the averaged network to every client; to none if nobody keeps rows for validation."""
        return self._network_messages(server_round, arrays, records.EVALUATE) if self.rows.val_ratio else []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the networks, weighted by training rows, and pool the training scores."""
        answers = self._read_all(replies, self._read_trained)
        # The weight is what the client described before the rounds; a reply cannot raise it.
        weights = [description.train_rows for description in self.descriptions]
        average = weighted_mean([network for _, network, _ in answers], weights)
        scores = add_tallies(tally for *_, tally in answers).scores()
        return records.to_array_record(average), _scores_record(scores)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Pool the clients' tallies into the exact scores over all validation rows."""
        if not self.rows.val_ratio:
            return None
        answers = self._read_all(replies, records.read_evaluate_reply)
        self._check_counts(answers, self._rows_of("validation"))
        return _scores_record(add_tallies(tally for _, tally in answers).scores())

    def summary(self) -> None:
        """Log what this strategy averages."""
        logger.info(
            "FedXgbLlr: %d clients x %d trees, %d iterations a round, Adam at %g",
            self.client_num,
            self.trees.n_estimators,
            self.network.num_iterations,
            self.network.lr,
        )

    def exchange_round(self, grid: Grid, messages: Iterable[Message]) -> tuple[list[Message], Traffic]:
        """Send a round's messages; a client that lost the forest gets it again and is asked once more."""
        pending = list(messages)
        replies, traffic = exchange(grid, pending, names=self._name, timeout=self.timeout)
        lost = [index for index, reply in enumerate(replies) if _lost_forest(reply)]
        if not lost:
            return replies, traffic
        logger.info("clients %s lost the forest; planting it again", [self._partition(replies[i]) for i in lost])
        before = self.traffic
        self._plant(grid, [self._partition(replies[index]) for index in lost], complete=True)
        planting = Traffic(self.traffic.up - before.up, self.traffic.down - before.down)
        self.traffic = before
        again = [
            Message(
                pending[index].content,
                pending[index].metadata.dst_node_id,
                pending[index].metadata.message_type,
                group_id=pending[index].metadata.group_id,
            )
            for index in lost
        ]
        second, more = exchange(grid, again, names=self._name, timeout=self.timeout)
        for index, reply in zip(lost, second, strict=True):
            if _lost_forest(reply):
                raise ClientError(f"{self._name(reply.metadata.src_node_id)} cannot keep the forest")
            replies[index] = reply
        return replies, traffic + planting + more

    # -- details ----------------------------------------------------------------------------------------------------

    @property
    def _partitions(self) -> range:
        return range(self.client_num)

    def _own_forest(self) -> Forest:
        assert self.forest is not None, "prepare() comes first"
        return self.forest

    def _planted_forest(self) -> Forest:
        assert self._planted is not None, "prepare() comes first"
        return self._planted

    def _train_request(self, server_round: int, part: str = "validation") -> records.TrainRequest:
        return records.TrainRequest(
            digest=self._planted_forest().digest,
            n_estimators=self.trees.n_estimators,
            part=part,
            scaling_mean=self.scaling.mean,
            scaling_std=self.scaling.std,
            round=server_round,
            channels=self.network.channels,
            num_iterations=self.network.num_iterations,
            batch_size=self.network.batch_size,
            lr=float(self.network.lr),
            accelerator=self.network.accelerator,
        )

    def _network_messages(self, server_round: int, arrays: ArrayRecord, action: str) -> list[Message]:
        content = records.content(self.rows, self._train_request(server_round), network=arrays)
        return [Message(content, node, action, group_id=str(server_round)) for node in self._nodes]

    def _exchange(self, grid: Grid, contents: Sequence[tuple[int, RecordDict]], action: str) -> list[Message]:
        messages = [Message(content, self._nodes[p], action, group_id="0") for p, content in contents]
        replies, traffic = self.exchange_round(grid, messages)
        self.traffic += traffic
        return replies

    def _name(self, node: int) -> str:
        return f"client {self._nodes.index(node)}" if node in self._nodes else f"the client on node {node}"

    def _partition(self, reply: Message) -> int:
        return self._nodes.index(reply.metadata.src_node_id)

    def _read(self, reply: Message, read: Callable[[RecordDict], T]) -> T:
        return read_reply(reply, read, names=self._name)

    def _read_ensemble(self, content: RecordDict, n_estimators: int) -> Ensemble:
        first = self.descriptions[0]
        return Ensemble.from_bytes(
            records.Grown.from_content(content).ensemble,
            features=first.features,
            outputs=self.task.outputs(first.classes),
            n_estimators=n_estimators,
            max_depth=self.trees.max_depth,
        )

    def _read_trained(self, content: RecordDict) -> tuple[int, dict[str, NDArray[np.float32]], Tally]:
        partition, network, tally = records.read_train_reply(content)
        return partition, self.read_network(network), tally

    def _read_all(self, replies: Iterable[Message], read: Callable[[RecordDict], Answer]) -> list[Answer]:
        """Return what every client says, its partition first, in the order of the partitions."""
        answers: dict[int, Answer] = {}
        for reply in replies:
            answer = self._read(reply, read)
            self._check_sender(reply, answer[0])
            answers[answer[0]] = answer
        missing = [partition for partition in self._partitions if partition not in answers]
        if missing:
            raise ClientError(f"{', '.join(f'client {partition}' for partition in missing)} did not answer")
        return [answers[partition] for partition in self._partitions]

    def _rows_of(self, part: str) -> list[int]:
        return [d.test_rows if part == "test" else d.validation_rows for d in self.descriptions]

    def _check_counts(self, answers: Sequence[tuple[int, Tally]], rows: Sequence[int]) -> None:
        # Whoever counts more rows than it described would weigh more than it should.
        for (partition, tally), expected in zip(answers, rows, strict=True):
            if tally.examples != expected:
                raise ClientError(f"client {partition} evaluated {tally.examples} rows, but described {expected}")

    def _check_sender(self, reply: Message, partition: int) -> None:
        # Who names another's partition would fill that one's slot.
        if partition != self._partition(reply):
            raise ClientError(
                f"{self._name(reply.metadata.src_node_id)} answered {reply.metadata.message_type!r} "
                f"as partition {partition}"
            )


def weighted_mean(
    networks: Sequence[Mapping[str, NDArray[np.float32]]], weights: Sequence[int]
) -> dict[str, NDArray[np.float32]]:
    """Return FedAvg's average of named arrays, summed in double precision in the given order."""
    total = sum(weights)
    average = {}
    for name in networks[0]:
        summed = np.zeros(networks[0][name].shape, dtype=np.float64)
        for network, weight in zip(networks, weights, strict=True):
            summed += network[name].astype(np.float64) * weight
        average[name] = (summed / total).astype(np.float32)
    return average


def read_scores(record: MetricRecord) -> Scores:
    """Return the scores of an aggregated record."""
    values = {key: record[key] for key in ("loss", "metric", "num-examples")}
    return Scores(float(values["loss"]), float(values["metric"]), int(values["num-examples"]))  # type: ignore[arg-type]


def _scores_record(scores: Scores) -> MetricRecord:
    return MetricRecord({"loss": scores.loss, "metric": scores.metric, "num-examples": scores.examples})


def _lost_forest(reply: Message) -> bool:
    return records.is_lost(reply.content)
