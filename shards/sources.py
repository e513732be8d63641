"""Sources of images that need no files of the user: the generated sets and the digits of scikit-learn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from shards.dataset import Dataset
from shards.digits import digit_records
from shards.records import Record, Source, png

# Enough for the renderer to work on whole arrays, few enough for a progress bar to move.
RENDER_BATCH = 64


def builtin_source(dataset: Dataset) -> Source:
    """Make a source of a generated or bundled data set; `shards.raw` has those of the user's own folders."""
    from shards.world.generate import VERSION

    generated = dataset.source == "world"
    return Source(
        dataset.name,
        dataset.classnames,
        dataset.template,
        dataset.templates,
        f"world {VERSION}" if generated else dataset.source,
        dict(dataset.counts),
        partial(WorldPart, dataset.name, dataset.classnames) if generated else ScansPart,
    )


@dataclass(frozen=True)
class WorldPart:
    """Generated images as PNG. Classes alternate, so the first images of a split contain every class."""

    family: str
    classnames: tuple[str, ...]
    split: str
    start: int
    stop: int

    def records(self) -> Iterator[Record]:
        from shards.world.generate import render, sample_seed

        for start in range(self.start, self.stop, RENDER_BATCH):
            index = np.arange(start, min(start + RENDER_BATCH, self.stop))
            labels = index % len(self.classnames)
            seeds = np.array([sample_seed(self.family, self.split, int(i)) for i in index], np.int64)
            for i, label, pixels in zip(index, labels, render(self.family, labels, seeds), strict=True):
                folder = self.classnames[label].replace(" ", "_")
                yield Record(f"{self.split}/{folder}/{i:05d}.png", int(label), png(pixels))

    def stamp(self) -> str:
        from shards.world.generate import VERSION

        return str(VERSION)


@dataclass(frozen=True)
class ScansPart:
    """Scans that ship with scikit-learn."""

    split: str
    start: int
    stop: int

    def records(self) -> Iterator[Record]:
        return islice(digit_records(self.split), self.start, self.stop)

    def stamp(self) -> str:
        return ""
