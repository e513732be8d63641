"""Export runs to MLflow in the background while they train; a slow or unreachable store does not delay them.

Nothing is exported that is not in a result file first, so that `procap track sync` can export later what was missed.
"""

from __future__ import annotations

import atexit
import functools
import math
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from procap.errors import UserError
from runner.config import RuntimeConfig
from runner.remote_results import RemoteResults
from runner.run_collection import COLLECTIONS, Collection, Status, write_collection
from runner.run_folders import TRACKING_FILE, RunFolder
from runner.tracking.export import read_record, sync
from runner.tracking.store import TrackingStore, format_error

INTERVAL_SECONDS = 30.0
"""Between two exports. A short run is exported once, at the end of the command, where it disturbs no measurement."""
WAIT_SECONDS = 30.0
"""How long a command waits in all for a store that makes no progress."""
NOTICE_SECONDS = 3.0
WRITE_SECONDS = 10.0
"""Between two updates of `collection.json`."""


class BackgroundExporter:
    """Export runs and collections from a daemon thread, everything posted since the last export at once.

    A failure is reported in one line; what could not be exported is tried again with the next ones, until a command
    has waited for WAIT_SECONDS in all.
    store: None only synchronizes with `remote`, the URL of the results.
    """

    def __init__(self, store: TrackingStore | None, remote: RemoteResults, log_checkpoints: bool = False) -> None:
        self.store = store
        self._remote = remote
        self._log_checkpoints = log_checkpoints
        self._pending: dict[str, None] = {}
        self._lock = threading.Lock()
        self._flushing = threading.Event()
        self._thread: threading.Thread | None = None
        self._exported = 0
        self._patience = WAIT_SECONDS
        self._failed = False
        self._reported: set[str] = set()
        self._elsewhere: set[str] = set()
        self._measured: set[str] = set()
        self._monitors: dict[str, Any] = {}

    def post(self, *paths: str, elsewhere: bool = False, measure: bool = False) -> None:
        """Export the runs or collections at `paths` soon.

        elsewhere: different processes write the runs; synchronize with the URL of the results first. measure: this
        process trains the runs; log its system metrics with them.
        """
        with self._lock:
            self._elsewhere.update(paths if elsewhere else ())
            self._measured.update(paths if measure else ())
            if (self.store is not None or self._remote.url) and self._patience > 0:
                self._pending |= dict.fromkeys(paths)
        self._start()

    def flush(self, *, create: bool = True) -> None:
        """Export everything that was posted; returns when that is done, has failed, or makes no progress.

        create: else the default store is left to `procap ui` while it does not exist. MLflow takes longer to import and
            to make its tables than a short training.
        """
        if not create and not self._remote.url and self.store and self.store.is_unused:
            with self._lock:
                self._pending.clear()
        self._flushing.set()
        self._failed = False
        # The second time for what was posted while the thread was exporting.
        for _ in range(2):
            if not self._failed:
                self._start()
                self._wait()
        self._flushing.clear()

    def report(self, text: str, about: str = "") -> None:
        """Print a line unless it, or one `about` the same, was printed before or stderr is closed."""
        if (about or text) not in self._reported:
            self._reported.add(about or text)
            with suppress(OSError, ValueError):
                print(f"tracking: {text}", file=sys.stderr, flush=True)

    def _wait(self) -> None:
        """Wait for the thread as long as it makes progress, or the patience of this command lasts."""
        exported = self._exported
        while self._thread and self._thread.is_alive() and self._patience > 0:
            began = time.monotonic()
            self._thread.join(min(NOTICE_SECONDS, self._patience))
            if self._exported == exported:
                self._patience -= time.monotonic() - began
            exported = self._exported
            if self._thread.is_alive() and self.store and self.store.is_server:
                self.report(f"waiting for {self.store.address}, at most {WAIT_SECONDS:g} s")
        if self._patience <= 0:
            self._fail(f"no answer within {WAIT_SECONDS:g} s")

    def _start(self) -> None:
        with self._lock:
            if self._pending and not (self._thread and self._thread.is_alive()):
                if self._thread is None:
                    atexit.register(self.flush, create=False)
                self._thread = threading.Thread(target=self._export_pending, name="mlflow-export", daemon=True)
                self._thread.start()

    def _export_pending(self) -> None:
        self._flushing.wait(INTERVAL_SECONDS)
        with self._lock:
            batch, self._pending = self._pending, {}
        for path in self._elsewhere.intersection(batch):
            if path.startswith(f"{COLLECTIONS}/"):
                self._transfer(self._remote.push_all, path)
            else:
                self._transfer(partial(self._remote.pull_run, weights=self._log_checkpoints), path)
        if self.store is None or not batch:
            return
        try:
            summary = sync(self.store, only=batch, log_checkpoints=self._log_checkpoints, on_run=self._count_export)
            for path, reason in summary.failed:
                self.report(f"{path}: {reason}")
            for path in self._measured.intersection(batch):
                self._measure(self.store, path)
            for path in batch:
                # Another machine continues with the same MLflow run.
                self._transfer(self._remote.push_file, f"{path}/{TRACKING_FILE}")
        except Exception as error:
            with self._lock:
                self._pending = batch | self._pending
            self._fail(format_error(error))

    def _transfer(self, transfer: Callable[[str], None], path: str) -> None:
        """Carry out a transfer from or to the URL of the results; the first error is reported."""
        try:
            transfer(path)
        except (UserError, OSError) as error:
            self.report(f"{error}; what is new is only in {self._remote.local} so far", about="transfer")

    def _measure(self, store: TrackingStore, path: str) -> None:
        """Start MLflow's system metrics for a run that trains, and end them when it is finished."""
        folder = RunFolder(store.results / path)
        if folder.train_file.exists():
            if monitor := self._monitors.pop(path, None):
                monitor.finish()
        elif path not in self._monitors and (record := read_record(store, folder.path)):
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            self._monitors[path] = SystemMetricsMonitor(record.run_id, resume_logging=True, tracking_uri=store.uri)
            self._monitors[path].start()

    def _count_export(self) -> None:
        self._exported += 1

    def _fail(self, reason: str) -> None:
        self._failed = True
        if self.store is not None:
            later = f"procap track sync --results {shlex.quote(str(self.store.results))}"
            self.report(f"{reason}; runs go on, export them later with `{later}`", about="failure")


