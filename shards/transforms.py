"""Transform decoded images to inputs of the vision tower: CoOp's test transform and seeded training augmentation.

Pillow and numpy release the interpreter lock and start no threads. Shapes: 3 colours, S = image size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ImageDraw, ImageEnhance, ImageOps
from PIL.Image import Image, Resampling, Transform
from torch import Tensor

from shards.images import shorter_side

# The default of torchvision's RandomResizedCrop.
CROP_RATIO = (3 / 4, 4 / 3)

# RandAugment as Dassl's trainers use it.
OPERATIONS = 2
STRENGTH = 10 / 30
GREY = (125, 123, 114)

Operation = Callable[[Image, float, torch.Generator], Image]


@dataclass(frozen=True)
class ImageTransform:
    """What transforms have in common: the image size, and mean and std of the backbone's training images."""

    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, image: Image | NDArray[np.float32], out: Tensor | None = None) -> Tensor:
        """Convert an RGB image, or pixels [S, S, 3] from 0 to 255, to [3, S, S] float32, normalised by mean and std.

        out: to write to, because allocating a tensor per image would cost as much as the arithmetic.
        """
        pixels = np.asarray(image).transpose(2, 0, 1)
        out = torch.empty(pixels.shape) if out is None else out
        values = out.numpy()
        mean, std = np.array([self.mean, self.std], np.float32)[..., None, None]
        # The same float32 operations in the same order as torchvision's ToTensor and Normalize, so the same floats.
        np.copyto(values, pixels)
        values /= np.float32(255)
        values -= mean
        values /= std
        return out


@dataclass(frozen=True)
class EvalTransform(ImageTransform):
    """Resize the shorter side to `image_size` (antialiased), crop the centre, normalise; no randomness.

    squash: resize the whole image to S x S pixels instead, which changes its proportions.
    interpolation: "bicubic" or "bilinear".
    """

    squash: bool = False
    interpolation: str = "bicubic"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what an image is transformed to."""
        return 3, self.image_size, self.image_size

    def crop(self, image: Image) -> Image:
        """Resize and crop to the S x S pixels that the model sees.

        Resizing by Pillow's `box` what the crop needs is a quarter faster, but changes a pixel value in 50,000.
        """
        resampling = Resampling[self.interpolation.upper()]
        if self.squash:
            return image.resize((self.image_size, self.image_size), resampling)
        size = shorter_side(image.size, self.image_size)
        if size != image.size:
            image = image.resize(size, resampling)
        # As torchvision's CenterCrop: Python's `round` gives the even number for a half.
        left, top = (round((length - self.image_size) / 2) for length in size)
        return image.crop((left, top, left + self.image_size, top + self.image_size))

    def __call__(self, image: Image, out: Tensor | None = None) -> Tensor:
        """Transform an image to [3, S, S] float32."""
        return self.normalise(self.crop(image), out)


@dataclass(frozen=True)
class TrainAugment(ImageTransform):
    """Random augmentation that takes every random number from the generator it is called with.

    "randaugment": the whole image is squashed to a square and changed by RandAugment. "crop": rotation (whole image,
    empty corners in the mean colour), RandomResizedCrop (bicubic), horizontal flip with probability 1/2, colour jitter.
    Algorithms and draws of "crop" are torchvision's.

    crop_scale: range of the crop's share of the area. colour_jitter: brightness, contrast and saturation are scaled by
    1 +- this. rotation: largest angle in degrees. 0 switches either off. views: how many of them are made of an image.
    """

    crop_scale: tuple[float, float] = (0.08, 1.0)
    flip: bool = True
    colour_jitter: float = 0.0
    rotation: float = 0.0
    augmentation: str = "crop"
    views: int = 1

    def augment(self, image: Image, generator: torch.Generator) -> Image:
        """Augment an image to S x S pixels."""
        if self.augmentation == "randaugment":
            return randaugment(image.resize((self.image_size, self.image_size), Resampling.BICUBIC), generator)
        if self.rotation:
            angle = _uniform(-self.rotation, self.rotation, generator)
            fill = tuple(round(255 * channel) for channel in self.mean)
            image = image.rotate(angle, Resampling.BILINEAR, fillcolor=fill)
        box = crop_box(*image.size, self.crop_scale, generator)
        image = cut(image, box, self.image_size)
        if self.flip and torch.rand(1, generator=generator).item() < 0.5:
            image = ImageOps.mirror(image)
        return jitter_colours(image, self.colour_jitter, generator) if self.colour_jitter else image

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what an image is augmented to: [3, S, S], or [views, 3, S, S] if there are several."""
        return (self.views,) * (self.views > 1) + (3, self.image_size, self.image_size)

    def __call__(self, image: Image, generator: torch.Generator, out: Tensor | None = None) -> Tensor:
        """Augment and normalise an image to float32 of shape `shape`."""
        out = torch.empty(self.shape) if out is None else out
        for view in out if self.views > 1 else (out,):
            self.normalise(self.augment(image, generator), view)
        return out


