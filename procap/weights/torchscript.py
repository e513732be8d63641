"""Read the tensors of a TorchScript archive without running its code.

OpenAI published CLIP as TorchScript. `torch.jit.load` would compile and run the archive's code; the weights lie in it
as a pickle of nested modules and raw storages, and reading those needs only a dozen harmless constructors.
"""

from __future__ import annotations

import collections
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from procap.errors import UserError

STORAGES: Mapping[str, torch.dtype] = {
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "BoolStorage": torch.bool,
}


class _Object:
    """An object of a class that is defined in the archive: its fields, and none of its behaviour."""

    fields: Mapping[str, Any]

    def __setstate__(self, state: object) -> None:
        self.fields = state if isinstance(state, Mapping) else {}


def is_torchscript(path: Path) -> bool:
    """Whether `path` is a TorchScript archive, as opposed to a file of `torch.save`."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def read_torchscript(path: Path) -> dict[str, Tensor]:
    """Read every tensor of the archived module, by its dotted name.

    Raises UserError for an archive that is broken or contains anything but tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            index = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(index) as file:
                root = _Reader(file, archive, index.removesuffix("data.pkl"), path).load()
    except UserError:
        raise
    except Exception as error:
        # A crafted or truncated pickle can raise many types of errors; all of them mean that the file is broken.
        raise UserError(f"{path} is a damaged TorchScript archive: {error or type(error).__name__}") from error
    state: dict[str, Tensor] = {}
    _collect(root, "", state)
    return state


class _Reader(pickle.Unpickler):
    def __init__(self, file: IO[bytes], archive: zipfile.ZipFile, folder: str, path: Path) -> None:
        super().__init__(file)
        self._archive, self._folder, self._path = archive, folder, path

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("__torch__"):
            return _Object
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        harmless: dict[tuple[str, str], Callable[..., Any]] = {
            ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor,
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch.jit._pickle", "restore_type_tag"): lambda value, _type: value,
        }
        for kind in ("int", "double", "bool", "tensor"):
            harmless["torch.jit._pickle", f"build_{kind}list"] = lambda values: values
        if (module, name) not in harmless:
            raise UserError(f"{self._path} asks to run {module}.{name}: refused, weights hold tensors only")
        return harmless[module, name]

    def persistent_load(self, pid: Any) -> Tensor:
        kind, dtype, key, _device, _numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise ValueError(f"unknown reference {kind}")
        return torch.frombuffer(bytearray(self._archive.read(f"{self._folder}data/{key}")), dtype=dtype)


def rebuild_tensor(storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object) -> Tensor:
    """Make the tensor of a pickle from its storage, a flat tensor."""
    # as_strided checks that the view lies inside the storage.
    return storage.as_strided(size, stride, offset)


def _collect(value: object, prefix: str, state: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        state[prefix] = value
    elif isinstance(value, _Object):
        for name, field in value.fields.items():
            _collect(field, f"{prefix}.{name}" if prefix else name, state)
