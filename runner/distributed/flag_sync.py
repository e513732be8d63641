"""Non-blocking all-reduce of save and stop flags: the result of step t is applied at step t + 1."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from runner.distributed.collectives import CPU, ProcessGroup


class Flags(NamedTuple):
    """The maximum of the flags of all ranks. save: write a state. signum: the signal that asks to stop, else 0."""

    save: bool = False
    signum: int = 0


class FlagSync:
    """Exchange flags so that all ranks see the same ones at the same step; all ranks call each method equally often."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._pending: tuple[Tensor, dist.Work] | None = None

    def exchange(self, *, save: bool = False, signum: int | None = None) -> Flags:
        """Start the all-reduce of this rank's flags; returns the result of the call before, with one rank its own."""
        flags = Flags(save, signum or 0)
        if self._group.size == 1:
            return flags
        result = self.wait()
        values = torch.tensor(flags, dtype=torch.int64)
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group.flag_group, async_op=True)
        assert work is not None
        self._pending = values, work
        return result

    def wait(self) -> Flags:
        """Wait for the pending all-reduce, clear it, and return its result."""
        if self._pending is None:
            return Flags()
        (values, work), self._pending = self._pending, None
        with self._group.timed(CPU):
            work.wait()
        save, signum = values.tolist()
        return Flags(bool(save), signum)