def crop_box(
    width: int, height: int, scale: tuple[float, float], generator: torch.Generator
) -> tuple[int, int, int, int]:
    """Draw (top, left, height, width) of a crop as torchvision's `RandomResizedCrop.get_params` does, in its order.

    Ten tries at an area and a log-uniform ratio, else the largest centred box of an allowed ratio.
    """
    low, high = (math.log(ratio) for ratio in CROP_RATIO)
    for _ in range(10):
        area = width * height * _uniform(*scale, generator)
        # In float32, as torchvision computes it: `math.exp` would give other boxes where a side is rounded.
        ratio = torch.exp(torch.empty(1).uniform_(low, high, generator=generator)).item()
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = int(torch.randint(0, height - h + 1, (1,), generator=generator))
            left = int(torch.randint(0, width - w + 1, (1,), generator=generator))
            return top, left, h, w
    ratio = min(max(width / height, CROP_RATIO[0]), CROP_RATIO[1])
    w, h = (width, round(width / ratio)) if width / height < ratio else (round(height * ratio), height)
    return (height - h) // 2, (width - w) // 2, h, w


def cut(image: Image, box: tuple[int, int, int, int], size: int, resampling: Resampling = Resampling.BICUBIC) -> Image:
    """Resize a box (top, left, height, width) of an image to size x size pixels."""
    top, left, height, width = box
    return image.crop((left, top, left + width, top + height)).resize((size, size), resampling)


def jitter_colours(image: Image, strength: float, generator: torch.Generator) -> Image:
    """Scale brightness, contrast and saturation by factors in [1 - strength, 1 + strength], in random order."""
    # The order before the factors, as in torchvision's ColorJitter, so that equal generators give equal images.
    order = torch.randperm(4, generator=generator).tolist()
    low, high = max(0.0, 1 - strength), 1 + strength
    factors = [_uniform(low, high, generator) for _ in range(3)]
    adjust = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    # The fourth entry of torchvision's order is hue, left alone: it would change the colour a class is named by.
    for step in order:
        if step < 3:
            image = adjust[step](image).enhance(factors[step])
    return image


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return torch.empty(1).uniform_(low, high, generator=generator).item()


def randaugment(image: Image, generator: torch.Generator) -> Image:
    """Apply two of sixteen operations, which may be the same one twice, at strength 10 of 30; the size stays.

    Source: Cubuk et al. 2020, "RandAugment"; the operations, their ranges and their grey fill are those of Dassl.
    """
    for index in torch.randint(len(TABLE), (OPERATIONS,), generator=generator).tolist():
        operation, low, high = TABLE[index]
        image = operation(image, low + STRENGTH * (high - low), generator)
    return image


def _cutout(image: Image, size: float, generator: torch.Generator) -> Image:
    """Cover a square of `size` pixels around a random point, as far as it lies in the image."""
    x, y = (length * torch.rand(1, generator=generator).item() for length in image.size)
    left, top = int(max(0, x - size / 2)), int(max(0, y - size / 2))
    image = image.copy()
    ImageDraw.Draw(image).rectangle((left, top, min(image.width, left + size), min(image.height, top + size)), GREY)
    return image


def _enhance(enhancer: Callable[[Image], ImageEnhance._Enhance]) -> Operation:
    return lambda image, factor, generator: enhancer(image).enhance(factor)


def affine(
    image: Image,
    *,
    x_by_y: float = 0,
    y_by_x: float = 0,
    x: float = 0,
    y: float = 0,
    resampling: Resampling = Resampling.NEAREST,
) -> Image:
    """Shear an image by coefficients, or translate it by pixels."""
    return image.transform(image.size, Transform.AFFINE, (1, x_by_y, x, y_by_x, 1, y), resampling)


def _signed(value: float, generator: torch.Generator) -> float:
    return -value if torch.rand(1, generator=generator).item() > 0.5 else value


TABLE: tuple[tuple[Operation, float, float], ...] = (
    # The first three have no strength.
    (lambda image, value, generator: ImageOps.autocontrast(image), 0, 1),
    (lambda image, value, generator: ImageOps.equalize(image), 0, 1),
    (lambda image, value, generator: ImageOps.invert(image), 0, 1),
    (lambda image, value, generator: image.rotate(_signed(value, generator)), 0, 30),
    (lambda image, value, generator: ImageOps.posterize(image, int(value)), 4, 8),
    (lambda image, value, generator: ImageOps.solarize(image, math.ceil(value)), 0, 256),
    (lambda image, value, generator: ImageOps.solarize(image.point(lambda x: min(255, int(x + value))), 128), 0, 110),
    (_enhance(ImageEnhance.Color), 0.1, 1.9),
    (_enhance(ImageEnhance.Contrast), 0.1, 1.9),
    (_enhance(ImageEnhance.Brightness), 0.1, 1.9),
    (_enhance(ImageEnhance.Sharpness), 0.1, 1.9),
    (lambda image, value, draws: affine(image, x_by_y=_signed(value, draws)), 0, 0.3),
    (lambda image, value, draws: affine(image, y_by_x=_signed(value, draws)), 0, 0.3),
    (_cutout, 0, 40),
    (lambda image, value, draws: affine(image, x=_signed(value, draws)), 0, 100),
    (lambda image, value, draws: affine(image, y=_signed(value, draws)), 0, 100),
)
"""The operations with the values that they have at strength 0 and 30."""
