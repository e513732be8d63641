"""Capture the objective of training steps as CUDA graphs: one launch on the host instead of thousands.

Captured work runs the same kernels on the same memory every time: it must not read numbers back to the host, and shapes
must not change. After a capture that fails, the allocator of torch 2.11 and 2.12 releases no memory any more. So work
is first tried under torch's check for synchronizations, and a capture that fails all the same ends the run. A
`CaptureTape` finds on any device what a graph could not hold.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from procap.errors import UserError

log = logging.getLogger(__name__)
aten = torch.ops.aten
WAITS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""Marks of operations whose result the host reads from the device, such as `item` and `nonzero`."""
COPIES_FROM_HOST = (aten.lift_fresh.default, aten.lift.default)
"""Operations by which `torch.tensor` makes a tensor of numbers of the host."""

WARMUP_RUNS = 3
"""Eager runs before a capture: libraries choose kernels and workspaces, torch compiles and allocates."""


def capture_objective(objective: nn.Module, inputs: tuple[Tensor, ...]) -> nn.Module | None:
    """Make forward and backward passes of `objective` replays of CUDA graphs, for inputs of these shapes.

    inputs: an example, to whose memory each call copies its arguments. Returns `objective`, or None with a warning if
    the host would wait for the device in a step. Raises UserError if the capture fails.
    """
    learned = [parameter for parameter in objective.parameters() if parameter.requires_grad]

    def step() -> None:
        torch.autograd.grad(objective(*inputs).sum(), learned, allow_unused=True)

    for _ in range(WARMUP_RUNS):
        step()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        log.warning("steps run eagerly, without CUDA graphs: %s", str(error).partition("\n")[0])
        return None
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    try:
        # It replaces the module's forward by the replay.
        torch.cuda.make_graphed_callables(objective, inputs, WARMUP_RUNS, allow_unused_input=True)
    except Exception as error:
        # Ending a broken capture raises another error; the one that caused it says more.
        text = str(error.__context__ if isinstance(error.__context__, RuntimeError) else error).partition("\n")[0]
        raise UserError(f"steps cannot be captured as CUDA graphs: {text}: repeat with --accelerate off") from error
    return objective


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
