"""Read weights from a file: safetensors, `torch.save` files and OpenAI's TorchScript archives; nothing is executed.

A file's tensors get open_clip's CustomTextCLIP names. Shapes: R stored vocabulary rows, V vocabulary, D text width.
"""

from __future__ import annotations

import io
import json
import pickletools
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from procap.errors import UserError

OPENAI_KEYS = ("input_resolution", "context_length", "vocab_size")
# Top-level names of CLIP's text side before open_clip's CustomTextCLIP put them under `text.`.
TEXT_KEYS = ("positional_embedding", "text_projection", "token_embedding.", "transformer.", "ln_final.")
DERIVED_KEYS = ("attn_mask", "text.attn_mask", *OPENAI_KEYS)

ZIP, LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""Starts of files of `torch.save`: since version 1.6, and before."""
SIZE_LIMIT = 24 * 10**9
"""Bytes; the largest weights of open_clip have 20 GB."""

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

    The prefixes `module.` of DDP and DataParallel and `_orig_mod.` of torch.compile are dropped. Raises UserError, one
    line, for any other file.
    """
    from safetensors import safe_open

    if not path.is_file():
        # A pipe would be waited for.
        raise UserError(f"{path} is refused: it is {'no regular file' if path.exists() else 'not there'}")
    if (size := path.stat().st_size) > SIZE_LIMIT:
        raise UserError(f"{path} is refused: it has {size / 1e9:,.0f} GB; the limit is {SIZE_LIMIT / 1e9:,.0f} GB")
    content: Any
    try:
        with path.open("rb") as opened:
            start = opened.read(40)
        # The length of a JSON header.
        if start[8:9] == b"{":
            with safe_open(path, framework="pt") as file:
                content, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
        elif start.startswith((ZIP, LEGACY)):
            content = _read_zip(path) if start.startswith(ZIP) else _read_legacy(path)
            metadata = content if isinstance(content, dict) else {}
        else:
            raise ValueError(f"it begins with {start!r}: safetensors and files of torch.save are read")
    # Readers of untrusted bytes raise errors of nearly any class.
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        # Without torch's advice to run the code in a file.
        reason = text.partition("trusted source. ")[2].partition(" Check the documentation")[0] or text
        raise UserError(f"{path} is refused: {reason[:160]}") from error
    state = content.tensors if isinstance(content, Inert) else metadata.get("state_dict", content)
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        entries = f" but {', '.join(map(ascii, [*state][:5]))}" if isinstance(state, dict) and state else ""
        raise UserError(f"{path} holds no state dict of tensors{entries}: save model.state_dict() by torch.save")
    for prefix in ("module.", "_orig_mod.", "module."):
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return dict(state), metadata


def _read_zip(path: Path) -> Any:
    """Read a file of `torch.save`, or a TorchScript archive, whose root is an `Inert`.

    `torch.load(weights_only=True)` refuses what OpenAI (TorchScript) and the public trainers (schedulers that hold live
    objects) have saved with the tensors, so objects and results of functions that it does not know become inert.
    """
    from torch.serialization import get_unsafe_globals_in_checkpoint

    plain = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(plain, "w") as copy:
        for name in archive.namelist():
            # By this file torch takes an archive for TorchScript, which it would run.
            if not name.endswith("/constants.pkl"):
                copy.writestr(name, archive.read(name))
    plain.seek(0)
    names = get_unsafe_globals_in_checkpoint(plain)
    plain.seek(0)
    return _load(plain, names)


def _read_legacy(path: Path) -> Any:
    """Read a file of `torch.save` before 1.6, four pickles in front of the tensors, as `_read_zip` does."""
    with path.open("rb") as file:
        operations = [operation for _ in range(4) for operation in pickletools.genops(file)]
    names = {str(name).replace(" ", ".") for code, name, _ in operations if code.name == "GLOBAL"}
    # What tensors consist of is in other modules of torch.
    live = [name for name in names if not name.startswith("torch.") or name.startswith(("torch.nn.", "torch.optim."))]
    return _load(path, [name.replace("__builtin__.", "builtins.") for name in live if "OrderedDict" not in name])


def _load(file: Path | io.BytesIO, inert: Iterable[str]) -> Any:
    from torch.serialization import safe_globals

    with safe_globals([(_new_dict if name == "collections.defaultdict" else Inert, name) for name in inert]):
        return torch.load(file, map_location="cpu", weights_only=True)


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
    try:
        config = json.loads(metadata["config"]) if isinstance(metadata.get("config"), str) else {}
    except ValueError:
        config = {}
    # Programs also write different settings by this name, which say nothing of the model.
    config = config if isinstance(config, dict) and {"vision_cfg", "quick_gelu"} & config.keys() else {}
    return _custom_text_names(state), {"quick_gelu": True} if is_openai else config


def _custom_text_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename to CustomTextCLIP names, and complete the vocabulary of `mini`.

    Rows [R, D] of the vocabulary [V, D] that training `mini` did not use are not stored, and get the stored mean, so
    that any class name can be tokenized and none is random.
    """
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
