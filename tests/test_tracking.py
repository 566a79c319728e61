"""Tests for recording runs in MLflow; every test reads the store back through a client of its own."""

import logging
import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from fedlightning import __version__, tracking
from fedlightning.experiment import Comparison
from fedlightning.federation.rounds import RoundReport
from fedlightning.tasks import Scores
from fedlightning.tracking import DataDescription, TrackedRun, TrackingStore, sqlite_uri


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the tests that only add experiments, since making a database takes over a second."""
    return tmp_path_factory.mktemp("project")


@pytest.fixture
def store(root: Path, monkeypatch: pytest.MonkeyPatch) -> TrackingStore:
    """The store of the shared folder."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return TrackingStore.open(root)


@pytest.fixture
def experiment(request: pytest.FixtureRequest) -> str:
    """An experiment name that no other test uses."""
    return f"study {request.node.name}"[:400]


def read(store: TrackingStore, run_id: str) -> Any:
    """Read a run through a client that has seen nothing else."""
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=store.uri).get_run(run_id)


def history(store: TrackingStore, run_id: str, key: str) -> list[tuple[int, float]]:
    """Read all (step, value) pairs of a metric."""
    from mlflow import MlflowClient

    metrics = MlflowClient(tracking_uri=store.uri).get_metric_history(run_id, key)
    return [(metric.step, metric.value) for metric in metrics]


def artifacts(store: TrackingStore, run_id: str, folder: str | None = None) -> list[str]:
    """List a run's artifacts."""
    from mlflow import MlflowClient

    return [item.path for item in MlflowClient(tracking_uri=store.uri).list_artifacts(run_id, folder)]


@pytest.fixture
def locked(store: TrackingStore, root: Path) -> Iterator[None]:
    """Another writer that never lets go: a trigger that refuses, as fast as a lock is slow."""
    tables = ("metrics", "tags", "latest_metrics")
    with closing(sqlite3.connect(root / "mlruns" / "mlflow.db")) as database:
        for table in tables:
            refusal = "BEGIN SELECT RAISE(FAIL, 'no space'); END"
            database.execute(f"CREATE TRIGGER no_{table} BEFORE INSERT ON {table} {refusal}")
        database.commit()
        yield
        for table in tables:
            database.execute(f"DROP TRIGGER IF EXISTS no_{table}")
        database.commit()


def unlock(root: Path) -> None:
    """Let the store be written again."""
    with closing(sqlite3.connect(root / "mlruns" / "mlflow.db")) as database:
        for table in ("metrics", "tags", "latest_metrics"):
            database.execute(f"DROP TRIGGER no_{table}")
        database.commit()


