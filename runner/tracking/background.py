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
from collections.abc import Mapping, Sequence
from contextlib import suppress

from procap.errors import UserError
from runner.config import RuntimeConfig
from runner.remote_results import RemoteResults
from runner.run_collection import COLLECTIONS, Collection, Status, write_collection
from runner.tracking.export import sync
from runner.tracking.store import TrackingStore, format_error

INTERVAL_SECONDS = 30.0
"""Between two exports. A short run is exported once, at the end of the command, where it disturbs no measurement."""
FLUSH_SECONDS = 60.0
WRITE_SECONDS = 10.0
"""Between two updates of `collection.json`."""


class BackgroundExporter:
    """Export runs and collections from a daemon thread, everything posted since the last export at once.

    A failure is reported in one line; what could not be exported is tried again with the next ones.
    store: None only synchronizes with `remote`, the URL of the results.
    """

    def __init__(self, store: TrackingStore | None, remote: RemoteResults, log_checkpoints: bool = False) -> None:
        self.store = store
        self._remote = remote
        self._log_checkpoints = log_checkpoints
        self._pending: dict[str, bool] = {}
        self._lock = threading.Lock()
        self._flushing = threading.Event()
        self._thread: threading.Thread | None = None
        self._exported = 0
        self._reported: set[str] = set()

    def post(self, *paths: str, synchronize: bool = False) -> None:
        """Export the runs or collections at `paths` soon; `synchronize`: with the URL of the results first."""
        if self.store is not None or self._remote.url:
            with self._lock:
                self._pending |= {path: synchronize or self._pending.get(path, False) for path in paths}
                self._start()

    def flush(self, *, create: bool = True) -> None:
        """Export everything that was posted; returns when that is done, has failed, or makes no progress.

        create: else the default store is left to `procap ui` while it does not exist. MLflow takes longer to import and
            to make its tables than a short training.
        """
        if not (create or self.store is None or self._remote.url) and self.store.is_unused:
            with self._lock:
                self._pending.clear()
        self._flushing.set()
        # The second time for what was posted while the thread was exporting.
        for _ in range(2):
            with self._lock:
                self._start()
                thread = self._thread
            while thread is not None and thread.is_alive():
                before = self._exported
                thread.join(FLUSH_SECONDS)
                if thread.is_alive() and self._exported == before:
                    self._report_failure(f"no answer within {FLUSH_SECONDS:g} s")
                    return
        self._flushing.clear()

    def report(self, text: str) -> None:
        """Print a line unless it was printed before or stderr is closed."""
        if text not in self._reported:
            self._reported.add(text)
            with suppress(OSError, ValueError):
                print(f"tracking: {text}", file=sys.stderr, flush=True)

    def _start(self) -> None:
        if self._pending and (self._thread is None or not self._thread.is_alive()):
            if self._thread is None:
                atexit.register(self.flush, create=False)
            self._thread = threading.Thread(target=self._export_pending, name="mlflow-export", daemon=True)
            self._thread.start()

    def _export_pending(self) -> None:
        self._flushing.wait(INTERVAL_SECONDS)
        with self._lock:
            batch, self._pending = self._pending, {}
        if not batch:
            return
        for path in (path for path, synchronize in batch.items() if synchronize):
            try:
                if path.startswith(f"{COLLECTIONS}/"):
                    self._remote.push_run(path)
                else:
                    self._remote.pull_run(path, weights=self._log_checkpoints)
            except (UserError, OSError) as error:
                self.report(f"{error}; what is new is only in {self._remote.local} so far")
        if self.store is None:
            return

        def on_run(path: str, sent: bool) -> None:
            self._exported += 1

        try:
            summary = sync(self.store.open(), only=batch, log_checkpoints=self._log_checkpoints, on_run=on_run)
            for path, reason in summary.failed:
                self.report(f"{path}: {reason}")
        except Exception as error:
            with self._lock:
                self._pending = batch | self._pending
            self._report_failure(format_error(error))

    def _report_failure(self, reason: str) -> None:
        if self.store is not None:
            later = f"procap track sync --results {shlex.quote(str(self.store.results))}"
            self.report(f"{reason}; runs go on, export them later with `{later}`")


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
        finished = float(len(self.collection.finished(self._results)))
        counts = {"runs": float(len(self.collection.runs)), "runs_finished": finished}
        self._replace(metrics=self.collection.metrics | counts)
        try:
            self.collection = write_collection(self._results, self.collection)
        except (UserError, OSError) as error:
            self._exporter.report(f"{error}; the runs go on")
            return
        self._written = time.monotonic()
        self._exporter.post(self.collection.path, *self._changed, synchronize=True)
        self._changed.clear()
