"""Where images come from before they are packed: labelled, encoded images in the order of their split."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from shards.dataset import Dataset

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


class Part(Protocol):
    """Consecutive images of a split that one process packs; small enough to be sent to it."""

    def records(self) -> Iterator[Record]: ...

    def stamp(self) -> str:
        """Text that changes when the images would, found without reading them."""
        ...


@dataclass(frozen=True)
class Source:
    """Everything that packing needs to know of a data set.

    origin: what made the images, with its version: a set packed from another origin is packed again.
    counts: images per split; `part(split, start, stop)` yields images start..stop - 1 of a split, in the order that
        few-shot draws rest on.
    size: bytes of all images, where that is known before reading them.
    variant: how the set differs from a published one. resize: shorter side that larger images are brought to.
    """

    name: str
    classnames: tuple[str, ...]
    template: str
    templates: tuple[str, ...]
    origin: str
    counts: Mapping[str, int]
    part: Callable[[str, int, int], Part]
    size: int | None = None
    variant: str = ""
    resize: int | None = None


def source_of(dataset: Dataset) -> Source:
    """How a generated or bundled data set is packed; sets of the user's own folders have readers in `layouts`."""
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
    """Generated images as PNG, the classes taking turns: the first images of a split show every class."""

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
        from shards.digits import digit_records

        return islice(digit_records(self.split), self.start, self.stop)

    def stamp(self) -> str:
        return ""


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode grey [H, W] or RGB [H, W, 3] pixels; the same pixels always give the same bytes."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()
