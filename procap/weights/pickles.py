"""Restore tensors and plain values from the pickles of torch, without running any code that they name."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Mapping
from typing import IO, Any

import torch
from torch import Tensor

STORAGES: Mapping[str, torch.dtype] = {
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "BoolStorage": torch.bool,
}

Load = Callable[[str, torch.dtype, int], Tensor]
"""Returns the storage of a key as a flat tensor of so many elements."""


class Inert:
    """A placeholder for an object of any other class or the result of a function; all operations on it do nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def _ignore(self, *_: object) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = update = _ignore


class _Dict(dict[Any, Any]):
    """A replacement for OrderedDict that ignores the attributes in a pickle."""

    def __setstate__(self, state: object) -> None:
        pass


def _rebuild_tensor(storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object) -> Tensor:
    # as_strided checks that the view lies inside the storage.
    return storage.as_strided(size, stride, offset)


GLOBALS: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Dict,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
}
"""What names in a pickle are resolved to, beside storages."""


class TensorUnpickler(pickle.Unpickler):
    """Restore tensors whose storages `load_storage` returns, plain values, and what `find` returns for other names."""

    def __init__(
        self, file: IO[bytes], load_storage: Load | None = None, find: Callable[[str, str], Any] = lambda *_: Inert
    ) -> None:
        super().__init__(file, encoding="latin1")
        self._load_storage, self._find = load_storage, find

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.cuda") and name in STORAGES:
            return STORAGES[name]
        return GLOBALS.get((module, name)) or self._find(module, name)

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, *rest = pid
        if kind != "storage" or self._load_storage is None:
            return Inert()
        if not isinstance(dtype, torch.dtype):
            raise ValueError("a tensor of an unknown type")
        if len(rest) > 2 and rest[2] is not None:
            raise ValueError("a view of a storage")
        return self._load_storage(key, dtype, rest[1])


def zip_storages(archive: zipfile.ZipFile, folder: str) -> Load:
    """Return a function that reads each storage in `folder` of an archive once."""
    storages: dict[str, Tensor] = {}

    def load_storage(key: str, dtype: torch.dtype, count: int) -> Tensor:
        if key not in storages:
            data = archive.read(f"{folder}data/{key}")
            storages[key] = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return storages[key]

    return load_storage
