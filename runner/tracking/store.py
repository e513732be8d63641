"""Connect to the MLflow store that runs are exported to."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from procap.errors import UserError
from runner.environment import library_defaults
from shards.credentials import mask
from shards.files import file_lock
from shards.urls import redact

if TYPE_CHECKING:
    from mlflow.entities import Experiment
    from mlflow.tracking import MlflowClient

EXPERIMENT = "procap"
SQLITE = "sqlite:///"
DEFAULT_FILE = "mlflow.db"
CONNECT_SECONDS = 3.0
LOCK_SECONDS = 30.0
SILENT_SECONDS = 5.0
# By default MLflow tries seven times for 120 s. A server that hangs can cost a command two requests: system metrics and
# the export.
DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "6",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class TrackingError(UserError):
    """The store cannot be reached or opened, or refuses a request."""


@dataclass(frozen=True)
class TrackingStore:
    """An MLflow store for the runs of `results`; the first access to `client` or `experiment_id` connects."""

    uri: str
    experiment: str
    results: Path

    @classmethod
    def choose(cls, results: Path, uri: str | None = None) -> TrackingStore:
        """Choose `uri`, else MLFLOW_TRACKING_URI, else mlflow.db in `results`; experiment: MLFLOW_EXPERIMENT_NAME."""
        results = results.resolve()
        chosen = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{results / DEFAULT_FILE}"
        return cls(chosen, os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT, results)

    @property
    def file(self) -> Path | None:
        """The SQLite file, None for any other kind of store."""
        return Path(self.uri.removeprefix(SQLITE)) if self.uri.startswith(SQLITE) else None

    @property
    def exists(self) -> bool:
        """Whether runs can be exported without creating the default store."""
        return self.file != self.results / DEFAULT_FILE or self.file.exists()

    @property
    def address(self) -> str:
        """The URI without credentials, for messages and pages."""
        return redact(self.uri)

    @property
    def is_server(self) -> bool:
        return self.uri.startswith(("http://", "https://"))

    @property
    def artifacts(self) -> str | None:
        """Where artifacts are stored; None leaves that to a server."""
        folder = self.file.resolve().parent if self.file else self.results
        return None if self.is_server or self.uri == "databricks" else (folder / "mlartifacts").as_uri()

    def open(self) -> TrackingStore:
        """Connect to the store, and create it if needed. Raises TrackingError within seconds when that fails."""
        parts = urlsplit(self.uri)
        try:
            if parts.hostname and parts.port and not self.is_server:
                # MLflow would retry for an hour to reach a database that is down.
                socket.create_connection((parts.hostname, parts.port), timeout=CONNECT_SECONDS).close()
            if self.file is not None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise TrackingError(f"cannot reach {self.address}: {format_error(error)}") from error
        _ = self.experiment_id  # Connects.
        return self

    @cached_property
    def client(self) -> MlflowClient:
        """A client of the store."""
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        library_defaults()
        from mlflow.tracking import MlflowClient

        # These loggers write a line per table and retry; the caller reports a failure on one line.
        for name in ("mlflow", "alembic", "urllib3"):
            logging.getLogger(name).setLevel(logging.ERROR)
        return MlflowClient(self.uri)

    @cached_property
    def _stored_experiment(self) -> Experiment:
        try:
            # Processes that create the tables of one file at the same time would break each other's migration.
            lock = self.file and self.file.with_name(f".{self.file.name}.lock")
            with file_lock(lock, timeout=LOCK_SECONDS) if lock else nullcontext():
                if not (experiment := self.client.get_experiment_by_name(self.experiment)):
                    experiment = self.client.get_experiment(
                        self.client.create_experiment(self.experiment, self.artifacts)
                    )
                return experiment
        except Exception as error:
            raise TrackingError(f"cannot open {self.address}: {format_error(error)}") from error

    @property
    def experiment_id(self) -> str:
        """The id of the experiment, which is created if needed."""
        return self._stored_experiment.experiment_id

    @property
    def identity(self) -> str:
        """Identifies the experiment, also in a copy of its store or under a different address."""
        return f"{self.experiment} {self.experiment_id} {self._stored_experiment.creation_time}"


@contextmanager
def announce_wait(store: TrackingStore) -> Iterator[None]:
    """Say what the command waits for if the block takes longer than SILENT_SECONDS."""
    waiting = threading.Timer(SILENT_SECONDS, report, [f"waiting for {store.address} ..."])
    waiting.daemon = True
    waiting.start()
    try:
        yield
    finally:
        waiting.cancel()


def report(text: str) -> None:
    """Print a line about tracking to stderr."""
    # At the end of a process stderr can be closed.
    with suppress(OSError, ValueError):
        print(f"tracking: {text}", file=sys.stderr, flush=True)


def format_error(error: BaseException) -> str:
    """Format the message of `error` on one line of at most 200 characters."""
    text = (isinstance(error, OSError) and error.strerror) or str(error).strip() or type(error).__name__
    return shorten(mask(text.splitlines()[0]), 200, placeholder="...")
