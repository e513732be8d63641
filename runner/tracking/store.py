"""Connect to the MLflow store that runs are exported to."""

from __future__ import annotations

import logging
import os
import re
import socket
import sqlite3
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from procap.errors import UsageError, UserError
from runner.environment import library_defaults
from shards.credentials import mask
from shards.files import file_lock
from shards.remote import warn_of_stall

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

EXPERIMENT = "procap"
SQLITE = "sqlite:///"
DEFAULT_FILE = "mlflow.db"
SQLITE_URI = re.compile(r"sqlite(?:\+pysqlite)?:///(?P<path>[^?]+)(?P<query>\?.*)?")
CONNECT_SECONDS = 3.0
LOCK_SECONDS = 60.0
RUNS_PER_PAGE = 1000
SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")
PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306}
# MLflow's default for a server that does not answer is three attempts of 120 s.
DEFAULTS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}


class TrackingError(UserError):
    """The store cannot be reached or opened, or refuses a request."""


def check_uri(uri: str) -> None:
    """Raise UsageError for a URI whose kind of store neither MLflow nor one of its plug-ins has."""
    known = {*SCHEMES, *(point.name for point in entry_points(group="mlflow.tracking_store"))} - {"file"}
    if uri != "databricks" and not ("://" in uri and uri.partition("://")[0].partition("+")[0] in known):
        raise UsageError(
            f"tracking URI '{uri}' is not a store that MLflow supports: "
            f"use http://HOST:PORT, {SQLITE}/PATH/mlflow.db or another database"
        )


