"""Non-blocking all-reduce of save and stop flags: the result of step t is applied at step t + 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from runner.distributed.collectives import CPU, ProcessGroup


@dataclass(frozen=True)
class Flags:
    """The flags of one rank, or their maximum over all ranks.

    save: write a state now. signum: number of the signal that asks to stop, else 0.
    """

    save: bool = False
    signum: int = 0


class FlagSync:
    """Exchange flags so that all ranks see the same ones at the same step; all ranks call each method equally often."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._pending: tuple[Tensor, dist.Work] | None = None

    def exchange(self, flags: Flags) -> Flags:
        """Start the all-reduce of `flags` and return the result of the call before; with one rank, `flags` at once."""
        if self._group.ranks.size == 1:
            return flags
        result = self.wait()
        values = torch.tensor([flags.save, flags.signum], dtype=torch.int64)
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
