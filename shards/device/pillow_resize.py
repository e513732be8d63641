"""Reproduce the arithmetic of Pillow's bicubic resize to S x S pixels bit for bit.

Pillow resizes in whole numbers: coefficients in units of 2^-22, one direction first, then the other, each rounded to 8
bits. The code follows Resample.c operation by operation, because the order of the doubles' operations matters.
Shapes: S image size, H and W pixels of an image, K taps (source pixels that one new pixel is made of).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

COEFFICIENT_BITS = 22
LOW_BITS = 12
HIGH_BITS = COEFFICIENT_BITS - LOW_BITS
# Largest ratio of source to new pixels. It allows 31 taps, so no sum of low digits times pixels reaches 2^24:
# 31 x 2048 x 255 < 2^24.
REDUCTION = 7.5
# Sizes (W, H), resized to 8 x 8 pixels, on both sides of the limits at which Pillow changes the order of directions.
PROBES = ((5, 40), (40, 5), (5, 9), (12, 16), (12, 17), (17, 12), (30, 52), (30, 53))


def fits(width: int, height: int, size: int) -> bool:
    """Whether float32 holds the digit sums of an image of this size, and so of every crop of it, exactly."""
    return max(width, height) <= REDUCTION * size


def coefficients(length: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Compute first source pixel [S] and coefficients [S, K], times 2^22, for a row of `length` pixels."""
    scale = length / size
    stretch = max(scale, 1.0)
    support = 2.0 * stretch
    centre = (np.arange(size) + 0.5) * scale
    # Pillow truncates towards zero, as `astype` does; negative numbers become 0 in either case.
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    stop = np.minimum((centre + support + 0.5).astype(np.int64), length)
    tap = np.arange((stop - first).max())
    weights = _bicubic((first[:, None] + tap - centre[:, None] + 0.5) * (1.0 / stretch))
    weights[tap >= (stop - first)[:, None]] = 0.0
    # A running sum adds in Pillow's order; numpy's `sum` adds in pairs.
    weights /= np.cumsum(weights, axis=1)[:, -1:]
    scaled = weights * 2.0**COEFFICIENT_BITS
    return first, np.where(scaled < 0, scaled - 0.5, scaled + 0.5).astype(np.int64)


def _bicubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


@lru_cache(maxsize=4096)
def taps(length: int, size: int) -> tuple[NDArray[np.int32], NDArray[np.int16]]:
    """Compute the first source pixels [S] and digits (high, low) [2, S, K] of a row that is resized to `size` pixels.

    A coefficient is 4096 high + low with |low| <= 2048. No tap lies outside of the row; surplus ones are 0.
    """
    first, whole = coefficients(length, size)
    count = whole.shape[1]
    # Near the end of the row surplus taps would lie outside it, so all taps move back.
    back = np.maximum(first + count - length, 0)
    source = np.arange(count) - back[:, None]
    moved = np.where(source >= 0, np.take_along_axis(whole, np.maximum(source, 0), 1), 0)
    half = 1 << (LOW_BITS - 1)
    low = ((moved + half) & (2 * half - 1)) - half
    digits = np.stack([(moved - low) >> LOW_BITS, low]).astype(np.int16)
    return (first - back).astype(np.int32), digits


def columns_first(width: int, height: int, size: int) -> bool:
    """Whether Pillow, from version 13 on, resizes by columns before rows: if the height shrinks much more."""
    return height > size and height - size > 2 * (width - size)


@lru_cache(maxsize=1)
def is_pillow_reproduced() -> bool:
    """Whether `resize` gives the pixels of the installed Pillow, compared at sizes around the limits of its rules."""
    size, noise = 8, np.random.default_rng(0)
    images = [noise.integers(0, 256, (height, width, 3), dtype=np.uint8) for width, height in PROBES]
    resized = (Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC) for image in images)
    return all(np.array_equal(np.asarray(a), resize(b, size)) for a, b in zip(resized, images, strict=True))


def resize(pixels: NDArray[np.uint8], size: int) -> NDArray[np.int64]:
    """Resize pixels [H, W, 3] to [S, S, 3] like Pillow: a plain reference in NumPy."""
    height, width, _ = pixels.shape
    values = pixels.astype(np.int64)
    for axis in (0, 1) if columns_first(width, height, size) else (1, 0):
        values = np.moveaxis(values, axis, 0)
        first, whole = coefficients(len(values), size)
        # Surplus taps have weight 0, so any pixel will do for them.
        source = np.minimum(first[:, None] + np.arange(whole.shape[1]), len(values) - 1)
        total = np.einsum("sk,skxc->sxc", whole, values[source]) + (1 << (COEFFICIENT_BITS - 1))
        values = np.moveaxis(np.clip(total >> COEFFICIENT_BITS, 0, 255), 0, axis)
    return values
