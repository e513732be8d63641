"""Read and write checkpoints of public trainers: files of Dassl, and safetensors with the same names of tensors.

Dassl's `torch.save` files hold a dict of "state_dict" and "epoch", beside the state of the optimizer and a scheduler
that drags live objects along. `torch.load` would either refuse these or run code to restore them. The reader here
restores tensors and plain values, and puts an object without behaviour in the place of everything else.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from procap.errors import UserError
from procap.weights.files import check_file, read_safetensors
from procap.weights.pickles import TensorUnpickler, zip_storages
from procap.weights.torchscript import is_torchscript

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


def _read_zip(path: Path) -> Any:
    if is_torchscript(path):
        raise UserError(f"{path} is a TorchScript archive, not a checkpoint of a trainer")
    with zipfile.ZipFile(path) as archive:
        index = next((name for name in archive.namelist() if name.endswith("data.pkl")), None)
        if index is None:
            raise UserError(f"{path} is a zip file, but not one of torch.save: it has no data.pkl")
        with archive.open(index) as file:
            return TensorUnpickler(file, zip_storages(archive, index.removesuffix("data.pkl"))).load()


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
        if TensorUnpickler(file).load() != LEGACY_MAGIC:
            raise ValueError("it is no file of torch.save")
        for _ in ("protocol version", "sizes of the machine's types"):
            TensorUnpickler(file).load()
        content = TensorUnpickler(file, load_storage).load()
        for key in TensorUnpickler(file).load():
            count, storage = int.from_bytes(file.read(8), "little"), storages[key]
            data = bytearray(file.read(storage.nbytes))
            if count != len(storage) or len(data) != storage.nbytes:
                raise ValueError(f"storage {key} is incomplete")
            if data:
                storage.copy_(torch.frombuffer(data, dtype=storage.dtype))
    return content


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
