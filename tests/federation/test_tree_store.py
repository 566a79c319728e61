"""Tests of the trees that a client holds: what is found again, and what is never taken for it."""

import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from federations import DEPTH, XGB, open_federation, small_rows
from flwr.app import Message, RecordDict

from fedlightning.federation import client, client_app, records
from fedlightning.federation.cache import FolderCache
from fedlightning.federation.memory import Memory
from fedlightning.federation.tree_store import EnsembleShape, TreeStore
from fedlightning.trees import Ensemble, Forest, grow_ensemble

FEATURES = 3
SETTINGS = "5" * 64


def shape(n_estimators: int) -> EnsembleShape:
    """Return the shape of the tests' ensembles."""
    return EnsembleShape(FEATURES, 1, n_estimators, 2)


@cache
def grow(n_estimators: int, seed: int = 0) -> Ensemble:
    """Grow a small ensemble; another seed has other rows."""
    x = np.random.default_rng(seed).normal(size=(40, FEATURES)).astype(np.float32)
    return grow_ensemble(
        x,
        (x[:, 0] > 0).astype(np.float64),
        objective="binary:logistic",
        outputs=1,
        n_estimators=n_estimators,
        base_score=0.5,
        intercept=0.0,
        xgb_params={"max_depth": 2},
        seed=seed,
    )


def open_store(folder: Path, capacity: int = 2**30) -> TreeStore:
    """Return what a process that starts now has: an empty memory, and the folder."""
    return TreeStore(Memory(capacity), FolderCache(folder, 2**30))


def never() -> Ensemble:
    """Stand for a fit that must not happen."""
    raise AssertionError("the trees are there")


def ensemble_file(folder: Path, ensemble: Ensemble) -> Path:
    """Return where an ensemble is kept."""
    return folder / f"{ensemble.digest}.ensemble"


# -- what is found again --------------------------------------------------------------------------------------------


def test_trees_are_fitted_once_and_found_by_the_next_process(tmp_path: Path) -> None:
    """The same settings are fitted once, whoever asks; other settings are fitted anew."""
    first = open_store(tmp_path)
    grown, fitted = first.grown(SETTINGS, 4, shape=shape(4), fit=lambda: grow(4))
    assert (grown.digest, fitted) == (grow(4).digest, True)
    assert first.grown(SETTINGS, 4, shape=shape(4), fit=never) == (grown, False)
    again, fitted = open_store(tmp_path).grown(SETTINGS, 4, shape=shape(4), fit=never)
    assert (again.digest, fitted) == (grown.digest, False)
    _, fitted = open_store(tmp_path).grown("6" * 64, 4, shape=shape(4), fit=lambda: grow(4, 1))
    assert fitted


def test_fewer_trees_are_found_in_a_longer_ensemble(tmp_path: Path) -> None:
    """Another process that wants fewer trees gets the longer ensemble; one that wants more grows, for all after it."""
    open_store(tmp_path).grown(SETTINGS, 6, shape=shape(6), fit=lambda: grow(6))
    found, fitted = open_store(tmp_path).grown(SETTINGS, 2, shape=shape(2), fit=never)
    assert not fitted
    assert found.prefix(2).digest == grow(2).digest
    shorter = open_store(tmp_path)
    shorter.grown(SETTINGS, 2, shape=shape(2), fit=never)
    assert shorter.grown(SETTINGS, 8, shape=shape(8), fit=lambda: grow(8))[1]
    assert len(open_store(tmp_path).grown(SETTINGS, 1, shape=shape(1), fit=never)[0]) == 8


def test_a_longer_ensemble_in_the_folder_beats_a_shorter_in_memory(tmp_path: Path) -> None:
    """What another process grew meanwhile is found by one that holds too few trees."""
    store = open_store(tmp_path)
    store.grown(SETTINGS, 2, shape=shape(2), fit=lambda: grow(2))
    open_store(tmp_path).grown(SETTINGS, 6, shape=shape(6), fit=lambda: grow(6))
    assert store.grown(SETTINGS, 5, shape=shape(5), fit=never)[0].digest == grow(6).digest


