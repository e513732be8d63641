"""From decoded images to what the vision tower reads: CoOp's test transform and seeded training augmentation.

Pixels stay uint8 until the whole batch is normalised at once, which gives the same floats as doing it per image.
Shapes: B images, 3 colours, S = image size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torchvision.transforms.functional as F
from PIL.Image import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode

CROP_RATIO = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Normalise:
    """uint8 pixels [..., 3, S, S] to float32 in units of the backbone's training statistics."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __call__(self, pixels: Tensor) -> Tensor:
        return F.normalize(pixels.to(torch.float32).div(255), list(self.mean), list(self.std))


@dataclass(frozen=True)
class EvalTransform:
    """Shorter side to `image_size` (bicubic, antialiased), centre crop, normalise; nothing random."""

    image_size: int
    normalise: Normalise

    def pixels(self, image: Image) -> Tensor:
        """[3, S, S] uint8."""
        resized = F.resize(image, self.image_size, InterpolationMode.BICUBIC)
        return F.pil_to_tensor(F.center_crop(resized, [self.image_size, self.image_size]))

    def __call__(self, image: Image) -> Tensor:
        """[3, S, S] float32."""
        return self.normalise(self.pixels(image))


def eval_transform(image_size: int, mean: Sequence[float], std: Sequence[float]) -> EvalTransform:
    """The test transform of CoOp and its successors for a backbone's image size and statistics."""
    return EvalTransform(image_size, _normalise(mean, std))


class TrainAugment:
    """Random augmentation whose every draw comes from the generator it is called with.

    Rotation (whole image, empty corners in the mean colour), RandomResizedCrop (bicubic), horizontal flip with
    probability 1/2, colour jitter. Algorithms and draws are torchvision's.

    crop_scale: range of the crop's share of the area. colour_jitter: brightness, contrast and saturation are scaled by
    1 +- this. rotation: largest angle in degrees. 0 switches either off.
    """

    def __init__(
        self,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        crop_scale: tuple[float, float] = (0.08, 1.0),
        flip: bool = True,
        colour_jitter: float = 0.0,
        rotation: float = 0.0,
    ) -> None:
        self.image_size = image_size
        self.normalise = _normalise(mean, std)
        self.crop_scale, self.flip, self.colour_jitter, self.rotation = crop_scale, flip, colour_jitter, rotation

    def pixels(self, image: Image, generator: torch.Generator) -> Tensor:
        """[3, S, S] uint8."""
        if self.rotation:
            angle = _uniform(-self.rotation, self.rotation, generator)
            fill = [round(255 * channel) for channel in self.normalise.mean]
            image = F.rotate(image, angle, InterpolationMode.BILINEAR, fill=fill)
        top, left, height, width = crop_box(image.width, image.height, self.crop_scale, generator)
        size = [self.image_size, self.image_size]
        image = F.resized_crop(image, top, left, height, width, size, InterpolationMode.BICUBIC)
        if self.flip and torch.rand(1, generator=generator).item() < 0.5:
            image = F.hflip(image)
        if self.colour_jitter:
            image = jitter_colours(image, self.colour_jitter, generator)
        return F.pil_to_tensor(image)

    def __call__(self, image: Image, generator: torch.Generator) -> Tensor:
        """[3, S, S] float32."""
        return self.normalise(self.pixels(image, generator))


def crop_box(
    width: int, height: int, scale: tuple[float, float], generator: torch.Generator
) -> tuple[int, int, int, int]:
    """(top, left, height, width) of RandomResizedCrop: ten tries at an area and a log-uniform ratio, else the largest
    centred box of an allowed ratio. The draws of torchvision's `RandomResizedCrop.get_params`, in its order."""
    low, high = (math.log(ratio) for ratio in CROP_RATIO)
    for _ in range(10):
        area = width * height * _uniform(*scale, generator)
        ratio = torch.exp(torch.empty(1).uniform_(low, high, generator=generator)).item()
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = int(torch.randint(0, height - h + 1, (1,), generator=generator))
            left = int(torch.randint(0, width - w + 1, (1,), generator=generator))
            return top, left, h, w
    ratio = min(max(width / height, CROP_RATIO[0]), CROP_RATIO[1])
    w, h = (width, round(width / ratio)) if width / height < ratio else (round(height * ratio), height)
    return (height - h) // 2, (width - w) // 2, h, w


def jitter_colours(image: Image, strength: float, generator: torch.Generator) -> Image:
    """Brightness, contrast and saturation by factors in [1 - strength, 1 + strength], in random order."""
    order = torch.randperm(4, generator=generator).tolist()
    low, high = max(0.0, 1 - strength), 1 + strength
    factors = [_uniform(low, high, generator) for _ in range(3)]
    adjust = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation)
    # The fourth entry of torchvision's order is hue, left alone: it would change the colour a class is named by.
    for step in order:
        if step < 3:
            image = adjust[step](image, factors[step])
    return image


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return torch.empty(1).uniform_(low, high, generator=generator).item()


def _normalise(mean: Sequence[float], std: Sequence[float]) -> Normalise:
    return Normalise((mean[0], mean[1], mean[2]), (std[0], std[1], std[2]))
