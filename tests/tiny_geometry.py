"""The sizes of a CLIP that is small enough for tests, for fixtures and for child processes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from procap.geometry import Geometry
from procap.methods import METHODS, method_class
from procap.methods.features import FeatureMethod

GEOMETRY = Geometry(
    image_size=32, patch_size=16, vision_width=128, vision_layers=12, vision_heads=2, text_width=64, text_layers=12,
    text_heads=1, context_length=77, vocab_size=49408, embed_dim=48, quick_gelu=True,
)  # fmt: skip


def open_clip_config(g: Geometry) -> dict[str, Any]:
    """The configuration of open_clip for the sizes `g`."""
    vision = {"image_size": g.image_size, "layers": g.vision_layers, "width": g.vision_width}
    vision |= {"head_width": g.vision_width // g.vision_heads, "patch_size": g.patch_size}
    text = {"context_length": g.context_length, "vocab_size": g.vocab_size, "width": g.text_width}
    text |= {"heads": g.text_heads, "layers": g.text_layers}
    mlp = {"mlp_ratio": g.vision_mlp / g.vision_width}
    return {"embed_dim": g.embed_dim, "quick_gelu": g.quick_gelu, "vision_cfg": vision | mlp, "text_cfg": text}


SHORT_GEOMETRY = replace(GEOMETRY, vision_layers=3, text_layers=3)
SHORT_OPTIONS: dict[str, dict[str, Any]] = {
    "vpt": {"depth": 2}, "ivlp": {"depth": 2, "vision_depth": 2}, "maple": {"depth": 2},
    "promptsrc": {"depth": 2, "vision_depth": 2}, "coprompt": {"depth": 2}, "tcp": {"block": 1},
    "mma": {"first_block": 1}, "mmrl": {"first_block": 1}, "skipt": {"first_block": 1}, "mmlop": {"depth": 2},
    "procap": {"depth": 2}, "mmrlpp": {"first_block": 1}, "dept-maple": {"depth": 2},
    "kdpl-maple": {"depth": 2}, "cliplora": {"first_block": 1}, "rebapl": {"depth": 2},
    "promptkd": {"depth": 2, "width": 48}, "caspl-boost": {"boost_depth": 2}, "caspl": {"boost_depth": 2},
    "caspl-maple": {"boost_depth": 2, "depth": 2},
    "caspl-promptsrc": {"boost_depth": 2, "depth": 2, "vision_depth": 2},
    "gda": {"views": 2}, "clap": {"views": 2}, "prolip": {"views": 2}, "crossmodal": {"iterations": 20},
    "ipo": {"proposals": "templates"},
}  # fmt: skip
"""Options by method for towers of three layers, whose last one gets no prompt of its own, and for short trainings."""

IMAGE_METHODS = tuple(
    name
    for name in METHODS
    if not issubclass(method_class(name), FeatureMethod) and method_class(name).required_option != "teacher"
)
"""Methods whose training steps see images, without a teacher of their image size; others see features."""

UNTRAINED = ("zeroshot", "tda", "tpt")
STEPPED = tuple(
    name for name in METHODS
    if name not in UNTRAINED and getattr(method_class(name), "takes_steps", True)
)  # fmt: skip
"""Methods that are trained in steps; others are one pass over features without a recipe of their own."""


def needed_options(name: str, checkpoint: Path) -> dict[str, Any]:
    """Return the option without which a method does not train, if there is one; the teacher is `checkpoint`."""
    values = {"sentences": "templates", "teacher": str(checkpoint)}
    return {option: value for option, value in values.items() if option == method_class(name).required_option}
