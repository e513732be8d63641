"""Find on any device what a CUDA graph could not hold, by watching the operations of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
WAITS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""Marks of operations whose result the host reads from the device, such as `item` and `nonzero`."""
COPIES_FROM_HOST = (aten.lift_fresh.default, aten.lift.default)
"""Operations by which `torch.tensor` makes a tensor of numbers of the host."""


class CaptureError(RuntimeError):
    """An operation that a CUDA graph cannot hold."""


class CaptureTape(TorchDispatchMode):
    """Raise CaptureError at the first operation that a capture on a GPU would refuse. operations: how many ran."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check_capturable(operation, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
        self.operations += 1
        return operation(*args, **(kwargs or {}))


def check_capturable(operation: Any, tensors: list[Tensor]) -> None:
    """Raise CaptureError if a CUDA graph cannot hold `operation` on `tensors`."""
    # Indexing has the mark because of masks, whose true elements are counted.
    is_indexing = operation is aten.index.Tensor and not any(tensor.dtype == torch.bool for tensor in tensors[1:])
    if {*operation.tags} & WAITS and not is_indexing:
        raise CaptureError(f"the host waits for the result of {operation}")
    if operation in COPIES_FROM_HOST:
        raise CaptureError("a tensor is made of numbers of the host")
