"""Keep what the test transform makes of images, so that a further method on a data set costs its encoder alone.

Shapes: S image size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Hashable, Sequence
from contextlib import closing

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shards.eval_views import AnyEvalTransform, EvalViews
from shards.reader import ImageList
from shards.transforms import EvalTransform

MOST_BYTES = 2**31
"""Memory for crops: 14,000 of 224 pixels. Images beyond that are decoded again."""

Crops = dict[int, NDArray[np.uint8]]
"""Pixels [S, S, 3] by an image's position in its split."""


class KeptCrops:
    """The crops of all splits and transforms that a session has evaluated."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.left = most_bytes
        self._crops: dict[Hashable, Crops] = defaultdict(dict)

    def wrap(self, images: ImageList, transform: AnyEvalTransform) -> ImageList:
        """Return `images`, decoded to what `transform` crops of them, unless it makes random views of whole images."""
        if isinstance(transform, EvalViews):
            return images
        return _KeptImages(images, transform, self._crops[images.identity, transform], self)


class _KeptImages(ImageList):
    """Images that are decoded to crops of S x S pixels, which the transform leaves as they are."""

    def __init__(self, images: ImageList, transform: EvalTransform, crops: Crops, memory: KeptCrops) -> None:
        super().__init__(images._files, images.rows, images.positions, images.labels)
        self._transform, self._crops, self._memory = transform, crops, memory

    def stream(self, order: Sequence[int]) -> Generator[bytes]:
        """Yield the bytes of images as `ImageList.stream` does, without reading those that are kept: b"" for them."""
        kept = {i for i in order if int(self.positions[i]) in self._crops}
        with closing(super().stream([i for i in order if i not in kept])) as encoded:
            for i in order:
                yield b"" if i in kept else next(encoded)

    def decode(self, i: int, data: bytes) -> Image.Image:
        """Return the crop of image `i`, and keep it while there is room."""
        position = int(self.positions[i])
        if position in self._crops:
            return Image.fromarray(self._crops[position])
        crop = self._transform.crop(super().decode(i, data))
        # A copy, because torch warns of arrays that it cannot write to, as Pillow's are.
        if (pixels := np.array(crop)).nbytes <= self._memory.left:
            self._memory.left -= pixels.nbytes
            self._crops[position] = pixels
        return crop

    def decode_pixels(self, i: int, data: bytes) -> NDArray[np.uint8]:
        """Return the crop of image `i` if it is kept, else its pixels, which the device crops."""
        kept = self._crops.get(int(self.positions[i]))
        return super().decode_pixels(i, data) if kept is None else kept
