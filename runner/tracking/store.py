"""Opening an MLflow store: where it is, whether anyone answers there, and its creation by one process at a time."""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
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
ANSWER_SECONDS = 3.0
LOCK_SECONDS = 60.0
PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306}
# MLflow waits 120 s, three times, for a server that does not answer.
DEFAULTS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
# Write-ahead logging needs shared memory between the writers: never on a file system that several machines mount.
LOCAL_FILE_SYSTEMS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "apfs", "hfs"}


class TrackingError(UserError):
    """The store cannot be reached or opened, or refuses."""


@dataclass(frozen=True)
class Destination:
    """An MLflow store and an experiment in it; `results` is the folder whose runs go there."""

    uri: str
    experiment: str
    results: Path

    @classmethod
    def choose(cls, results: Path, uri: str | None = None) -> Destination:
        """`uri`, else MLFLOW_TRACKING_URI, else mlflow.db in `results`; MLFLOW_EXPERIMENT_NAME names the experiment."""
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
        """The URI without the password that may be before its host or in its query: fit for messages and files."""
        parts = urlsplit(self.uri)
        if self.file is not None or not (parts.query or "@" in parts.netloc):
            return self.uri
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()

    @property
    def label(self) -> str:
        """The name of this store and experiment in a run's `tracking.json`."""
        return f"{self.address} {self.experiment}"

    @property
    def is_server(self) -> bool:
        return self.uri.startswith(("http://", "https://"))


@dataclass(frozen=True)
class Store:
    """An open store: MLflow's client and the id of the experiment."""

    client: MlflowClient
    experiment_id: str


def open_store(destination: Destination) -> Store:
    """Open, and where needed create, the store and its experiment.

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
    check_answers(destination)
    try:
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise TrackingError(f"MLflow cannot be imported ({error}); install mlflow or turn tracking off") from error
    with _creation_lock(destination), quiet_libraries():
        try:
            _make_file(destination)
            client = MlflowClient(uri)
            experiment_id = _experiment(client, destination)
        except TrackingError:
            raise
        except Exception as error:
            raise TrackingError(f"cannot open {destination.address}: {first_line(error)}") from error
        _write_ahead(destination.file)
    return Store(client, experiment_id)


def check_answers(destination: Destination) -> None:
    """Raise TrackingError when nobody listens at the server's address or another program holds the database locked.

    MLflow's own patience is half a minute or more, for a database two minutes, which a run that waits would lose.
    """
    parts = urlsplit(destination.uri)
    if destination.is_server or parts.hostname:
        host = parts.hostname or ""
        if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
            return
        try:
            # Of other databases a name without a port may be no host at all.
            if port := parts.port or PORTS.get(parts.scheme.partition("+")[0]):
                socket.create_connection((host, port), timeout=ANSWER_SECONDS).close()
        except (OSError, ValueError) as error:
            raise TrackingError(f"cannot reach {destination.address}: {first_line(error)}") from error
    elif destination.file is not None and destination.file.exists():
        try:
            with closing(sqlite3.connect(destination.file, timeout=ANSWER_SECONDS, isolation_level=None)) as database:
                database.execute("BEGIN IMMEDIATE")
                database.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise TrackingError(f"cannot write to {destination.file}: {first_line(error)}") from error


@contextmanager
def held(lock: Path) -> Iterator[None]:
    """Hold the file `lock` against other processes. Raises TrackingError after LOCK_SECONDS."""
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(lock, timeout=LOCK_SECONDS))
        except LockHeld as error:
            raise TrackingError(f"another process ({error.owner}) holds {lock} and does not let go") from None
        except OSError as error:
            raise TrackingError(f"cannot write to {lock.parent}: {first_line(error)}") from error
        yield


def first_line(error: BaseException) -> str:
    """What went wrong, in one line of bearable length."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    # A refused connection arrives wrapped in the whole request; its end names the cause.
    for mark in ("Failed to establish a new connection: ", "(Caused by "):
        text = text.rpartition(mark)[2]
    return text if len(text) <= 200 else f"{text[:197]}..."


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep MLflow and what it uses from talking about every table and every retry: one line of ours says it all."""
    loggers = [logging.getLogger(name) for name in ("mlflow", "alembic", "urllib3")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _experiment(client: MlflowClient, destination: Destination) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(destination.experiment)
    if found is None:
        try:
            return client.create_experiment(destination.experiment, _artifacts(destination))
        except MlflowException:
            found = client.get_experiment_by_name(destination.experiment)
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise TrackingError(f"experiment '{found.name}' was deleted there; restore it or set MLFLOW_EXPERIMENT_NAME")
    here = _artifacts(destination)
    if destination.file is not None and here is not None and _was_elsewhere(found.artifact_location, here):
        _move_artifacts(destination.file, found.artifact_location, here)
    return found.experiment_id


def _make_file(destination: Destination) -> None:
    """A new SQLite file gets its name when its tables are there: MLflow mends none whose maker was killed half-way."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    file = destination.file
    if file is None or file.exists():
        return
    new = file.with_name(f".{file.name}.new")
    for left_over in file.parent.glob(f"{new.name}*"):
        left_over.unlink()
    SqlAlchemyStore(f"{SQLITE}{new}", _artifacts(destination)).engine.dispose()
    os.replace(new, file)


def _artifacts(destination: Destination) -> str | None:
    # MLflow's own choice depends on the working directory of whoever came first; a server decides for itself.
    if destination.is_server or destination.uri == "databricks":
        return None
    folder = destination.file.parent if destination.file else destination.results
    return (folder / "mlartifacts").as_uri()


def _was_elsewhere(there: str, here: str) -> bool:
    """Whether the URI `there` was given to the artifacts when their store was in another folder than that of `here`."""
    parts = urlsplit(there)
    if parts.scheme != "file" or parts.netloc or not there.endswith("/mlartifacts") or there == here:
        return False
    before, now = (Path(unquote(urlsplit(uri).path)).parent for uri in (there, here))
    # One folder has several names where it is mounted twice.
    with suppress(OSError):
        return not os.path.samefile(before, now)
    return True


def _move_artifacts(file: Path, there: str, here: str) -> None:
    """Let the store in `file`, which was copied or moved with its folder, keep artifacts in `here` instead of `there`.

    MLflow notes absolute URIs. Its models and traces have some as well, of which a run of ours has none.
    """
    with closing(sqlite3.connect(file, timeout=LOCK_SECONDS, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
            database.execute(
                f"UPDATE {table} SET {column} = :here || substr({column}, length(:there) + 1) "
                f"WHERE {column} = :there OR substr({column}, 1, length(:there) + 1) = :there || '/'",
                {"there": there, "here": here},
            )
        database.execute("COMMIT")


def _creation_lock(destination: Destination) -> AbstractContextManager[None]:
    # Processes that create the tables at once destroy one another's migration.
    file = destination.file
    return nullcontext() if file is None else held(file.with_name(f".{file.name}.lock"))


def _write_ahead(file: Path | None) -> None:
    if file is None or _file_system(file) not in LOCAL_FILE_SYSTEMS:
        return
    # It halves the time of many writers, and is theirs to do without.
    with suppress(sqlite3.Error), closing(sqlite3.connect(file, timeout=1.0)) as database:
        database.execute("PRAGMA journal_mode=WAL")


def _file_system(file: Path) -> str:
    import psutil

    mounts = [part for part in psutil.disk_partitions(all=True) if file.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else ""
