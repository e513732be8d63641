"""Collective operations of the processes of a run: gather rows with gradient, exchange objects and flags, wait.

Shapes: W ranks, N rows of one rank, R rows of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from procap.errors import UserError
from runner.distributed.ranks import Ranks

T = TypeVar("T")


class Flags(NamedTuple):
    """Maximum of the flags of all ranks, on which each acts: save a state, and stop for `signum` unless it is 0."""

    save: bool = False
    signum: int = 0


class ProcessGroup:
    """The ranks of one run; every method is called by all of them, in the same order.

    With one rank nothing is sent and nothing is copied. Tensors on the CPU go over gloo, on a GPU over NCCL; objects
    are pickled and go over gloo. When a rank is lost, calls of the others raise RuntimeError, at the latest after the
    group's timeout.
    """

    def __init__(self, ranks: Ranks | None = None, flag_group: dist.ProcessGroup | None = None) -> None:
        """flag_group: a separate gloo group for `exchange_flags`, so that no other message delays it."""
        self.ranks = ranks or Ranks()
        self.flag_group = flag_group

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        return self.ranks.size

    def gather(self, rows: Tensor) -> Tensor:
        """Gather rows [N, ...] of every rank to [W * N, ...] in order of the ranks; N must be the same on all.

        The gradient is right for this use: all ranks compute the same loss f(G, p) of the gathered
        G = [x_0(p) .. x_W-1(p)] and of the parameters p, and DDP then averages the gradients of p over the ranks. The
        total gradient is df/dp + sum_r (df/dG_r)(dx_r/dp). G and p are equal on all ranks, so every rank has df/dp and
        the whole df/dG without communication. The backward pass returns the slice df/dG_r times W on rank r, which then
        has df/dp + W (df/dG_r)(dx_r/dp); the average of that over the ranks is the total gradient.
        Random numbers that are drawn after the gather must be the same on all ranks.
        """
        return rows if self.size == 1 else _Gather.apply(rows, self)

    def gather_interleaved(self, rows: Tensor) -> Tensor:
        """Gather in the order of a batch dealt out as batch[r::W]: row i of rank r becomes row i * W + r."""
        if self.size == 1:
            return rows
        gathered = self.gather(rows)
        # [W N, ...] to [W, N, ...] to [N, W, ...]: the rows i of all ranks side by side.
        return gathered.view(self.size, len(rows), *rows.shape[1:]).transpose(0, 1).reshape(gathered.shape)

    def gather_uneven(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Gather like `gather` if rank r has counts[r] rows; a rank without rows passes a computed [0, ...] tensor."""
        if len(counts) != self.size or len(rows) != counts[self.rank]:
            raise ValueError(f"rank {self.rank} has {len(rows)} rows, counts are {list(counts)}")
        if self.size == 1:
            return rows
        # A collective needs equal shapes on all ranks: pad, gather, and cut the padding off.
        most = max(counts)
        padded = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
        parts = self.gather(padded).split(most)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def average(self, values: Tensor) -> None:
        """Replace `values` by their mean over the ranks."""
        if self.size > 1:
            # Divided first, as DDP does, so that both give the same bits.
            dist.all_reduce(values.div_(self.size))

    def merge_rows(self, rows: Tensor) -> None:
        """Fill in what the ranks have computed of `rows`, float32, in place; a row is not zero on one rank at most."""
        if self.size > 1:
            # As integers, so that every bit of that rank arrives: as numbers, -0.0 + 0.0 is 0.0.
            dist.all_reduce(rows.view(torch.int32))

    def all_gather_object(self, value: T) -> list[T]:
        """Gather `value` of every rank to every rank, in order of the ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast_object(self, value: T) -> T:
        """Send rank 0's `value` to every rank; what the other ranks pass is ignored."""
        if self.size == 1:
            return value
        values = [value if self.ranks.is_first else None]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return cast(T, values[0])

    def call_on_first(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0 and return its result on every rank."""
        return self.broadcast_object(cast(T, function() if self.ranks.is_first else None))

    def check_same(self, what: str, value: str) -> None:
        """Raise UserError on all ranks unless `value` is the same on all; names `what` and the first other rank."""
        for rank, other in enumerate(values := self.all_gather_object(value)):
            if other != values[0]:
                raise UserError(f"{what} is {values[0]} on rank 0 and {other} on rank {rank}: give all hosts the same")

    def exchange_flags(self, *, save: bool = False, signum: int = 0) -> Flags:
        """Return the maximum of the flags that the ranks pass, so that all act on it at the same step."""
        if self.size == 1:
            return Flags(save, signum)
        # A CPU tensor over gloo: an exchange on the GPU would make the host wait for the device.
        flags = torch.tensor([save, signum])
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.flag_group)
        return Flags(bool(flags[0]), int(flags[1]))

    def barrier(self) -> None:
        """Wait until every rank calls this. Raises RuntimeError naming a rank that does not come in time."""
        if self.size > 1:
            # Only gloo has it; `dist.barrier` would not say which rank is late.
            dist.monitored_barrier(self.flag_group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.ranks = group.ranks
        gathered = rows.new_empty(group.ranks.size * len(rows), *rows.shape[1:])
        dist.all_gather_into_tensor(gathered, rows.contiguous())
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ranks, rows = ctx.ranks, len(gradient) // ctx.ranks.size
        # No communication: every rank has the whole gradient of the gathered rows already, see `ProcessGroup.gather`.
        return gradient.narrow(0, ranks.rank * rows, rows) * ranks.size, None
