"""Export runs to MLflow while a command executes them: at most every 30 seconds, and at the end of the command.

Everything is read from result files, so the next export or `procap track sync` adds what a store missed.
"""

from __future__ import annotations

import atexit
import functools
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from procap.errors import UserError
from runner.remote_results import RemoteResults
from runner.run_collection import Collection, Status, write_collection
from runner.tracking.store import TrackingStore, format_error, sync

INTERVAL_SECONDS = 30.0
"""Between two exports. A short run is exported once, at the end of the command, where it disturbs no measurement."""


class Exporter:
    """Export what was posted since the last export, nothing with tracking off; a failure is printed, not raised."""

    def __init__(self, tracking_uri: str | None, remote: RemoteResults) -> None:
        """tracking_uri: that of `RuntimeConfig`. remote: the results whose runs are exported."""
        self.store = None if tracking_uri == "off" else TrackingStore.choose(remote.local, tracking_uri)
        self.remote = remote
        self._posted = set[str]()
        self._due = time.monotonic() + INTERVAL_SECONDS
        self._exported: dict[str, str] = {}
        self._monitor: Any = None
        # For a command that an error or a signal ends.
        atexit.register(self.flush, create=False)

    def post(self, *paths: str) -> None:
        """Export the runs or collections at `paths`: now if an export is due, else with a later one."""
        self._posted.update(paths)
        if self.store and time.monotonic() >= self._due:
            self._export(self.store)

    def post_epoch(self, path: str) -> None:
        """Post a run that this process trains, and log MLflow's system metrics with it until `post_end`."""
        self.post(path)
        if self.store and path in self._exported and path not in self._posted and not self._monitor:
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            # The store may be lost since the export.
            with suppress(Exception):
                run_id, uri = self._exported[path], self.store.uri
                self._monitor = SystemMetricsMonitor(run_id, resume_logging=True, tracking_uri=uri)
                self._monitor.start()

    def post_end(self, path: str) -> None:
        """Post a run whose training has ended or was interrupted."""
        if self._monitor:
            self._monitor.finish()
            self._monitor = None
        self.post(path)

    def flush(self, *, create: bool = True) -> None:
        """Export everything that was posted, and upload `tracking.json`; another machine continues the MLflow runs.

        create: False leaves a default store that does not exist to `procap ui`. MLflow takes longer to import and to
            make its tables than a short training.
        """
        if self.store and self._posted and (create or self.store.exists):
            self._export(self.store)
            for path in self._exported:
                self.remote.try_push(path)

    def _export(self, store: TrackingStore) -> None:
        """Export what was posted. A store that fails once is not tried again."""
        try:
            self._exported = sync(store, lambda path, error: report(f"{path}: {error}"), only=self._posted)
        except Exception as error:
            later = f"procap track sync --results {shlex.quote(str(store.results))}"
            report(f"{format_error(error)}; `{later}` exports what is missing")
            self.store, self._exported = None, {}
            return
        self._posted.clear()
        self._due = time.monotonic() + INTERVAL_SECONDS


@functools.cache
def report(text: str) -> None:
    """Print a line about tracking to stderr, each only once."""
    print(f"tracking: {text}", file=sys.stderr, flush=True)


class CollectionTracker:
    """Write `collection.json` of a suite or sweep and export it with its runs; problems are printed, not raised."""

    def __init__(self, exporter: Exporter, collection: Collection) -> None:
        self.collection, self.is_written = collection, False
        self._exporter = exporter

    def update(self, runs: Sequence[str], **changes: object) -> None:
        """Add runs, by their paths below the results, that have started, progressed or ended; change other fields."""
        runs = tuple(dict.fromkeys([*self.collection.runs, *runs]))
        self.collection = self.collection.model_copy(update={"runs": runs, **changes})
        try:
            self.collection, self.is_written = write_collection(self._exporter.remote.local, self.collection), True
        except (UserError, OSError) as error:
            report(f"{error}; the runs go on")
        self._exporter.post(self.collection.path, *runs)

    def close(self, status: Status, **changes: object) -> None:
        """Mark the collection as ended; change other fields as well."""
        self.update((), status=status, ended=time.time_ns() // 1_000_000, **changes)
