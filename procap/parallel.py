"""Share a training step between processes: each encodes its images and its classes, and all gather every feature.

Every process then computes the whole loss, so that contrastive terms see the global batch and penalties of the prompts
count once. Gradients are averaged over the processes afterwards; the backward pass of a gather is scaled for that.

Shapes: W processes, B images of the global batch, C classes, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from torch import Tensor

from procap.plan import Plan
from procap.prompt_packing import PromptSet

SHARED_FROM = 32
"""With fewer classes every process encodes all of them, which saves a message.

Measured with two processes of one thread, mini, MaPLe, batch 4: sharing saves nothing of the 32 ms of CPU time of a
step at 8 classes, 3 of 38 ms at 16, 5 of 49 at 32, 8 of 55 at 48. It costs a message, and waiting where shares are
uneven. A GPU launches as many kernels for half the classes: it gains at more classes, where the message is hidden.
"""


class Communicator(Protocol):
    """The part of `runner.distributed.collectives.ProcessGroup` that methods need.

    The gradient of a gathered tensor is the same in every process, since all compute the same loss from it. The
    backward pass of a gather returns this process's rows of this gradient, multiplied by W. After DDP has averaged over
    the processes, parameters before the gather then have the sum over all rows, and parameters after it have the
    gradient that every process computed.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather_interleaved(self, rows: Tensor) -> Tensor:
        """Gather [N, ...] of every process to [W N, ...]: row i of process r becomes row i W + r."""

    def gather_uneven(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Gather [counts[rank], ...] of every process to [sum of counts, ...], in the order of the processes."""


def gather_batch(group: Communicator | None, rows: Tensor) -> Tensor:
    """Gather rows [B / W, ...] of this process's images to those of the global batch [B, ...], in its order."""
    return rows if group is None else group.gather_interleaved(rows)


class ClassShares:
    """The classes divided into one contiguous share per process; sizes differ by one at most."""

    def __init__(self, classes: int, group: Communicator) -> None:
        self.cuts = [classes * rank // group.size for rank in range(group.size + 1)]
        self.counts = [stop - start for start, stop in pairwise(self.cuts)]
        self.bounds = self.cuts[group.rank], self.cuts[group.rank + 1]

    @staticmethod
    def are_worthwhile(classes: int, group: Communicator | None) -> bool:
        """Whether sharing the classes saves more than the message costs."""
        # An empty share of prompts cannot be laid out, so every process needs a class.
        return group is not None and classes >= max(SHARED_FROM, group.size)

    def select(self, prompts: PromptSet, plan: Plan) -> tuple[PromptSet, Plan]:
        """Return this process's prompts and the plan for them."""
        return prompts.subset(*self.bounds), plan.select(slice(*self.bounds))
