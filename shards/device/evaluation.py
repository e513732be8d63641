"""Evaluation images that are resized on the device: the batches of `evaluation_batches`, bit for bit.

Threads only decode, to uint8 pixels: resizing by Pillow costs more than that. Shapes as in `shards.device.crops`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from functools import cache, partial
from typing import TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from shards.device.crops import DeviceResize, fits
from shards.eval_views import AnyEvalTransform
from shards.loader import BATCHES_AHEAD, read_batches
from shards.reader import ImageList
from shards.tasks import prefetch, thread_pool
from shards.transfer import SideStream, upload_all
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
        take = side.run(lambda: (resizer().make_centres(upload_all(tasks, side.device)),))
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
