"""Connect to an MLflow store, and export runs, suites and sweeps to it any number of times.

`tracking.json` in the folder of a run holds the IDs of its MLflow runs. So a run has one MLflow run in each store and
experiment, however often it is interrupted, and the next export logs what is missing there.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from procap.errors import UsageError, UserError
from runner.config import FrozenModel
from runner.environment_defaults import set_environment_defaults
from runner.results import read_document, write_json
from runner.run_collection import LOCK_SECONDS
from runner.run_folders import TRACKING_FILE, OnError
from runner.tracking.content import DESCRIPTION, DIGITS, TABLE_START, Content, read_contents
from shards.credentials import mask, mask_urls
from shards.files import file_lock
from shards.urls import redact

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

DEFAULT_FILE = "mlflow.db"
DEFAULT_ARTIFACTS = "mlartifacts"
RUNS_PER_REQUEST = 500
PARENT_TAG = "mlflow.parentRunId"
KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Opens the list of runs with metrics; otherwise MLflow may show its pages for language models."""
SOURCE = {"mlflow.source.name": "procap", "mlflow.source.type": "LOCAL"}


def sqlite_uri(file: Path) -> str:
    """Return the URI of a SQLite database; a path may have signs such as # and ?."""
    from sqlalchemy import URL

    return URL.create("sqlite", database=str(file)).render_as_string()


@dataclass(frozen=True)
class TrackingStore:
    """An MLflow store for the runs of `results`. known_experiment: the ID of an experiment, in place of a name."""

    uri: str
    experiment: str
    results: Path
    known_experiment: str = ""

    @classmethod
    def choose(cls, results: Path, uri: str | None = None) -> TrackingStore:
        """Choose `uri`, else MLFLOW_TRACKING_URI, else mlflow.db in `results`.

        The experiment is that of MLFLOW_EXPERIMENT_NAME or, if it has none, of MLFLOW_EXPERIMENT_ID. Raises UsageError
        for "off", which is a store for commands that only export.
        """
        results = results.resolve()
        if uri == "off":
            raise UsageError("--tracking off names no store: leave it out, or name the store to export to")
        chosen = uri or os.environ.get("MLFLOW_TRACKING_URI") or sqlite_uri(results / DEFAULT_FILE)
        name, number = (os.environ.get(f"MLFLOW_EXPERIMENT_{field}", "") for field in ("NAME", "ID"))
        return cls(chosen, name or "procap", results, "" if name else number)

    @property
    def is_default(self) -> bool:
        """Whether this is mlflow.db in the results."""
        return self.uri == sqlite_uri(self.results / DEFAULT_FILE)

    @property
    def exists(self) -> bool:
        """Whether runs can be exported without creating the default store."""
        return not self.is_default or (self.results / DEFAULT_FILE).exists()

    @property
    def address(self) -> str:
        """The URI without credentials, for messages and pages."""
        return redact(self.uri)

    @cached_property
    def client(self) -> MlflowClient:
        """A client of the store."""
        # Before the import, which reads some of the variables.
        set_environment_defaults()
        from mlflow.store.db import utils
        from mlflow.tracking import MlflowClient

        # MLflow tries a database ten times, for 100 seconds.
        utils.MAX_RETRY_COUNT = 1
        # These loggers write a line per table and retry; the caller reports a failure on one line.
        for name in ("mlflow", "alembic", "urllib3"):
            logging.getLogger(name).setLevel(logging.ERROR)
        return MlflowClient(self.uri)

    @cached_property
    def experiment_id(self) -> str:
        """The ID of the experiment, which is created if needed. Raises UserError if the store does not answer."""
        with self.requests("open"):
            if self.known_experiment:
                return self.client.get_experiment(self.known_experiment).experiment_id
            experiment = self.client.get_experiment_by_name(self.experiment)
            if experiment:
                return experiment.experiment_id
            # MLflow's own default is a folder in the current directory.
            artifacts = (self.results / DEFAULT_ARTIFACTS).as_uri() if self.is_default else None
            return self.client.create_experiment(self.experiment, artifacts, KIND)

    @contextmanager
    def requests(self, purpose: str) -> Iterator[None]:
        """Raise UserError for an error of the block: MLflow's or one of the many of its HTTP and SQL libraries."""
        try:
            yield
        except Exception as error:
            raise UserError(f"cannot {purpose} {self.address}: {format_error(error)}") from error


class TrackingRecord(FrozenModel):
    """`tracking.json`: the MLflow run of a run or collection. elsewhere: those in other stores and experiments."""

    run_id: str
    elsewhere: tuple[str, ...] = ()