class TestOpening:
    """How a store is found, made and refused."""

    def test_importing_the_module_leaves_mlflow_alone(self) -> None:
        """MLflow takes a second to import, so the module waits until a store is opened."""
        code = "import sys, fedlightning.tracking; sys.exit('mlflow' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    def test_first_opening_is_silent_and_makes_the_default_store(self, tmp_path: Path) -> None:
        """A first creation with INFO logging prints nothing, sends no telemetry and stays below mlruns."""
        code = (
            "import logging, os, sys; from pathlib import Path; logging.basicConfig(level=logging.INFO)\n"
            "from fedlightning.tracking import TrackingStore\n"
            "store = TrackingStore.open(Path(sys.argv[1]))\n"
            "with store.start_run('e', 'r', kind='run') as run:\n"
            "    run.log_metrics({'a': 1.0}); run.log_text('x', 'x.txt')\n"
            "sys.exit(0 if os.environ['MLFLOW_DISABLE_TELEMETRY'] == 'true' else 3)\n"
        )
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW")}
        environment["PYTHONPATH"] = str(Path(tracking.__file__).parents[1])
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            capture_output=True, text=True, check=False, env=environment, cwd=tmp_path,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["mlruns"]
        assert {path.name for path in (tmp_path / "mlruns").iterdir()} >= {"mlflow.db", "artifacts"}

    @pytest.mark.parametrize("roots", [1, 4])
    def test_four_processes_may_create_the_store_at_once(self, roots: int, tmp_path: Path) -> None:
        """Workers that start together share one database and one experiment, also each with a root of its own."""
        shared = sqlite_uri(tmp_path / "shared" / "mlflow.db") if roots > 1 else ""
        code = (
            "import sys; from pathlib import Path; from fedlightning.tracking import TrackingStore\n"
            "sys.stdin.readline()\n"
            "store = TrackingStore.open(Path(sys.argv[1]), sys.argv[3])\n"
            "with store.start_run('shared', sys.argv[2], kind='trial') as run: run.log_metrics({'a': 1.0})\n"
        )
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(tmp_path / f"root{number % roots}"), f"worker {number}", shared],
                stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for number in range(4)
        ]  # fmt: skip
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
        errors = [worker.communicate(timeout=120)[1] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0, 0, 0], errors
        runs = TrackingStore.open(tmp_path / "root0", shared).runs("shared")
        assert sorted(run.info.run_name for run in runs) == [f"worker {number}" for number in range(4)]
        assert {run.info.status for run in runs} == {"FINISHED"}

    @given(st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1))
    @example("a%20b?c#d")
    def test_address_of_a_file_leads_to_that_file(self, name: str) -> None:
        """SQLAlchemy reads back the path that was encoded, whatever characters it holds."""
        from sqlalchemy.engine import make_url

        path = Path("/data") / name / "mlflow.db"
        assert make_url(sqlite_uri(path)).database == path.as_posix()

    def test_a_folder_may_have_any_name(self, tmp_path: Path) -> None:
        """Blanks, #, %, ? and letters of any script neither redirect the database nor leave stray folders."""
        root = tmp_path / "a b#c%20d?e%ä日"
        store = TrackingStore.open(root)
        with store.start_run("e", "r", kind="run") as run:
            run.log_text("hello", "notes/a b.txt")
        assert [path.name for path in tmp_path.iterdir()] == [root.name]
        assert [path.name for path in root.iterdir()] == ["mlruns"]
        assert len(list((root / "mlruns" / "artifacts").rglob("a b.txt"))) == 1
        assert artifacts(store, run.run_id, "notes") == ["notes/a b.txt"]

    @pytest.mark.parametrize("blocked", ["mlruns", "mlruns/.store.lock/x", "mlruns/mlflow.db/x"])
    def test_what_cannot_be_written_is_named(self, tmp_path: Path, blocked: str) -> None:
        """A file in a folder's place, or a folder in a file's place, is an error with the path."""
        path = tmp_path / blocked
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        with pytest.raises(OSError, match=r"cannot write the tracking .*--tracking-uri") as caught:
            TrackingStore.open(tmp_path)
        assert str(tmp_path / "mlruns") in str(caught.value)

    @pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
    def test_read_only_folder_is_named(self, tmp_path: Path) -> None:
        """A folder without the permission to write is an error, not a hang."""
        tmp_path.chmod(0o500)
        with pytest.raises(OSError, match="cannot write the tracking folder"):
            TrackingStore.open(tmp_path)

    def test_a_file_that_is_no_database_is_named(self, tmp_path: Path) -> None:
        """Foreign content in the database's place is refused at once and left as it is."""
        (tmp_path / "mlruns").mkdir()
        foreign = tmp_path / "mlruns" / "mlflow.db"
        foreign.write_text("not a database, but long enough to be looked at " * 20)
        with pytest.raises(ValueError, match="no tracking database"):
            TrackingStore.open(tmp_path)
        assert foreign.read_text().startswith("not a database")

    def test_a_store_killed_while_it_was_made_is_made_anew(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """MLflow cannot go on from tables without a schema version, so that state is removed."""
        (tmp_path / "mlruns").mkdir()
        path = tmp_path / "mlruns" / "mlflow.db"
        with closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE experiments (experiment_id INTEGER)")
            database.execute("CREATE TABLE runs (run_uuid TEXT)")
            database.execute("CREATE TABLE alembic_version (version_num TEXT)")
            database.commit()
        assert TrackingStore.open(tmp_path).runs("any") == []
        assert "left unfinished" in caplog.text

    def test_a_database_with_runs_is_never_removed(self, tmp_path: Path) -> None:
        """Tables without a schema version stay if they hold runs, whatever MLflow then says."""
        (tmp_path / "mlruns").mkdir()
        path = tmp_path / "mlruns" / "mlflow.db"
        with closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE experiments (experiment_id INTEGER)")
            database.execute("CREATE TABLE runs (run_uuid TEXT)")
            database.execute("INSERT INTO runs VALUES ('precious')")
            database.commit()
        with pytest.raises(OSError, match=r"cannot be opened|does not answer"):
            TrackingStore.open(tmp_path)
        with closing(sqlite3.connect(path)) as database:
            assert database.execute("SELECT run_uuid FROM runs").fetchall() == [("precious",)]

    @pytest.mark.parametrize("uri", ["file:///srv/runs", "mlruns", "/srv/runs", "./mlruns", "C:\\runs"])
    def test_file_stores_are_refused_with_the_way_out(self, tmp_path: Path, uri: str) -> None:
        """MLflow 3 refuses folders of plain files; the error says what to give instead."""
        with pytest.raises(ValueError, match=r"plain files; leave it out .*mlflow\.db, or give sqlite:///"):
            TrackingStore.open(tmp_path, uri)
        assert list(tmp_path.iterdir()) == []

    def test_unknown_kind_of_store_is_refused(self, tmp_path: Path) -> None:
        """A URI whose scheme nobody knows is the user's mistake and names the kinds there are."""
        with pytest.raises(ValueError, match=r"'foo://x' names no kind of store .*postgresql"):
            TrackingStore.open(tmp_path, "foo://x")

    def test_dead_server_is_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A server that is not there is told before any work is done."""
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        with pytest.raises(OSError, match=r"tracking store http://127\.0\.0\.1:9 does not answer"):
            TrackingStore.open(tmp_path, "http://127.0.0.1:9")
        assert list(tmp_path.iterdir()) == []

    def test_environment_names_the_store_and_the_argument_wins(
        self, root: Path, store: TrackingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """MLFLOW_TRACKING_URI is honoured as in MLflow itself, unless a URI is given."""
        monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
        assert TrackingStore.open(tmp_path).uri == store.uri
        assert not (tmp_path / "mlruns" / "mlflow.db").exists()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "foo://x")
        assert TrackingStore.open(tmp_path, store.uri).uri == store.uri

    def test_other_database_keeps_its_artifacts_below_the_root(
        self, store: TrackingStore, tmp_path: Path, experiment: str
    ) -> None:
        """A database elsewhere works without depending on the current folder."""
        other = TrackingStore.open(tmp_path, store.uri)
        with other.start_run(experiment, "r", kind="run") as run:
            run.log_text("x", "x.txt")
        assert len(list((tmp_path / "mlruns" / "artifacts").rglob("x.txt"))) == 1


class TestExperiments:
    """How experiments are found."""

    def test_same_name_is_same_experiment(self, store: TrackingStore, experiment: str) -> None:
        """A second call finds what the first has made."""
        assert store.experiment_id(experiment) == store.experiment_id(experiment)

    def test_deleted_experiment_is_restored(self, store: TrackingStore, experiment: str) -> None:
        """A study whose experiment was deleted in the UI goes on in it."""
        identity = store.experiment_id(experiment)
        store.client.delete_experiment(identity)
        assert store.experiment_id(experiment) == identity
        assert store.client.get_experiment(identity).lifecycle_stage == "active"

    def test_runs_of_an_unknown_experiment_are_none(self, store: TrackingStore) -> None:
        """Asking does not create."""
        assert store.runs("never made") == []
        assert store.client.get_experiment_by_name("never made") is None

    def test_runs_come_page_by_page_and_by_parent(
        self, store: TrackingStore, experiment: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All pages are read, and a parent selects its own children."""
        monkeypatch.setattr(tracking, "_PAGE", 2)
        with store.start_run(experiment, "study", kind="study") as parent:
            for number in range(5):
                with store.start_run(experiment, f"trial {number}", kind="trial", parent=parent.run_id):
                    pass
        assert len(store.runs(experiment)) == 6
        children = store.runs(experiment, parent=parent.run_id)
        assert [run.info.run_name for run in children] == [f"trial {number}" for number in range(5)]
        assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.run_id}


