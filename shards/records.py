"""The interface between sources and packing: labelled, encoded images in the order of their split."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

JPEG_ENDINGS = ("jpg", "jpeg", "jpe", "jfif")


@dataclass(frozen=True)
class ImageRecord:
    """One image of a split: `path` names it inside its data set, `data` is stored: the encoded file, or a smaller one.

    unreadable: why its file could not be read; `data` is empty then.
    """

    path: str
    label: int
    data: bytes = field(repr=False)
    unreadable: str = ""

    @property
    def extension(self) -> str:
        """The member extension of the WebDataset convention."""
        extension = self.path.rpartition(".")[2].lower()
        return "jpg" if extension in JPEG_ENDINGS else extension


class ImageRange(Protocol):
    """Consecutive images of a split that one process packs; small enough to be sent to it."""

    def records(self) -> Iterator[ImageRecord]: ...


@dataclass(frozen=True)
class Source:
    """Everything about a data set that packing needs.

    origin: what made the images, with its version; a set from another origin is packed again.
    counts: images per split.
    part: `part(split, start, stop)` makes an `ImageRange` of start..stop - 1, in the order that few-shot draws use.
    size: bytes of all images; None if it is not known before reading them.
    per_shard: images of a shard, fewer if it would be larger than `shards.pack.SHARD_BYTES`.
    problems: what is wrong in the lists of images; such a source is not packed. notes: what a user should know of them.
    """

    name: str
    classnames: tuple[str, ...]
    template: str
    templates: tuple[str, ...]
    origin: str
    counts: Mapping[str, int]
    part: Callable[[str, int, int], ImageRange]
    size: int | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    per_shard: int = 1000

    def ranges(self, size: int) -> list[tuple[str, int, int]]:
        """Divide every split into ranges of so many images: split, start and stop."""
        return [
            (split, start, min(start + size, count))
            for split, count in self.counts.items()
            for start in range(0, count, size)
        ]


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode grey [H, W] or RGB [H, W, 3] pixels; the same pixels always give the same bytes."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()
