"""Evaluation images that are resized on the device: the batches of `evaluation_batches`, bit for bit.

Threads only decode, to uint8 pixels: resizing by Pillow costs more than that. Shapes as in `shards.device.crops`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import cache, partial
from typing import TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from shards.device.crops import HIGH_BITS, LOW_BITS, columns_first, fits, normalisation, resize_crops, taps
from shards.eval_views import AnyEvalTransform
from shards.images import shorter_side
from shards.loader import BATCHES_AHEAD, read_batches
from shards.pools import prefetch, thread_pool
from shards.reader import ImageList
from shards.transfer import SideStream, staging, upload, upload_all
from shards.transforms import EvalTransform


def resizes_on_device(transform: AnyEvalTransform) -> TypeGuard[EvalTransform]:
    """Whether `DeviceResize` computes `transform`: a bicubic resize and a crop."""
    return isinstance(transform, EvalTransform) and transform.interpolation == "bicubic" and not transform.squash


def device_evaluation_batches(
    images: ImageList,
    transform: EvalTransform,
    batch_size: int,
    workers: int,
    *,
    device: torch.device,
    **part: int,
) -> Generator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the batches of `evaluation_batches` with the images on `device`; what images of padding hold is undefined.

    part: `rank` and `world_size`, as for `evaluation_batches`.
    On CUDA the work on a batch is issued on a side stream up to `BATCHES_AHEAD` batches before its turn.
    """
    side, size = SideStream(device), transform.image_size
    labels = torch.from_numpy(images.labels)
    blank = np.zeros((size, size, 3), np.uint8)

    def read(i: int, data: bytes) -> NDArray[np.uint8]:
        if i < 0:
            return blank
        pixels = images.decode_pixels(i, data)
        height, width, _ = pixels.shape
        if fits(width, height, size):
            return pixels
        # S x S pixels already, which the device's resize to S x S leaves as they are.
        return np.array(transform.crop(Image.fromarray(pixels)))

    @cache
    def resizer() -> DeviceResize:
        # Created at the first use, on the side stream: tensors that it reads must be allocated on it.
        return DeviceResize(transform, side.device)

    def start(batch: list[tuple[int, bytes]]) -> tuple[list[int], list[Callable[[], NDArray[np.uint8]]]]:
        tasks = [partial(read, *image) for image in batch]
        return [i for i, _ in batch], [task if pool is None else pool.submit(task).result for task in tasks]

    def issue(started: tuple[list[int], list[Callable[[], NDArray[np.uint8]]]]) -> Callable[[], tuple[Tensor, ...]]:
        indices, tasks = torch.tensor(started[0]), [torch.from_numpy(task()) for task in started[1]]
        take = side.run(lambda: (resizer()(upload_all(tasks, side.device)),))
        return lambda: (*take(), torch.where(indices < 0, -1, labels[indices]), indices)

    with (
        thread_pool(workers, "images") as pool,
        closing(read_batches(images, batch_size, **part)) as batches,
        # The inner one starts decoding in threads, the outer one issues device work on images that are decoded.
        closing(prefetch(prefetch(batches, start, BATCHES_AHEAD), issue, BATCHES_AHEAD)) as issued,
    ):
        for take in issued:
            pixels, targets, indices = take()
            yield pixels, targets, indices


class DeviceResize:
    """Resize, crop and normalise whole batches on `device`, as `transform` does."""

    def __init__(self, transform: EvalTransform, device: torch.device) -> None:
        self.size, self.device = transform.image_size, device
        self._normalise = normalisation(transform.normalise, device)

    def __call__(self, images: Sequence[Tensor]) -> Tensor:
        """Compute [B, 3, S, S] float32 of images [H, W, 3] uint8 on the device that `fits` allows."""
        # The lengths (source, new) of the side that is resized first, and of the other.
        along, across, turned = [], [], []
        for height, width, _ in (image.shape for image in images):
            new_width, new_height = shorter_side((width, height), self.size)
            turn = columns_first(width, height, new_width, new_height)
            columns, rows = (width, new_width), (height, new_height)
            along.append(rows if turn else columns)
            across.append(columns if turn else rows)
            turned.append(turn)
        # [A, 3, L] each: L pixels along the side that is resized first, A across it.
        crops = [
            image.permute(1, 2, 0) if turn else image.transpose(1, 2)
            for image, turn in zip(images, turned, strict=True)
        ]
        pixels = resize_crops(crops, lambda group: (self._matrices(along[group]), self._matrices(across[group])))
        is_turned = upload(torch.tensor(turned), self.device)[:, None, None, None]
        return self._normalise(torch.where(~is_turned, pixels, pixels.transpose(2, 3)))

    def _matrices(self, lengths: Sequence[tuple[int, int]]) -> Tensor:
        """Make the matrices [G, 2 S, L] of the central S new pixels of rows, as `TapTable.make_matrices` does."""
        rows = [_central_taps(*length, self.size) for length in lengths]
        count = max(digits.shape[2] for _, digits in rows)
        positions = staging((len(rows), 1, self.size, count), torch.int64, self.device)
        digits = staging((len(rows), 2, self.size, count), torch.float32, self.device).zero_()
        for target, to, (first, values) in zip(positions.numpy(), digits.numpy(), rows, strict=True):
            target[0] = first[:, None] + np.arange(count)
            to[..., : values.shape[2]] = values
        width = -(-(max(length for length, _ in lengths) + count) // 16) * 16
        matrices = torch.zeros(len(rows), 2, self.size, width, device=self.device)
        digits, positions = upload(digits, self.device), upload(positions, self.device)
        return matrices.scatter_(3, positions.expand(-1, 2, -1, -1), digits).flatten(1, 2)


def _central_taps(length: int, new: int, size: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the first source pixels [S] and the scaled digits [2, S, K] of the central `size` of `new` pixels."""
    first, digits = taps(length, new)
    # Rounded as `EvalTransform.crop` does.
    start = round((new - size) / 2)
    scale = np.array([2.0**-HIGH_BITS, 2.0**-LOW_BITS], np.float32).reshape(2, 1, 1)
    return first[start : start + size], digits[:, start : start + size] * scale
