"""Open the MLflow store that runs are exported to."""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from procap.errors import UsageError, UserError
from runner.environment import library_defaults
from shards.locks import LockHeld, file_lock

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

EXPERIMENT = "procap"
SQLITE = "sqlite:///"
CONNECT_SECONDS = 3.0
LOCK_SECONDS = 60.0
PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306}
# Instead of MLflow's default for a server that does not answer, which is three attempts of 120 s.
DEFAULTS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}


class TrackingError(UserError):
    """The store cannot be reached or opened, or refuses."""


@dataclass(frozen=True)
class Destination:
    """An MLflow store and an experiment in it. results: the folder whose runs are exported."""

    uri: str
    experiment: str
    results: Path

    @classmethod
    def choose(cls, results: Path, uri: str | None = None) -> Destination:
        """Choose `uri`, else MLFLOW_TRACKING_URI, else mlflow.db in `results`; experiment: MLFLOW_EXPERIMENT_NAME."""
        chosen = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{(results / 'mlflow.db').resolve()}"
        if chosen.startswith(SQLITE):
            chosen = f"{SQLITE}{Path(chosen.removeprefix(SQLITE)).resolve()}"
        return cls(chosen, os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT, results.resolve())

    @property
    def file(self) -> Path | None:
        """The SQLite file, None for any other kind of store."""
        return Path(self.uri.removeprefix(SQLITE)) if self.uri.startswith(SQLITE) else None

    @property
    def address(self) -> str:
        """The URI without credentials (before its host or in its query), for messages and pages."""
        parts = urlsplit(self.uri)
        if self.file is not None or not (parts.query or "@" in parts.netloc):
            return self.uri
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()

    @property
    def is_server(self) -> bool:
        return self.uri.startswith(("http://", "https://"))


@dataclass(frozen=True)
class Store:
    """An open store: MLflow's client and the id of the experiment."""

    client: MlflowClient
    experiment_id: str


def open_store(destination: Destination) -> Store:
    """Open the store and its experiment, and create them if needed.

    Raises TrackingError, within seconds and not minutes, when that cannot be done, UsageError for a URI that is none.
    """
    uri = destination.uri
    if uri.startswith("file:") or ("://" not in uri and uri != "databricks"):
        raise UsageError(
            f"tracking URI '{uri}' is not a store that MLflow still takes: "
            f"http://HOST:PORT, {SQLITE}/PATH/mlflow.db and other databases are"
        )
    library_defaults()
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    check_listening(destination)
    try:
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise TrackingError(f"MLflow cannot be imported ({error}); install mlflow or turn tracking off") from error
    # These loggers write a line per table and retry; the caller reports a failure on one line.
    for name in ("mlflow", "alembic", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)
    file = destination.file
    try:
        # Lock, because processes that create or migrate the tables of one file at once break each other's migration.
        with nullcontext() if file is None else locked(file.with_name(f".{file.name}.lock")):
            if file is not None and not file.exists():
                _create_database(file, destination)
            client = MlflowClient(uri)
            return Store(client, _experiment(client, destination))
    except TrackingError:
        raise
    except Exception as error:
        raise TrackingError(f"cannot open {destination.address}: {first_line(error)}") from error


def check_listening(destination: Destination) -> None:
    """Raise TrackingError if no program listens at the address of a server: MLflow would retry for minutes."""
    parts = urlsplit(destination.uri)
    host = parts.hostname or ""
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return
    try:
        # Skip the check without a known port: the host may be a name that only the database driver can resolve.
        if host and (port := parts.port or PORTS.get(parts.scheme.partition("+")[0])):
            socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise TrackingError(f"cannot reach {destination.address}: {first_line(error)}") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file against other processes and threads; in a read-only folder, continue without a lock.

    Raises TrackingError after LOCK_SECONDS.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(path, timeout=LOCK_SECONDS))
        except LockHeld as error:
            raise TrackingError(f"another process ({error.owner}) has held {path} for {LOCK_SECONDS:.0f} s") from None
        except OSError:
            pass
        yield


def first_line(error: BaseException) -> str:
    """Format the message of `error` on one line of at most 200 characters."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    # urllib3 wraps a refused connection in a description of the request; the cause is at the end.
    for mark in ("Failed to establish a new connection: ", "(Caused by "):
        text = text.rpartition(mark)[2]
    return text if len(text) <= 200 else f"{text[:197]}..."


def _create_database(file: Path, destination: Destination) -> None:
    """Create the tables in a new file that is renamed when whole: MLflow repairs none whose creator was killed."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    new = file.with_name(f".{file.name}.new")
    for leftover in file.parent.glob(f"{new.name}*"):
        leftover.unlink()
    SqlAlchemyStore(f"{SQLITE}{new}", _artifacts(destination)).engine.dispose()
    os.replace(new, file)


def _experiment(client: MlflowClient, destination: Destination) -> str:
    from mlflow.exceptions import MlflowException

    artifacts = _artifacts(destination)
    found = client.get_experiment_by_name(destination.experiment)
    if found is None:
        try:
            return client.create_experiment(destination.experiment, artifacts)
        except MlflowException:
            # Another process has just created it.
            found = client.get_experiment_by_name(destination.experiment)
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise TrackingError(f"experiment '{found.name}' was deleted there; restore it or set MLFLOW_EXPERIMENT_NAME")
    if destination.file is not None and artifacts and _has_moved(found.artifact_location, artifacts):
        _move_artifacts(destination.file, found.artifact_location, artifacts)
    return found.experiment_id


def _artifacts(destination: Destination) -> str | None:
    # MLflow's own choice depends on the working directory of the creating process; a server decides for itself.
    if destination.is_server or destination.uri == "databricks":
        return None
    folder = destination.file.parent if destination.file else destination.results
    return (folder / "mlartifacts").as_uri()


def _has_moved(recorded: str, expected: str) -> bool:
    """Whether artifacts are `recorded` where the store's folder was before it was moved or copied."""
    parts = urlsplit(recorded)
    if parts.scheme != "file" or parts.netloc or not recorded.endswith("/mlartifacts") or recorded == expected:
        return False
    before, now = (Path(unquote(urlsplit(uri).path)).parent for uri in (recorded, expected))
    # A folder that is mounted twice has several names.
    with suppress(OSError):
        return not os.path.samefile(before, now)
    return True


def _move_artifacts(file: Path, recorded: str, expected: str) -> None:
    """Replace the absolute artifact URIs that MLflow has recorded in the SQLite `file`."""
    with closing(sqlite3.connect(file, timeout=LOCK_SECONDS, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
            database.execute(
                f"UPDATE {table} SET {column} = :now || substr({column}, length(:before) + 1) "
                f"WHERE {column} = :before OR substr({column}, 1, length(:before) + 1) = :before || '/'",
                {"now": expected, "before": recorded},
            )
        database.execute("COMMIT")
