"""Read weights from a file: detect its format, and never execute anything in it.

Takes safetensors, `torch.save` files of tensors and OpenAI's TorchScript archives; gives open_clip's CustomTextCLIP
names.

Shapes: R stored vocabulary rows, V vocabulary, D text width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from procap.errors import UserError
from procap.weights.pickles import Inert, read_pickle

OPENAI_KEYS = ("input_resolution", "context_length", "vocab_size")
# Top-level names of CLIP's text side before open_clip's CustomTextCLIP put them under `text.`.
TEXT_KEYS = ("positional_embedding", "text_projection", "token_embedding.", "transformer.", "ln_final.")
DERIVED_KEYS = ("attn_mask", "text.attn_mask", *OPENAI_KEYS)

VOCABULARY = 49408
"""The number of tokens that CLIP's tokenizer knows."""


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """Read a checkpoint: its tensors by name, and the other entries of its dict or the metadata of safetensors.

    Raises UserError, one line, for any other file.
    """
    from safetensors import safe_open

    content: Any
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return tensors, file.metadata() or {}
        content = read_pickle(path)
    except Exception as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(f"{path} is no readable checkpoint, perhaps cut short: {reason}") from error
    others = content if isinstance(content, dict) else {}
    state = content.tensors() if isinstance(content, Inert) else others.get("state_dict", content)
    if not isinstance(state, dict) or not state:
        raise UserError(f"{path} holds no state dict")
    odd = [
        str(name)[:100] for name, value in state.items() if not (isinstance(name, str) and isinstance(value, Tensor))
    ]
    if odd:
        raise UserError(f"{path} is refused: it holds no state dict of tensors, {', '.join(odd[:3])} is something else")
    return dict(state), others


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a CLIP: its state dict with CustomTextCLIP names, and what the file says of open_clip's configuration.

    That is all of it as JSON in the metadata of safetensors, QuickGELU for files of OpenAI, and nothing for others.
    Raises UserError, one line, for a file that holds no state dict of tensors.
    """
    state, others = read_tensors(path)
    is_openai = any(key in state for key in OPENAI_KEYS)
    config = json.loads(others["config"]) if path.suffix == ".safetensors" and "config" in others else {}
    return _custom_text_names(state), {"quick_gelu": True} if is_openai else config


def _custom_text_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename to CustomTextCLIP names, without the prefix of DDP, and complete the vocabulary of `mini`."""
    if all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): value for name, value in state.items()}
    state = {("text." + name if name.startswith(TEXT_KEYS) else name): value for name, value in state.items()}
    for key in DERIVED_KEYS:
        state.pop(key, None)
    for key in ("logit_scale", "logit_bias"):
        if key in state and state[key].numel() == 1:
            state[key] = state[key].reshape(())
    table = "text.token_embedding.weight"
    if table in state and "token_rows" in state:
        state[table] = expand_vocabulary(state[table], state.pop("token_rows"))
    return state


def expand_vocabulary(table: Tensor, rows: Tensor) -> Tensor:
    """Expand the rows [R, D] that training `mini` has used to the full table [V, D], float32.

    Rows that are not stored get the stored mean, so that any class name can be tokenized and none is random.
    """
    stored = table.float()
    full = stored.mean(dim=0).repeat(VOCABULARY, 1)
    full[rows] = stored
    return full
