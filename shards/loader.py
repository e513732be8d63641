"""Batches for training, in drawn order, and for evaluation, in list order: seeded, resumable, each test image once.

What a batch holds depends on (seed, pass, position) alone, never on the number of workers or processes. Workers are
threads: decoding and resizing release the interpreter lock, and threads share the decoded images and start at once.
Shapes: B images, W = processes, S = image size, N = images of a split.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from shards.eval_views import AnyEvalTransform
from shards.reader import ImageList, LazyImage
from shards.rng import generator, stream_seed
from shards.tasks import prefetch, thread_pool
from shards.transforms import TrainAugment

# Main memory for decoded training images, the encoded images that a training on all images mixes with each other, and
# the batches that threads prepare while an earlier one is used.
CACHE_BYTES = 2**30
WINDOW_BYTES = 2**32
BATCHES_AHEAD = 2

T = TypeVar("T")


class DecodedImages:
    """The images of a split, kept decoded once read until `limit_bytes` are in memory (4 bytes a pixel)."""

    def __init__(self, images: ImageList, limit_bytes: int = CACHE_BYTES) -> None:
        self.images = images
        self._room = limit_bytes
        self._decoded: dict[int, Image] = {}
        self._lock = threading.Lock()

    def __getitem__(self, i: int) -> Image:
        image = self._decoded.get(i)
        return self.keep(i, self.images.image(i) if image is None else image)

    def lazy_images(self, order: Sequence[int]) -> Generator[LazyImage]:
        """Yield each index of `order`, all different, with a function that returns its image without keeping it."""
        # Listed before the first is decoded: images that the caller keeps meanwhile are still decoded in this order.
        absent = [i for i in order if i not in self._decoded]
        are_absent = set(absent)
        with closing(self.images.lazy_images(absent)) as lazy_images:
            for i in order:
                yield next(lazy_images) if i in are_absent else (i, partial(self._decoded.__getitem__, i))

    def keep(self, i: int, image: Image) -> Image:
        """Keep a decoded image if there is room, and return it."""
        # Pillow stores an RGB pixel in four bytes.
        size = 4 * image.width * image.height
        with self._lock:
            # Two threads may have decoded the same image: it takes room once.
            if i not in self._decoded and size <= self._room:
                self._room -= size
                self._decoded[i] = image
        return image


@dataclass(frozen=True)
class LoaderOptions:
    """How a `TrainLoader` makes batches, and with what.

    workers: threads that decode. With `world_size` processes each gets every world_size-th image of a global batch,
    from its rank on, so that their union is the batch of a single process.
    drop_last: drop the last incomplete batch if there is a complete one (Dassl's rule), so that a pass has
        max(1, N // batch_size) steps. one_class: all images of a batch have the same label; what remains of a class is
        left out of the pass. window_bytes: see `shard_order`; None mixes all images.
    cache_bytes: memory for decoded images.
    """

    workers: int = 0
    rank: int = 0
    world_size: int = 1
    drop_last: bool = True
    one_class: bool = False
    window_bytes: int | None = None
    cache_bytes: int = CACHE_BYTES


class TrainLoader:
    """The training images, in a new seeded order and with new augmentation in each pass; `batch_size` is global."""

    def __init__(
        self,
        images: ImageList,
        batch_size: int,
        augment: TrainAugment,
        seed: int,
        options: LoaderOptions = LoaderOptions(),
    ) -> None:
        self.images, self.batch_size, self.augment = images, batch_size, augment
        self.seed, self.options = seed, options
        self.labels = torch.from_numpy(images.labels)
        self._decoded = DecodedImages(images, options.cache_bytes)

    @property
    def num_samples(self) -> int:
        """The number of samples that the batches of a pass are drawn from."""
        return len(self.images)

    @property
    def steps_per_pass(self) -> int:
        if self.options.one_class:
            return int((np.bincount(self.images.labels) // self.batch_size).sum())
        if not self.options.drop_last:
            return math.ceil(len(self.images) / self.batch_size)
        return max(1, len(self.images) // self.batch_size)

    def order(self, pass_number: int) -> list[int]:
        """Return the order of the images in a pass: of all N, or with `one_class` of those in complete batches."""
        if self.options.one_class:
            draw = random.Random(stream_seed(self.seed, "order", pass_number))
            return one_class_order(self.images.labels.tolist(), self.batch_size, draw)
        # The same permutation on every rank, which takes its part of each batch.
        return shard_order(self.images, self.options.window_bytes, generator(self.seed, "order", pass_number))

    def batches(self, pass_number: int, start_step: int = 0) -> Generator[tuple[Tensor, Tensor]]:
        """Yield (this process's images [B / W, 3, S, S] or [B / W, views, 3, S, S], labels [B] of all) of every step.

        Steps before `start_step` are left out, which changes no later batch.
        """

        def prepare(item: LazyImage, out: Tensor) -> None:
            i, load = item
            self.augment(self._decoded.keep(i, load()), self.augment_generator(pass_number, i), out)

        batches = [*self.batch_indices(pass_number, start_step)]
        # Interleaved: a gather over all ranks puts image i of rank r back to i * world_size + r.
        shares = [batch[self.options.rank :: self.options.world_size] for batch in batches]
        with closing(self._decoded.lazy_images([i for share in shares for i in share])) as lazy_images:
            loaded = ([next(lazy_images) for _ in share] for share in shares)
            prepared = prepare_batches(loaded, prepare, self.augment.shape, self.options.workers)
            for (_, images), batch in zip(prepared, batches, strict=True):
                # All ranks compute the loss of the gathered batch, so they need all of its labels.
                yield images, self.labels[batch]

    def batch_indices(self, pass_number: int, start_step: int = 0) -> Iterator[list[int]]:
        """Yield the indices [B] of the images of every global batch from `start_step` on."""
        order = self.order(pass_number)
        for step in range(start_step, self.steps_per_pass):
            yield order[step * self.batch_size : (step + 1) * self.batch_size]

    def image(self, i: int, generator: torch.Generator) -> Tensor:
        """Return image `i` in a random view [3, S, S], on the CPU."""
        return self.augment(self._decoded[i], generator)

    def augment_generator(self, pass_number: int, i: int) -> torch.Generator:
        """Return the generator for the augmentation of image `i` in a pass."""
        # Named by the image, so that its view does not depend on the thread, the rank or the step that prepares it.
        return generator(self.seed, "augment", pass_number, i)


def shard_order(images: ImageList, window_bytes: int | None, draws: torch.Generator) -> list[int]:
    """Order images at random, so that a reader of whole shards holds at most `window_bytes` of them at a time.

    More images are mixed as by a shuffle buffer behind shuffled shards: an image comes within a window after the place
    of its shard. A remote split needs that order; a stored one takes the same, so that both give equal trainings.
    """
    count, size = len(images), int(images.rows["size"].sum(dtype=np.int64))
    if window_bytes is None or size <= window_bytes:
        return torch.randperm(count, generator=draws).tolist()
    shards = torch.from_numpy(images.rows["shard"].astype(np.int64))
    by_shard = torch.randperm(int(shards.max()) + 1, generator=draws)[shards].argsort(stable=True)
    window = count * window_bytes / size
    times = torch.arange(count) + window * torch.rand(count, generator=draws, dtype=torch.float64)
    return by_shard[times.argsort(stable=True)].tolist()


def one_class_order(labels: Sequence[int], batch_size: int, draw: random.Random) -> list[int]:
    """Order images so that each `batch_size` consecutive ones have the same label; what remains of a class is left out.

    As in SkipTuning's public code: a class is drawn among those with enough images left, and then the images of it.
    """
    images: dict[int, list[int]] = {}
    for i, label in enumerate(labels):
        images.setdefault(label, []).append(i)
    order = []
    while waiting := [remaining for remaining in images.values() if len(remaining) >= batch_size]:
        remaining = draw.choice(waiting)
        chosen = draw.sample(remaining, batch_size)
        order += chosen
        for i in chosen:
            remaining.remove(i)
    return order


def evaluation_batches(
    images: ImageList,
    transform: AnyEvalTransform,
    batch_size: int,
    workers: int = 0,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> Generator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (images [B, 3, S, S] or [B, views, 3, S, S], labels [B], indices [B]) in list order, each image once.

    Unless crops are kept, shards are read from start to end, so every byte of them is compared with the manifest.
    Each of `world_size` processes gets consecutive batches of those that one process has, as the last bits of logits
    depend on the size of a batch, and all get equally many: those after the last are one image of zeros with label and
    index -1. Callers must skip every index below 0.
    """
    labels = torch.from_numpy(images.labels)

    def prepare(image: tuple[int, bytes], out: Tensor) -> None:
        i, data = image
        if i < 0:
            # By numpy, as transforms write, which starts no threads.
            out.numpy()[:] = 0
        else:
            transform(images.decode(i, data), out)

    with closing(read_batches(images, batch_size, rank=rank, world_size=world_size)) as batches:
        for batch, pixels in prepare_batches(batches, prepare, transform.shape, workers):
            indices = torch.tensor([i for i, _ in batch])
            # `labels[-1]` would be the label of the last image.
            yield pixels, torch.where(indices < 0, -1, labels[indices]), indices


def read_batches(
    images: ImageList, batch_size: int, *, rank: int = 0, world_size: int = 1
) -> Generator[list[tuple[int, bytes]]]:
    """Yield index and encoded bytes of the images of each batch of `evaluation_batches`; index -1 is padding."""
    batches = deal_batches(len(images), batch_size, rank, world_size)
    with closing(images.stream([i for batch in batches for i in batch if i >= 0])) as encoded:
        for batch in batches:
            yield [(i, next(encoded) if i >= 0 else b"") for i in batch]


def deal_batches(count: int, batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """List the indices of a rank's batches of `count` images, as `evaluation_batches` deals them; -1 is padding."""
    batches = [[*range(start, min(start + batch_size, count))] for start in range(0, count, batch_size)]
    # Consecutive images lie in few shards, which the rank reads as a whole.
    first, last = (math.ceil(number * len(batches) / world_size) for number in (rank, rank + 1))
    return batches[first:last] + [[-1]] * (math.ceil(len(batches) / world_size) - (last - first))


def prepare_batches(
    batches: Iterable[list[T]], prepare: Callable[[T, Tensor], object], shape: tuple[int, ...], workers: int
) -> Iterator[tuple[list[T], Tensor]]:
    """Yield each list of items with its images [B, *shape], which `prepare(item, out)` writes one by one.

    With workers, threads prepare up to `BATCHES_AHEAD` later batches; what one of them raises is raised here, in order.
    """

    def start(items: list[T]) -> tuple[list[T], Tensor, list[Future[object]]]:
        # Each item writes its row of the batch: stacking would copy all of them once more.
        images = torch.empty(len(items), *shape)
        pairs = zip(items, images, strict=True)
        if pool is not None:
            return items, images, [pool.submit(prepare, *pair) for pair in pairs]
        for pair in pairs:
            prepare(*pair)
        return items, images, []

    with thread_pool(workers, "images") as pool:
        for items, images, futures in prefetch(batches, start, BATCHES_AHEAD if workers else 0):
            for future in futures:
                future.result()
            yield items, images
