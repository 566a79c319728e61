"""Record studies and runs in MLflow by explicit run ids, so that several workers may write at once."""

import getpass
import json
import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self
from urllib.parse import urlsplit

from fedlightning import __version__
from fedlightning.locks import CREATION_SECONDS, creation_lock

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Metric, Run

    from fedlightning.experiment import Comparison
    from fedlightning.federation.rounds import RoundReport
    from fedlightning.tasks import Scores

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]

RETRY_AFTER = 30.0
"""Seconds for which a store that failed is left alone; a locked database costs 20 s per attempt."""

_PAGE = 1000
_BATCH = 100  # MLflow's limit for the params of one log_batch
# Without it, MLflow's page opens on traces of language models, of which there are none here.
_MODEL_TRAINING = {"mlflow.experimentKind": "custom_model_development"}
_METRIC_BATCH = 1000  # and for its metrics
_KEY_LENGTH = 250
_PARAM_LENGTH = 6000
_TAG_LENGTH = 8000
_DIGEST_LENGTH = 36

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataDescription:
    """The data set that a run read, as MLflow shows it."""

    name: str
    digest: str
    """Of the content, such as its sha256; MLflow keeps 36 characters."""
    rows: int
    features: int
    source: str
    """Where the rows came from: a path, an address, or the package that bundles them."""


