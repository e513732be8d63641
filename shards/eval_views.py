"""Several views of a test image, for methods that adapt to each image: the plain one, and random ones.

Source: Shu et al. 2022, "Test-Time Prompt Tuning for Zero-Shot Generalization", and its public code. AugMix is that of
Hendrycks et al. 2020 with the operations of that code, all at its lowest severity. Shapes: V views, S image size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ImageOps
from PIL.Image import Image, Resampling
from torch import Tensor

from shards.rng import generator
from shards.transforms import EvalTransform, affine, crop_box, cut

CHAINS = 3
"""Chains of operations that AugMix blends; each has at most as many operations."""

Change = Callable[[Image, float, float], Image]
"""Changes an image by a strength in [0.1, 1] and a sign, 1 or -1."""


@dataclass(frozen=True)
class EvalViews:
    """Make V views of an image: that of `plain`, then random crops of any size, half of them flipped.

    mixes: blend each crop with changed copies of it (AugMix).
    Random numbers are those of the stream "views" of `seed` and the image's pixels: an image has the same views in all
    batches, processes and targets.
    """

    plain: EvalTransform
    views: int
    mixes: bool = False
    seed: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what an image is transformed to."""
        return self.views, *self.plain.shape

    def __call__(self, image: Image, out: Tensor | None = None) -> Tensor:
        """Transform an image to [V, 3, S, S] float32, the plain view first."""
        out = torch.empty(self.shape) if out is None else out
        self.plain(image, out[0])
        draws = generator(self.seed, "views", hashlib.sha256(image.tobytes()).hexdigest())
        for view in out[1:]:
            crop = random_crop(image, self.plain.image_size, draws)
            self.plain.normalise(augmix(crop, draws) if self.mixes else crop, view)
        return out


AnyEvalTransform = EvalTransform | EvalViews


def random_crop(image: Image, size: int, draws: torch.Generator) -> Image:
    """Crop and flip an image at random, as torchvision's RandomResizedCrop (bilinear) and RandomHorizontalFlip do."""
    view = cut(image, crop_box(*image.size, (0.08, 1.0), draws), size, Resampling.BILINEAR)
    return ImageOps.mirror(view) if torch.rand(1, generator=draws).item() < 0.5 else view


def augmix(image: Image, draws: torch.Generator) -> NDArray[np.float32]:
    """Blend an image with three chains of one to three random operations on it: pixels [S, S, 3] from 0 to 255."""
    # A Dirichlet distribution with all parameters 1, and a Beta distribution with both.
    weights = torch.empty(CHAINS).exponential_(generator=draws).numpy()
    rest = torch.rand(1, generator=draws).numpy()
    pixels = (1 - rest) * np.asarray(image, np.float32)
    for weight in rest * weights / weights.sum():
        changed = image
        length = int(torch.randint(1, CHAINS + 1, (1,), generator=draws))
        for index in torch.randint(len(CHANGES), (length,), generator=draws).tolist():
            strength, sign = torch.rand(2, generator=draws).tolist()
            changed = CHANGES[index](changed, 0.1 + 0.9 * strength, 1 if sign < 0.5 else -1)
        pixels += weight * np.asarray(changed, np.float32)
    return pixels


_shift = partial(affine, resampling=Resampling.BILINEAR)

CHANGES: tuple[Change, ...] = (
    lambda image, strength, sign: ImageOps.autocontrast(image),
    lambda image, strength, sign: ImageOps.equalize(image),
    lambda image, strength, sign: ImageOps.posterize(image, 4),
    lambda image, strength, sign: image.rotate(sign * int(3 * strength), Resampling.BILINEAR),
    lambda image, strength, sign: ImageOps.solarize(image, 256 - int(25.6 * strength)),
    lambda image, strength, sign: _shift(image, x_by_y=sign * 0.03 * strength),
    lambda image, strength, sign: _shift(image, y_by_x=sign * 0.03 * strength),
    # By 0 to 7 of 224 pixels.
    lambda image, strength, sign: _shift(image, x=sign * int(strength * image.width / 30)),
    lambda image, strength, sign: _shift(image, y=sign * int(strength * image.width / 30)),
)
