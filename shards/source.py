"""Define what packing needs of a data set: labelled, encoded images in the order of their split."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from procap.errors import UserError
from shards.names import unsafe_path

# Extensions that WebDataset readers treat as images. Others can be dangerous: a library that decodes members by
# extension would unpickle a `pyd`.
MEMBER_EXTENSIONS = ("jpg", "png", "webp", "gif", "bmp", "tif", "tiff")
JPEG_ENDINGS = ("jpg", "jpeg", "jpe", "jfif")


@dataclass(frozen=True)
class ImageRecord:
    """One image of a split. path: inside its data set. data: what is stored. unreadable: why `data` is empty."""

    path: str
    label: int
    data: bytes = field(repr=False)
    unreadable: str = ""

    @property
    def extension(self) -> str:
        """The member extension of the WebDataset convention."""
        extension = self.path.rpartition(".")[2].lower()
        return "jpg" if extension in JPEG_ENDINGS else extension


RecordReader = Callable[[], Iterator[ImageRecord]]
"""Reads consecutive images of a split, which one process packs; small enough to be sent to it."""


@dataclass(frozen=True)
class Source:
    """Everything about a data set that packing needs.

    origin: what made the images, with its version; a set from another origin is packed again.
    counts: images per split. make_reader: makes the reader of images start..stop - 1 of a split, in its order.
    total_bytes: of all images; None if it is not known before reading them. per_shard: most images of a shard.
    problems: what is wrong in the lists of images; such a source is not packed. notes: what a user should know of them.
    """

    name: str
    classnames: tuple[str, ...]
    template: str
    templates: tuple[str, ...]
    origin: str
    counts: Mapping[str, int]
    make_reader: Callable[[str, int, int], RecordReader]
    total_bytes: int | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    per_shard: int = 1000

    def ranges(self, length: int) -> list[tuple[str, int, int]]:
        """Divide every split into ranges of `length` images: split, start and stop."""
        return [
            (split, start, min(start + length, count))
            for split, count in self.counts.items()
            for start in range(0, count, length)
        ]


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode grey [H, W] or RGB [H, W, 3] pixels; the same pixels always give the same bytes."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def sample_key(position: int) -> str:
    """Return the member name of the image at `position` of its split."""
    return f"s{position:07d}"


def make_sample(key: str, record: ImageRecord) -> dict[str, str | bytes]:
    """Make the sample that webdataset's TarWriter writes for an image. Raises UserError if it cannot be stored."""
    reason = unsafe_path(record.path)
    if record.extension not in MEMBER_EXTENSIONS:
        reason = f"does not end as an image's does ({', '.join(MEMBER_EXTENSIONS)})"
    if reason:
        raise UserError(f"{record.path!r} cannot be packed: its name {reason}")
    side = json.dumps({"path": record.path}, ensure_ascii=False).encode()
    return {"__key__": key, "cls": str(record.label).encode(), "json": side, record.extension: record.data}