def test_a_forest_is_found_by_the_next_process(tmp_path: Path) -> None:
    """A kept forest is found by its digest, with its ensembles in their slots."""
    forest = Forest((grow(4), grow(4, 1)))
    first = open_store(tmp_path)
    for ensemble in forest.ensembles:
        assert Ensemble.from_bytes(
            first.keep_ensemble(ensemble), features=FEATURES, outputs=1, n_estimators=4, max_depth=2
        )
    first.keep_forest(forest, shape(4))
    assert first.forest(forest.digest) is forest
    store = open_store(tmp_path)
    found = store.forest(forest.digest)
    assert found is not None
    assert [ensemble.digest for ensemble in found.ensembles] == [ensemble.digest for ensemble in forest.ensembles]
    # From now on it is in memory: the folder may go.
    for path in tmp_path.glob("*.*"):
        path.unlink()
    assert store.forest(forest.digest) is found
    assert open_store(tmp_path).forest(forest.digest) is None


def test_without_room_in_memory_the_folder_is_enough(tmp_path: Path) -> None:
    """A process that can keep nothing reads the folder each time."""
    store = open_store(tmp_path, capacity=0)
    store.grown(SETTINGS, 4, shape=shape(4), fit=lambda: grow(4))
    assert store.grown(SETTINGS, 4, shape=shape(4), fit=never)[0].digest == grow(4).digest
    store.keep_forest(Forest((grow(4),)), shape(4))
    assert store.forest(Forest((grow(4),)).digest) is not None


def test_without_a_folder_memory_is_enough(tmp_path: Path) -> None:
    """Where nothing can be written, what is in memory is found, and nothing else."""
    (tmp_path / "file").touch()
    store = open_store(tmp_path / "file")
    assert store.grown(SETTINGS, 4, shape=shape(4), fit=lambda: grow(4))[1]
    assert not store.grown(SETTINGS, 3, shape=shape(3), fit=never)[1]
    assert open_store(tmp_path / "file").grown(SETTINGS, 3, shape=shape(3), fit=lambda: grow(3))[1]


# -- what is not what its name says ---------------------------------------------------------------------------------


