"""Stopping politely: a signal asks, the loop finishes its step, writes a checkpoint and leaves."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from procap.errors import UserError

ECHO_SECONDS = 2.0
"""A cluster signals all processes of a job, and a launcher among them passes the signal on: that is one request."""


class Interrupted(UserError):
    """A signal stopped the run after a checkpoint; `exit_code` is 128 plus the signal's number."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


class StopRequest:
    """Holds SIGINT and SIGTERM back while it is entered; `signum` is the one that came, or None.

    A second signal acts at once, in a process that a launcher started if it comes after ECHO_SECONDS. Outside the main
    thread, where Python takes no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, Any] = {}
        self._came = 0.0

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is None:
            self.signum, self._came = signum, time.monotonic()
            if "LOCAL_RANK" not in os.environ:
                self._restore()
        elif time.monotonic() - self._came >= ECHO_SECONDS:
            self._restore()
            signal.raise_signal(signum)

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def check(self, message: str) -> None:
        """Raise `Interrupted` when a signal has come."""
        if self.signum is not None:
            raise interrupted(self.signum, message)


def interrupted(signum: int, message: str) -> Interrupted:
    """What signal `signum` ends a run with."""
    return Interrupted(f"{signal.Signals(signum).name}: {message}", signum)


@contextmanager
def sigterm_as_interrupt() -> Iterator[list[int]]:
    """Let SIGTERM unwind like Ctrl-C where no `StopRequest` holds it back; the list given tells whether one came."""
    came: list[int] = []

    def interrupt(signum: int, frame: FrameType | None) -> None:
        came.append(signum)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
