"""Reproduce the arithmetic of Pillow's bicubic resize to S x S pixels bit for bit.

Pillow resizes in whole numbers: coefficients in units of 2^-22, one direction first, then the other, each rounded to 8
bits. The code follows Resample.c operation by operation, because the order of the doubles' operations matters.
Shapes: S image size, H and W pixels of an image, K taps (source pixels that one new pixel is made of).
"""

from __future__ import annotations

from dataclasses import dataclass
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
# Sizes (W, H), resized to 8 x 8 pixels, on both sides of the limits at which the two known rules of Pillow differ.
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


@dataclass(frozen=True)
class Taps:
    """How `size` pixels are made of a row: first source pixel [S] int32 and digits (high, low) [2, S, K] int16.

    A coefficient is 4096 high + low with |low| <= 2048. No tap lies outside of the row; surplus ones are 0.
    """

    first: NDArray[np.int32]
    digits: NDArray[np.int16]


@lru_cache(maxsize=4096)
def taps(length: int, size: int) -> Taps:
    """Compute the taps of a row of `length` pixels that is resized to `size` pixels."""
    first, whole = coefficients(length, size)
    count = whole.shape[1]
    # Near the end of the row surplus taps would lie outside it, so all taps move back.
    back = np.maximum(first + count - length, 0)
    source = np.arange(count) - back[:, None]
    moved = np.where(source >= 0, np.take_along_axis(whole, np.maximum(source, 0), 1), 0)
    half = 1 << (LOW_BITS - 1)
    low = ((moved + half) & (2 * half - 1)) - half
    digits = np.stack([(moved - low) >> LOW_BITS, low]).astype(np.int16)
    return Taps((first - back).astype(np.int32), digits)


def columns_first(width: int, height: int, size: int) -> bool:
    """Whether the installed Pillow resizes this crop by columns before it resizes by rows.

    Raises ValueError when it follows no known rule.
    """
    rule = known_rule()
    if rule is None:
        raise ValueError("this Pillow resizes in an order that is not known")
    return rule == "tall" and _much_taller(width, height, size)


@lru_cache(maxsize=1)
def known_rule() -> str | None:
    """Find out by experiment when the installed Pillow resizes columns first.

    Returns "never" (before version 13), "tall" (from 13 on: if the height shrinks much more than the width), or None if
    it follows neither rule or its pixels differ from those of `resized`.
    """
    size, noise = 8, np.random.default_rng(0)
    rules = {"never", "tall"}
    for width, height in PROBES:
        pixels = noise.integers(0, 256, (height, width, 3), dtype=np.uint8)
        found = np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC))
        if not np.array_equal(found, resized(pixels, size, columns=False)):
            rules.discard("never")
        if not np.array_equal(found, resized(pixels, size, columns=_much_taller(width, height, size))):
            rules.discard("tall")
    return rules.pop() if len(rules) == 1 else None


def _much_taller(width: int, height: int, size: int) -> bool:
    return height > size and height - size > 2 * (width - size)


def resized(pixels: NDArray[np.uint8], size: int, columns: bool) -> NDArray[np.int64]:
    """Resize pixels [H, W, 3] to [S, S, 3] like Pillow, by columns or by rows first: a plain reference in NumPy."""
    values = pixels.astype(np.int64)
    for axis in (0, 1) if columns else (1, 0):
        values = np.moveaxis(values, axis, 0)
        first, whole = coefficients(len(values), size)
        # Surplus taps have weight 0, so any pixel will do for them.
        source = np.minimum(first[:, None] + np.arange(whole.shape[1]), len(values) - 1)
        total = np.einsum("sk,skxc->sxc", whole, values[source]) + (1 << (COEFFICIENT_BITS - 1))
        values = np.moveaxis(np.clip(total >> COEFFICIENT_BITS, 0, 255), 0, axis)
    return values