@dataclass(frozen=True)
class TrackingStore:
    """An MLflow store for the runs of `results`; the first access to `client` or `experiment_id` connects."""

    uri: str
    experiment: str
    results: Path

    @classmethod
    def choose(cls, results: Path, uri: str | None = None) -> TrackingStore:
        """Choose `uri`, else MLFLOW_TRACKING_URI, else mlflow.db in `results`; experiment: MLFLOW_EXPERIMENT_NAME."""
        chosen = uri or os.environ.get("MLFLOW_TRACKING_URI") or sqlite_uri(results / DEFAULT_FILE)
        if found := SQLITE_URI.fullmatch(chosen):
            chosen = sqlite_uri(Path(unquote(found["path"]))) + (found["query"] or "")
        return cls(chosen, os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT, results.resolve())

    @property
    def file(self) -> Path | None:
        """The SQLite file, None for any other kind of store."""
        found = SQLITE_URI.fullmatch(self.uri)
        return Path(unquote(found["path"])) if found else None

    @property
    def is_unused(self) -> bool:
        """Whether this is the store of the results that is chosen by default, and nothing was exported to it yet."""
        return self.file == self.results / DEFAULT_FILE and not self.file.exists()

    @property
    def address(self) -> str:
        """The URI without credentials (before its host or in its query), for messages and pages."""
        parts = urlsplit(self.uri)
        if self.file is not None or not (parts.query or "@" in parts.netloc):
            return self.uri
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()

    def describe(self, results: Path | str) -> str:
        """Return the address, or the path of a SQLite file in the results below `results`, as the user wrote it."""
        if self.file and self.file.is_relative_to(self.results):
            return str(Path(results, self.file.relative_to(self.results)))
        return self.address

    @property
    def is_server(self) -> bool:
        return self.uri.startswith(("http://", "https://"))

    def open(self) -> TrackingStore:
        """Connect to the store, and create it if needed. Raises TrackingError within seconds when that fails."""
        parts = urlsplit(self.uri)
        host = parts.hostname or ""
        if parts.scheme not in urllib.request.getproxies() or urllib.request.proxy_bypass(host):
            # MLflow would retry for minutes to reach a server that is down.
            try:
                # Skip the check without a known port: the host may be a name that only the database driver can resolve.
                if host and (port := parts.port or PORTS.get(parts.scheme.partition("+")[0])):
                    socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
            except (OSError, ValueError) as error:
                raise TrackingError(f"cannot reach {self.address}: {format_error(error)}") from error
        with warn_of_stall(self.address if self.is_server else ""):
            _ = self.experiment_id  # Connects.
        return self

    def search(self, where: str) -> Iterator[Run]:
        """List all runs of the experiment that match MLflow's search expression `where`, page by page."""
        token = None
        while True:
            page = self.client.search_runs([self.experiment_id], where, max_results=RUNS_PER_PAGE, page_token=token)
            yield from page
            token = page.token
            if not token:
                return

    @cached_property
    def client(self) -> MlflowClient:
        """A client of the store, which is created if needed."""
        check_uri(self.uri)
        library_defaults()
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise TrackingError(f"MLflow cannot be imported ({error}); install mlflow or turn tracking off") from error
        # These loggers write a line per table and retry; the caller reports a failure on one line.
        for name in ("mlflow", "alembic", "urllib3"):
            logging.getLogger(name).setLevel(logging.ERROR)
        with self._opening():
            if self.file is not None and not self.file.exists():
                self._create_tables(self.file)
            return MlflowClient(self.uri)

    @cached_property
    def experiment_id(self) -> str:
        """The id of the experiment, which is created if needed."""
        client = self.client
        from mlflow.exceptions import MlflowException

        with self._opening():
            found = client.get_experiment_by_name(self.experiment)
            if found is None:
                try:
                    return client.create_experiment(self.experiment, self._artifacts)
                except MlflowException:
                    # Another process has just created it.
                    found = client.get_experiment_by_name(self.experiment)
                    if found is None:
                        raise
            if found.lifecycle_stage != "active":
                raise TrackingError(f"experiment '{found.name}' is deleted; restore it or set MLFLOW_EXPERIMENT_NAME")
            recorded, expected = str(found.artifact_location), self._artifacts
            if self.file and expected not in (None, recorded) and re.fullmatch("file:///.*/mlartifacts", recorded):
                self._move_artifacts(self.file, recorded, expected)
            return found.experiment_id

    @property
    def _artifacts(self) -> str | None:
        # MLflow's own choice depends on the working directory of the creating process; a server decides for itself.
        if self.is_server or self.uri == "databricks":
            return None
        return ((self.file.parent if self.file else self.results) / "mlartifacts").as_uri()

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """Hold the lock of a SQLite file in the block, and raise its errors as TrackingError.

        Processes that create or migrate the tables of one file at once would break each other's migration.
        """
        try:
            with locked(self.file.with_name(f".{self.file.name}.lock")) if self.file else nullcontext():
                yield
        except TrackingError:
            raise
        except Exception as error:
            raise TrackingError(f"cannot open {self.address}: {format_error(error)}") from error

    def _create_tables(self, file: Path) -> None:
        """Create the tables under another name first: MLflow cannot repair a file whose creator was killed."""
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        new = file.with_name(f".{file.name}.new")
        for leftover in new.parent.glob(f"{new.name}*"):
            leftover.unlink()
        SqlAlchemyStore(sqlite_uri(new), self._artifacts).engine.dispose()
        os.replace(new, file)

    @staticmethod
    def _move_artifacts(file: Path, before: str, now: str | None) -> None:
        """Replace the absolute URIs that MLflow has recorded, after the results were moved or copied."""
        with closing(sqlite3.connect(file, timeout=LOCK_SECONDS)) as database, database:
            for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
                database.execute(
                    f"UPDATE {table} SET {column} = :now || substr({column}, length(:before) + 1) "
                    f"WHERE substr({column} || '/', 1, length(:before) + 1) = :before || '/'",
                    {"now": now, "before": before},
                )


def sqlite_uri(file: Path) -> str:
    """Make the URI of a SQLite file, percent-encoded where a URI needs it."""
    path = str(file.resolve())
    encoded = path.replace("%", "%25").replace("?", "%3F")
    # For a URI that begins with `sqlite:///` MLflow makes the encoded folder too, beside the right one.
    return f"{SQLITE if encoded == path else SQLITE.replace(':', '+pysqlite:')}{encoded}"


def locked(path: Path) -> AbstractContextManager[None]:
    """Lock a file, or raise LockHeld after LOCK_SECONDS; in a read-only folder, continue without a lock."""
    return file_lock(path, timeout=LOCK_SECONDS, required=False)


def format_error(error: BaseException) -> str:
    """Format the message of `error` on one line of at most 200 characters."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    # urllib3 wraps a refused connection in a description of the request; the cause is at the end.
    for mark in ("Failed to establish a new connection: ", "(Caused by "):
        text = text.rpartition(mark)[2]
    text = mask(text)
    return text if len(text) <= 200 else f"{text[:197]}..."
