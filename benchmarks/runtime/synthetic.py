"""Make single batches of noise and methods on made-up classes, for measurements without data.

Shapes: B images, S image size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from benchmarks.runtime.settings import METHOD_OPTIONS, SEED
from procap.clip import CLIP
from procap.methods import build_method, method_class
from procap.methods.hooks import TaughtMethod
from procap.methods.method import Method
from procap.text import LabelSpace
from shards.rng import generator

COLOURS = ("white", "pink", "dark red", "pale blue", "golden", "purple", "snow-white", "orange", "black", "spotted")
ORIGINS = ("garden", "mountain", "swamp", "mexican", "canterbury", "desert", "silver", "alpine", "water", "tree")
THINGS = ("lily", "rose", "bellflower", "snapdragon", "aster", "poppy", "orchid", "thistle", "primrose", "geranium")


def class_names(count: int) -> tuple[str, ...]:
    """Make distinct names of one to five words, the same ones every time."""
    names = [thing if not origin else f"{origin} {thing}" for origin, thing in product(("", *ORIGINS), THINGS)]
    names = names[:1] + names[11::7] + [f"{colour} {name}" for colour, name in product(COLOURS, names)]
    if count > len(names):
        names += [f"{name} number {i}" for i, name in enumerate(names * (count // len(names)))]
    return tuple(dict.fromkeys(names))[:count]


def synthetic_case(clip: CLIP, method: str, classes: int, batch: int) -> tuple[Method, Tensor, Tensor]:
    """Make an untrained method with synthetic class names, and images [B, 3, S, S] and labels [B] on the device.

    A teacher is the same backbone.
    """
    size = clip.geometry.image_size
    space, options = LabelSpace(class_names(classes)), {**METHOD_OPTIONS.get(method, {})}
    if method == "promptkd":
        options["width"] = clip.geometry.embed_dim
    if method_class(method).required_option == "teacher":
        options["teacher"] = clip.name
    built = build_method(method, clip, space, options, generator(SEED, "init"))
    built.training_images = NoiseImages(torch.arange(classes), size)
    if isinstance(built, TaughtMethod):
        built.set_teacher(build_method("zeroshot", clip, space, {}, generator(SEED, "init")).classifier)
        built.prepare_training()
    images = torch.randn(batch, 3, size, size, generator=generator(SEED, "images"))
    return built, images.to(clip.device), (torch.arange(batch) % classes).to(clip.device)


@dataclass
class NoiseImages:
    """One training image of noise per class, for methods that add some to a batch."""

    labels: Tensor
    size: int

    def image(self, i: int, generator: torch.Generator) -> Tensor:
        return torch.randn(3, self.size, self.size, generator=generator)
