"""A small data set for the shard tests: every image is a flat colour that only its split and position have."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from procap.errors import UserError
from shards.builtin_sources import builtin_source
from shards.catalogue import find
from shards.check import check_dataset
from shards.pack import pack_source
from shards.source import ImageRecord, Source, png

CLASSNAMES = ("red_ball", "left-handed teapot", "crane (floating)", "potter's wheel", "kite")
COUNTS = {"train": 23, "val": 21, "test": 17}
SIZE = (9, 7)
SAME_PATH = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
"""The environment of another process that imports what this one does."""


def pixels(split: str, i: int) -> np.ndarray:
    """[H, W, 3] uint8."""
    return np.full((*SIZE, 3), (list(COUNTS).index(split) * 80, i * 7, 255 - i), np.uint8)


def label(i: int) -> int:
    # Neither sorted nor balanced, and the first label seen is not 0.
    return (i * 7 // 3 + 3) % len(CLASSNAMES)


def toy_records(split: str) -> Iterator[ImageRecord]:
    for i in range(COUNTS[split]):
        folder = CLASSNAMES[label(i)]
        yield ImageRecord(f"{split}/{folder}/{i}.png", label(i), png(pixels(split, i)))


def few(images: Callable[[str], Iterator[ImageRecord]], split: str, start: int, stop: int) -> Iterator[ImageRecord]:
    """Images start..stop - 1 of what a function yields for a split; fewer where it yields fewer."""
    return islice(images(split), start, stop)


def held(log: Path, held: int, split: str, start: int, stop: int) -> Iterator[ImageRecord]:
    """Toy images; each part that is packed writes a line to a log: split, first image, process.

    held: train images from that one on take ten minutes each, so that a packing cannot get past them.
    """
    with log.open("a") as file:
        file.write(f"{split} {start} {os.getpid()}\n")
    for i, record in enumerate(islice(toy_records(split), start, stop), start):
        if split == "train" and i >= held:
            time.sleep(600)
        yield record


def broken(split: str, start: int, stop: int) -> Iterator[ImageRecord]:
    """Toy images of which one of a split is not an image."""
    for i, record in enumerate(islice(toy_records(split), start, stop), start):
        yield ImageRecord(record.path, record.label, b"broken") if (split, i) == ("val", 12) else record


def toy_source(images: Callable[[str], Iterator[ImageRecord]] = toy_records, **changes: object) -> Source:
    fields: dict[str, object] = {
        "name": "toy", "classnames": CLASSNAMES, "template": "a photo of a {}.",
        "templates": ("a photo of a {}", "an image of a {}"), "origin": "toy", "counts": COUNTS,
        "make_reader": partial(partial, few, images),
    }  # fmt: skip
    return Source(**(fields | changes))  # type: ignore[arg-type]


def pack_some_shapes(root: Path) -> None:
    """The first 40 test images of a generated family."""
    pack_source(replace(builtin_source(find("shapes-v2")), counts={"test": 40}), root)


def is_whole(root: Path, name: str, **options: Any) -> bool:
    """Whether `procap data check` finds no problem."""
    try:
        return not any(split.problems for split in check_dataset(root, name, **options))
    except UserError:
        return False
