"""MLflow beside a run and after it: a tracker that never hurts the run, and the sending of what was missed.

Nothing is sent that is not in a result file first, so that a tracker that is down loses nothing.
"""

from __future__ import annotations

import atexit
import functools
import shlex
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from procap.errors import UserError
from runner.config import RuntimeConfig
from runner.results import RunFolder, find_runs
from runner.tracking.outbox import Delivery, delivery_of, ids_of_runs, looks_sent, sync, tracking_of
from runner.tracking.parents import find_collections, missing_collections, parents, sync_collection
from runner.tracking.record import read_record
from runner.tracking.store import Destination, Store, TrackingError, check_answers, first_line, open_store

FEW = 20
"""Runs below which each is asked for by itself."""

Post = Callable[[Destination, Store], object]


@dataclass(frozen=True)
class Missing:
    """What a store has not got of one run."""

    run: str
    epochs: int
    files: tuple[str, ...]
    unreadable: str = ""
    """Why that cannot be told, where it cannot."""

    def __str__(self) -> str:
        if self.unreadable:
            return f"{self.run}: {self.unreadable}"
        parts = [f"{self.epochs} epoch{'s' * (self.epochs != 1)}"] if self.epochs else []
        return f"{self.run}: {', '.join([*parts, *self.files]) or 'its state'}"


@dataclass
class Summary:
    """What `sync_all` did; `failed` holds the run and the reason."""

    destination: str
    sent: list[str] = field(default_factory=list)
    up_to_date: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)


def pending(results_root: Path, uri: str | None = None) -> list[Missing]:
    """What every run and collection below `results_root` has not sent yet, by its own `tracking.json`.

    Asks no store, needs no MLflow. One with a broken file is among them, and why nobody can tell.
    """
    destination = Destination.choose(results_root, uri)
    gone = destination.file is not None and not destination.file.exists()
    collections = missing_collections(results_root, destination, gone=gone)
    missing = [Missing(name, 0, (), unreadable) for name, unreadable in collections.items()]
    links = parents(results_root, destination.label)
    for folder in find_runs(results_root):
        name = _name(folder, results_root)
        above = links.get(name)
        if not gone and looks_sent(folder.path, delivery_of(folder.path, destination.label), above):
            continue
        try:
            record = read_record(folder)
            if record is None or record.attempt is None:
                continue
            tracking = tracking_of(folder.path, record)
        except UserError as error:
            missing.append(Missing(name, 0, (), str(error)))
            continue
        there = None if gone else tracking.stores.get(destination.label)
        if there is None or not there.covers(record, above):
            last, sent = (there.last_epoch, there.files) if there else (-1, {})
            epochs = sum(epoch.epoch > last for epoch in record.epochs)
            files = tuple(name for name, digest in record.files.items() if sent.get(name) != digest)
            missing.append(Missing(name, epochs, files))
    return missing


def sync_all(results_root: Path, uri: str | None = None, on_run: Callable[[str, bool], None] | None = None) -> Summary:
    """Send what is missing of every run below `results_root`; `on_run(run, sent)` after each.

    A run with a broken file is reported in the summary and the others go on. Raises TrackingError when the store cannot
    be reached or stops answering, UsageError for a URI that is none.
    """
    destination = Destination.choose(results_root, uri)
    summary = Summary(destination.address)
    folders, collections = find_runs(results_root), find_collections(results_root)
    if not folders and not collections:
        return summary
    store = open_store(destination)

    def post(where: Path, send: Callable[[], bool]) -> None:
        name = where.relative_to(results_root).as_posix()
        try:
            sent = send()
        except TrackingError:
            raise
        except UserError as error:
            summary.failed.append((name, str(error)))
            return
        if sent:
            summary.sent.append(name)
        else:
            summary.up_to_date += 1
        if on_run is not None:
            on_run(name, sent)

    # Parents first: a run cannot be put below what is not there.
    for collection in collections:
        post(collection.path, functools.partial(sync_collection, collection, destination, store))
    links = parents(results_root, destination.label)
    known = {folder.path: delivery_of(folder.path, destination.label) for folder in folders}
    # Asking for one run after the other takes longer than asking for all, unless they are few.
    there = ids_of_runs(store) if len(folders) > FEW else set()
    for folder in folders:
        above, delivery = links.get(_name(folder, results_root)), known[folder.path]
        if delivery and delivery.run_id in there and looks_sent(folder.path, delivery, above):
            post(folder.path, lambda: False)
            continue
        post(folder.path, functools.partial(sync, folder, destination, store, above))
    return summary


