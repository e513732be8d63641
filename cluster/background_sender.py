"""What a driver tells its tracker, in the background: who is slow to answer holds up no run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

Send = Callable[[list[str], dict[str, float]], None]


class BackgroundSender:
    """Gives `send` the runs that have something new and the latest figures, from a thread of its own.

    What is posted while `send` is busy goes out together: however many runs speak and however slow the tracker is, no
    more than one sending waits, so that an end or a Ctrl-C never waits for a backlog.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._runs: dict[str, None] = {}
        self._figures: dict[str, float] = {}
        self._waits = False
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tracker")

    def post(self, runs: Iterable[str], figures: Mapping[str, float] | None = None) -> None:
        """Returns at once."""
        with self._lock:
            self._runs |= dict.fromkeys(runs)
            self._figures |= figures or {}
            if not self._waits:
                self._waits = True
                self._thread.submit(self._deliver)

    def close(self) -> None:
        """Everything that was posted is sent when this returns."""
        self._thread.shutdown(wait=True)

    def _deliver(self) -> None:
        with self._lock:
            runs, figures, self._waits = list(self._runs), dict(self._figures), False
            self._runs.clear()
            self._figures.clear()
        self._send(runs, figures)
