"""Time what storing a trial costs: SQLite against a journal file, with one worker and with two."""

import itertools
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from fedlightning.config.study_files import study_from_document
from fedlightning.owners import Owner
from fedlightning.search import Proposal, StudySearch
from fedlightning.storages import open_storage
from fedlightning.workers import owners_folder

TRIALS, REPORTS, NOTES, REPEATS = 60, 30, 5, 3
STORES = {"sqlite": "sqlite:///{folder}/studies.db", "journal": "journal://{folder}/studies.log"}
STUDY: dict[str, Any] = {
    "dataset": "a9a",
    "client_num": 5,
    "trials": TRIALS,
    "pruner": "median",
    # Drawing at random costs nothing, so that what is left is the store.
    "sampler": "random",
    "space": {
        "n_estimators_client": {"choices": [50, 100]},
        "num_iterations": 500,
        "num_rounds": REPORTS,
        "xgb.max_depth": {"low": 2, "high": 8},
        "CNN.lr": {"low": 1e-5, "high": 1e-2, "log": True},
    },
}


def evaluate(proposal: Proposal) -> float:
    """Report and note what a trial of 30 rounds does."""
    for number in range(1, REPORTS + 1):
        proposal.report(1.0 / number, number)
    for number in range(NOTES):
        proposal.note(f"note {number}", [[0.1, 0.2, 0.3]] * REPORTS)
    return 1.0 / (1 + proposal.number)


def work(folder: str, url: str, worker: int, ready: Any) -> None:
    """Search beside the other workers, from a common start."""
    search = StudySearch(
        "storage", study_from_document(STUDY, source="benchmark"), Path(folder), open_storage(Path(folder), url)
    )
    search.open()
    with Owner(owners_folder(search.root)) as owner:
        search.enter(owner.name)
        ready.wait()
        search.run(evaluate, total=TRIALS, owner=owner.name, worker=worker)


def milliseconds(kind: str, workers: int) -> float:
    """Return the wall milliseconds per trial of one study."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ready = context.Barrier(workers + 1)
        url = STORES[kind].format(folder=folder)
        processes = [context.Process(target=work, args=(folder, url, number, ready)) for number in range(workers)]
        for process in processes:
            process.start()
        ready.wait()
        started = time.perf_counter()
        for process in processes:
            process.join()
        return 1000 * (time.perf_counter() - started) / TRIALS


def main() -> None:
    """Print a table: medians over the repeats, stores in turn."""
    cases = list(itertools.product(STORES, (1, 2)))
    taken: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for _ in range(REPEATS):
        for case in cases:
            taken[case].append(milliseconds(*case))
    print(f"{TRIALS} trials of {REPORTS} reports and {NOTES} attributes; wall ms per trial, median of {REPEATS}")
    for (kind, workers), times in taken.items():
        print(f"{kind:8} {workers} worker(s): {statistics.median(times):7.1f} ({min(times):.1f} to {max(times):.1f})")


if __name__ == "__main__":
    main()