class TestStarting:
    """What a run carries from its start."""

    def test_params_tags_and_data_are_read_back(self, store: TrackingStore, experiment: str) -> None:
        """Params are exact strings, tags hold kind and version, and the data set is an MLflow input."""
        import numpy as np

        params = {"xgb.max_depth": 8, "CNN.lr": 1e-5, "np": np.float64(0.1), "none": None, "flag": True}
        data = DataDescription("a9a", "0123456789abcdef" * 4, 32561, 123, "bundled")
        with store.start_run(
            experiment, "trial 0", kind="trial", params=params, tags={"engine": "local"}, data=data
        ) as run:
            pass
        found = read(store, run.run_id)
        assert found.info.run_name == "trial 0"
        expected = {"xgb.max_depth": "8", "CNN.lr": "1e-05", "np": "0.1", "none": "None", "flag": "True"}
        assert found.data.params == expected
        tags = found.data.tags
        assert (tags["kind"], tags["engine"], tags["fedlightning.version"]) == ("trial", "local", __version__)
        (entry,) = found.inputs.dataset_inputs
        assert (entry.dataset.name, entry.dataset.digest) == ("a9a", data.digest[:36])
        assert '"num_rows": 32561' in entry.dataset.profile
        assert "bundled" in entry.dataset.source

    def test_more_params_than_a_batch_holds(self, store: TrackingStore, experiment: str) -> None:
        """MLflow takes 100 params at once; all 250 arrive."""
        with store.start_run(experiment, "r", kind="run", params={f"p{i}": i for i in range(250)}) as run:
            pass
        assert len(read(store, run.run_id).data.params) == 250

    def test_long_values_are_cut_with_a_warning(
        self, store: TrackingStore, experiment: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """MLflow's limits never end a run; the log says what was cut."""
        with store.start_run(
            experiment, "r", kind="run", params={"long": "x" * 7000}, tags={"wide": "y" * 9000}
        ) as run:
            pass
        data = read(store, run.run_id).data
        assert (len(data.params["long"]), len(data.tags["wide"])) == (6000, 8000)
        assert "parameter long has 7000 characters" in caplog.text
        assert "tag wide has 9000 characters" in caplog.text

    @pytest.mark.parametrize("key", ["a*b", "", "a//b", "../a", "a/./b", "x" * 251, "lr=0.1", "a\n"])
    def test_keys_that_mlflow_refuses_are_named(self, store: TrackingStore, key: str) -> None:
        """A refused key is an error before a run exists."""
        with pytest.raises(ValueError, match="cannot be a key in MLflow"):
            store.start_run("keys", "r", kind="run", params={key: 1})
        assert store.runs("keys") == []

    def test_store_that_fails_at_the_start_is_an_error(
        self, store: TrackingStore, experiment: str, locked: None
    ) -> None:
        """Nothing is trained for a run that cannot be recorded at all."""
        with pytest.raises(OSError, match=r"cannot start the run 'r' in the tracking store sqlite.*no space"):
            store.start_run(experiment, "r", kind="run")


class TestEnding:
    """How runs end."""

    @pytest.mark.parametrize(
        ("error", "status"),
        [(ValueError("bad"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (SystemExit(1), "KILLED")],
    )
    def test_exceptions_decide_the_status(
        self, store: TrackingStore, experiment: str, error: BaseException, status: str
    ) -> None:
        """An exception passes through, and the run says how it ended."""
        with (
            pytest.raises(type(error)),
            store.start_run(experiment, "r", kind="run") as run,
        ):
            raise error
        found = read(store, run.run_id)
        assert found.info.status == status
        assert found.info.end_time is not None
        said = found.data.tags.get("fedlightning.error")
        assert said == ("ValueError: bad" if status == "FAILED" else None)

    def test_first_finish_counts(self, store: TrackingStore, experiment: str) -> None:
        """A pruned trial finishes its run itself, and the exception that follows changes nothing."""
        run = store.start_run(experiment, "r", kind="run")

        def prune() -> None:
            with run:
                run.finish("FINISHED")
                raise RuntimeError("pruned")

        with pytest.raises(RuntimeError, match="pruned"):
            prune()
        run.finish("KILLED")
        found = read(store, run.run_id)
        assert found.info.status == "FINISHED"
        assert "fedlightning.error" not in found.data.tags

    def test_stale_runs_are_closed_and_others_stay(self, store: TrackingStore, experiment: str) -> None:
        """Only runs that still count as running are ended."""
        dead = store.start_run(experiment, "dead", kind="trial")
        alive = store.start_run(experiment, "alive", kind="trial")
        with store.start_run(experiment, "done", kind="trial") as done:
            pass
        assert store.close_stale([dead.run_id, done.run_id]) == [dead.run_id]
        statuses = {run.info.run_name: run.info.status for run in store.runs(experiment)}
        assert statuses == {"dead": "KILLED", "alive": "RUNNING", "done": "FINISHED"}
        store.end_run(alive.run_id, "FAILED")
        assert read(store, alive.run_id).info.status == "FAILED"

    def test_resumed_run_runs_again_and_ends(self, store: TrackingStore, experiment: str) -> None:
        """A study's parent run goes on under its own id."""
        with store.start_run(experiment, "study", kind="study") as first:
            pass
        with store.resume_run(first.run_id) as second:
            assert read(store, first.run_id).info.status == "RUNNING"
            assert (second.run_id, second.name) == (first.run_id, "study")
            second.log_metrics({"trials": 3.0})
        found = read(store, first.run_id)
        assert (found.info.status, found.data.metrics) == ("FINISHED", {"trials": 3.0})

    def test_unknown_run_cannot_be_resumed(self, store: TrackingStore) -> None:
        """An id that the store does not know is an error that names it."""
        with pytest.raises(OSError, match="cannot resume the run 0123"):
            store.resume_run("0123" * 8)


class TestRecording:
    """What is recorded while a run goes on."""

    @pytest.fixture
    def run(self, store: TrackingStore, experiment: str) -> Iterator[TrackedRun]:
        """A run in progress."""
        with store.start_run(experiment, "r", kind="run") as run:
            yield run

    def test_rounds_become_histories(self, store: TrackingStore, run: TrackedRun) -> None:
        """Each round is one step with losses, metrics, bytes and seconds."""
        for number in (1, 2, 3):
            scores = Scores(loss=1 / number, metric=number / 10, examples=10)
            report = RoundReport(number, scores, scores if number > 1 else None, 1200, 3400, 0.25, {})
            run.log_round(report, metric="accuracy")
        assert history(store, run.run_id, "train_loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
        assert history(store, run.run_id, "train_accuracy") == [(1, 0.1), (2, 0.2), (3, 0.3)]
        assert history(store, run.run_id, "validation_loss") == [(2, 0.5), (3, 1 / 3)]
        assert history(store, run.run_id, "validation_accuracy") == [(2, 0.2), (3, 0.3)]
        assert history(store, run.run_id, "bytes_up") == [(1, 1200.0), (2, 1200.0), (3, 1200.0)]
        assert history(store, run.run_id, "bytes_down")[0] == (1, 3400.0)
        assert history(store, run.run_id, "round_seconds")[0] == (1, 0.25)

    def test_not_numbers_are_kept_out_and_named(
        self, store: TrackingStore, run: TrackedRun, caplog: pytest.LogCaptureFixture
    ) -> None:
        """NaN and infinities do not reach the store, the others of the batch do."""
        run.log_metrics({"good": 1.0, "bad": math.nan, "worse": -math.inf}, step=4)
        assert read(store, run.run_id).data.metrics == {"good": 1.0}
        assert "step 4: bad is nan" in caplog.text
        assert "step 4: worse is -inf" in caplog.text

    def test_comparison_names_every_competitor(self, store: TrackingStore, run: TrackedRun) -> None:
        """Network and baselines stand beside each other; a missing one is left out."""
        scores = [Scores(loss=i / 10, metric=i / 100, examples=5) for i in range(1, 4)]
        comparison = Comparison(scores[0], scores[1], (scores[2], scores[2]), centralized=None)
        run.log_comparison("test", comparison, metric="mse")
        assert read(store, run.run_id).data.metrics == {
            "test_network_loss": 0.1, "test_network_mse": 0.01,
            "test_mean_margin_loss": 0.2, "test_mean_margin_mse": 0.02,
            "test_local_only_loss": 0.3, "test_local_only_mse": 0.03,
        }  # fmt: skip

    def test_artifacts_tags_and_description(self, store: TrackingStore, run: TrackedRun, tmp_path: Path) -> None:
        """Texts, figures, files and folders become artifacts; the description is MLflow's note."""
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "weights.bin").write_bytes(b"123")
        figure = Figure()
        figure.add_subplot().plot([1, 2])
        run.log_text("a: 1\n", "clients.yaml")
        run.log_figure(figure, "figures/convergence.png")
        run.log_file(tmp_path / "model" / "weights.bin")
        run.log_file(tmp_path / "model", "model")
        run.set_tags({"trial.state": "COMPLETE"})
        run.set_description("## Best trial")
        assert sorted(artifacts(store, run.run_id)) == ["clients.yaml", "figures", "model", "weights.bin"]
        assert artifacts(store, run.run_id, "model") == ["model/weights.bin"]
        picture = store.client.download_artifacts(run.run_id, "figures/convergence.png", str(tmp_path))
        assert Path(picture).read_bytes().startswith(b"\x89PNG")
        tags = read(store, run.run_id).data.tags
        assert (tags["trial.state"], tags["mlflow.note.content"]) == ("COMPLETE", "## Best trial")
        assert run.lost == 0

    def test_file_that_is_not_there_is_an_error(self, run: TrackedRun, tmp_path: Path) -> None:
        """A caller's mistake is not taken for a failing store."""
        with pytest.raises(FileNotFoundError, match=r"model\.bin does not exist"):
            run.log_file(tmp_path / "model.bin")

    def test_failing_store_is_told_once_and_metrics_are_sent_again(
        self,
        store: TrackingStore,
        root: Path,
        experiment: str,
        request: pytest.FixtureRequest,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Training goes on while the store fails; what waited arrives with the next success."""
        monkeypatch.setattr(tracking, "RETRY_AFTER", 0.0)
        with store.start_run(experiment, "r", kind="run") as run:
            request.getfixturevalue("locked")
            for step in (1, 2, 3):
                run.log_metrics({"loss": 1 / step}, step=step)
            assert run.lost == 3
            assert [r.levelname for r in caplog.records if r.name == "fedlightning.tracking"] == ["WARNING"]
            assert "going on" in caplog.text
            unlock(root)
            run.log_metrics({"loss": 0.25}, step=4)
            assert run.lost == 0
        assert history(store, run.run_id, "loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]

    def test_failing_store_is_left_alone_for_a_while(
        self, store: TrackingStore, root: Path, experiment: str, request: pytest.FixtureRequest
    ) -> None:
        """After a failure the next rounds only queue up, and the end of the run sends them."""
        with store.start_run(experiment, "r", kind="run") as run:
            request.getfixturevalue("locked")
            run.log_metrics({"loss": 1.0}, step=1)
            unlock(root)
            run.log_metrics({"loss": 0.5}, step=2)
            assert run.lost == 2
        assert run.lost == 0
        assert history(store, run.run_id, "loss") == [(1, 1.0), (2, 0.5)]

    def test_store_that_stays_broken_raises_nothing(
        self,
        store: TrackingStore,
        experiment: str,
        request: pytest.FixtureRequest,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Ends are logged as errors and losses counted, never raised into the work."""
        with store.start_run(experiment, "r", kind="run") as run:
            request.getfixturevalue("locked")
            run.log_metrics({"loss": 1.0})
            run.set_tags({"a": "b"})
        assert run.lost == 2
        assert "tag a could not be recorded" in caplog.text
        assert "2 records are not in the tracking store" in caplog.text
        assert not [record for record in caplog.records if record.name.startswith("mlflow")]

    def test_gone_run_is_logged_as_an_error_at_the_end(
        self, store: TrackingStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A status that cannot be set is an error in the log, not in the program."""
        run = TrackedRun(store.client, "0123" * 8, "ghost")
        with caplog.at_level(logging.ERROR):
            run.finish("FINISHED")
        assert "run ghost could not be marked FINISHED" in caplog.text


@pytest.mark.slow
def test_tracking_server_takes_runs_and_may_die(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A remote server keeps metrics and artifacts, and training survives its end."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backend, served = TrackingStore.open(tmp_path / "backend").uri, tmp_path / "served"
    command = ["server", "--backend-store-uri", backend, "--artifacts-destination", str(served), "--workers", "1"]
    log = (tmp_path / "server.log").open("w")
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *command, "--host", "127.0.0.1", "--port", str(port)],
        stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip
    uri = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                store = TrackingStore.open(tmp_path / "here", uri)
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "server.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.5)
        with store.start_run("study", "r", kind="run", params={"CNN.lr": 0.1}) as run:
            run.log_metrics({"loss": 0.5}, step=1)
            run.log_text("hello", "notes.txt")
            found = read(store, run.run_id)
            assert (found.data.params, found.data.metrics) == ({"CNN.lr": "0.1"}, {"loss": 0.5})
            assert artifacts(store, run.run_id) == ["notes.txt"]
            assert len(list(served.rglob("notes.txt"))) == 1
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(timeout=60)
            run.log_metrics({"loss": 0.4}, step=2)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        log.close()
    assert run.lost == 1
    assert "the tracking store failed, going on" in caplog.text
    assert "could not be marked FINISHED" in caplog.text
    assert not (tmp_path / "here").exists()
    assert "View run" not in capfd.readouterr().out
