"""Where images come from before they are packed: labelled, encoded images in the order of their split."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from shards.catalogue import Dataset

# Enough for the renderer to work on whole arrays, few enough for a progress bar to move.
RENDER_BATCH = 64


@dataclass(frozen=True)
class Record:
    """One image of a split: `path` names it inside its data set, `data` is the encoded file, copied as it is."""

    path: str
    label: int
    data: bytes = field(repr=False)

    @property
    def extension(self) -> str:
        """The member extension of the WebDataset convention."""
        extension = self.path.rpartition(".")[2].lower()
        return "jpg" if extension == "jpeg" else extension


@dataclass(frozen=True)
class Source:
    """Everything that packing needs to know of a data set.

    origin: what made the images, with its version: a set packed from another origin is packed again.
    counts: images per split; `records(split)` yields exactly that many, in the order that few-shot draws rest on.
    """

    name: str
    classnames: tuple[str, ...]
    template: str
    templates: tuple[str, ...]
    origin: str
    counts: dict[str, int]
    records: Callable[[str], Iterator[Record]]


def source_of(dataset: Dataset) -> Source:
    """How a data set of the catalogue is packed."""
    from shards.world import VERSION

    def records(split: str) -> Iterator[Record]:
        if dataset.source == "scans":
            from shards.digits import digit_records

            return digit_records(split)
        return world_records(dataset.name, dataset.classnames, split, dataset.counts[split])

    return Source(
        dataset.name,
        dataset.classnames,
        dataset.template,
        dataset.templates,
        f"world {VERSION}" if dataset.source == "world" else dataset.source,
        dict(dataset.counts),
        records,
    )


def world_records(family: str, classnames: tuple[str, ...], split: str, count: int) -> Iterator[Record]:
    """`count` generated images as PNG, the classes taking turns: the first images of a split show every class."""
    from shards.world import render, sample_seed

    for start in range(0, count, RENDER_BATCH):
        index = np.arange(start, min(start + RENDER_BATCH, count))
        labels = index % len(classnames)
        seeds = np.array([sample_seed(family, split, int(i)) for i in index], np.int64)
        for i, label, pixels in zip(index, labels, render(family, labels, seeds), strict=True):
            folder = classnames[label].replace(" ", "_")
            yield Record(f"{split}/{folder}/{i:05d}.png", int(label), png(pixels))


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode grey [H, W] or RGB [H, W, 3] pixels; the same pixels always give the same bytes."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()