class TrackingStore:
    """An opened MLflow store: experiments are found or made here, and runs started and closed.

    Open it anew in every process: a forked copy would share its parent's database connections.
    """

    def __init__(self, uri: str, client: "MlflowClient", artifact_location: str | None) -> None:
        self.uri = uri
        self.client = client
        self.artifact_location = artifact_location
        """Below which new experiments keep their files; None where a server decides that."""

    def __repr__(self) -> str:
        return f"TrackingStore({self.uri!r})"

    @classmethod
    def open(cls, root: Path, tracking_uri: str | None = None) -> Self:
        """Open the store, creating the default one on first use.

        Without ``tracking_uri`` the environment variable ``MLFLOW_TRACKING_URI`` decides; without both the
        store is ``<root>/mlruns/mlflow.db``. Runs in a database have their artifacts in
        ``<root>/mlruns/artifacts``; a tracking server decides for itself.

        Raises:
            OSError: The folder or the database cannot be written.
            ValueError: The URI, or what it leads to, is no store that MLflow can use.
        """
        database = default_database(root)
        mlruns = database.parent
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if uri:
            _refuse_file_store(uri, mlruns)
            if _is_server(uri):
                return cls(uri, _connect(uri), artifact_location=None)
        artifact_location = (mlruns / "artifacts").as_uri()
        with _lock(mlruns), _lock(_folder_of(uri) or mlruns):
            if not uri:
                uri = sqlite_uri(database)
                _check_database(database)
            return cls(uri, _connect(uri), artifact_location)

    def experiment_id(self, name: str) -> str:
        """Return the experiment's id; a missing experiment is created and a deleted one restored."""
        from mlflow.exceptions import MlflowException

        # Another worker may create or restore it between our two calls; then the second look finds it.
        for attempt in (1, 2):
            experiment = self.client.get_experiment_by_name(name)
            try:
                if experiment is None:
                    return self.client.create_experiment(name, self.artifact_location, tags=_MODEL_TRAINING)
                if experiment.lifecycle_stage == "deleted":
                    self.client.restore_experiment(experiment.experiment_id)
                    _logger.info("restored the deleted experiment %r", name)
                return str(experiment.experiment_id)
            except MlflowException:
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    def start_run(
        self,
        experiment: str,
        name: str,
        *,
        kind: str,
        parent: str | None = None,
        params: Mapping[str, object] | None = None,
        tags: Mapping[str, str] | None = None,
        data: DataDescription | None = None,
    ) -> "TrackedRun":
        """Start a run of the given ``kind`` (a tag), nested below ``parent`` if that run id is given.

        Raises:
            ValueError: A key that MLflow refuses.
            OSError: The store does not answer.
        """
        params, tags = params or {}, tags or {}
        for key in (*params, *tags):
            _check_key(key)
        all_tags = {"fedlightning.version": __version__, "kind": kind, **tags}
        if parent is not None:
            all_tags["mlflow.parentRunId"] = parent
        with suppress(OSError, KeyError, ImportError):  # no such thing as a user name in some containers
            all_tags.setdefault("mlflow.user", getpass.getuser())
        with self._answering(f"start the run {name!r}"):
            run = self.client.create_run(
                self.experiment_id(experiment),
                tags={key: _cut(f"tag {key}", value, _TAG_LENGTH) for key, value in all_tags.items()},
                run_name=name,
            )
            tracked = TrackedRun(self.client, run.info.run_id, name)
            try:
                self._describe(run.info.run_id, params, data)
            except BaseException:
                tracked.finish("FAILED")
                raise
        return tracked

    def resume_run(self, run_id: str) -> "TrackedRun":
        """Set an existing run back to RUNNING, such as the parent run of a study that goes on.

        Raises:
            OSError: The store does not answer or does not know the run.
        """
        with self._answering(f"resume the run {run_id}"):
            self.client.update_run(run_id, status="RUNNING")
            return TrackedRun(self.client, run_id, self.client.get_run(run_id).info.run_name or run_id)

    def end_run(self, run_id: str, status: RunStatus) -> None:
        """End a run that its own process cannot end any more."""
        with self._answering(f"end the run {run_id}"):
            self.client.set_terminated(run_id, status)

    def close_stale(
        self, run_ids: Iterable[str], status: RunStatus = "KILLED", *, tags: Mapping[str, str] | None = None
    ) -> list[str]:
        """End those of the runs that still count as running, with further ``tags``; returns their ids."""
        closed = []
        for run_id in run_ids:
            with self._answering(f"close the run {run_id}"):
                if self.client.get_run(run_id).info.status == "RUNNING":
                    for key, value in (tags or {}).items():
                        self.client.set_tag(run_id, key, value)
                    self.client.set_terminated(run_id, status)
                    closed.append(run_id)
        return closed

    def runs(self, experiment: str, *, parent: str | None = None, status: str | None = None) -> "list[Run]":
        """Return the runs of an experiment, oldest first: all, or those nested below ``parent`` or of one status."""
        conditions = []
        if parent is not None:
            conditions.append(f"tags.`mlflow.parentRunId` = '{parent}'")
        if status is not None:
            conditions.append(f"attributes.status = '{status}'")
        with self._answering(f"read the runs of {experiment!r}"):
            found = self.client.get_experiment_by_name(experiment)
            if found is None:
                return []
            runs: list[Run] = []
            token: str | None = None
            while True:
                page = self.client.search_runs(
                    [found.experiment_id],
                    " and ".join(conditions),
                    max_results=_PAGE,
                    order_by=["attributes.start_time ASC"],
                    page_token=token,
                )
                runs.extend(page)
                token = page.token
                if not token:
                    return runs

    def _describe(self, run_id: str, params: Mapping[str, object], data: DataDescription | None) -> None:
        from mlflow.entities import Param

        entries = [Param(key, _cut(f"parameter {key}", _text(value), _PARAM_LENGTH)) for key, value in params.items()]
        for start in range(0, len(entries), _BATCH):
            self.client.log_batch(run_id, params=entries[start : start + _BATCH])
        if data is not None:
            self.client.log_inputs(run_id, datasets=[_dataset_input(data)])

    @contextmanager
    def _answering(self, action: str) -> Iterator[None]:
        from mlflow.exceptions import MlflowException

        try:
            with _quiet():
                yield
        except MlflowException as error:
            raise OSError(f"cannot {action} in the tracking store {self.uri}: {_reason(error)}") from error


