"""Copy batches to the device ahead of their use: the next batch is copied while one is used.

On CUDA copies come from page-locked memory and run on a separate stream, and nothing here waits for the device. On
a device without streams the same code does the same work in the same order, at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shards.tasks import prefetch


def to_device(
    batches: Iterable[tuple[Tensor, ...]], device: torch.device, moved: Collection[int] | None = None
) -> Generator[tuple[Tensor, ...], None, None]:
    """Yield the tuples of tensors of `batches` in order, with the entries `moved` (default: all) on `device`.

    On CUDA the copy of the next batch is begun before a batch is yielded; on a CPU tensors pass as they are, one tuple
    at a time. Closing this closes `batches`.
    """
    side = SideStream(device)

    def start(batch: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        return side.run(
            lambda: tuple(upload(t, device) if moved is None or n in moved else t for n, t in enumerate(batch))
        )

    for take in prefetch(batches, start, 1 if device.type == "cuda" else 0):
        yield take()


class SideStream:
    """A CUDA stream for work parallel to that of the consumer; the work issued on one device keeps its order."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        # torch.cuda, or torch.cpu, whose streams and events do nothing.
        self._module = torch.get_device_module(device)
        self._stream = _side_stream(device)

    def run(self, work: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
        """Issue `work`, and return a function that returns its tensors for use on the then current stream.

        That stream waits for them, the host does not. Memory that `work` allocates must be used on the side stream
        only, except for the tensors it returns.
        """
        with self._module.stream(self._stream):
            tensors = work()
            done = self._stream.record_event()

        def take() -> tuple[Tensor, ...]:
            stream = self._module.current_stream(self.device)
            stream.wait_event(done)
            for tensor in tensors:
                # The memory was allocated on the side stream. Without this it could be reused there as soon as the last
                # reference is gone, while kernels that read it are still queued on the current stream.
                if tensor.is_cuda:
                    tensor.record_stream(stream)
            return tensors

        return take


@lru_cache
def _side_stream(device: torch.device) -> Any:
    # One stream per device, because the allocator reuses freed memory only for the stream it was allocated on.
    return torch.get_device_module(device).Stream(device)


def staging(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate host memory, page-locked for CUDA, to fill and then `upload` once, by the thread that issues the work.

    torch's allocator reuses it only after its copies have finished: release it at once, but do not overwrite it.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to `device` on the current stream without blocking the host; returns it if it is there already."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    # A copy from pageable memory, or one that must first be made contiguous, would hold up the host.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def upload_all(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors of one type and any shapes to `device` as `upload` does, in one copy from one page-locked buffer."""
    sizes = [tensor.numel() for tensor in tensors]
    buffer = staging((sum(sizes),), tensors[0].dtype, device)
    for part, tensor in zip(buffer.split(sizes), tensors, strict=True):
        part.view(tensor.shape).copy_(tensor)
    parts = buffer.to(device, non_blocking=True).split(sizes)
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
