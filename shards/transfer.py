"""Copy batches to the device; on CUDA the copies come from page-locked memory, and the host does not wait for them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

import torch
from torch import Tensor

from shards.tasks import prefetch


def to_device(batches: Iterable[tuple[Tensor, ...]], device: torch.device) -> Generator[tuple[Tensor, ...], None, None]:
    """Yield the tuples of tensors of `batches` on `device`, in order. Closing this closes `batches`."""
    return prefetch(batches, lambda batch: tuple(upload(tensor, device) for tensor in batch), 0)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to `device` on the current stream without blocking the host; returns it if it is there already."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    # A copy from pageable memory, or one that must first be made contiguous, would hold up the host.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def upload_all(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors of one type and any shapes to `device` as `upload` does, in one copy."""
    together = upload(torch.cat([tensor.flatten() for tensor in tensors]), device)
    parts = together.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