class TrackedRun:
    """A run that is being recorded; as a context manager it always ends.

    It ends FINISHED, FAILED after an exception, KILLED after Ctrl-C or a request to exit; a `finish` inside
    the block has the first word. A store that fails after the run has started never stops the work: metrics
    are kept and sent again, anything else is dropped with a warning. `lost` counts what is not in the store.
    """

    def __init__(self, client: "MlflowClient", run_id: str, name: str) -> None:
        self.run_id = run_id
        self.name = name
        self._client = client
        self._waiting: list[list[Metric]] = []
        self._dropped = 0
        self._quiet_until = -math.inf
        self._warned = False
        self._finished = False

    def __repr__(self) -> str:
        return f"TrackedRun({self.name!r}, run_id={self.run_id!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish("FINISHED")
            return
        if not self._finished and isinstance(error, Exception):
            self.set_tags({"fedlightning.error": f"{type(error).__name__}: {error}"})
        self.finish("FAILED" if isinstance(error, Exception) else "KILLED")

    @property
    def lost(self) -> int:
        """Number of batches and artifacts that are not in the store."""
        return len(self._waiting) + self._dropped

    def log_round(self, report: "RoundReport", *, metric: str) -> None:
        """Record a round's scores, bytes and seconds in one batch; the step is the round's number."""
        values = {
            **score_metrics("train", report.train, metric=metric),
            "bytes_up": report.bytes_up,
            "bytes_down": report.bytes_down,
            "round_seconds": report.seconds,
        }
        if report.validation is not None:
            values |= score_metrics("validation", report.validation, metric=metric)
        self.log_metrics(values, step=report.number)

    def log_scores(self, prefix: str, scores: "Scores", *, metric: str, step: int = 0) -> None:
        """Record ``<prefix>_loss`` and ``<prefix>_<metric>``."""
        self.log_metrics(score_metrics(prefix, scores, metric=metric), step=step)

    def log_comparison(self, prefix: str, comparison: "Comparison", *, metric: str) -> None:
        """Record the loss and metric of every competitor on the same rows."""
        self.log_metrics(comparison_metrics(prefix, comparison, metric=metric))

    def log_metrics(self, values: Mapping[str, float], *, step: int = 0) -> None:
        """Record numbers at one step; NaN and infinite ones are kept out and named in a warning."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        batch = []
        for key, value in values.items():
            _check_key(key)
            if math.isfinite(value):
                batch.append(Metric(key, float(value), now, step))
            else:
                _logger.warning("run %s, step %d: %s is %s and was not recorded", self.name, step, key, value)
        if batch:
            self._waiting.append(batch)
            if time.monotonic() >= self._quiet_until:
                self._send_metrics()

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set or overwrite tags of the run."""
        for key in tags:
            _check_key(key)
        # One by one: in a batch, MLflow would try for 14 s to get them into a database that refuses.
        for key, value in tags.items():
            short = _cut(f"tag {key}", str(value), _TAG_LENGTH)
            self._attempt(f"tag {key}", partial(self._client.set_tag, self.run_id, key, short))

    def set_description(self, markdown: str) -> None:
        """Set the text that MLflow shows at the head of the run."""
        self.set_tags({"mlflow.note.content": markdown})

    def log_text(self, text: str, file: str) -> None:
        """Store a text as the artifact ``file``, a relative path with forward slashes."""
        self._attempt(file, lambda: self._client.log_text(self.run_id, text, file))

    def log_figure(self, figure: "Figure", file: str) -> None:
        """Store a matplotlib figure as the artifact ``file``, whose suffix names the format."""
        self._attempt(file, lambda: self._client.log_figure(self.run_id, figure, file))

    def log_file(self, path: Path, folder: str | None = None) -> None:
        """Store a file or a whole folder as an artifact, below ``folder`` if given."""
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist, so it cannot become an artifact of {self.name}")
        log = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
        self._attempt(path.name, lambda: log(self.run_id, str(path), folder))

    def finish(self, status: RunStatus) -> None:
        """End the run; only the first call counts, and a store that fails is logged as an error."""
        if self._finished:
            return
        self._finished = True
        if self._waiting:
            self._send_metrics()
        problem = self._try(lambda: self._client.set_terminated(self.run_id, status))
        if problem is not None:
            _logger.error("run %s could not be marked %s: %s", self.name, status, problem)
        if self.lost:
            _logger.error("run %s: %d records are not in the tracking store", self.name, self.lost)

    def _send_metrics(self) -> None:
        # A batch that got through before its reply was lost may be sent twice: it keeps its time stamp,
        # and MLflow stores an identical metric once.
        entries = [entry for batch in self._waiting for entry in batch]
        for start in range(0, len(entries), _METRIC_BATCH):
            part = entries[start : start + _METRIC_BATCH]
            problem = self._try(partial(self._client.log_batch, self.run_id, metrics=part))
            if problem is not None:
                self._quiet_until = time.monotonic() + RETRY_AFTER
                if not self._warned:
                    self._warned = True
                    _logger.warning("run %s: the tracking store failed, going on: %s", self.name, problem)
                return
        self._waiting.clear()

    def _attempt(self, what: str, call: Callable[[], object]) -> None:
        problem = self._try(call)
        if problem is not None:
            self._dropped += 1
            _logger.warning("run %s: %s could not be recorded: %s", self.name, what, problem)

    def _try(self, call: Callable[[], object]) -> str | None:
        from mlflow.exceptions import MlflowException

        try:
            with _quiet():
                call()
        except (MlflowException, OSError) as error:
            return _reason(error)
        return None