# One exporter per store and process, so that all runs of a command open the store, and report its failure, only once.
_shared_exporter = functools.cache(BackgroundExporter)


def exporter_for(runtime: RuntimeConfig) -> BackgroundExporter:
    """Return this process's exporter for the store of `runtime`; with tracking off it exports nothing."""
    off = runtime.tracking_uri == "off"
    store = None if off else TrackingStore.choose(runtime.results, runtime.tracking_uri)
    return _shared_exporter(store, RemoteResults.from_runtime(runtime), runtime.log_checkpoints)


class CollectionTracker:
    """Write `collection.json` of a suite or sweep and export it with its runs; problems are printed, not raised."""

    def __init__(self, runtime: RuntimeConfig, collection: Collection) -> None:
        self.collection = collection
        self._results = runtime.results
        self._exporter = exporter_for(runtime)
        self._changed: set[str] = set()
        self._written = -math.inf
        self._lock = threading.Lock()

    def update(self, runs: Sequence[str], metrics: Mapping[str, float] | None = None) -> None:
        """Add runs, by their paths below the results, that have started, progressed or ended, and metrics of all."""
        with self._lock:
            self._changed.update(runs)
            together = tuple(dict.fromkeys([*self.collection.runs, *runs]))
            self._replace(runs=together, metrics={**self.collection.metrics, **(metrics or {})})
            if time.monotonic() - self._written >= WRITE_SECONDS:
                self._write()

    def close(
        self,
        status: Status,
        metrics: Mapping[str, float] | None = None,
        failed: Mapping[str, str] | None = None,
        *,
        wait: bool = True,
    ) -> None:
        """Mark the collection as ended. failed: reasons by run. wait: return when it is exported or cannot be.

        A collection that a signal has interrupted is not waited for.
        """
        self.update((), metrics)
        with self._lock:
            self._replace(status=status, ended=time.time_ns() // 1_000_000, failed=dict(failed or {}))
            self._write()
        if wait and status != "interrupted":
            self._exporter.flush()

    def _replace(self, **changes: object) -> None:
        self.collection = self.collection.model_copy(update=changes)

    def _write(self) -> None:
        try:
            self.collection = write_collection(self._results, self.collection)
        except (UserError, OSError) as error:
            self._exporter.report(f"{error}; the runs go on")
            return
        self._written = time.monotonic()
        self._exporter.post(self.collection.path, *self._changed, elsewhere=True)
        self._changed.clear()
