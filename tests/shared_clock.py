"""A clock for ranks on which only what a test says takes time: who waited for whom is then exact on any machine."""

import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np

import runner.clock
import runner.meters
from runner.distributed.collectives import ProcessGroup

LOOK = 1e-6
"""Seconds that a look at the clock takes, so that nothing takes none."""


class SharedClock:
    """Stands for the module `time` where waits are measured, in this process; all ranks make one of the same file.

    Shapes: W ranks.
    """

    def __init__(self, file, ranks):
        with file.open("ab") as made:
            made.truncate(8 * (1 + ranks.size))
        self._rank = ranks.rank
        self._looks = 0
        # What time it is, and [W] how often each rank has begun to wait for others.
        self._now, self._waits = np.split(np.memmap(file, np.float64, "r+"), [1])
        for module in (runner.clock, runner.meters):
            module.time = self  # type: ignore[attr-defined]
        timed, begin = ProcessGroup.timed, ProcessGroup.begin_waiting

        @contextmanager
        def counted(group, device):
            with timed(group, device):
                self._waits[self._rank] += 1
                yield

        def begun(group, device):
            begin(group, device)
            self._waits[self._rank] += 1

        replaced: dict[str, Callable[..., Any]] = {"timed": counted, "begin_waiting": begun}
        for name, function in replaced.items():
            setattr(ProcessGroup, name, function)

    def perf_counter(self) -> float:
        self._looks += 1
        return float(self._now[0]) + self._looks * LOOK

    def hold_up(self, seconds: float) -> None:
        """Let so much time pass as soon as all others wait for this rank."""
        own, deadline = self._waits[self._rank], time.monotonic() + 120
        while np.delete(self._waits, self._rank).min() <= own:
            assert time.monotonic() < deadline, f"not all wait for rank {self._rank}: {self._waits.tolist()}"
            time.sleep(0.001)
        self._now[0] += seconds
