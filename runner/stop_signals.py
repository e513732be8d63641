"""Stop on SIGINT and SIGTERM: the training loop finishes its step, saves its state and returns."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from procap.errors import UserError

if TYPE_CHECKING:
    from runner.distributed.collectives import ProcessGroup


class Interrupted(UserError):
    """A signal stopped the run, whose state is saved; `exit_code` is 128 plus the signal's number."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(f"{signal.Signals(signum).name}: {message}")
        self.signum, self.exit_code = signum, 128 + signum


@contextmanager
def handling(numbers: Sequence[int], handler: Any) -> Iterator[None]:
    """Handle signals by `handler` in the block, in the main thread alone: Python allows it nowhere else."""
    before = dict[int, Any]()
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            # None stands for a handler that was not set from Python and cannot be set again.
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


class StopRequest(ExitStack):
    """Defer SIGINT and SIGTERM within the block in the main thread; `signum` is the first that arrived, else 0.

    A second SIGINT acts at once. A second SIGTERM does nothing: batch systems and launchers send several.
    """

    signum = 0

    def __enter__(self) -> Self:
        self.enter_context(handling((signal.SIGINT, signal.SIGTERM), self._handle))
        return self

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signum = self.signum or signum

    def check(self, message: str) -> None:
        """Raise `Interrupted` if a signal has arrived."""
        if self.signum:
            raise Interrupted(self.signum, message)

    def check_ranks(self, group: ProcessGroup, message: str) -> None:
        """Raise `Interrupted` on all ranks if a signal has arrived on one of them."""
        if signum := group.exchange_flags(signum=self.signum).signum:
            # No rank leaves while another may still exchange the flags.
            group.barrier()
            raise Interrupted(signum, message)


@contextmanager
def sigterm_as_interrupt() -> Iterator[list[int]]:
    """Turn SIGTERM into KeyboardInterrupt if no `StopRequest` defers it; the list receives the signals."""
    arrived: list[int] = []

    def interrupt(signum: int, frame: FrameType | None) -> None:
        arrived.append(signum)
        raise KeyboardInterrupt

    with handling((signal.SIGTERM,), interrupt):
        yield arrived