def score_metrics(prefix: str, scores: "Scores", *, metric: str) -> dict[str, float]:
    """Return ``<prefix>_loss`` and ``<prefix>_<metric>``."""
    return {f"{prefix}_loss": scores.loss, f"{prefix}_{metric}": scores.metric}


def comparison_metrics(prefix: str, comparison: "Comparison", *, metric: str) -> dict[str, float]:
    """Return loss and metric per competitor, as ``test_mean_margin_loss``; local-only is the mean client."""
    competitors: dict[str, Scores | None] = {
        "network": comparison.network,
        "mean_margin": comparison.mean_margin,
        "local_only": comparison.local_only_mean,
        "centralized": comparison.centralized,
    }
    values: dict[str, float] = {}
    for name, scores in competitors.items():
        if scores is not None:
            values |= score_metrics(f"{prefix}_{name}", scores, metric=metric)
    return values


def default_database(root: Path) -> Path:
    """Return the file of the store below a root, absolute."""
    return root.expanduser().absolute() / "mlruns" / "mlflow.db"


def sqlite_uri(path: Path) -> str:
    """Return an address that MLflow opens as exactly this SQLite file, whatever characters its path holds."""
    absolute = path.absolute().as_posix()
    # SQLAlchemy ends the path at '?' and decodes '%20', so those two characters must be encoded ...
    quoted = absolute.replace("%", "%25").replace("?", "%3F")
    # ... but for "sqlite:///" MLflow first makes the folder of the *encoded* path, which would lie around
    # empty. It leaves that out where the driver is named.
    scheme = "sqlite" if quoted == absolute else "sqlite+pysqlite"
    return f"{scheme}:///{quoted}"


def _connect(uri: str) -> "MlflowClient":
    # Said before MLflow is imported, and only where the user has said nothing: no telemetry, no links on
    # stdout, and seconds instead of four minutes until a server that does not answer counts as gone.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        with _quiet():
            client = MlflowClient(tracking_uri=uri, registry_uri=uri)
            client.search_experiments(max_results=1)  # the store itself is built on first use
    except MlflowException as error:
        message = str(error)
        if "unsupported URI" in message or "Invalid database" in message:
            raise ValueError(
                f"tracking URI {uri!r} names no kind of store that MLflow knows; "
                "use sqlite:///..., postgresql://..., mysql://..., http://... or https://..."
            ) from error
        if "out-of-date" in message:
            raise ValueError(
                f"the tracking store {uri} was made by another version of MLflow; back it up and run "
                f"`mlflow db upgrade {uri}`"
            ) from error
        raise OSError(f"the tracking store {uri} does not answer: {_reason(error)}") from error
    except (ImportError, _database_error()) as error:
        raise OSError(f"the tracking store {uri} cannot be opened: {_reason(error)}") from error
    return client


def _database_error() -> type[Exception]:
    from sqlalchemy.exc import SQLAlchemyError

    return SQLAlchemyError


def _is_server(uri: str) -> bool:
    """Tell whether somebody else keeps the artifacts: a tracking server or a hosted service."""
    return not urlsplit(uri).scheme.startswith(("sqlite", "postgresql", "mysql", "mssql"))


