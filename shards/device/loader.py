"""Evaluation batches that are resized on the device, those of `shards.loader` bit for bit.

Threads decode images; only the thread that iterates over the batches uses the device. Shapes: B images, S image size.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from typing import TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import fromarray
from torch import Tensor

from shards.device.resize import DeviceResize, fits
from shards.eval_views import AnyEvalTransform
from shards.loader import BATCHES_AHEAD, read_batches
from shards.reader import ImageList
from shards.tasks import prefetch, thread_pool
from shards.transfer import upload_all
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
    """
    resize, size = DeviceResize(transform, device), transform.image_size
    labels = torch.from_numpy(images.labels)
    blank = np.zeros((size, size, 3), np.uint8)

    def read(image: tuple[int, bytes]) -> NDArray[np.uint8]:
        i, data = image
        if i < 0:
            return blank
        pixels = images.decode_pixels(i, data)
        height, width, _ = pixels.shape
        if fits(width, height, size):
            return pixels
        # S x S pixels already, which the device's resize to S x S leaves as they are.
        return np.array(transform.crop(fromarray(pixels)))

    def start(batch: list[tuple[int, bytes]]) -> tuple[list[int], list[Callable[[], NDArray[np.uint8]]]]:
        tasks = [partial(read, image) for image in batch]
        return [i for i, _ in batch], [task if pool is None else pool.submit(task).result for task in tasks]

    with (
        thread_pool(workers, "images") as pool,
        closing(prefetch(read_batches(images, batch_size, **part), start, BATCHES_AHEAD)) as started,
    ):
        for numbers, tasks in started:
            pixels = upload_all([torch.from_numpy(task()) for task in tasks], device)
            indices = torch.tensor(numbers)
            yield resize.make_centres(pixels), torch.where(indices < 0, -1, labels[indices]), indices
