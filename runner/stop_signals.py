"""Stop on SIGINT and SIGTERM: the training loop finishes its step, writes a checkpoint and returns."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from procap.errors import UserError
from runner.distributed.ranks import is_launched

Item = TypeVar("Item")
ECHO_SECONDS = 2.0
"""Repeated signals within this time are one request: a batch system signals all processes of a job, and the launcher
among them forwards the signal to the others."""
GROUP_WAIT_SECONDS = 2.0
"""How long a wait of one process of a group goes on after a signal. It usually ends by itself, and all processes stop
at the same step. Rank 0 ends a longer one first, because it saves the state, and the others a second later."""


class Interrupted(UserError):
    """A signal stopped the run after a checkpoint; `exit_code` is 128 plus the signal's number."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(f"{signal.Signals(signum).name}: {message}")
        self.exit_code = 128 + signum


class StopRequest:
    """Defer SIGINT and SIGTERM within the block in the main thread; `signum` is the first that arrived, or None.

    A second signal acts at once; in a process that a launcher started, only after ECHO_SECONDS. The first one also ends
    a wait, see `interruptible`: at once without a launcher, else after GROUP_WAIT_SECONDS.
    stop_signal: returns a signal that arrived elsewhere, for a training outside the main thread.
    """

    def __init__(self, stop_signal: Callable[[], int | None] | None = None) -> None:
        self._signum: int | None = None
        self._stop_signal = stop_signal
        self._before: dict[int, Any] = {}
        self._arrived = 0.0
        self._is_waiting = False

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    @property
    def signum(self) -> int | None:
        return self._signum or (self._stop_signal() if self._stop_signal else None)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._signum is None:
            self._signum, self._arrived = signum, time.monotonic()
            if is_launched():
                self._limit_wait()
            else:
                self._restore()
                self._end_wait()
        elif time.monotonic() - self._arrived >= ECHO_SECONDS:
            self._restore()
            signal.raise_signal(signum)

    def _limit_wait(self) -> None:
        """End the wait of this process, if it is in one now, GROUP_WAIT_SECONDS from now."""
        if self._is_waiting and self._before:
            if signal.SIGALRM not in self._before:
                self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._end_wait)
            signal.setitimer(signal.ITIMER_REAL, GROUP_WAIT_SECONDS + (os.environ.get("RANK", "0") != "0"))

    def _end_wait(self, *_: object) -> None:
        if self._is_waiting:
            raise KeyboardInterrupt

    def _restore(self) -> None:
        if signal.SIGALRM in self._before:
            # By default the alarm would end the process.
            signal.setitimer(signal.ITIMER_REAL, 0)
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextmanager
    def interruptible(self, message: str) -> Iterator[None]:
        """Raise `Interrupted` if a signal arrives in the block, which has nothing to lose, such as a wait."""
        self._is_waiting = True
        if self._signum:
            self._limit_wait()
        try:
            yield
        except KeyboardInterrupt:
            if self._signum is None:
                raise
            raise Interrupted(self._signum, message) from None
        finally:
            self._is_waiting = False

    def iterate(self, items: Iterable[Item], what: str, *, together: bool) -> Iterator[Item]:
        """Iterate over the `items` of `what`, and end early if a signal arrives while it waits for the next.

        together: in a process group of several raise `Interrupted` instead, as the others cannot take part in what
            follows: the others stop in their own wait, or when a collective with this rank fails.
        """
        waiting = iter(items)
        while True:
            try:
                with self.interruptible(f"stopped {what}, which waited for images; repeat the command to resume"):
                    item = next(waiting)
            except StopIteration:
                return
            except Interrupted:
                if together:
                    raise
                return
            yield item

    def check(self, message: str) -> None:
        """Raise `Interrupted` if a signal has arrived."""
        if signum := self.signum:
            raise Interrupted(signum, message)


@contextmanager
def sigterm_as_interrupt() -> Iterator[list[int]]:
    """Turn SIGTERM into KeyboardInterrupt if no `StopRequest` defers it; the list receives the signals."""
    arrived: list[int] = []

    def interrupt(signum: int, frame: FrameType | None) -> None:
        arrived.append(signum)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield arrived
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield arrived
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
