"""Train on 1,000,000 rows x 50 features with 5 clients, and hold a round's training part against a9a_5's.

Every client has a file of its own, made here: 200,000 rows with 50 columns of a9a's 123 filled, of which it keeps a
quarter for the test and trains on 120,000. Both federations have the same client processes, 100 trees a client, and
500 iterations of 32 rows a round; the seconds are those of the exchange of training messages alone.
"""

import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from flwr.app import Message

from fedlightning.config import load_clients, resolve_run
from fedlightning.experiment import fit_federated
from fedlightning.federation.engines import client_processes
from fedlightning.federation.local_grid import LocalGrid, warm_up
from fedlightning.federation.records import TRAIN
from fedlightning.federation.shard import CACHE_DIR, DATA_FILE

CLIENTS, ROWS, FEATURES, ROUNDS = 5, 200_000, 50, 30
OVERRIDES = (f"num_rounds={ROUNDS}", "dataset.patience=1000", "n_estimators_client=100", "CNN.lr=0.0005")


class TimedGrid(LocalGrid):
    """Notes how long each exchange of messages takes."""

    def __init__(self, node_configs: Sequence[Mapping[str, str]]) -> None:
        super().__init__(CLIENTS, processes=client_processes(CLIENTS), node_configs=node_configs)
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Exchange messages, and note the seconds under their type."""
        sent, start = list(messages), time.perf_counter()
        replies = super().send_and_receive(sent, timeout=timeout)
        self.seconds[sent[0].metadata.message_type].append(time.perf_counter() - start)
        return replies


def write_silo(path: Path, seed: int) -> None:
    """Write one client's rows: two classes that five columns, two products and noise decide on."""
    generator = np.random.default_rng(seed)
    with path.open("w", encoding="ascii") as file:
        for _ in range(10):
            x = generator.normal(size=(ROWS // 10, FEATURES)).round(3)
            score = x[:, :5].sum(axis=1) + 2 * x[:, 5] * x[:, 6] + 2 * np.sin(3 * x[:, 7])
            y = np.where(score + generator.normal(size=len(x)) > 0, 1, -1)
            rows = np.char.add(np.array([f"{column + 1}:" for column in range(FEATURES)]), x.astype(str))
            file.writelines(f"{label} {' '.join(row)}\n" for label, row in zip(y, rows, strict=True))


def memory_of_all() -> int:
    """Return the resident bytes of this process and all that descend from it; shared pages count each time."""
    parents, resident = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = dict(
                line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line
            )
        except OSError:
            continue
        parents[int(folder.name)] = int(status["PPid"])
        resident[int(folder.name)] = int(status.get("VmRSS", "0 kB").split()[0]) * 1024

    def descends(process: int) -> bool:
        return process == os.getpid() or (process in parents and descends(parents[process]))

    return sum(size for process, size in resident.items() if descends(process))


@contextmanager
def watched_memory() -> Iterator[list[int]]:
    """Yield a list whose only entry becomes the largest memory seen while the block runs."""
    peak, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            peak[0] = max(peak[0], memory_of_all())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def measure(name: str, node_configs: Sequence[Mapping[str, str]]) -> list[float]:
    """Train, print a row of the table, and return the seconds of each round's training part."""
    config = resolve_run("a9a", load_clients("paper_5_clients"), OVERRIDES, seed=0)
    start = time.perf_counter()
    with watched_memory() as peak, TimedGrid(node_configs) as grid:
        fit = fit_federated(grid, config)
        seconds = grid.seconds[TRAIN]
    whole = time.perf_counter() - start
    columns = [statistics.median(seconds), statistics.mean(seconds), seconds[1], seconds[-1], whole, peak[0] / 1e9]
    print(f"| {name} | {fit.training_rows:,} | " + " | ".join(f"{value:.2f}" for value in columns) + " |", flush=True)
    return seconds


def main() -> None:
    """Print the table and the ratios."""
    warm_up()
    print("| | training rows | median round, s | mean | round 2 | last | whole fit, s | peak memory, GB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        cache = {CACHE_DIR: f"{folder}/cache"}
        small = measure("a9a_5", [cache] * CLIENTS)
        nodes = []
        for client in range(CLIENTS):
            path = Path(folder) / f"silo{client}.libsvm"
            write_silo(path, client)
            nodes.append({**cache, DATA_FILE: str(path)})
        big = measure("1,000,000 rows", nodes)
    median, mean = (function(big) / function(small) for function in (statistics.median, statistics.mean))
    print(f"\nratio of the medians {median:.2f}, of the means {mean:.2f}")


if __name__ == "__main__":
    main()
