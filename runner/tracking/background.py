"""Export runs to MLflow in the background while they train: a store that is slow or down neither stops nor slows them.

Nothing is exported that is not in a result file first, so that `procap track sync` can export later what was missed.
"""

from __future__ import annotations

import atexit
import functools
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from procap.errors import UserError
from runner.collection import Collection, Status, write_collection
from runner.config import RuntimeConfig
from runner.remote_results import RemoteResults
from runner.results import RunFolder
from runner.tracking.export import sync
from runner.tracking.store import Destination, Store, check_listening, first_line, open_store
from shards.errors import DataError

INTERVAL_SECONDS = 30.0
"""Between two exports. A short run is exported once, at the end of the command, where it disturbs no measurement."""
FLUSH_SECONDS = 60.0

Prepare = Callable[[], None]


class BackgroundExporter:
    """Export folders from a daemon thread, all that were posted since the last time together.

    A failure is reported in one line; what could not be exported is tried again with the next ones.
    """

    def __init__(self, destination: Destination | None, log_checkpoints: bool = False) -> None:
        """destination: None exports nothing, but calls what prepares an export."""
        self.destination = destination
        self._log_checkpoints = log_checkpoints
        self._store: Store | None = None
        self._pending: dict[str, Prepare | None] = {}
        self._changed = threading.Condition()
        self._flushing = self._busy = self._failed = False
        self._reported: set[str] = set()
        self._thread: threading.Thread | None = None

    def post(self, path: str, prepare: Prepare | None = None) -> None:
        """Export the run or collection at `path` below the results soon; returns at once.

        prepare: called in the background before the export.
        """
        with self._changed:
            self._pending[path] = prepare or self._pending.get(path)
            # After a fork the thread is in the parent alone.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="mlflow-export", daemon=True)
                self._thread.start()
                atexit.register(self.flush)

    def flush(self) -> None:
        """Export everything that was posted; returns when that is done, has failed, or stands still."""
        with self._changed:
            if self._thread is None or not self._thread.is_alive() or not (self._pending or self._busy):
                return
            self._flushing = True
            self._changed.notify_all()
            while self._flushing or self._busy:
                if not self._changed.wait(FLUSH_SECONDS):
                    self._fail(f"no answer within {FLUSH_SECONDS:.0f} s")
                    return

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._flushing, INTERVAL_SECONDS)
                self._flushing, self._busy = False, True
                batch, self._pending = self._pending, {}
            left = self._export(batch) if batch else {}
            with self._changed:
                self._pending = {**left, **self._pending}
                self._busy = False
                self._changed.notify_all()

    def _export(self, batch: Mapping[str, Prepare | None]) -> dict[str, Prepare | None]:
        """Export the posted paths; gives those that could not be."""
        for prepare in batch.values():
            if prepare is not None:
                prepare()
        if self.destination is None:
            return {}
        left = dict(batch)

        def exported(path: str, sent: bool) -> None:
            left.pop(path, None)
            with self._changed:
                self._changed.notify_all()

        try:
            if self._store is None:
                self._store = open_store(self.destination)
            else:
                check_listening(self.destination)
            summary = sync(
                self.destination.results,
                self.destination.uri,
                only=batch,
                log_checkpoints=self._log_checkpoints,
                store=self._store,
                on_run=exported,
            )
        except Exception as error:
            self._fail(first_line(error))
            return left
        for path, reason in summary.failed:
            self.report(f"{path}: {reason}")
        if self._failed:
            self._failed = False
            say(f"{self.destination.address} is back: what was missed is exported")
        return {}

    def report(self, text: str) -> None:
        """Print a line that was not printed before."""
        if text not in self._reported:
            self._reported.add(text)
            say(text)

    def _fail(self, reason: str) -> None:
        assert self.destination is not None
        if not self._failed:
            self._failed = True
            later = f"procap track sync --results {shlex.quote(str(self.destination.results))}"
            self.report(f"{reason}; runs go on, export them later with `{later}`")


# One per store and process: a store is opened once, and its failure is reported once, for all runs of a command.
_shared_exporter = functools.cache(BackgroundExporter)


