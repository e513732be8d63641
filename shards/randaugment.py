"""RandAugment as Dassl's trainers use it: two of sixteen operations of Pillow, all at the strength 10 of 30.

Source: Cubuk et al. 2020, "RandAugment"; the operations, their ranges and their grey fill are those of Dassl.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from PIL import ImageDraw, ImageEnhance, ImageOps
from PIL.Image import Image, Transform

OPERATIONS = 2
STRENGTH = 10 / 30
GREY = (125, 123, 114)

Operation = Callable[[Image, float, torch.Generator], Image]


def randaugment(image: Image, generator: torch.Generator) -> Image:
    """Apply randomly drawn operations, which may be the same one twice, to an RGB image; its size stays."""
    for index in torch.randint(len(TABLE), (OPERATIONS,), generator=generator).tolist():
        operation, low, high = TABLE[index]
        image = operation(image, low + STRENGTH * (high - low), generator)
    return image


def _rotate(image: Image, degrees: float, generator: torch.Generator) -> Image:
    return image.rotate(_signed(degrees, generator))


def _posterize(image: Image, bits: float, generator: torch.Generator) -> Image:
    return ImageOps.posterize(image, int(bits))


def _solarize(image: Image, threshold: float, generator: torch.Generator) -> Image:
    return ImageOps.solarize(image, math.ceil(threshold))


def _solarize_add(image: Image, addition: float, generator: torch.Generator) -> Image:
    return ImageOps.solarize(image.point(lambda value: min(255, int(value + addition))), 128)


def _cutout(image: Image, size: float, generator: torch.Generator) -> Image:
    """Cover a square of `size` pixels around a random point, as far as it lies in the image."""
    x, y = (length * torch.rand(1, generator=generator).item() for length in image.size)
    left, top = int(max(0, x - size / 2)), int(max(0, y - size / 2))
    image = image.copy()
    ImageDraw.Draw(image).rectangle((left, top, min(image.width, left + size), min(image.height, top + size)), GREY)
    return image


def _enhance(kind: Callable[[Image], ImageEnhance._Enhance]) -> Operation:
    return lambda image, factor, generator: kind(image).enhance(factor)


def _shift(x_by_y: float = 0, y_by_x: float = 0, x: float = 0, y: float = 0) -> Operation:
    """Make an operation that shears or translates by its signed value times the given coefficients."""

    def shift(image: Image, value: float, generator: torch.Generator) -> Image:
        value = _signed(value, generator)
        matrix = (1, x_by_y * value, x * value, y_by_x * value, 1, y * value)
        return image.transform(image.size, Transform.AFFINE, matrix)

    return shift


def _signed(value: float, generator: torch.Generator) -> float:
    return -value if torch.rand(1, generator=generator).item() > 0.5 else value


TABLE: tuple[tuple[Operation, float, float], ...] = (
    (lambda image, value, generator: ImageOps.autocontrast(image), 0, 1),
    (lambda image, value, generator: ImageOps.equalize(image), 0, 1),
    (lambda image, value, generator: ImageOps.invert(image), 0, 1),
    (_rotate, 0, 30),
    (_posterize, 4, 8),
    (_solarize, 0, 256),
    (_solarize_add, 0, 110),
    (_enhance(ImageEnhance.Color), 0.1, 1.9),
    (_enhance(ImageEnhance.Contrast), 0.1, 1.9),
    (_enhance(ImageEnhance.Brightness), 0.1, 1.9),
    (_enhance(ImageEnhance.Sharpness), 0.1, 1.9),
    (_shift(x_by_y=1), 0, 0.3),
    (_shift(y_by_x=1), 0, 0.3),
    (_cutout, 0, 40),
    (_shift(x=1), 0, 100),
    (_shift(y=1), 0, 100),
)
"""The operations with the values that they have at strength 0 and 30."""
