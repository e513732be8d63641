"""What the processes of a run do together: gather rows with gradient, pass each other JSON, average.

Shapes: W ranks, N rows of one rank, R rows of all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor
from torch.autograd.function import once_differentiable

from procap.errors import UserError
from runner.distributed.ranks import Ranks

CPU = torch.device("cpu")
Record = TypeVar("Record", bound=BaseModel)


class ProcessGroup:
    """The ranks of one run; every method but `seconds` is called by all of them, in the same order.

    With one rank there is no group, nothing is sent and nothing is copied. Tensors on the CPU go over gloo, on a GPU
    over NCCL; JSON never touches the GPU. A rank that is lost makes the others' calls raise RuntimeError, at the latest
    after the group's timeout; `runner.distributed.process_group.joined` turns that into a line for people.
    """

    def __init__(self, ranks: Ranks, votes: dist.ProcessGroup | None = None) -> None:
        """votes: a group of gloo for `runner.distributed.flag_sync`, whose messages never mix with those of others."""
        self.ranks = ranks
        self.votes = votes
        self._seconds = 0.0
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._waiting: float | torch.cuda.Event | None = None

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self.ranks.rank

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.ranks.size

    def gather(self, rows: Tensor) -> Tensor:
        """The rows [N, ...] of every rank as [W * N, ...] in order of the ranks; N must be the same on all.

        With gradient, for this use: all ranks compute the same loss f(G, p) of the gathered G = [x_0(p) .. x_W-1(p)]
        and of the parameters p, and the gradients of p are then averaged over the ranks, as DDP does. The gradient that
        is wanted is df/dp + sum_r (df/dG_r)(dx_r/dp). G and p are the same everywhere, so every rank has df/dp and the
        whole df/dG without asking. Backward hands rank r its own slice df/dG_r times W, and nothing is communicated:
        rank r then has df/dp + W (df/dG_r)(dx_r/dp), and the average over ranks is what is wanted.
        What draws random numbers after the gather must draw the same on all ranks.
        """
        return rows if self.ranks.size == 1 else _Gather.apply(rows, self)

    def gather_interleaved(self, rows: Tensor) -> Tensor:
        """`gather` in the order of a batch that was dealt out as batch[r::W]: row i of rank r becomes row i * W + r."""
        if self.ranks.size == 1:
            return rows
        gathered = self.gather(rows)
        return gathered.view(self.ranks.size, len(rows), *rows.shape[1:]).transpose(0, 1).reshape(gathered.shape)

    def gather_uneven(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """`gather` where rank r has counts[r] rows, known to all, as `procap.parallel.ClassShares` has them.

        Gradients are needed on all ranks or on none: a rank without rows passes [0, ...] that stems from its weights.
        """
        if len(counts) != self.ranks.size or len(rows) != counts[self.ranks.rank]:
            raise ValueError(f"rank {self.ranks.rank} has {len(rows)} rows, counts are {list(counts)}")
        if self.ranks.size == 1:
            return rows
        most = max(counts)
        padded = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
        parts = self.gather(padded).split(most)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one device by their mean over the ranks, all in one message."""
        if self.ranks.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with self.timed(flat.device):
            dist.all_reduce(flat)
        flat /= self.ranks.size
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    def collect(self, value: Any) -> list[Any]:
        """The JSON-able `value` of every rank, on every rank, in order of the ranks."""
        if self.ranks.size == 1:
            return [value]
        own = _bytes(value)
        with self.timed(CPU):
            lengths = torch.empty(self.ranks.size, dtype=torch.int64)
            dist.all_gather_into_tensor(lengths, torch.tensor([len(own)]))
            most = int(lengths.max())
            everything = torch.empty(self.ranks.size * most, dtype=torch.uint8)
            dist.all_gather_into_tensor(everything, torch.cat([own, own.new_zeros(most - len(own))]))
        return [_value(part[:n]) for part, n in zip(everything.split(most), lengths.tolist(), strict=True)]

    def same(self, what: str, value: str) -> None:
        """Raises UserError, the same on all ranks, where `value` is not: it says `what` differs, and on which rank."""
        for rank, other in enumerate(found := self.collect(value)):
            if other != found[0]:
                raise UserError(f"{what} is {found[0]} on rank 0 and {other} on rank {rank}: give all hosts the same")

    def share(self, value: Any) -> Any:
        """Rank 0's JSON-able `value`, on every rank; what the others pass is not looked at."""
        if self.ranks.size == 1:
            return value
        message = self._sent(_bytes(value) if self.ranks.first else None)
        return value if self.ranks.first else _value(message)

    def share_record(self, record: Record | None, kind: type[Record]) -> Record | None:
        """Rank 0's `record`, on every rank; what the others pass is not looked at."""
        plain = self.share(record and record.model_dump(mode="json", by_alias=True))
        return record if self.ranks.first or plain is None else kind.model_validate(plain)

    def share_bytes(self, data: bytes | None) -> bytes | None:
        """Rank 0's `data`, on every rank, None for nothing; what the others pass is not looked at."""
        if self.ranks.size == 1:
            return data
        first = self.ranks.first
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if first and data else torch.empty(0).byte()
        message = self._sent(own if first else None)
        return data if first else message.numpy().tobytes() or None

    def _sent(self, message: Tensor | None) -> Tensor:
        """Rank 0's uint8 `message` [n], on every rank."""
        with self.timed(CPU):
            length = torch.tensor([0 if message is None else len(message)])
            dist.broadcast(length, 0)
            if message is None:
                message = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(message, 0)
        return message

    def meet(self) -> None:
        """Wait until every rank is here."""
        if self.ranks.size > 1:
            with self.timed(CPU):
                dist.all_reduce(torch.zeros(1))

    def restart_seconds(self) -> None:
        """Count `seconds` from here on: a crew may do several runs, and waits while each is set up."""
        self._seconds, self._marks = 0.0, []

    @property
    def seconds(self) -> float:
        """Spent in the calls above so far, waiting for other ranks included; DeepSpeed's messages are not seen.

        On a GPU the device's time, of the calls it is done with: reading never waits.
        """
        waiting = []
        for start, end in self._marks:
            if end.query():
                self._seconds += start.elapsed_time(end) / 1000
            else:
                waiting.append((start, end))
        self._marks = waiting
        return self._seconds

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave what the block sends, all of it on the CPU, out of `seconds`."""
        before = self._seconds
        try:
            yield
        finally:
            self._seconds = before

    def begin_waiting(self, device: torch.device) -> None:
        """From here on, unless called again, there is nothing to do but to wait for messages that others make."""
        self._waiting = self._mark(device)

    def end_waiting(self, device: torch.device) -> None:
        """Count the time since `begin_waiting` in `seconds`."""
        if self._waiting is not None:
            start, self._waiting = self._waiting, None
            end = self._mark(device)
            if isinstance(start, float) and isinstance(end, float):
                self._seconds += end - start
            elif not isinstance(start, float) and not isinstance(end, float):
                self._marks.append((start, end))

    def _mark(self, device: torch.device) -> float | torch.cuda.Event:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    @contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Count the block, which communicates tensors of `device`, in `seconds`."""
        if device.type != "cuda":
            began = time.perf_counter()
            try:
                yield
            finally:
                self._seconds += time.perf_counter() - began
            return
        if torch.cuda.is_current_stream_capturing():
            # Events that were recorded into a CUDA graph have no time of their own.
            yield
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(torch.cuda.current_stream(device))
        yield
        end.record(torch.cuda.current_stream(device))
        self._marks.append((start, end))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, crew: ProcessGroup) -> Tensor:
        ctx.ranks = crew.ranks
        gathered = rows.new_empty(crew.ranks.size * len(rows), *rows.shape[1:])
        with crew.timed(rows.device):
            dist.all_gather_into_tensor(gathered, rows.contiguous())
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ranks, rows = ctx.ranks, len(gradient) // ctx.ranks.size
        return gradient.narrow(0, ranks.rank * rows, rows) * ranks.size, None


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(message: Tensor) -> Any:
    return json.loads(message.numpy().tobytes())
