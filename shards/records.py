"""Where images come from before they are packed: labelled, encoded images in the order of their split."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


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


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode grey [H, W] or RGB [H, W, 3] pixels; the same pixels always give the same bytes."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()