def sync(store: TrackingStore, on_error: OnError, *, only: Iterable[str] | None = None) -> dict[str, str]:
    """Log what is missing of runs and collections; returns the IDs of MLflow runs that got something, by path.

    on_error: gets the path and the error of a broken file, which fails its run alone. only: paths below the results, by
    default all, and the collections of these runs. Raises UserError when the store refuses or cannot be reached.
    """
    sent: dict[str, str] = {}
    # Two processes would make two MLflow runs of one run.
    with file_lock(store.results / ".tracking.lock", timeout=LOCK_SECONDS):
        contents = read_contents(store.results, on_error, only)
        files = {path: store.results / path / TRACKING_FILE for path in contents}
        records = {path: read_document(file, TrackingRecord) for path, file in files.items()}
        known = {path: (record.run_id, *record.elsewhere) if record else () for path, record in records.items()}
        runs = _find_mlflow_runs(store, known)
        for path, content in contents.items():
            if content.parent:
                content.tags[PARENT_TAG] = runs[content.parent].info.run_id
            with store.requests(f"export {path} to"):
                if path not in runs:
                    runs[path] = store.client.create_run(store.experiment_id, content.started, SOURCE, content.name)
                run_id = runs[path].info.run_id
                if known[path][:1] != (run_id,):
                    # Before anything is logged, so that an export which is killed continues with this run.
                    elsewhere = tuple(other for other in known[path] if other != run_id)
                    write_json(files[path], TrackingRecord(run_id=run_id, elsewhere=elsewhere))
                if _log_missing(store.client, runs[path], content):
                    sent[path] = run_id
    return sent


def _find_mlflow_runs(store: TrackingStore, known: Mapping[str, Sequence[str]]) -> dict[str, Run]:
    """Find the MLflow runs of folders, by path; those not exported to this experiment of the store have none.

    known: IDs of MLflow runs in any store and experiment, by path.
    """
    experiment = store.experiment_id
    # After the first access to the client, which sets variables that MLflow reads.
    from mlflow.entities import ViewType

    by_id = {run_id: path for path, run_ids in known.items() for run_id in run_ids}
    quoted, runs = [f"'{run_id}'" for run_id in by_id], {}
    # MLflow limits the length of a filter and the number of runs in a response.
    for first in range(0, len(quoted), RUNS_PER_REQUEST):
        where = f"attributes.run_id IN ({', '.join(quoted[first : first + RUNS_PER_REQUEST])})"
        with store.requests("find the runs of"):
            for run in store.client.search_runs([experiment], where, ViewType.ALL):
                runs[by_id[run.info.run_id]] = run
    return runs


def _log_missing(client: MlflowClient, run: Run, content: Content) -> bool:
    """Log what an MLflow run lacks, unless it was deleted in MLflow; returns whether anything was missing."""
    from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

    run_id, logged = run.info.run_id, run.data.metrics
    tags = {name: mask_urls(value) for name, value in content.tags.items()}
    if not run.data.tags.get(DESCRIPTION, TABLE_START).startswith(TABLE_START):
        # A user has written it in MLflow.
        tags.pop(DESCRIPTION, None)
    latest = {name: value for name, value, _, _ in content.curves} | content.metrics
    # MLflow keeps metrics of methods that a suite has no longer; those that a user has logged have other names.
    kinds = {*DIGITS, *(name.partition("/")[0] for name in content.metrics)} if content.replaces_metrics else set()
    gone = [name for name in logged.keys() - latest.keys() if name.partition("/")[0] in kinds]
    gone = [name for name in gone if not math.isnan(logged[name])]
    is_logged = not gone and latest.items() <= logged.items() and tags.items() <= run.data.tags.items()
    # The status is set last.
    if run.info.lifecycle_stage == "deleted" or (is_logged and run.info.status == content.status):
        return False
    # An epoch that a killed training repeats took a different time: it would be a second point of the curve.
    curves = logged.keys() & {name for name, *_ in content.curves}
    steps = {name: {point.step for point in client.get_metric_history(run_id, name)} for name in curves}
    metrics = [
        Metric(name, value, run.info.start_time + at, epoch)
        for name, value, at, epoch in content.curves
        if epoch not in steps.get(name, ())
    ]
    now = time.time_ns() // 1_000_000
    metrics += [Metric(name, value, now, 0) for name, value in content.metrics.items() if logged.get(name) != value]
    metrics += [Metric(name, math.nan, now, 0) for name in gone]
    params = [Param(*param) for param in content.params.items()]
    client.log_batch(run_id, metrics, params, [RunTag(*tag) for tag in tags.items()])
    if content.inputs:
        inputs = [
            DatasetInput(Dataset(name, digest, "procap", name), [InputTag("mlflow.data.context", context)])
            for name, digest, context in content.inputs
        ]
        client.log_inputs(run_id, inputs)
    if content.ended is not None:
        client.set_terminated(run_id, content.status, content.ended)
    else:
        client.update_run(run_id, content.status)
    return True


def format_error(error: BaseException) -> str:
    """Format the message of `error` on one line of at most 200 characters."""
    return shorten(mask((str(error).strip() or type(error).__name__).splitlines()[0]), 200, placeholder="...")
