"""Ranks agree before anyone saves or stops, and nobody waits for it: a step reads what was said at the step before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from runner.distributed.collectives import CPU, ProcessGroup


@dataclass(frozen=True)
class Status:
    """What a rank wishes, or what all decided.

    save: write a state now. signum: of the signal that asks to stop, else 0; of several the highest.
    failed: this rank cannot go on; it raises its error once all know; the others wait in `ProcessGroup.meet`.
    """

    save: bool = False
    signum: int = 0
    failed: bool = False


class FlagSync:
    """One decision a step, the same on all ranks at the same step; all call each method equally often."""

    def __init__(self, crew: ProcessGroup) -> None:
        self._crew = crew
        self._posted: tuple[Tensor, dist.Work] | None = None

    def exchange(self, status: Status) -> Status:
        """Post a wish and give what all decided by their wishes of the call before; with one rank its own at once."""
        if self._crew.ranks.size == 1:
            return status
        decided = self.settle()
        wish = torch.tensor([status.save, status.signum, status.failed], dtype=torch.int64)
        work = dist.all_reduce(wish, dist.ReduceOp.MAX, group=self._crew.votes, async_op=True)
        assert work is not None
        self._posted = wish, work
        return decided

    def settle(self) -> Status:
        """Wait for what is decided by the last wishes; nothing is then under way. Nobody wishes anything twice."""
        if self._posted is None:
            return Status()
        (wishes, work), self._posted = self._posted, None
        with self._crew.timed(CPU):
            work.wait()
        save, signum, failed = wishes.tolist()
        return Status(bool(save), signum, bool(failed))