DAMAGES: list[Callable[[bytes], bytes]] = [
    lambda data: b"",
    lambda data: data[: len(data) // 2],
    lambda data: data + b"more",
    lambda data: b"\x80\x04K\x01.",
    lambda data: grow(4, 1).to_bytes(),
    lambda data: grow(3).to_bytes(),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=["empty", "cut", "longer", "pickle", "other trees", "fewer trees"])
def test_a_damaged_ensemble_is_lost_and_written_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """Bytes that are not the named ensemble are as good as none: it is fitted, sent and kept as if they were not."""
    open_store(tmp_path).grown(SETTINGS, 4, shape=shape(4), fit=lambda: grow(4))
    path, whole = ensemble_file(tmp_path, grow(4)), grow(4).to_bytes()
    path.write_bytes(damage(whole))
    assert open_store(tmp_path).ensemble(grow(4).digest, shape(4)) is None
    path.write_bytes(damage(whole))
    assert open_store(tmp_path).grown(SETTINGS, 4, shape=shape(4), fit=lambda: grow(4))[1]
    assert path.read_bytes() == whole
    # What is sent is the ensemble, whatever lies there under its name.
    path.write_bytes(damage(whole))
    assert open_store(tmp_path).keep_ensemble(grow(4)) == whole
    assert path.read_bytes() == whole


DOCUMENTS = [
    b"",
    b"{",
    b"[]",
    b"[" * 100_000,
    b"\xff\xfe",
    b"{}",
    b'{"ensemble": 5, "n_estimators": 9}',
    b'{"ensemble": "../../etc/passwd", "n_estimators": 9}',
    b'{"ensemble": ["a"], "n_estimators": 9}',
    json.dumps({"ensemble": "0" * 64, "n_estimators": 9}).encode(),
    json.dumps({"ensemble": grow(4).digest, "n_estimators": "9"}).encode(),
    json.dumps({"ensemble": grow(4).digest, "n_estimators": 9}).encode(),
    json.dumps({"ensemble": grow(4).digest, "n_estimators": -1}).encode(),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=range(len(DOCUMENTS)))
def test_a_damaged_note_of_grown_trees_is_ignored_and_replaced(tmp_path: Path, document: bytes) -> None:
    """What says where grown trees are and is wrong leads to a fit, and to a note that is right."""
    open_store(tmp_path).keep_ensemble(grow(4))
    (tmp_path / f"{SETTINGS}.grown").write_bytes(document)
    assert open_store(tmp_path).grown(SETTINGS, 4, shape=shape(4), fit=lambda: grow(4))[1]
    assert not open_store(tmp_path).grown(SETTINGS, 4, shape=shape(4), fit=never)[1]


def forest_note(**changes: object) -> bytes:
    """Return the note of a forest of two ensembles, some of it changed."""
    whole: dict[str, object] = {
        "shape": {"features": FEATURES, "outputs": 1, "n_estimators": 4, "max_depth": 2},
        "ensembles": [grow(4).digest, grow(4, 1).digest],
    }
    return json.dumps(whole | changes).encode()


FOREST_NOTES = [
    *DOCUMENTS[:6],
    forest_note(shape=None),
    forest_note(shape={"features": FEATURES}),
    forest_note(shape={"features": "many", "outputs": 1, "n_estimators": 4, "max_depth": 2}),
    forest_note(shape={"features": FEATURES, "outputs": 1, "n_estimators": 3, "max_depth": 2}),
    forest_note(ensembles=None),
    forest_note(ensembles=[]),
    forest_note(ensembles=[grow(4).digest]),
    forest_note(ensembles=[grow(4, 1).digest, grow(4).digest]),
    forest_note(ensembles=[grow(4).digest, "0" * 64]),
    forest_note(ensembles=[grow(4).digest, 5]),
    forest_note(ensembles=[grow(4).digest, ["a"]]),
    forest_note(ensembles=["../../etc/passwd", grow(4).digest]),
]


@pytest.mark.parametrize("note", FOREST_NOTES, ids=range(len(FOREST_NOTES)))
def test_a_damaged_note_of_a_forest_is_a_lost_forest(tmp_path: Path, note: bytes) -> None:
    """What is not exactly the named forest is not there, and keeping it again mends it."""
    forest = Forest((grow(4), grow(4, 1)))
    for ensemble in forest.ensembles:
        open_store(tmp_path).keep_ensemble(ensemble)
    (tmp_path / f"{forest.digest}.forest").write_bytes(note)
    assert open_store(tmp_path).forest(forest.digest) is None
    for ensemble in forest.ensembles:
        open_store(tmp_path).keep_ensemble(ensemble)
    open_store(tmp_path).keep_forest(forest, shape(4))
    assert open_store(tmp_path).forest(forest.digest) is not None


@pytest.mark.parametrize("digest", ["", "../secret", "/etc/passwd", "0" * 63, "0" * 65, "F" * 64, "0" * 64 + "\n"])
def test_a_digest_that_is_none_never_becomes_a_path(tmp_path: Path, digest: str) -> None:
    """Whatever a peer calls a digest is refused unless it is one; no file of that name is looked at."""
    store = open_store(tmp_path / "trees")
    for ask in (
        lambda: store.forest(digest),
        lambda: store.ensemble(digest, shape(4)),
        lambda: store.grown(digest, 4, shape=shape(4), fit=never),
    ):
        with pytest.raises(ValueError, match="is no sha256"):
            ask()
    assert list(tmp_path.iterdir()) == []


# -- several processes ----------------------------------------------------------------------------------------------


def grow_beside_another(folder: str, first: bool, answer: Connection) -> None:
    """Ask for the same trees as another process, while the first of the two grows them."""
    growing, asking = Path(folder) / "growing", Path(folder) / "asking"
    trees = Path(folder) / "trees"

    def fit() -> Ensemble:
        growing.touch()
        while not asking.exists():
            time.sleep(0.01)
        # Time enough for the other to start growing, too, if nothing kept it.
        time.sleep(0.5 if first else 0)
        return grow(4)

    if not first:
        while not growing.exists():
            time.sleep(0.01)
        asking.touch()
    ensemble, fitted = open_store(trees).grown(SETTINGS, 4, shape=shape(4), fit=fit)
    answer.send((ensemble.digest, fitted))


@pytest.mark.usefixtures("warm_processes")
def test_two_processes_grow_the_same_trees_once(tmp_path: Path) -> None:
    """Of two processes that want the same trees at the same time one fits, and the other waits and finds them."""
    processes = multiprocessing.get_context("forkserver")
    answers = []
    running = []
    for first in (True, False):
        ours, theirs = processes.Pipe()
        process = processes.Process(target=grow_beside_another, args=(str(tmp_path), first, theirs), daemon=True)
        process.start()
        theirs.close()
        answers.append(ours)
        running.append(process)
    assert [answer.recv() for answer in answers] == [(grow(4).digest, True), (grow(4).digest, False)]
    for process in running:
        process.join()


# -- what makes trees the same --------------------------------------------------------------------------------------

ROWS = small_rows()
KEYS, VALUES = records.GrowRequest.split_params(XGB)
GROW = records.GrowRequest(2, 4, 0.5, 0.0, KEYS, VALUES)


def ask(
    folder: Path,
    *,
    rows: records.RowsRequest = ROWS,
    request: records.GrowRequest = GROW,
    partition: int = 0,
    client_num: int = 3,
) -> records.Grown:
    """Ask a client of a process that starts now for its trees."""
    client_app.memory = Memory(2**30)
    with open_federation(client_num, cache_dir=folder) as grid:
        content: RecordDict = records.content(rows, request)
        (reply,) = grid.send_and_receive([Message(content, 2 + partition, records.GROW, group_id="0")])
    assert not reply.has_error(), reply.error.reason
    return records.Grown.from_content(reply.content)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": replace(ROWS, seed=1)},
        {"rows": replace(ROWS, val_ratio=0.3)},
        {"rows": replace(ROWS, split_seed=1)},
        {"rows": replace(ROWS, train_ratio=0.6)},
        {"partition": 1},
        {"client_num": 4},
        {"request": replace(GROW, base_score=0.4)},
        {"request": replace(GROW, intercept=0.1)},
        {"request": replace(GROW, n_estimators=5)},
        {"request": replace(GROW, xgb_values=[*VALUES[:-1], 1.0])},
        {"request": replace(GROW, xgb_values=[2.0, *VALUES[1:]])},
        {"request": replace(GROW, xgb_keys=[*KEYS, "lambda"], xgb_values=[*VALUES, 2.0])},
    ],
    ids=str,
)
def test_whatever_trees_depend_on_makes_them_others(tmp_path: Path, change: dict[str, object]) -> None:
    """The same request finds its trees in the folder; a change of anything that trees depend on grows others."""
    first = ask(tmp_path)
    again = ask(tmp_path)
    assert (first.fitted, again.fitted) == (True, False)
    assert again.ensemble == first.ensemble
    assert ask(tmp_path, **change).fitted  # type: ignore[arg-type]
    assert not ask(tmp_path, **change).fitted  # type: ignore[arg-type]


