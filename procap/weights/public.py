"""Read and write checkpoints of public trainers: files of Dassl, and safetensors with the same names of tensors.

Dassl's `torch.save` files hold a dict of "state_dict" and "epoch", beside the state of the optimizer and a scheduler
that drags live objects along. `torch.load` would either refuse these or run code to restore them. The reader here
restores tensors and plain values, and puts an object without behaviour in the place of everything else.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from procap.errors import UserError
from procap.weights.files import check_file, read_safetensors
from procap.weights.torchscript import STORAGES, rebuild_tensor

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
"""The first object in a file that `torch.save` wrote before it wrote zip files (torch 1.6)."""


@dataclass(frozen=True)
class PublicFile:
    """The tensors of a file under the names of the public code; epoch: how many were trained, None if not recorded."""

    tensors: dict[str, Tensor]
    epoch: int | None


def read_public(path: Path) -> PublicFile:
    """Read a checkpoint without executing anything in it. Raises UserError, one line, for any other file."""
    check_file(path)
    if path.suffix == ".safetensors":
        tensors, metadata = read_safetensors(path)
        epoch = metadata.get("epoch", "")
        return PublicFile(tensors, int(epoch) if epoch.isdecimal() else None)
    try:
        content = _read_zip(path) if zipfile.is_zipfile(path) else _read_legacy(path)
    except UserError:
        raise
    except Exception as error:
        # A damaged or crafted pickle can raise any type of error.
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(f"{path} is no readable checkpoint, perhaps cut short: {reason}") from error
    state = content.get("state_dict", content) if isinstance(content, dict) else None
    if not isinstance(state, dict) or not state:
        raise UserError(f"{path} holds no state dict")
    others = [str(name)[:100] for name, value in state.items() if not (isinstance(name, str) and _is_tensor(value))]
    if others:
        raise UserError(f"{path} holds no state dict of tensors: {', '.join(others[:3])} in it is something else")
    epoch = content.get("epoch")
    return PublicFile(dict(state), epoch if type(epoch) is int else None)


def pack_public(file: PublicFile, format: str) -> bytes:
    """Encode a checkpoint as Dassl writes it ("dassl", plain values and tensors only) or as "safetensors"."""
    if format == "safetensors":
        from safetensors.torch import save

        return save(file.tensors, {"epoch": str(file.epoch)})
    content = {"state_dict": file.tensors, "epoch": file.epoch}
    buffer = io.BytesIO()
    torch.save(content | {"optimizer": None, "scheduler": None, "val_result": None}, buffer)
    return buffer.getvalue()


class _Inert:
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


GLOBALS: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Dict,
    ("torch._utils", "_rebuild_tensor"): rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
}
"""What names in a pickle are resolved to, beside storages; any other name gives `_Inert`."""

Load = Callable[[str, torch.dtype, int], Tensor]
"""Returns the storage of a key as a flat tensor of so many elements."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], load_storage: Load | None = None) -> None:
        super().__init__(file, encoding="latin1")
        self._load_storage = load_storage

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.cuda") and name in STORAGES:
            return STORAGES[name]
        return GLOBALS.get((module, name), _Inert)

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, *rest = pid
        if kind != "storage" or self._load_storage is None:
            return _Inert()
        if not isinstance(dtype, torch.dtype):
            raise ValueError("a tensor of an unknown type")
        if len(rest) > 2 and rest[2] is not None:
            raise ValueError("a view of a storage")
        return self._load_storage(key, dtype, rest[1])


def _read_zip(path: Path) -> Any:
    storages: dict[str, Tensor] = {}
    with zipfile.ZipFile(path) as archive:
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            raise UserError(f"{path} is a TorchScript archive, not a checkpoint of a trainer")
        index = next((name for name in archive.namelist() if name.endswith("data.pkl")), None)
        if index is None:
            raise UserError(f"{path} is a zip file, but not one of torch.save: it has no data.pkl")

        def load_storage(key: str, dtype: torch.dtype, count: int) -> Tensor:
            if key not in storages:
                data = archive.read(f"{index.removesuffix('data.pkl')}data/{key}")
                storages[key] = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
            return storages[key]

        with archive.open(index) as file:
            return _Unpickler(file, load_storage).load()


def _read_legacy(path: Path) -> Any:
    """Read the pickles of the format in turn; the content of the storages follows them."""
    if tarfile.is_tarfile(path):
        raise UserError(f"{path} is a tar file of an old torch: save it again with a newer one")
    size, storages = path.stat().st_size, dict[str, Tensor]()

    def load_storage(key: str, dtype: torch.dtype, count: int) -> Tensor:
        if key not in storages:
            if not 0 <= count * dtype.itemsize <= size:
                raise ValueError(f"a tensor of {count} elements")
            storages[key] = torch.empty(count, dtype=dtype)
        return storages[key]

    with path.open("rb") as file:
        if _Unpickler(file).load() != LEGACY_MAGIC:
            raise ValueError("it is no file of torch.save")
        for _ in ("protocol version", "sizes of the machine's types"):
            _Unpickler(file).load()
        content = _Unpickler(file, load_storage).load()
        for key in _Unpickler(file).load():
            count, storage = int.from_bytes(file.read(8), "little"), storages[key]
            data = bytearray(file.read(storage.nbytes))
            if count != len(storage) or len(data) != storage.nbytes:
                raise ValueError(f"storage {key} is incomplete")
            if data:
                storage.copy_(torch.frombuffer(data, dtype=storage.dtype))
    return content


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
