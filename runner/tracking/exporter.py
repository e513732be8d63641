"""Export runs to MLflow while a command executes them: at most every 30 seconds, and at the end of the command.

Everything is read from result files, so the next export or `procap track sync` adds what a store missed.
"""

from __future__ import annotations

import atexit
import functools
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from procap.errors import UserError
from runner.config import RuntimeConfig
from runner.remote_results import RemoteResults
from runner.results import read_document
from runner.run_collection import Collection, Status, write_collection
from runner.run_folders import TRACKING_FILE
from runner.tracking.store import TrackingStore, format_error, report
from runner.tracking.sync import TrackingRecord, sync

INTERVAL_SECONDS = 30.0
"""Between two exports. A short run is exported once, at the end of the command, where it disturbs no measurement."""


class Exporter:
    """Export what was posted since the last export, nothing without a store; a failure is printed, not raised."""

    def __init__(self, store: TrackingStore | None, remote: RemoteResults) -> None:
        self.store = store
        self.remote = remote
        # A set that keeps its order.
        self._pending: dict[str, None] = {}
        self._due = time.monotonic() + INTERVAL_SECONDS
        self._failed = False
        self._monitors: dict[str, Any] = {}
        if store is not None:
            # For a command that an error or a signal ends.
            atexit.register(self.flush, create=False)

    def post(self, *paths: str) -> None:
        """Export the runs or collections at `paths`: now if an export is due, else with a later one."""
        self._pending |= dict.fromkeys(paths)
        if time.monotonic() >= self._due:
            self._export()

    def post_epoch(self, path: str) -> None:
        """Post a run that this process trains, and log MLflow's system metrics with it until `post_end`."""
        self.post(path)
        if self.store is None or path in self._pending or path in self._monitors:
            return
        if record := read_document(self.store.results / path / TRACKING_FILE, TrackingRecord):
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            self._monitors[path] = None
            # The store may be lost since the export.
            with suppress(Exception):
                monitor = SystemMetricsMonitor(record.run_id, resume_logging=True, tracking_uri=self.store.uri)
                monitor.start()
                self._monitors[path] = monitor

    def post_end(self, path: str) -> None:
        """Post a run whose training has ended or was interrupted."""
        if monitor := self._monitors.pop(path, None):
            monitor.finish()
        self.post(path)

    def flush(self, *, create: bool = True) -> None:
        """Export everything that was posted, and upload `tracking.json`; another machine continues the MLflow runs.

        create: False leaves a default store that does not exist to `procap ui`. MLflow takes longer to import and to
            make its tables than a short training.
        """
        if self.store and self._pending and (create or self.store.exists):
            for path in self._export():
                self.remote.try_push_all(path)

    def _export(self) -> list[str]:
        """Export what was posted; returns the paths of what was sent. A store that fails once is not tried again."""
        if self.store is None or self._failed:
            return []
        try:
            summary = sync(self.store, only=self._pending)
        except Exception as error:
            self._failed = True
            later = f"procap track sync --results {shlex.quote(str(self.store.results))}"
            report(f"{format_error(error)}; `{later}` exports what is missing")
            return []
        for path, reason in summary.failed.items():
            report(f"{path}: {reason}")
        self._pending.clear()
        self._due = time.monotonic() + INTERVAL_SECONDS
        return summary.sent


# One exporter per store and process, so that all runs of a command open the store, and report its failure, only once.
_shared_exporter = functools.cache(Exporter)


def exporter_for(runtime: RuntimeConfig) -> Exporter:
    """Return this process's exporter for the store of `runtime`; with tracking off it exports nothing."""
    off = runtime.tracking_uri == "off"
    store = None if off else TrackingStore.choose(runtime.results, runtime.tracking_uri)
    return _shared_exporter(store, RemoteResults.from_runtime(runtime))


class CollectionTracker:
    """Write `collection.json` of a suite or sweep and export it with its runs; problems are printed, not raised."""

    def __init__(self, runtime: RuntimeConfig, collection: Collection) -> None:
        self.collection = collection
        self._results = runtime.results
        self._exporter = exporter_for(runtime)

    def update(self, runs: Sequence[str], **changes: object) -> None:
        """Add runs, by their paths below the results, that have started, progressed or ended; change other fields."""
        runs = tuple(dict.fromkeys([*self.collection.runs, *runs]))
        self.collection = self.collection.model_copy(update={"runs": runs, **changes})
        try:
            self.collection = write_collection(self._results, self.collection)
        except (UserError, OSError) as error:
            report(f"{error}; the runs go on")
        self._exporter.post(self.collection.path, *runs)

    def close(
        self, status: Status, metrics: Mapping[str, float] | None = None, failed: Mapping[str, str] | None = None
    ) -> None:
        """Mark the collection as ended. failed: reasons by run."""
        metrics = {**self.collection.metrics, **(metrics or {})}
        ended = time.time_ns() // 1_000_000
        self.update(self.collection.runs, status=status, ended=ended, failed=dict(failed or {}), metrics=metrics)
