"""Suites and sweeps in MLflow: one parent run for each, its runs nested below, kept up to date while it goes on."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable, Mapping

from procap.errors import UserError
from runner.collection import Collection, CollectionFolder, Status, write_collection
from runner.config import RuntimeConfig
from runner.remote_results import RemoteResults
from runner.results import RunFolder
from runner.tracking.outbox import TRACKING, sync
from runner.tracking.parents import parents, sync_collection
from runner.tracking.store import Destination, Store, TrackingError
from runner.tracking.tracker import Sender, say, sender_for
from shards.errors import DataError


class CollectionTracker:
    """Writes `collection.json` and keeps MLflow up to date with a collection and its runs, from any thread.

    Nothing here raises: trouble is one line, and what was missed is sent by `procap track sync`. Where the results are
    behind a URL, what was noted of each sending is there at once: whoever goes on elsewhere must not send it again.
    """

    LIVE_SECONDS = 10.0

    def __init__(self, place: RuntimeConfig, collection: Collection) -> None:
        self.place = place
        self.collection = collection
        self.folder = CollectionFolder(place.results / collection.path)
        self._kept = RemoteResults.of(place)
        self._away = self._said = False
        self._waiting: dict[str, None] = {}
        self._finished: set[str] = set()
        self._counted = False
        self._lock = threading.Lock()
        self._sent = -self.LIVE_SECONDS
        self._sender: Sender | None = None
        if place.tracking_uri != "off":
            self._sender = sender_for(Destination.choose(place.results, place.tracking_uri))

    def update(self, runs: Iterable[str], figures: Mapping[str, float] | None = None) -> None:
        """Runs, by their path below the results, have begun, gone on or ended; sent every LIVE_SECONDS at most."""
        with self._lock:
            self._take(runs, figures)
            if time.monotonic() - self._sent >= self.LIVE_SECONDS:
                self._send()

    def close(
        self, status: Status, figures: Mapping[str, float] | None = None, failed: Mapping[str, str] | None = None
    ) -> None:
        """The collection has ended as `status` says; everything that waits is sent. failed: runs and reasons."""
        with self._lock:
            self._take((), figures)
            ended = {"status": status, "ended": time.time_ns() // 1_000_000, "failed": dict(failed or {})}
            self.collection = self.collection.model_copy(update=ended)
            self._send()

    def _take(self, runs: Iterable[str], figures: Mapping[str, float] | None) -> None:
        given = dict.fromkeys(runs)
        self._waiting |= given
        known = tuple(dict.fromkeys([*self.collection.runs, *given]))
        merged = {**self.collection.figures, **(figures or {})}
        self.collection = self.collection.model_copy(update={"runs": known, "figures": merged})

    def _send(self) -> None:
        try:
            self._count()
            self.collection = write_collection(self.place.results, self.collection)
        except (UserError, OSError) as error:
            say(f"{error}; the runs go on")
            return
        self._away = False
        if self._sender is not None:
            self._sender.send(self.folder.file, self._post)
        self._keep(self.collection.path)
        self._sent = time.monotonic()

    def _count(self) -> None:
        # All of them once, for what was finished before; after that a look at the few that were named is enough.
        looked = self._waiting if self._counted else self.collection.runs
        results = self.place.results
        self._finished |= {run for run in looked if RunFolder(results / run).train_file.exists()}
        self._counted = True
        counts = {"runs": float(len(self.collection.runs)), "runs_finished": float(len(self._finished))}
        self.collection = self.collection.model_copy(update={"figures": {**self.collection.figures, **counts}})

    def _post(self, destination: Destination, store: Store) -> None:
        sync_collection(self.folder, destination, store, lambda: self._keep(self.collection.path))
        links = parents(self.place.results, destination.label)
        for run in list(self._waiting):
            folder = RunFolder(self.place.results / run)
            # A run that was only planned has nothing to send yet; whoever begins it names it again.
            try:
                if folder.config_file.exists():
                    keep = functools.partial(self._keep, run, only=TRACKING)
                    sync(folder, destination, store, links.get(run, {}), keep)
            except TrackingError:
                raise
            except UserError as error:
                say(str(error))
            del self._waiting[run]

    def _keep(self, name: str, *, only: str = "") -> None:
        """Put a folder of the results, or one file of it, to their URL, unless that failed a moment ago."""
        if self._away:
            return
        try:
            self._kept.push_run(name, only=only)
        except (UserError, DataError, OSError) as error:
            self._away = True
            if not self._said:
                self._said = True
                say(f"{error}; what was noted of the runs is only in {self.place.results} so far")
