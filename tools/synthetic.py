"""Make data sets of JPEGs with the spectrum of photographs, for measurements.

`photographs-102` has the size of 16-shot Flowers102: 102 classes, 16 training images each, JPEGs of 500 x 375 pixels.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.console.packing_progress import pack_with_progress
from benchmarks.runtime.synthetic import class_names
from shards.resolve import is_packed
from shards.source import ImageRecord, Source

TRAIN_IMAGES, TEST_IMAGES = 16, 4


def pack_photographs(name: str, root: Path) -> Path:
    """Pack `photographs-C` into `root` unless it is there; returns `root`."""
    if not is_packed(root, name):
        pack_with_progress(photograph_source(name), root)
    return root


def photograph_records(classes: int, split: str, start: int, stop: int) -> Iterator[ImageRecord]:
    """Yield consecutive images of a synthetic split."""
    for i, image in enumerate(photographs(stop - start, start + (10**6 if split == "test" else 0)), start):
        yield ImageRecord(f"{split}/{i:05d}.jpg", i % classes, image)


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
        make_reader=partial(partial, photograph_records, classes),
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
