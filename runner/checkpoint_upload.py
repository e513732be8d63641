"""Sends what a training writes to the results' URL while it goes on, without taking much of its time."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from procap.errors import UserError
from runner.results_store import ResultsStore
from shards.errors import DataError

logger = logging.getLogger(__name__)

SHARE = 20
"""One part in so many of the time may go into sending."""


class CheckpointUploader:
    """Sends the folder of one run now and then; what cannot be sent is sent later, and is on this disk meanwhile."""

    def __init__(self, store: ResultsStore, run: str) -> None:
        self.store = store
        self.run = run
        self._ended = time.monotonic()
        self._cost = 0.0

    def offer(self) -> None:
        """Send what has changed, unless that was done too short a time ago for what it cost."""
        if not self.store.url or time.monotonic() - self._ended < SHARE * self._cost:
            return
        began = time.monotonic()
        try:
            self.store.push(self.run)
        except (UserError, DataError, OSError) as error:
            logger.warning("%s; the state of %s is sent later", error, self.run)
        self._ended = time.monotonic()
        self._cost = self._ended - began


@contextmanager
def delivered(store: ResultsStore, run: str, *, anew: bool = False) -> Iterator[None]:
    """Bring what a run goes on from, or with `anew` forget it there, and send its folder at the end, however it ends.

    Whoever holds the lock of the run calls this. An error of the run itself is not hidden by one of sending.
    """
    if anew:
        store.clear(run)
    else:
        store.pull(run, state=True)
    try:
        yield
    except BaseException:
        store.push_left(run)
        raise
    store.push(run)