def deliveries(results_root: Path, uri: str | None = None) -> dict[str, Delivery]:
    """Where each run of `results_root` is in the store, by its path below `results_root`.

    A run whose `tracking.json` cannot be read is left out; `sync_all` reports it.
    """
    label = Destination.choose(results_root, uri).label
    found = {}
    for folder in find_runs(results_root):
        delivery = delivery_of(folder.path, label)
        if delivery is not None:
            found[_name(folder, results_root)] = delivery
    return found


class Sender:
    """Sends the runs of this process to one destination and keeps trouble away from them: `send` never raises.

    After a failure it says so once, leaves the store alone for a while (RETRY_SECONDS, and ten times what the failure
    took), and tries a last time when the process ends; a run that was missed goes with the next one that succeeds.
    """

    RETRY_SECONDS = 60.0

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self._store: Store | None = None
        self._waiting: dict[Path, Post] = {}
        self._lock = threading.RLock()
        self._down = False
        self._retry = 0.0
        self._said = False

    def send(self, sign: Path, post: Post) -> None:
        """Call `post`, now or later, unless the file `sign` is gone by then; the latest one of a file counts."""
        with self._lock:
            self._waiting[sign] = post
            if not self._down or time.monotonic() >= self._retry:
                self._try()

    def _try(self) -> None:
        began = time.monotonic()
        self._waiting = {sign: post for sign, post in self._waiting.items() if sign.exists()}
        missed = len(self._waiting) - 1
        if not self._waiting:
            return
        try:
            if self._store is None:
                self._store = open_store(self.destination)
            else:
                check_answers(self.destination)
            # The newest first: an older run that cannot be sent must not hold it up.
            for sign, post in reversed(list(self._waiting.items())):
                post(self.destination, self._store)
                del self._waiting[sign]
        except Exception as error:
            self._down, now = True, time.monotonic()
            self._retry = now + max(self.RETRY_SECONDS, 10 * (now - began))
            if not self._said:
                self._said = True
                atexit.register(self._last_try)
                later = f"procap track sync --results {shlex.quote(str(self.destination.results))}"
                say(f"{first_line(error)}; the run goes on, send it later with `{later}`")
            return
        if self._down:
            self._down = False
            say(f"{self.destination.address} is back; {missed + 1} run{'s' * (missed > 0)} sent")

    def _last_try(self) -> None:
        with suppress(KeyboardInterrupt), self._lock:
            self._try()


class Tracker:
    """Keeps MLflow up to date with one run; never raises, and with no `sender` does nothing."""

    LIVE_SECONDS = 30.0

    def __init__(self, folder: RunFolder, sender: Sender | None) -> None:
        self.folder = folder
        self.sender = sender
        self._sent = time.monotonic()

    def sync(self) -> None:
        """Let people watch a long run: sends every LIVE_SECONDS at most; a short run is sent only at its end."""
        if time.monotonic() - self._sent >= self.LIVE_SECONDS:
            self.close()

    def close(self) -> None:
        """Send everything that is missing."""
        if self.sender is not None:
            self.sender.send(self.folder.config_file, lambda destination, store: sync(self.folder, destination, store))
        self._sent = time.monotonic()


def tracker_for(folder: RunFolder, place: RuntimeConfig) -> Tracker:
    """The tracker of a run at `place`; `place.tracking_uri` "off" gives one that does nothing."""
    if place.tracking_uri == "off":
        return Tracker(folder, None)
    return Tracker(folder, sender_for(Destination.choose(place.results, place.tracking_uri)))


# One sender per store and process: a store is opened once, and its failure said once, for all the runs of a command.
sender_for = functools.cache(Sender)


def say(text: str) -> None:
    """Tell people about tracking, where there is still somebody to tell."""
    with suppress(OSError, ValueError):
        print(f"tracking: {text}", file=sys.stderr, flush=True)


def _name(folder: RunFolder, results_root: Path) -> str:
    return folder.path.relative_to(results_root).as_posix()