def test_another_seed_grows_other_trees_on_the_same_rows(tmp_path: Path) -> None:
    """Without validation rows two seeds train on the very same ones, and still do not share trees."""
    rows = replace(ROWS, val_ratio=0.0)
    first, other = ask(tmp_path, rows=rows), ask(tmp_path, rows=replace(rows, seed=1))
    assert (first.fitted, other.fitted) == (True, True)
    assert first.examples == other.examples
    assert first.ensemble != other.ensemble


def test_another_version_of_xgboost_grows_its_own_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees that another version left in the folder are not taken for those of this one."""
    ask(tmp_path)
    monkeypatch.setattr(client, "version", lambda package: f"{package} 0.0")
    assert ask(tmp_path).fitted


def test_the_order_of_parameters_and_the_number_of_trees_do_not_matter(tmp_path: Path) -> None:
    """Parameters in another order, and fewer trees, are the same trees, byte for byte those of a fit of their own."""
    ask(tmp_path / "shared", request=replace(GROW, n_estimators=6))
    turned = replace(GROW, xgb_keys=KEYS[::-1], xgb_values=VALUES[::-1])
    found = ask(tmp_path / "shared", request=turned)
    assert not found.fitted
    assert found.ensemble == ask(tmp_path / "own").ensemble


def test_damage_in_the_folder_never_reaches_the_server(tmp_path: Path) -> None:
    """A client whose folder was written into sends what it would have sent without."""
    whole = ask(tmp_path)
    for path in tmp_path.glob("*.*"):
        path.write_bytes(path.read_bytes()[:-3])
    again = ask(tmp_path)
    assert (again.fitted, again.ensemble) == (True, whole.ensemble)
    assert Ensemble.from_bytes(again.ensemble, features=30, outputs=1, n_estimators=4, max_depth=DEPTH)


def test_a_path_for_a_digest_is_refused_by_the_client(tmp_path: Path) -> None:
    """A server that asks for a forest by a path gets an error that quotes it, and the client reads no file."""
    request = records.TrainRequest("../../secret", 4, "validation", 0.0, 1.0, 1, 4, 8, 16, 0.01, "cpu")
    with open_federation(cache_dir=tmp_path / "trees") as grid:
        content = records.content(ROWS, request)
        (reply,) = grid.send_and_receive([Message(content, 2, records.COMPARE, group_id="0")])
    assert "ValueError: '../../secret' is no sha256" in str(reply.error.reason)
