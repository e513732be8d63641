"""A small data set for the shard tests: every image is a flat colour that only its split and position have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from shards.catalogue import find
from shards.pack import pack_source
from shards.records import Record, Source, png, source_of, world_records

CLASSNAMES = ("red_ball", "left-handed teapot", "crane (floating)", "potter's wheel", "kite")
COUNTS = {"train": 23, "val": 21, "test": 17}
SIZE = (9, 7)


def pixels(split: str, i: int) -> np.ndarray:
    """[H, W, 3] uint8."""
    return np.full((*SIZE, 3), (list(COUNTS).index(split) * 80, i * 7, 255 - i), np.uint8)


def label(i: int) -> int:
    # Neither sorted nor balanced, and the first label seen is not 0.
    return (i * 7 // 3 + 3) % len(CLASSNAMES)


def toy_records(split: str) -> Iterator[Record]:
    for i in range(COUNTS[split]):
        folder = CLASSNAMES[label(i)]
        yield Record(f"{split}/{folder}/{i}.png", label(i), png(pixels(split, i)))


def toy_source(**changes: object) -> Source:
    fields: dict[str, object] = {
        "name": "toy",
        "classnames": CLASSNAMES,
        "template": "a photo of a {}.",
        "templates": ("a photo of a {}", "an image of a {}"),
        "origin": "toy",
        "counts": COUNTS,
        "records": toy_records,
    }
    return Source(**(fields | changes))  # type: ignore[arg-type]


def pack_some_shapes(root: Path) -> None:
    """The first 40 test images of a generated family."""
    source = source_of(find("shapes-v2"))

    def records(split: str) -> Iterator[Record]:
        return world_records(source.name, source.classnames, split, 40)

    pack_source(replace(source, counts={"test": 40}, records=records), root)
