"""The loop: train, average, evaluate, report. Whatever stops or watches it consumes the stream."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import ConfigRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedlightning.federation.strategy import FedXgbLlr, read_scores
from fedlightning.tasks import Scores


@dataclass(frozen=True)
class RoundReport:
    """What one round did."""

    number: int
    """From 1."""
    train: Scores
    """Over the rows that the clients' iterations visited, each before its step."""
    validation: Scores | None
    """Of the averaged network over all clients' validation rows; None where there are none."""
    bytes_up: int
    bytes_down: int
    seconds: float
    network: Mapping[str, NDArray[np.float32]]
    """The averaged network after this round."""


def rounds(grid: Grid, strategy: FedXgbLlr, num_rounds: int) -> Iterator[RoundReport]:
    """Yield a report per round, as each ends.

    Args:
        grid: The federation.
        strategy: Prepared: the forest is planted.
        num_rounds: Rounds to do at most; a consumer that has seen enough stops listening.
    """
    arrays = strategy.initial_arrays()
    nothing = ConfigRecord()
    for number in range(1, num_rounds + 1):
        start = time.perf_counter()
        replies, traffic = strategy.exchange_round(grid, strategy.configure_train(number, arrays, nothing, grid))
        averaged, trained = strategy.aggregate_train(number, replies)
        assert averaged is not None, "a strategy that insists on every client always averages"
        assert trained is not None
        arrays = averaged
        validation = None
        if strategy.rows.val_ratio:
            replies, more = strategy.exchange_round(grid, strategy.configure_evaluate(number, arrays, nothing, grid))
            evaluated = strategy.aggregate_evaluate(number, replies)
            assert evaluated is not None
            validation = read_scores(evaluated)
            traffic += more
        yield RoundReport(
            number=number,
            train=read_scores(trained),
            validation=validation,
            bytes_up=traffic.up,
            bytes_down=traffic.down,
            seconds=time.perf_counter() - start,
            network=strategy.read_network(arrays),
        )
