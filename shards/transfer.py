"""Batches to the device ahead of their use: the copy of a later batch runs beside the work on an earlier one.

On CUDA copies come from page-locked memory and run on a stream of their own, and nothing here waits for the device. On
a device without streams the same code does the same work in the same order, at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Started = TypeVar("Started")


def to_device(
    batches: Iterable[tuple[Tensor, ...]],
    device: torch.device,
    ahead: int = 1,
    moved: Collection[int] | None = None,
) -> Generator[tuple[Tensor, ...], None, None]:
    """The tuples of tensors of `batches` in their order, with the entries `moved` (default: all) on `device`.

    On CUDA up to `ahead` later batches are taken from `batches` and their copies begun before a batch is given out; on
    a CPU tensors pass as they are, one tuple at a time. What `batches` raises is raised after the tuples before it.
    Closing this closes `batches`.
    """
    side = SideStream(device)

    def start(batch: tuple[Tensor, ...]) -> Handover:
        return side.run(
            lambda: tuple(upload(t, device) if moved is None or n in moved else t for n, t in enumerate(batch))
        )

    for handover in early(batches, start, ahead if side.overlaps else 0):
        yield handover.take()


def early(items: Iterable[Item], start: Callable[[Item], Started], ahead: int) -> Generator[Started, None, None]:
    """`start` of every item, called up to `ahead` items before its turn.

    An error of `items` or `start` is raised when it is that item's turn; nothing is started after it. Closing this
    closes `items`.
    """
    source = iter(items)
    begun: deque[Started] = deque()
    error: Exception | None = None
    more = True
    try:
        while True:
            while more and len(begun) <= ahead:
                try:
                    item = next(source)
                except StopIteration:
                    more = False
                except Exception as reason:
                    error, more = reason, False
                else:
                    try:
                        begun.append(start(item))
                    except Exception as reason:
                        error, more = reason, False
            if not begun:
                break
            yield begun.popleft()
        if error is not None:
            raise error
    finally:
        # What was begun and is not wanted any more must not outlive this frame inside the traceback of an error.
        begun.clear()
        if callable(close := getattr(source, "close", None)):
            close()


@dataclass(frozen=True)
class Handover:
    """Tensors that a side stream may still be working on."""

    tensors: tuple[Tensor, ...]
    device: torch.device
    done: torch.cuda.Event | None = None

    def take(self) -> tuple[Tensor, ...]:
        """The tensors, for work on the current stream, which waits for them; the host does not."""
        if self.done is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self.done)
            for tensor in self.tensors:
                # Its memory belongs to the side stream: without this it would be written again as soon as the last
                # reference is gone, while kernels of this stream that read it are still queued.
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return self.tensors


class SideStream:
    """Where work runs beside that of the consumer; all that is run there on one device keeps its order."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self._stream = _cuda_stream(device) if device.type == "cuda" else None

    @property
    def overlaps(self) -> bool:
        return self._stream is not None

    def run(self, work: Callable[[], tuple[Tensor, ...]]) -> Handover:
        """Issue `work`. What it allocates must be used by this stream alone, except for the tensors it returns."""
        if self._stream is None:
            return Handover(work(), self.device)
        with torch.cuda.stream(self._stream):
            tensors = work()
            return Handover(tensors, self.device, self._stream.record_event())


@lru_cache
def _cuda_stream(device: torch.device) -> torch.cuda.Stream:
    # One for all: freed memory serves the stream again that it was allocated on, and no other.
    return torch.cuda.Stream(device)


def staging(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory to fill and then `upload` to `device` once; page-locked where that is CUDA.

    Page-locked memory is torch's to reuse: it takes a dropped tensor's memory again after the copies out of it are
    done, which it knows by their events. So a staged tensor may be dropped at once, but never rewritten. To be called
    by the thread that issues the device's work alone: CUDA refuses to lock memory while a graph is recorded.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on `device`, on the current stream and without waiting for it; itself where it is there already."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    # A copy from pageable memory, or one that must first be made contiguous, would hold up the host.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
