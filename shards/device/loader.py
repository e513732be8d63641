"""Batches that are cropped and resized on the device, those of `shards.loader` bit for bit.

Threads decode and draw random views; only the thread that iterates over the batches uses the device, because CUDA
forbids many calls in other threads while a graph is captured. Shapes: B images, S image size, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from functools import partial
from typing import TypeGuard, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image, fromarray
from torch import Tensor

from shards.device.crops import DeviceResize, fits
from shards.eval_views import AnyEvalTransform
from shards.loader import BATCHES_AHEAD, LoaderOptions, TrainLoader, read_batches
from shards.reader import ImageList, LazyImage
from shards.tasks import prefetch, thread_pool
from shards.transfer import upload
from shards.transforms import EvalTransform, TrainAugment, View

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_batches(
    batches: Iterable[list[Item]], function: Callable[[Item], Result], workers: int
) -> Generator[tuple[list[Item], list[Result]]]:
    """Yield each list of items with `function(item)` of each; with workers, threads compute later batches meanwhile."""
    with thread_pool(workers, "images") as pool:

        def start(items: list[Item]) -> tuple[list[Item], list[Callable[[], Result]]]:
            return items, [pool.submit(function, item).result if pool else partial(function, item) for item in items]

        with closing(prefetch(batches, start, BATCHES_AHEAD)) as started:
            for items, tasks in started:
                yield items, [task() for task in tasks]


class DeviceTrainLoader(TrainLoader):
    """`TrainLoader` on `device`: the same batches from the same draws, if `augments_on_device` allows it."""

    def __init__(
        self,
        images: ImageList,
        batch_size: int,
        augment: TrainAugment,
        seed: int,
        options: LoaderOptions,
        device: torch.device,
    ) -> None:
        super().__init__(images, batch_size, augment, seed, options)
        self.device, self._resize = device, DeviceResize(augment, device)

    def epoch(self, epoch: int, start_step: int = 0) -> Generator[tuple[Tensor, Tensor]]:
        """Yield the batches of `TrainLoader.epoch`, on the device."""

        def prepare(item: LazyImage) -> tuple[Tensor, View]:
            i, load = item
            image, size = self._decoded.keep(i, load()), self.augment.image_size
            view = self.augment.draw_view(image.width, image.height, self.augment_generator(epoch, i))
            if fits(image.width, image.height, size):
                return _pixels(image), view
            # S x S pixels already, which the device's crop and resize of all of them leave as they are.
            return _pixels(view.cut(image, size)), View(0, 0, size, size, flip=False)

        batches = [*self.batch_indices(epoch, start_step)]
        with closing(map_batches(self.load(batches), prepare, self.options.workers)) as prepared:
            for (_, images), batch in zip(prepared, batches, strict=True):
                # [H, W, 3] to [H, 3, W].
                pixels = [upload(image, self.device).transpose(1, 2) for image, _ in images]
                views = [view for _, view in images]
                yield self._resize.make_views(pixels, views), upload(self.labels[batch], self.device)


def _pixels(image: Image) -> Tensor:
    """Convert an image to [H, W, 3] uint8."""
    return torch.from_numpy(np.array(image))


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

    with closing(map_batches(read_batches(images, batch_size, **part), read, workers)) as decoded:
        for batch, arrays in decoded:
            pixels = [upload(torch.from_numpy(array), device) for array in arrays]
            indices = torch.tensor([i for i, _ in batch])
            yield resize.make_centres(pixels), torch.where(indices < 0, -1, labels[indices]), indices
