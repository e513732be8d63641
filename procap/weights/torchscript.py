"""Read the tensors of a TorchScript archive without running its code.

OpenAI published CLIP as TorchScript. `torch.jit.load` would compile and run the archive's code; the weights lie in it
as a pickle of nested modules and raw storages, and reading those needs only a dozen harmless constructors.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from procap.errors import UserError
from procap.weights.pickles import TensorUnpickler, zip_storages

LISTS = ("build_intlist", "build_doublelist", "build_boollist", "build_tensorlist")


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
                root = TensorUnpickler(file, zip_storages(archive, index.removesuffix("data.pkl")), _find).load()
    except UserError as error:
        raise UserError(f"{path} {error}") from None
    except Exception as error:
        # A crafted or truncated pickle can raise many types of errors; all of them mean that the file is broken.
        raise UserError(f"{path} is a damaged TorchScript archive: {str(error) or type(error).__name__}") from error
    state: dict[str, Tensor] = {}
    _collect(root, "", state)
    return state


def _find(module: str, name: str) -> Any:
    if module.startswith("__torch__"):
        return _Object
    if module == "torch.jit._pickle" and name == "restore_type_tag":
        return lambda value, _type: value
    if module == "torch.jit._pickle" and name in LISTS:
        return lambda values: values
    raise UserError(f"asks to run {module}.{name}: refused, weights hold tensors only")


def _collect(value: object, prefix: str, state: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        state[prefix] = value
    elif isinstance(value, _Object):
        for name, field in value.fields.items():
            _collect(field, f"{prefix}.{name}" if prefix else name, state)
