"""Tensors that report the device cuda:0 and compute on the CPU: mixed devices and waits for the device raise.

They lie in a mode that torch takes for its FakeTensorMode but, unlike fake tensors, have values: the set-up of methods,
which may read them, works as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
COPIES = (aten._to_copy.default, aten.copy_.default)
WAITS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
"""Marks of operations whose result the host reads from the device, such as `item` and `nonzero`."""


class CudaTensor(Tensor):
    """A tensor on cuda:0. content: what it holds, on the CPU."""

    content: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> CudaTensor:
        layout = {"strides": values.stride(), "storage_offset": values.storage_offset(), "dtype": values.dtype}
        tensor = Tensor._make_wrapper_subclass(cls, values.shape, device=DEVICE, **layout)
        tensor.content = values
        return tensor

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{operation} outside of `CudaDevice`")


class CudaDevice(TorchDispatchMode):
    """The device cuda:0. in_step: whether operations that the host waits for raise."""

    in_step = False
    # In the place of a FakeTensorMode torch initialises no driver.
    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    @contextmanager
    def step(self) -> Iterator[None]:
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False

    def __enter__(self) -> CudaDevice:
        # As FakeTensorMode: torch asks no driver for the current device, and creates data on the CPU.
        torch._C._ensureCUDADeviceGuardSet()
        self._lifts_cpu_only = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        # `Module.to` replaces parameters, instead of their data.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self._lifts_cpu_only)
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        super().__exit__(*error)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_cuda = [tensor for tensor in tensors if isinstance(tensor, CudaTensor)]
        device = kwargs.get("device")
        to_cuda = torch.device(device).type == "cuda" if device is not None else bool(on_cuda)
        self._check(operation, tensors, on_cuda, to_cuda)
        if device is not None and to_cuda:
            kwargs["device"] = "cpu"
        wrappers = {id(tensor.content): tensor for tensor in on_cuda}
        values = tree_map(lambda leaf: leaf.content if isinstance(leaf, CudaTensor) else leaf, (args, kwargs))
        outputs = operation(*values[0], **values[1])

        def wrap(output: Any) -> Any:
            if not isinstance(output, Tensor):
                return output
            if id(output) in wrappers:
                return wrappers[id(output)]
            return CudaTensor(output) if to_cuda else output

        return tree_map(wrap, outputs)

    def _check(self, operation: Any, tensors: list[Tensor], on_cuda: list[CudaTensor], to_cuda: bool) -> None:
        # Torch moves indices on the CPU to the device.
        is_copy = operation in (*COPIES, aten.index.Tensor)
        is_mixed = bool(on_cuda) and any(tensor.dim() for tensor in tensors if not isinstance(tensor, CudaTensor))
        if is_mixed and not is_copy:
            raise RuntimeError(f"{operation} of tensors on cuda:0 and cpu")
        crosses = is_copy and (is_mixed or bool(on_cuda) != to_cuda)
        # Indexing has the mark because of masks, whose true elements are counted.
        is_indexing = operation is aten.index.Tensor and not any(tensor.dtype == torch.bool for tensor in tensors[1:])
        waits = on_cuda and {*operation.tags} & {*WAITS} and not is_indexing
        if self.in_step and (crosses or waits):
            raise RuntimeError(f"{operation} waits for the device")
