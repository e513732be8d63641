"""Read the tensors of `torch.save` files and TorchScript archives without running any code that they name.

Both are zip files of a pickle and raw storages. Tensors and plain values are restored; an object of any other class and
the result of any function become an object without behaviour. `torch.load` and `torch.jit.load` would refuse or run
what OpenAI (TorchScript) and the public trainers (schedulers that hold live objects) have saved with the tensors.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Inert:
    """A placeholder for an object of any other class or the result of a function: it keeps fields, and does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        self.fields: Mapping[Any, Any] = {}

    def __setstate__(self, state: object) -> None:
        self.fields = state if isinstance(state, Mapping) else {}

    def _ignore(self, *_: object) -> None:
        pass

    __setitem__ = append = extend = add = update = _ignore

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the tensors in the fields of this object and of those that it holds, by their dotted names."""
        tensors: dict[str, Tensor] = {}
        for name, field in self.fields.items():
            if isinstance(field, Tensor):
                tensors[f"{prefix}{name}"] = field
            elif isinstance(field, Inert):
                tensors |= field.tensors(f"{prefix}{name}.")
        return tensors


class _Dict(dict[Any, Any]):
    """A replacement for OrderedDict that ignores the attributes in a pickle."""

    def __setstate__(self, state: object) -> None:
        pass


def _rebuild_tensor(storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object) -> Tensor:
    # as_strided checks that the view lies inside the storage.
    return storage.as_strided(size, stride, offset)


GLOBALS: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Dict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
}
"""What names in a pickle are resolved to, except storages."""


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile) -> None:
        index = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        if index is None:
            raise ValueError("it is no zip file of torch.save")
        super().__init__(archive.open(index), encoding="latin1")
        self._archive, self._folder = archive, index.removesuffix("data.pkl")
        self._storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        # HalfStorage holds torch.half; everything that is not a type stays without behaviour.
        dtype = getattr(torch, name.removesuffix("Storage").lower(), None)
        if module in ("torch", "torch.cuda") and name.endswith("Storage") and isinstance(dtype, torch.dtype):
            return dtype
        return GLOBALS.get((module, name), Inert)

    def persistent_load(self, pid: Any) -> Tensor:
        _, dtype, key, *_ = pid
        if not isinstance(dtype, torch.dtype):
            raise ValueError("it has a tensor of an unknown type")
        if key not in self._storages:
            data = bytearray(self._archive.read(f"{self._folder}data/{key}"))
            self._storages[key] = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return self._storages[key]


def read_pickle(path: Path) -> Any:
    """Return the content of a file of `torch.save` (1.6 or newer) or a TorchScript archive, whose root is an `Inert`.

    A damaged or crafted file can raise any type of error.
    """
    with zipfile.ZipFile(path) as archive:
        return _TensorUnpickler(archive).load()
