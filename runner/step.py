"""Take a training step (loss terms, gradients, update), eagerly or captured as CUDA graphs and replayed.

A step never makes the host wait for the device; loss terms reach the host through `AsyncLosses`.

Shapes: T loss terms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from runner.cuda_graphs import CudaGraphs, Part, warm_up_and_capture
from runner.engine import Batch, Engine, make_scaler
from runner.meters import Meter

PHASES = ("forward", "backward", "optimizer")

MAX_PENDING_STEPS = 32
"""How many steps the host may run ahead of the device."""


class TrainStep:
    """The three parts of a step on an engine: forward, backward, update."""

    def __init__(self, engine: Engine, meter: Meter, graphs: CudaGraphs | None = None) -> None:
        """graphs: steps after `capture` are replays; without it every step runs eagerly."""
        self.engine, self.meter = engine, meter
        self._graphs = graphs
        self._replays: list[Part] = []
        self._fixed: Batch | None = None
        self._terms: Tensor | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The loss terms, in order, once a step has run."""
        return self.engine.objective.names

    @property
    def needs_capture(self) -> bool:
        """Whether CUDA graphs are wanted and `capture` has not been called."""
        return self._graphs is not None and self._fixed is None

    @property
    def _parts(self) -> tuple[Part, ...]:
        # Not stored in an attribute: bound methods would form a reference cycle, which keeps the graphs and their
        # memory until the next garbage collection.
        return self._forward, lambda: self.engine.backward(self._weighted), self._update

    def capture(self, batch: Batch) -> None:
        """Warm up and capture, with `batch` as an example; weights and optimizer do not change."""
        assert self._graphs is not None
        # A copy, whose memory all replays read: that of `batch` is freed and used again.
        self._batch = self._fixed = batch.copy()
        with self._graphs.side_stream(), _unchanged(self.engine):
            self._replays = warm_up_and_capture(self._graphs, self._parts, "steps are")
            if not self._replays:
                # The scaler may be in the middle of a step.
                engine = self.engine
                engine.scaler = make_scaler(engine.objective.config, engine.method.clip.device)

    def __call__(self, batch: Batch) -> Tensor:
        """Take a step on `batch`; returns [T + 2], which the next step overwrites.

        These are the weighted terms, their sum, and 1 if the step was skipped because of an overflow at fp16, else 0.
        """
        with self._graphs.side_stream() if self._graphs else nullcontext():
            parts: Sequence[Part] = self._parts
            # A replay reads the memory of the captured batch; a last batch of a different size runs eagerly.
            if self._replays and self._fixed is not None and self._fixed.takes(batch):
                for fixed, tensor in zip(self._fixed.tensors, batch.tensors, strict=True):
                    fixed.copy_(tensor)
                self._batch, parts = self._fixed, self._replays
            else:
                self._batch = batch
            for name, part in zip(PHASES, parts, strict=True):
                with self.meter.phase(name):
                    part()
        assert self._terms is not None
        return self._terms

    def _forward(self) -> None:
        self._weighted = self.engine.terms(self._batch)
        weighted = torch.cat([self._weighted, self._weighted.sum()[None], self.engine.skipped[None]]).detach()
        if self._terms is None:
            self._terms = torch.empty_like(weighted)
        # Into the same memory in all steps, because a replay writes where the captured step wrote.
        self._terms.copy_(weighted)

    def _update(self) -> None:
        self.engine.update()
        assert self._terms is not None
        # In the forward pass it was still that of the step before.
        self._terms[-1].copy_(self.engine.skipped)


@contextmanager
def _unchanged(engine: Engine) -> Iterator[None]:
    """Restore weights, optimizer and scaler in place after the block; optimizer state created in it is zeroed."""
    method, optimizer, scale = engine.method, engine.optimizer, engine.scaler.state_dict()
    weights = [parameter.detach().clone() for parameter in method.parameters()]
    slots = {id(slot): slot.clone() for slot in _slots(optimizer)}
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, before in zip(method.parameters(), weights, strict=True):
                parameter.copy_(before)
            for slot in _slots(optimizer):
                # Optimizers create their state in their first step, here a warm-up; it begins with zeros.
                slot.copy_(slots[id(slot)]) if id(slot) in slots else slot.zero_()
        engine.scaler.load_state_dict(scale)


def _slots(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [slot for state in optimizer.state.values() for slot in state.values() if isinstance(slot, Tensor)]


class AsyncLosses:
    """Copy loss terms from the device to the host without waiting, in order of the steps."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._waiting: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def __len__(self) -> int:
        """Number of steps whose terms were sent and not yet taken."""
        return len(self._waiting)

    def send(self, terms: Tensor) -> None:
        """Start the copy of terms [T + 2]."""
        if not self._on_gpu:
            self._waiting.append((terms.clone(), None))
            return
        copied = torch.empty(terms.shape, dtype=terms.dtype, pin_memory=True)
        # In the stream before the next step overwrites `terms`. Only a copy to page-locked memory does not block.
        copied.copy_(terms, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(terms.device))
        self._waiting.append((copied, arrived))

    def have_arrived(self) -> bool:
        """Whether the terms of all steps so far have arrived."""
        arrived = self._waiting[-1][1] if self._waiting else None
        return arrived is None or arrived.query()

    def take(self, *, everything: bool = False) -> Iterator[list[float]]:
        """Yield the terms that have arrived; with `everything`, wait for all of them."""
        while self._waiting:
            terms, arrived = self._waiting[0]
            if arrived is not None and not arrived.query():
                if not everything and len(self._waiting) <= MAX_PENDING_STEPS:
                    return
                arrived.synchronize()
            self._waiting.popleft()
            yield terms.tolist()