def _folder_of(uri: str | None) -> Path | None:
    """Return the folder of an SQLite database, which workers of other roots may be creating, too."""
    if not uri or not urlsplit(uri).scheme.startswith("sqlite"):
        return None
    from sqlalchemy.engine import make_url

    database = make_url(uri).database
    return Path(database).absolute().parent if database and database != ":memory:" else None


def _refuse_file_store(uri: str, mlruns: Path) -> None:
    scheme = urlsplit(uri).scheme
    # A single letter is a Windows drive; MLflow's bare words for Databricks have no scheme but are no path.
    is_path = len(scheme) == 1 or (not scheme and uri not in ("databricks", "databricks-uc", "uc"))
    if scheme == "file" or is_path:
        raise ValueError(
            f"tracking URI {uri!r} names a folder, and MLflow no longer writes stores of plain files; "
            f"leave it out to use {mlruns / 'mlflow.db'}, or give sqlite:///<file>.db "
            "(`mlflow migrate-filestore` takes old runs along)"
        )


def _lock(folder: Path) -> AbstractContextManager[None]:
    return creation_lock(
        folder / ".store.lock",
        what="tracking folder",
        way_out="choose another folder, or a store elsewhere with --tracking-uri",
    )


def _check_database(path: Path) -> None:
    """Fail at once, with the file's name, where MLflow would retry for minutes."""
    try:
        with closing(sqlite3.connect(path, timeout=CREATION_SECONDS)) as database:
            database.execute("BEGIN IMMEDIATE")
            unfinished = _is_unfinished(database)
            database.rollback()
    except sqlite3.OperationalError as error:
        raise OSError(
            f"cannot write the tracking database {path}: {error}; "
            "choose another folder, or a store elsewhere with --tracking-uri"
        ) from error
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} is no tracking database ({error}); move it away and run again") from error
    if unfinished:
        _logger.warning("%s was left unfinished by a process that was killed; it is made anew", path)
        path.unlink()


def _is_unfinished(database: sqlite3.Connection) -> bool:
    """Tell whether MLflow was killed before it noted a schema version, from which it does not recover."""
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not {"experiments", "runs"} <= tables or database.execute("SELECT 1 FROM runs").fetchone():
        return False
    if "alembic_version" not in tables:
        return True
    return database.execute("SELECT 1 FROM alembic_version").fetchone() is None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what MLflow says about migrations and the tracebacks of errors that we report ourselves."""
    if _logger.isEnabledFor(logging.DEBUG):
        yield
        return
    loggers = [logging.getLogger(name) for name in ("mlflow.store.db.utils", "alembic")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _dataset_input(data: DataDescription) -> "DatasetInput":
    from mlflow.entities import Dataset, DatasetInput, InputTag

    dataset = Dataset(
        name=data.name,
        digest=data.digest[:_DIGEST_LENGTH],
        source_type="local",
        source=json.dumps({"uri": data.source}),
        profile=json.dumps({"num_rows": data.rows, "num_features": data.features}),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])


def _check_key(key: str) -> None:
    parts = key.split("/")
    allowed = all(character.isalnum() or character in "_-. :/" for character in key)
    if not allowed or any(part in ("", ".", "..") for part in parts) or len(key) > _KEY_LENGTH:
        raise ValueError(
            f"{key!r} cannot be a key in MLflow: use 1 to {_KEY_LENGTH} letters, digits, "
            "blanks and _ - . : /, and no empty part between slashes"
        )


def _cut(what: str, value: str, limit: int) -> str:
    if len(value) <= limit:
        return value
    _logger.warning("%s has %d characters; MLflow keeps the first %d", what, len(value), limit)
    return value[:limit]


def _text(value: object) -> str:
    # float() first: numpy's scalars are floats whose repr names their type.
    return repr(float(value)) if isinstance(value, float) else str(value)


def _reason(error: BaseException) -> str:
    """Return the first line of what the database or server said, without SQLAlchemy's statement."""
    said = getattr(error.__cause__, "orig", None) or getattr(error, "orig", None) or error
    lines = str(said).strip().splitlines()
    return lines[0] if lines else type(error).__name__
