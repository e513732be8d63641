"""Names of backbones: the embedded one, the architectures of open_clip, files; without importing torch or open_clip."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from procap.errors import UsageError, unknown_name
from procap.geometry import Geometry

HUB = "hf-hub:"
"""Start of the name of a model on the Hugging Face Hub in open_clip's format, as `hf-hub:ORGANIZATION/MODEL`."""

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")

PLAIN_VISION = frozenset({"image_size", "layers", "width", "patch_size", "head_width", "mlp_ratio"})
PLAIN_TEXT = frozenset({"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio"})
"""The settings in open_clip's configurations that CLIP's own transformers have (`procap.towers`)."""


def canonical_name(name: str, pretrained: str | None = None) -> tuple[str, str | None]:
    """Map all names of backbone and weights that `load_clip` treats alike to the same; imports and checks nothing.

    The second value is None for the backbone's default weights; the path of a file is absolute.
    """
    backbone = _spelling(name)
    if backbone is None:
        return (_absolute(name) if names_file(name) else name), pretrained
    if pretrained and names_file(pretrained):
        return backbone, _absolute(pretrained)
    plain = backbone.removesuffix("-quickgelu")
    # The activation of weights with a tag is that of the tag, under either name of their architecture.
    if pretrained != "random" and plain in model_configs():
        backbone = plain
    default = "embedded" if backbone == "mini" else "openai"
    return backbone, None if pretrained == default else pretrained


def named_architecture(name: str, pretrained: str | None) -> str | None:
    """Return the architecture, or None if `name` has its own: a file, a folder, a model on the Hub.

    Raises UsageError for neither, or for both.
    """
    architecture = _spelling(name)
    if architecture is None and not names_file(name) and not name.startswith(HUB):
        raise unknown_name("backbone", name, model_configs(), listing="list them with `procap ls backbones`")
    if architecture is None and pretrained is not None:
        raise UsageError(f"'{name}' has weights already: name an architecture next to '{pretrained}', or drop it")
    return architecture


@functools.cache
def model_configs() -> dict[str, dict[str, Any]]:
    """Read the configurations of `mini` and of the architectures that open_clip ships, without importing it."""
    package = importlib.util.find_spec("open_clip")
    assert package and package.origin
    files = sorted(Path(package.origin).with_name("model_configs").glob("*.json"), key=lambda file: file.stem.lower())
    return {file.stem: json.loads(file.read_text()) for file in (Path(__file__).with_name("mini.json"), *files)}


def plain_towers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """List the towers ("image", "text") of an open_clip configuration that are CLIP's own transformers.

    Methods can change these. Every other tower is computed by open_clip's own module.
    """
    settings = {"image": (config["vision_cfg"], PLAIN_VISION), "text": (config["text_cfg"], PLAIN_TEXT)}
    return tuple(
        tower
        for tower, (values, plain) in settings.items()
        # An entry that is 0, false or null leaves a feature off that other towers have.
        # The stages of a ResNet, and the two sides of an image that is not square, are lists.
        if all(key in plain and not isinstance(value, list) for key, value in values.items() if value)
    )


def check_towers(name: str, needed: Iterable[str], backbone: str, plain: Sequence[str]) -> None:
    """Raise UsageError if the method `name` needs a plain tower that `backbone` does not have (`plain_towers`)."""
    words = {"image": "a plain ViT as image tower", "text": "CLIP's own text tower"}
    if missing := [words[tower] for tower in needed if tower not in plain]:
        raise UsageError(
            f"{name} needs {' and '.join(missing)}, which {backbone} does not have: `procap ls backbones` lists what "
            "each backbone admits"
        )


def geometry_from_config(config: Mapping[str, Any], quick_gelu: bool) -> Geometry:
    """Convert a configuration of open_clip; the sizes of a tower that is not plain are 0."""
    plain, zeros = plain_towers(config), {"width": 0, "layers": 0, "heads": 0, "patch_size": 0, "mlp_ratio": 0}
    vision = {**config["vision_cfg"], **(zeros if "image" not in plain else {})}
    text = {**config["text_cfg"], **(zeros if "text" not in plain else {})}
    size = vision["image_size"]
    return Geometry(
        image_size=size[0] if isinstance(size, list) else size,
        patch_size=vision["patch_size"],
        vision_width=vision["width"],
        vision_layers=vision["layers"],
        vision_heads=vision["width"] // vision.get("head_width", 64),
        text_width=text["width"],
        text_layers=text["layers"],
        text_heads=text["heads"],
        context_length=text.get("context_length", 77),
        vocab_size=text.get("vocab_size", 49408),
        embed_dim=config["embed_dim"],
        quick_gelu=quick_gelu,
        vision_mlp=int(vision["width"] * vision.get("mlp_ratio", 4.0)),
        text_mlp=int(text["width"] * text.get("mlp_ratio", 4.0)),
    )


def _spelling(name: str) -> str | None:
    """Return an architecture as open_clip spells it, None for an unknown one."""
    # OpenAI writes ViT-L/14@336px, open_clip ViT-L-14-336.
    dashed = name.replace("/", "-").replace("@336px", "-336")
    return dashed if dashed in model_configs() else None


def names_file(text: str) -> bool:
    """Whether `text` is a path by its form, as every folder is, or a file that exists."""
    return text.endswith(SUFFIXES) or text.startswith((".", "~", os.sep)) or Path(text).is_file()


def _absolute(file: str) -> str:
    # Links are not resolved: in Hugging Face's cache only the link has the suffix that names the format.
    return os.path.abspath(Path(file).expanduser())
