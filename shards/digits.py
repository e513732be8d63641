"""Scans of handwritten digits that ship with scikit-learn: real images without a download."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from shards.records import Record, png
from shards.rng import stream_seed

CLASSNAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COUNTS: Mapping[str, int] = MappingProxyType({"train": 898, "val": 359, "test": 540})


def split_positions(labels: NDArray[np.int64]) -> dict[str, list[int]]:
    """Return the positions of each split in scikit-learn's order: per class 50 % train, 20 % val, the rest test.

    The rule of CoOp's folder data sets; the shuffle is a fixed stream of its own, the same for every run.
    """
    splits: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    for label in range(len(CLASSNAMES)):
        positions = np.flatnonzero(labels == label).tolist()
        random.Random(stream_seed(0, "digits", "split", label)).shuffle(positions)
        train, val = round(0.5 * len(positions)), round(0.2 * len(positions))
        splits["train"] += positions[:train]
        splits["val"] += positions[train : train + val]
        splits["test"] += positions[train + val :]
    return {name: sorted(positions) for name, positions in splits.items()}


def digit_records(split: str) -> Iterator[Record]:
    """Read the scans of one split as 8-bit grey PNGs of 8 x 8 pixels, in scikit-learn's order."""
    # scikit-learn takes a second to import and only packing needs it.
    from sklearn.datasets import load_digits

    scans = load_digits()
    labels = np.asarray(scans.target, np.int64)
    for position in split_positions(labels)[split]:
        grey = np.rint(scans.images[position] * (255 / 16)).astype(np.uint8)
        yield Record(f"{split}/{CLASSNAMES[labels[position]]}/{position:04d}.png", int(labels[position]), png(grey))
