"""Sources of images that need no files of the user: the generated sets and the digits of scikit-learn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from shards.catalogue import Dataset
from shards.rng import stream_seed
from shards.source import ImageRecord, Source, png
from shards.world.generate import VERSION, paint, sample_seed
from shards.world.scenes import DIGITS

# Enough for the renderer to work on whole arrays, few enough for a progress bar to move.
RENDER_BATCH = 64


def builtin_source(dataset: Dataset) -> Source:
    """Make a source of a generated or bundled data set; `shards.raw` has those of the user's own folders."""
    generated = dataset.images_from == "world"
    records = partial(paint_images, dataset.name, dataset.classnames) if generated else read_digits
    return Source(
        dataset.name,
        dataset.classnames,
        dataset.template,
        dataset.templates,
        f"world {VERSION}" if generated else dataset.images_from,
        dict(dataset.counts),
        # A split, start and stop make a `RecordReader` of it.
        partial(partial, records),
    )


def paint_images(family: str, classnames: tuple[str, ...], split: str, start: int, stop: int) -> Iterator[ImageRecord]:
    """Yield generated images as PNG. Classes alternate, so the first images of a split contain every class."""
    for first in range(start, stop, RENDER_BATCH):
        index = np.arange(first, min(first + RENDER_BATCH, stop))
        labels = index % len(classnames)
        seeds = np.array([sample_seed(family, split, int(i)) for i in index], np.int64)
        pictures, _ = paint(family, labels, seeds)
        for i, label, pixels in zip(index, labels, pictures, strict=True):
            folder = classnames[label].replace(" ", "_")
            yield ImageRecord(f"{split}/{folder}/{i:05d}.png", int(label), png(pixels))


def read_digits(split: str, start: int, stop: int) -> Iterator[ImageRecord]:
    """Yield scans of digits that ship with scikit-learn, as 8-bit grey PNGs of 8 x 8 pixels in its order."""
    # scikit-learn takes a second to import and only packing needs it.
    from sklearn.datasets import load_digits

    scans = load_digits()
    labels = np.asarray(scans.target, np.int64)
    for position in split_digits(labels)[split][start:stop]:
        label = int(labels[position])
        # scikit-learn's pixels are 0 to 16.
        grey = np.rint(scans.images[position] * (255 / 16)).astype(np.uint8)
        yield ImageRecord(f"{split}/{DIGITS[label]}/{position:04d}.png", label, png(grey))


def split_digits(labels: NDArray[np.int64]) -> dict[str, list[int]]:
    """Return the positions of each split by CoOp's rule for folders, per class 50 % train and 20 % val."""
    splits: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    for label in range(len(DIGITS)):
        positions = np.flatnonzero(labels == label).tolist()
        random.Random(stream_seed(0, "digits", "split", label)).shuffle(positions)
        train, val = round(0.5 * len(positions)), round(0.2 * len(positions))
        splits["train"] += positions[:train]
        splits["val"] += positions[train : train + val]
        splits["test"] += positions[train + val :]
    return {name: sorted(positions) for name, positions in splits.items()}
