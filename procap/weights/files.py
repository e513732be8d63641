"""Read weights from a file: detect its format and geometry, and never execute anything in it.

Takes safetensors, `torch.save` files of tensors and OpenAI's TorchScript archives; gives open_clip's CustomTextCLIP
names.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from procap.errors import UserError
from procap.geometry import Geometry
from procap.weights.architectures import SUFFIXES
from procap.weights.torchscript import is_torchscript, read_torchscript

OPENAI_KEYS = ("input_resolution", "context_length", "vocab_size")
# Top-level names of CLIP's text side before open_clip's CustomTextCLIP put them under `text.`.
TEXT_KEYS = ("positional_embedding", "text_projection", "token_embedding.", "transformer.", "ln_final.")
DERIVED_KEYS = ("attn_mask", "text.attn_mask", *OPENAI_KEYS)
FOREIGN_KEYS = {
    "vision_model.": "has the names of transformers' CLIPModel",
    "visual.trunk.": "has an image tower from timm",
    "visual.layer1.": "has a ResNet image tower",
    "visual.attn_pool": "has an attention pooler (CoCa)",
    "text.transformer.embeddings.": "has a text tower from transformers",
    "logit_bias": "is a SigLIP model",
    "visual.head.": "has an image tower from timm",
}


@dataclass(frozen=True)
class Weights:
    """A state dict with CustomTextCLIP names, and the metadata of its file.

    quick_gelu: whether the model uses QuickGELU; None if the file does not determine it.
    openai_format: OpenAI's own file, or one with its bookkeeping entries.
    """

    state: dict[str, Tensor]
    quick_gelu: bool | None
    openai_format: bool


def read_weights(path: Path) -> Weights:
    """Read a checkpoint file. Raises UserError, one line, for a file that does not hold a ViT CLIP's weights."""
    check_file(path)
    metadata: dict[str, str] = {}
    if path.suffix == ".safetensors":
        state, metadata = read_safetensors(path)
    elif is_torchscript(path):
        state = read_torchscript(path)
    else:
        state = _read_torch(path)
    openai = any(key in state for key in OPENAI_KEYS)
    declared = {"true": True, "false": False}.get(metadata.get("quick_gelu", "").lower())
    return Weights(_custom_text_names(state, path), True if openai else declared, openai)


def geometry_of(weights: Weights, quick_gelu: bool, path: Path) -> Geometry:
    """Infer the geometry from the shapes; heads are 64 wide, as in every CLIP of OpenAI's release.

    Raises UserError naming the first weight that a ViT CLIP has and this file lacks.
    """
    state = weights.state
    try:
        vision_width, _, patch_size, _ = state["visual.conv1.weight"].shape
        text_width = state["text.ln_final.weight"].shape[0]
        return Geometry(
            image_size=patch_size * round((state["visual.positional_embedding"].shape[0] - 1) ** 0.5),
            patch_size=patch_size,
            vision_width=vision_width,
            vision_layers=_layers(state, "visual."),
            vision_heads=max(1, vision_width // 64),
            text_width=text_width,
            text_layers=_layers(state, "text."),
            text_heads=max(1, text_width // 64),
            context_length=state["text.positional_embedding"].shape[0],
            vocab_size=state["text.token_embedding.weight"].shape[0],
            embed_dim=state["visual.proj"].shape[1],
            quick_gelu=quick_gelu,
            vision_mlp=state["visual.transformer.resblocks.0.mlp.c_fc.weight"].shape[0],
            text_mlp=state["text.transformer.resblocks.0.mlp.c_fc.weight"].shape[0],
        )
    except KeyError as error:
        raise UserError(f"{path} is no ViT CLIP checkpoint: it has no weight {error.args[0]!r}") from None
    except (ValueError, IndexError):
        raise UserError(f"{path} is no ViT CLIP checkpoint: its weights have unexpected dimensions") from None


def _layers(state: dict[str, Tensor], tower: str) -> int:
    prefix = f"{tower}transformer.resblocks."
    return len({name.removeprefix(prefix).split(".")[0] for name in state if name.startswith(prefix)})


def check_file(path: Path) -> None:
    """Raise UserError if the path is not a file with content."""
    if path.is_dir():
        inside = sorted(file.name for file in path.iterdir() if file.suffix in SUFFIXES)
        hint = f"name one of its files: {', '.join(inside[:5])}" if inside else "it holds no weights file"
        raise UserError(f"{path} is a folder, not a weights file; {hint}")
    if not path.is_file():
        raise UserError(f"no weights file at {path}")
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        raise UserError(f"{path} is empty: fetch the weights again")
    if head.startswith(b"version https://git-lfs"):
        raise UserError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` where it came from")


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{path} is no readable safetensors file, perhaps cut short: {error}") from error


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        what = "holds Python objects, and loading those can run code" if _is_pickle(path) else "is no checkpoint"
        raise UserError(f"{path} {what}: refused; save a plain state dict or safetensors") from error
    except Exception as error:
        # torch reports a damaged file as anything from EOFError to RuntimeError, with its own advice over many lines.
        reason = str(error).strip().split("\n")[0][:160] or type(error).__name__
        raise UserError(f"{path} is no readable checkpoint, perhaps cut short: {reason}") from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not content:
        raise UserError(f"{path} holds a {type(content).__name__}, not a state dict")
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor) and name not in OPENAI_KEYS]
    if others:
        raise UserError(f"{path} is no state dict: {', '.join(others[:3])} hold no tensor")
    return content


def _is_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def _custom_text_names(state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Rename to CustomTextCLIP names, without wrappers' prefixes; UserError for models known not to fit."""
    for wrapper in ("module.", "_orig_mod."):
        if all(name.startswith(wrapper) for name in state):
            state = {name.removeprefix(wrapper): value for name, value in state.items()}
    for start, what in FOREIGN_KEYS.items():
        if any(name.startswith(start) for name in state):
            raise UserError(f"{path} {what}; this project takes ViT CLIPs with open_clip's or OpenAI's weight names")
    state = {("text." + name if name.startswith(TEXT_KEYS) else name): value for name, value in state.items()}
    for key in DERIVED_KEYS:
        state.pop(key, None)
    if "logit_scale" in state and state["logit_scale"].numel() == 1:
        state["logit_scale"] = state["logit_scale"].reshape(())
    return state
