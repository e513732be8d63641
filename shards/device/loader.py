"""Batches that are resized on the device, those of `shards.loader` bit for bit; training images stay there as uint8.

Threads decode and draw random views; only the thread that iterates over the batches uses the device, because CUDA
forbids many calls in other threads while a graph is captured. Shapes: B images, S image size, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image, fromarray
from torch import Tensor

from shards.device.crops import DeviceResize, fits
from shards.eval_views import AnyEvalTransform
from shards.loader import BATCHES_AHEAD, CACHE_BYTES, LoaderOptions, TrainLoader, read_batches
from shards.reader import ImageList, LazyImage
from shards.tasks import prefetch, thread_pool
from shards.transfer import upload
from shards.transforms import EvalTransform, TrainAugment, View


@dataclass(frozen=True)
class PreparedImage:
    """One image of a batch: its view and, unless they are on the device, pixels [H, W, 3] uint8 that it is a view of.

    whole: these pixels are those of the image, which stay on the device if there is room.
    """

    i: int
    view: View
    pixels: Tensor | None = None
    whole: bool = False


Prepared = list[Callable[[], PreparedImage]]


class DeviceTrainLoader(TrainLoader):
    """`TrainLoader` on `device`: the same batches from the same draws, if `augments_on_device` allows it.

    The pixels of up to `device_bytes` of images stay on the device (default: a quarter of its free memory, on a CPU
    what `TrainLoader` keeps). Images beyond that are kept and augmented as `TrainLoader` does, and uploaded.
    """

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
        self.device, self._resize, room = device, DeviceResize(augment, device), options.device_bytes
        if room is None:
            room = torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else CACHE_BYTES
        self._room = room
        self._on_device: dict[int, Tensor] = {}  # [H, 3, W] uint8

    def epoch(self, epoch: int, start_step: int = 0) -> Generator[tuple[Tensor, Tensor]]:
        """Yield the batches of `TrainLoader.epoch`, on the device."""
        batches = [*self.batch_indices(epoch, start_step)]
        absent = [i for batch in batches for i in self.share(batch) if i not in self._on_device]
        lazy_images = self._decoded.lazy_images(absent)
        with thread_pool(self.options.workers, "images") as pool, closing(lazy_images):
            prepared = prefetch(batches, partial(self._prepare, pool, epoch, lazy_images), BATCHES_AHEAD)
            with closing(prepared):
                for batch, tasks in prepared:
                    images = [task() for task in tasks]
                    pixels = [self._upload(image) for image in images]
                    views = self._resize.make_views(pixels, [image.view for image in images])
                    yield views, upload(self.labels[batch], self.device)

    def _prepare(
        self, pool: ThreadPoolExecutor | None, epoch: int, lazy_images: Iterator[LazyImage], batch: list[int]
    ) -> tuple[list[int], Prepared]:
        """Start reading this process's images of `batch` in threads; without a pool the functions read them."""
        loaded = ((i, None) if i in self._on_device else next(lazy_images) for i in self.share(batch))
        tasks = [partial(self._prepare_image, epoch, *image) for image in loaded]
        return batch, [task if pool is None else pool.submit(task).result for task in tasks]

    def _prepare_image(self, epoch: int, i: int, load: Callable[[], Image] | None) -> PreparedImage:
        """Draw the view of an image, and load it; one that is on the device needs no more than its view."""
        draws = self.augment_generator(epoch, i)
        if load is None:
            height, _, width = self._on_device[i].shape
            return PreparedImage(i, self.augment.draw_view(width, height, draws))
        image = load()
        view = self.augment.draw_view(image.width, image.height, draws)
        size = self.augment.image_size
        # After the first image that does not fit, `_room` is 0.
        # Threads read `_room` without a lock: at worst they prepare whole pixels that `_upload` finds no room for.
        if fits(image.width, image.height, size) and self._room:
            return PreparedImage(i, view, _pixels(image), whole=True)
        self._decoded.keep(i, image)
        # S x S pixels already, which the device's crop and resize of all of them leave as they are.
        return PreparedImage(i, View(0, 0, size, size, flip=False), _pixels(view.cut(image, size)))

    def _upload(self, image: PreparedImage) -> Tensor:
        """Return pixels [H, 3, W] uint8 on the device."""
        if image.i in self._on_device and (image.whole or image.pixels is None):
            return self._on_device[image.i]
        assert image.pixels is not None
        pixels = upload(image.pixels, self.device).transpose(1, 2)
        if image.whole and pixels.numel() <= self._room:
            self._room -= pixels.numel()
            # [H, 3, W] has contiguous rows per colour, which every epoch copies faster than every third byte of a row.
            pixels = self._on_device[image.i] = pixels.contiguous()
        elif image.whole:
            self._room = 0
        return pixels


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

    def read(i: int, data: bytes) -> NDArray[np.uint8]:
        if i < 0:
            return blank
        pixels = images.decode_pixels(i, data)
        height, width, _ = pixels.shape
        if fits(width, height, size):
            return pixels
        # S x S pixels already, which the device's resize to S x S leaves as they are.
        return np.array(transform.crop(fromarray(pixels)))

    def start(batch: list[tuple[int, bytes]]) -> tuple[list[int], list[Callable[[], NDArray[np.uint8]]]]:
        tasks = [partial(read, *image) for image in batch]
        return [i for i, _ in batch], [task if pool is None else pool.submit(task).result for task in tasks]

    with (
        thread_pool(workers, "images") as pool,
        closing(read_batches(images, batch_size, **part)) as batches,
        closing(prefetch(batches, start, BATCHES_AHEAD)) as started,
    ):
        for numbers, tasks in started:
            pixels = [upload(torch.from_numpy(task()), device) for task in tasks]
            indices = torch.tensor(numbers)
            yield resize.make_centres(pixels), torch.where(indices < 0, -1, labels[indices]), indices
