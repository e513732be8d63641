"""Names of backbones: the embedded one, the architectures of open_clip, files; without importing torch or open_clip."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from procap.errors import UsageError, unknown_name
from procap.geometry import Geometry

EXAMPLES = "mini, ViT-B-16, ViT-B-32, ViT-L-14"
OPENAI = ("ViT-B-32", "ViT-B-16", "ViT-L-14", "ViT-L-14-336")
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


def canonical_name(name: str, pretrained: str | None = None) -> tuple[str, str | None]:
    """Map all spellings of backbone and weights that `load_clip` treats alike to one; imports and checks nothing.

    The second value is None for the backbone's default weights; the path of a file is absolute.
    """
    backbone = _spelling(name, ["mini", *model_configs()])
    if backbone is None:
        return (_absolute(name) if names_file(name) else name), pretrained
    if pretrained is None or tag_spelling(pretrained) == ("embedded" if backbone == "mini" else "openai"):
        # With OpenAI's weights both names of an architecture mean QuickGELU.
        plain = backbone.removesuffix("-quickgelu")
        return (plain if plain in OPENAI else backbone), None
    # A folder with the name of a tag is not a checkpoint.
    is_file = _is_path(pretrained) or Path(pretrained).is_file()
    return backbone, _absolute(pretrained) if is_file else tag_spelling(pretrained)


def supported_architectures() -> list[str]:
    """List the architectures of open_clip whose two towers are plain CLIP transformers."""
    return [name for name, config in model_configs().items() if not _differences(config)]


def check_backbone(name: str, pretrained: str) -> None:
    """Raise UsageError for an unknown backbone, or weights beside a file; "" is the default. Reads no weights."""
    if name.lower() not in ("", "mini"):
        named_architecture(name, pretrained or None)


def named_architecture(name: str, pretrained: str | None) -> str | None:
    """Return the architecture, or None if `name` is a file that has its own; UsageError for neither, or for both."""
    architecture = None if _is_path(name) else _spelling(name, model_configs())
    if architecture is None and not names_file(name):
        raise unknown_name(
            "backbone", name, ["mini", *supported_architectures()], listing="list them with `procap ls backbones`"
        )
    if architecture is None and pretrained is not None:
        raise UsageError(f"'{name}' is a file already: name an architecture beside '{pretrained}', or drop it")
    if architecture and (other := _differences(model_configs()[architecture])):
        raise UsageError(
            f"backbone '{architecture}' differs from CLIP in {', '.join(other)}: prompts go into plain ViT CLIPs, such "
            f"as {EXAMPLES}"
        )
    return architecture


@functools.cache
def model_configs() -> dict[str, dict[str, Any]]:
    """Read the architectures that open_clip ships, without importing it, which takes seconds."""
    package = importlib.util.find_spec("open_clip")
    folders = package.submodule_search_locations if package else None
    files = [file for folder in folders or () for file in Path(folder, "model_configs").glob("*.json")]
    return {file.stem: json.loads(file.read_text()) for file in sorted(files, key=lambda file: file.stem.lower())}


def geometry_from_config(config: Mapping[str, Any]) -> Geometry:
    """Convert an architecture of open_clip."""
    vision, text = config["vision_cfg"], config["text_cfg"]
    return Geometry(
        image_size=vision["image_size"],
        patch_size=vision["patch_size"],
        vision_width=vision["width"],
        vision_layers=vision["layers"],
        vision_heads=vision["width"] // vision.get("head_width", 64),
        text_width=text["width"],
        text_layers=text["layers"],
        text_heads=text["heads"],
        context_length=text["context_length"],
        vocab_size=text["vocab_size"],
        embed_dim=config["embed_dim"],
        quick_gelu=config.get("quick_gelu", False),
        vision_mlp=int(vision["width"] * vision.get("mlp_ratio", 4.0)),
        text_mlp=int(text["width"] * text.get("mlp_ratio", 4.0)),
    )


def _differences(config: Mapping[str, Any]) -> list[str]:
    """List the settings in which an open_clip architecture is not two plain CLIP transformers."""
    vision, text = config["vision_cfg"], config["text_cfg"]
    plain_vision = {"image_size", "layers", "width", "patch_size", "head_width", "mlp_ratio"}
    plain_text = {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio"}
    # CoCa's captioning tower; the stages of a ResNet.
    odd = (config.keys() & {"multimodal_cfg"}) | {key for key in ("layers",) if isinstance(vision.get(key), list)}
    return sorted(odd | (vision.keys() - plain_vision) | (text.keys() - plain_text))


def _spelling(name: str, known: Iterable[str]) -> str | None:
    """Return `name` as spelled in `known`, None if it is not among them."""
    # OpenAI writes ViT-L/14@336px, open_clip ViT-L-14-336.
    dashed = name.replace("/", "-").replace("@336px", "-336")
    return {model.lower(): model for model in known}.get(dashed.lower())


def tag_spelling(tag: str) -> str:
    """Spell a tag of weights as open_clip does."""
    return tag.lower().replace("-", "_")


def names_file(text: str) -> bool:
    """Whether `text` is a path by its form, or a file that exists."""
    return _is_path(text) or Path(text).exists()


def _is_path(text: str) -> bool:
    return text.endswith(SUFFIXES) or text.startswith((".", "~", os.sep))


def _absolute(file: str) -> str:
    # Links are not resolved: in Hugging Face's cache only the link has the suffix that names the format.
    return os.path.abspath(Path(file).expanduser())
