"""Make inputs of measurements: single batches of noise, and data sets of JPEGs with the spectrum of photographs.

`photographs-102` has the size of 16-shot Flowers102: 102 classes, 16 training images each, JPEGs of 500 x 375 pixels.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.console.packing import pack_with_progress
from benchmarks.runtime.settings import METHOD_OPTIONS, SEED
from procap.clip import CLIP
from procap.methods import build_method
from procap.methods.method import Method
from procap.text import LabelSpace
from shards.records import ImageRecord, Source
from shards.resolve import is_packed
from shards.rng import generator

TRAIN_IMAGES, TEST_IMAGES = 16, 4
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
    """Make an untrained method with synthetic class names, and images [B, 3, S, S] and labels [B] on the device."""
    size = clip.geometry.image_size
    space = LabelSpace(class_names(classes))
    built = build_method(method, clip, space, METHOD_OPTIONS.get(method, {}), generator(SEED, "init"))
    built.training_images = NoiseImages(torch.arange(classes), size)
    if built.required_option == "teacher":
        built.teacher_classifier = build_method("zeroshot", clip, space, {}, generator(SEED, "init")).classifier()
    images = torch.randn(batch, 3, size, size, generator=generator(SEED, "images"))
    return built, images.to(clip.device), (torch.arange(batch) % classes).to(clip.device)


@dataclass(frozen=True)
class NoiseImages:
    """One training image of noise per class, for methods that add some to a batch."""

    labels: Tensor
    size: int

    def image(self, i: int, generator: torch.Generator) -> Tensor:
        return torch.randn(3, self.size, self.size, generator=generator)


def pack_photographs(name: str, root: Path) -> Path:
    """Pack `photographs-C` into `root` unless it is there; returns `root`."""
    if not is_packed(root, name):
        pack_with_progress(photograph_source(name), root)
    return root


@dataclass(frozen=True)
class PhotographPart:
    """Consecutive images of a synthetic split."""

    classes: int
    split: str
    start: int
    stop: int

    def records(self) -> Iterator[ImageRecord]:
        seed = self.start + (10**6 if self.split == "test" else 0)
        for i, image in enumerate(photographs(self.stop - self.start, seed), self.start):
            yield ImageRecord(f"{self.split}/{i:05d}.jpg", i % self.classes, image)

    def stamp(self) -> str:
        return f"photographs {self}"


def photograph_source(name: str) -> Source:
    """Make the source that `photographs-C` is packed from."""
    classes = int(name.rpartition("-")[2])
    return Source(
        name=name,
        classnames=class_names(classes),
        template="a photo of a {}.",
        templates=("a photo of a {}",),
        origin="made-up photographs 1",
        counts={"train": TRAIN_IMAGES * classes, "test": TEST_IMAGES * classes},
        part=partial(PhotographPart, classes),
    )


def photographs(count: int, seed: int = 0) -> list[bytes]:
    """Make JPEGs with the spectrum of photographs, two of three in landscape format."""
    draw = np.random.default_rng(seed)
    noise = [_one_over_f(draw) for _ in range(min(count, 60))]
    images = []
    for i in range(count):
        shift = draw.integers(0, 375, 2)
        pixels = np.roll(noise[i % len(noise)], shift, (0, 1))
        buffer = io.BytesIO()
        Image.fromarray(pixels if i % 3 else pixels.swapaxes(0, 1)).save(buffer, "JPEG", quality=90)
        images.append(buffer.getvalue())
    return images


def _one_over_f(draw: np.random.Generator, width: int = 500, height: int = 375) -> np.ndarray[Any, np.dtype[np.uint8]]:
    frequency = np.hypot(np.fft.fftfreq(height)[:, None] * height, np.fft.rfftfreq(width)[None] * width)
    frequency[0, 0] = 1
    shape = (3, *frequency.shape)
    spectrum = (draw.normal(size=shape) + 1j * draw.normal(size=shape)) / frequency**1.05
    planes = np.fft.irfft2(spectrum, s=(height, width)).transpose(1, 2, 0)
    planes /= planes.std((0, 1))
    # As in photographs, colours vary less than brightness, and the sensor adds a little noise.
    pixels = 110 + 50 * planes[..., :1] + 12 * planes + 4 * draw.normal(size=(height, width, 1))
    return np.clip(pixels, 0, 255).astype(np.uint8)
