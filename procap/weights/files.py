"""Read weights from a file: safetensors, `torch.save` files and OpenAI's TorchScript archives; nothing is executed.

A file's tensors get open_clip's CustomTextCLIP names. Shapes: R stored vocabulary rows, V vocabulary, D text width.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from procap.errors import UserError

OPENAI_KEYS = ("input_resolution", "context_length", "vocab_size")
# Top-level names of CLIP's text side before open_clip's CustomTextCLIP put them under `text.`.
TEXT_KEYS = ("positional_embedding", "text_projection", "token_embedding.", "transformer.", "ln_final.")
DERIVED_KEYS = ("attn_mask", "text.attn_mask", *OPENAI_KEYS)

VOCABULARY = 49408
"""The number of tokens that CLIP's tokenizer knows."""


class Inert:
    """A placeholder for an object of a class that torch does not load; `tensors`: those below it, by dotted names."""

    tensors: dict[str, Tensor]

    def __new__(cls, *_: object, **__: object) -> Inert:
        inert = super().__new__(cls)
        inert.tensors = {}
        return inert

    def __setstate__(self, state: object) -> None:
        for name, field in state.items() if isinstance(state, dict) else ():
            if isinstance(field, Tensor):
                self.tensors[name] = field
            elif isinstance(field, Inert):
                self.tensors |= {f"{name}.{inner}": tensor for inner, tensor in field.tensors.items()}


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """Read a checkpoint: its tensors by name, and the other entries of its dict or the metadata of safetensors.

    Raises UserError, one line, for any other file.
    """
    from safetensors import safe_open

    content: Any
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
        content = _read_pickle(path)
    # Readers of untrusted bytes raise errors of nearly any class.
    except Exception as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(f"{path} is refused: no readable checkpoint, perhaps cut short: {reason}") from error
    metadata = content if isinstance(content, dict) else {}
    state = content.tensors if isinstance(content, Inert) else metadata.get("state_dict", content)
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path} holds no state dict of tensors")
    return dict(state), metadata


def _read_pickle(path: Path) -> Any:
    """Read a file of `torch.save` (1.6 or newer), or a TorchScript archive, whose root is an `Inert`.

    `torch.load(weights_only=True)` refuses what OpenAI (TorchScript) and the public trainers (schedulers that hold live
    objects) have saved with the tensors, so objects and results of functions that it does not know become inert.
    """
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    plain = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(plain, "w") as copy:
        for name in archive.namelist():
            # By this file torch takes an archive for TorchScript, which it would run.
            if not name.endswith("/constants.pkl"):
                copy.writestr(name, archive.read(name))
    plain.seek(0)
    names = get_unsafe_globals_in_checkpoint(plain)
    plain.seek(0)
    with safe_globals([(_new_dict if name == "collections.defaultdict" else Inert, name) for name in names]):
        return torch.load(plain, map_location="cpu", weights_only=True)


def _new_dict(*_: object) -> dict[Any, Any]:
    # Stands for `defaultdict`: its argument, which a look-up of a missing key would call, is dropped.
    return {}


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a CLIP: its state dict with CustomTextCLIP names, and what the file says of open_clip's configuration.

    That is all of it as JSON in the metadata of safetensors, QuickGELU for files of OpenAI, and nothing for others.
    Raises UserError, one line, for a file that holds no state dict of tensors.
    """
    state, metadata = read_tensors(path)
    is_openai = any(key in state for key in OPENAI_KEYS)
    config = json.loads(metadata["config"]) if path.suffix == ".safetensors" and "config" in metadata else {}
    return _custom_text_names(state), {"quick_gelu": True} if is_openai else config


def _custom_text_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename to CustomTextCLIP names, without the prefix of DDP, and complete the vocabulary of `mini`.

    Rows [R, D] of the vocabulary [V, D] that training `mini` did not use are not stored, and get the stored mean, so
    that any class name can be tokenized and none is random.
    """
    if all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): value for name, value in state.items()}
    state = {("text." + name if name.startswith(TEXT_KEYS) else name): value for name, value in state.items()}
    for key in DERIVED_KEYS:
        state.pop(key, None)
    for key in ("logit_scale", "logit_bias"):
        if key in state and state[key].numel() == 1:
            # Models with open_clip's `nonscalar_logit_scale` store one element [1].
            state[key] = state[key].reshape(())
    table = "text.token_embedding.weight"
    if table in state and "token_rows" in state:
        stored = state[table].float()
        state[table] = stored.mean(dim=0).repeat(VOCABULARY, 1)
        state[table][state.pop("token_rows")] = stored
    return state