def exporter_for(runtime: RuntimeConfig) -> BackgroundExporter:
    """The exporter of this process for the store of `runtime`; with tracking off it exports nothing."""
    if runtime.tracking_uri == "off":
        return _shared_exporter(None)
    return _shared_exporter(Destination.choose(runtime.results, runtime.tracking_uri), runtime.log_checkpoints)


class Tracker:
    """Export one run as far as its files show it, in the background; with tracking off, do nothing."""

    def __init__(self, folder: RunFolder, runtime: RuntimeConfig) -> None:
        self._path = folder.path.relative_to(runtime.results).as_posix()
        self._exporter = None if runtime.tracking_uri == "off" else exporter_for(runtime)

    def update(self) -> None:
        if self._exporter is not None:
            self._exporter.post(self._path)

    close = update


class CollectionTracker:
    """Write `collection.json` of a suite or sweep and export it with its runs, from any thread and without waiting.

    Nothing here raises: trouble is one line. Where the results are behind a URL, the collection is copied there and its
    runs are fetched before they are exported.
    """

    WRITE_SECONDS = 10.0

    def __init__(self, runtime: RuntimeConfig, collection: Collection) -> None:
        self.place = runtime
        self.collection = collection
        self._exporter = exporter_for(runtime)
        self._store = RemoteResults.of(runtime)
        self._changed: set[str] = set()
        self._finished: set[str] | None = None
        self._written = -self.WRITE_SECONDS
        self._lock = threading.Lock()

    def update(self, runs: Iterable[str], figures: Mapping[str, float] | None = None) -> None:
        """Add runs, by their paths below the results, that have started, progressed or ended, and metrics of all."""
        with self._lock:
            self._add(runs, figures)
            if time.monotonic() - self._written >= self.WRITE_SECONDS:
                self._write()

    def close(
        self, status: Status, figures: Mapping[str, float] | None = None, failed: Mapping[str, str] | None = None
    ) -> None:
        """The collection has ended; returns when everything is exported or cannot be. failed: reasons by run."""
        with self._lock:
            self._add((), figures)
            ended = {"status": status, "ended": time.time_ns() // 1_000_000, "failed": dict(failed or {})}
            self.collection = self.collection.model_copy(update=ended)
            self._write()
        self._exporter.flush()

    def _add(self, runs: Iterable[str], figures: Mapping[str, float] | None) -> None:
        new = dict.fromkeys(runs)
        self._changed |= new.keys()
        update = {
            "runs": tuple(dict.fromkeys([*self.collection.runs, *new])),
            "figures": {**self.collection.figures, **(figures or {})},
        }
        self.collection = self.collection.model_copy(update=update)

    def _write(self) -> None:
        results = self.place.results
        # At first all runs are looked at, for those that were finished before, then only those that changed.
        candidates = self.collection.runs if self._finished is None else self._changed
        self._finished = {run for run in candidates if RunFolder(results / run).train_file.exists()} | (
            self._finished or set()
        )
        counts = {"runs": float(len(self.collection.runs)), "runs_finished": float(len(self._finished))}
        self.collection = self.collection.model_copy(update={"figures": {**self.collection.figures, **counts}})
        try:
            self.collection = write_collection(results, self.collection)
        except (UserError, OSError) as error:
            self._exporter.report(f"{error}; the runs go on")
            return
        self._written = time.monotonic()
        self._exporter.post(self.collection.path, functools.partial(self._copy, self.collection.path))
        for run in self._changed:
            self._exporter.post(run, functools.partial(self._fetch, run))
        self._changed.clear()

    def _copy(self, path: str) -> None:
        try:
            self._store.push_run(path)
        except (UserError, DataError, OSError) as error:
            self._exporter.report(f"{error}; {path} is only in {self.place.results} so far")

    def _fetch(self, run: str) -> None:
        with suppress(UserError, DataError, OSError):
            self._store.pull_run(run, weights=self.place.log_checkpoints)


def say(text: str) -> None:
    """Print a line about tracking, unless the terminal is gone."""
    with suppress(OSError, ValueError):
        print(f"tracking: {text}", file=sys.stderr, flush=True)
