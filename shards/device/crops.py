"""Random resized crops on the device: from uint8 pixels to normalised images, bit for bit those of Pillow and numpy.

Pillow's bicubic resize works in whole numbers: coefficients in units of 2^-22, one direction first, then the other,
each rounded to 8 bits. `coefficients` follows Resample.c operation by operation, because the order of the doubles'
operations matters.

Either direction of a resize is a batched matrix product of pixels with coefficients in two digits, 4096 high + low.
Digits have at most 11 significant bits and pixels 8, and no sum of their products reaches 2^24, whatever its order. So
every product and every partial sum is a number that float32 holds exactly, and TF32, which keeps 11 bits of a factor
and sums in float32, changes nothing: no global setting of precision is read or written.

Cost, counted for B = 32 photographs of 500 x 375 to S = 224: 30 GFLOP. The forward pass of ViT-B/16 on such a batch
alone is 1,100 GFLOP.

Shapes: B images, G of them at a time, S image size, H and W pixels of an image, K taps (source pixels that make up one
new pixel), L pixels a row is padded to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shards.transfer import staging, upload
from shards.transforms import Normalise, TrainAugment, View

COEFFICIENT_BITS = 22
LOW_BITS = 12
HIGH_BITS = COEFFICIENT_BITS - LOW_BITS
# Largest ratio of source to new pixels. It allows 31 taps, so no sum of low digits times pixels reaches 2^24:
# 31 x 2048 x 255 < 2^24.
REDUCTION = 7.5


def fits(width: int, height: int, size: int) -> bool:
    """Whether float32 holds the digit sums of an image of this size, and so of every crop of it, exactly."""
    return max(width, height) <= REDUCTION * size


def coefficients(length: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Compute first source pixel [S] and coefficients [S, K], times 2^22, for a row of `length` pixels."""
    scale = length / size
    stretch = max(scale, 1.0)
    support = 2.0 * stretch
    centre = (np.arange(size) + 0.5) * scale
    # Pillow truncates towards zero, as `astype` does; negative numbers become 0 in either case.
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    stop = np.minimum((centre + support + 0.5).astype(np.int64), length)
    tap = np.arange((stop - first).max())
    weights = _bicubic((first[:, None] + tap - centre[:, None] + 0.5) * (1.0 / stretch))
    weights[tap >= (stop - first)[:, None]] = 0.0
    # A running sum adds in Pillow's order; numpy's `sum` adds in pairs.
    weights /= np.cumsum(weights, axis=1)[:, -1:]
    scaled = weights * 2.0**COEFFICIENT_BITS
    # Halves are rounded away from zero, as in Pillow; numpy's `rint` would take the even neighbour.
    return first, np.where(scaled < 0, scaled - 0.5, scaled + 0.5).astype(np.int64)


def _bicubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    # Pillow's parameter; OpenCV's is -0.75.
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


@lru_cache(maxsize=4096)
def taps(length: int, size: int) -> tuple[NDArray[np.int32], NDArray[np.int16]]:
    """Compute the first source pixels [S] and digits (high, low) [2, S, K] of a row that is resized to `size` pixels.

    A coefficient is 4096 high + low with |low| <= 2048. No tap lies outside of the row; surplus ones are 0.
    """
    first, whole = coefficients(length, size)
    count = whole.shape[1]
    # Near the end of the row surplus taps would lie outside it, so all taps move back.
    back = np.maximum(first + count - length, 0)
    source = np.arange(count) - back[:, None]
    moved = np.where(source >= 0, np.take_along_axis(whole, np.maximum(source, 0), 1), 0)
    half = 1 << (LOW_BITS - 1)
    # The mask gives the remainder by 4096, of negative numbers as well.
    low = ((moved + half) & (2 * half - 1)) - half
    digits = np.stack([(moved - low) >> LOW_BITS, low]).astype(np.int16)
    return (first - back).astype(np.int32), digits


def columns_first(width: int, height: int, new_width: int, new_height: int) -> bool:
    """Whether Pillow resizes by columns before rows: if the height shrinks much more."""
    return height > new_height and height - new_height > 2 * (width - new_width)


# Pixels of the images that are resized in one matrix product, after padding them to the largest.
GROUP_PIXELS = 8_000_000


def augments_on_device(augment: TrainAugment) -> bool:
    """Whether `augment` is crop and flip alone."""
    is_plain = augment.augmentation == "crop" and augment.views == 1
    return is_plain and not augment.colour_jitter and not augment.rotation


class DeviceCrops:
    """Crop, resize, flip and normalise whole batches on `device`, as `augment` does."""

    def __init__(self, augment: TrainAugment, device: torch.device) -> None:
        self.size, self.device = augment.image_size, device
        self._normalise = normalisation(augment.normalise, device)
        self._table = TapTable(self.size, 1, device)

    def __call__(self, images: Sequence[Tensor], views: Sequence[View]) -> Tensor:
        """Compute views [B, 3, S, S] float32 of images [H, 3, W] uint8 on the device.

        The host waits for the device only for crops that are larger than all before. Images may be larger than `fits`
        allows, crops may not.
        """
        if not views:
            return torch.empty(0, 3, self.size, self.size, device=self.device)
        # The side of a crop that is resized first, and the other. A crop whose columns are resized first is transposed.
        turned = [columns_first(view.width, view.height, self.size, self.size) for view in views]
        sides = [(v.height, v.width) if turn else (v.width, v.height) for v, turn in zip(views, turned, strict=True)]
        along, across = (max(lengths) for lengths in zip(*sides, strict=True))
        if max(along, across) > self._table.longest:
            self._table = TapTable(self.size, max(along, across), self.device)
        # [4, B]: lengths along and across, turned, flipped. One tensor, so that one copy uploads all of them.
        facts = staging((4, len(views)), torch.int64, self.device)
        facts.numpy()[:] = [*zip(*sides, strict=True), turned, [view.flip for view in views]]
        facts = upload(facts, self.device)
        crops = [
            image[view.top : view.top + view.height, :, view.left : view.left + view.width]
            for image, view in zip(images, views, strict=True)
        ]
        # [A, 3, L] each: L pixels along the side that is resized first, A across it.
        crops = [crop.transpose(0, 2) if turn else crop for crop, turn in zip(crops, turned, strict=True)]

        def make_matrices(group: slice) -> tuple[Tensor, Tensor]:
            make = self._table.make_matrices
            return make(facts[0, group], along), make(facts[1, group], across)

        pixels = resize_crops(crops, make_matrices)
        is_turned, is_flipped = facts[2:].bool()[..., None, None, None]
        # `torch.where` keeps the memory layout of its first tensor.
        pixels = torch.where(~is_turned, pixels, pixels.transpose(2, 3))
        return self._normalise(torch.where(is_flipped, pixels.flip(3), pixels))


class TapTable:
    """The taps of every length up to `longest`, which is `length` or more, by length."""

    def __init__(self, size: int, length: int, device: torch.device) -> None:
        # The longest length grows with the first images; doubling keeps the number of new tables small.
        self.longest = min(1 << length.bit_length(), int(REDUCTION * size))
        # No crop has a length of 0; its row makes the length the index.
        rows = [taps(max(each, 1), size) for each in range(self.longest + 1)]
        # A row can have fewer taps than a shorter one, depending on where the centres of its pixels fall.
        self._counts = np.maximum.accumulate([digits.shape[2] for _, digits in rows])
        table = np.zeros((len(rows), 2, size, self._counts[-1]), np.float32)
        for target, (_, digits) in zip(table, rows, strict=True):
            target[..., : digits.shape[2]] = digits
        # Sums of products with pixels are then in units of a pixel's value, and those of low digits of 2^-10 of that.
        table *= np.array([2.0**-HIGH_BITS, 2.0**-LOW_BITS], np.float32).reshape(2, 1, 1)
        self._digits = torch.from_numpy(table).to(device)
        self._first = torch.from_numpy(np.stack([first for first, _ in rows]).astype(np.int64)).to(device)
        self._taps = torch.arange(table.shape[3], device=device)

    def make_matrices(self, lengths: Tensor, longest: int) -> Tensor:
        """Make the matrices [G, 2 S, L] of rows of `lengths` [G], high digits before low ones; L is at least `longest`.

        The length L has room for surplus taps, whose digits are 0, and is a multiple of 16.
        """
        count = int(self._counts[longest])
        positions = self._first.index_select(0, lengths)[:, None, :, None] + self._taps[:count]
        digits = self._digits[..., :count].index_select(0, lengths)
        matrices = torch.zeros(*digits.shape[:3], -(-(longest + count) // 16) * 16, device=digits.device)
        return matrices.scatter_(3, positions.expand(-1, 2, -1, -1), digits).flatten(1, 2)


def normalisation(normalise: Normalise, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function of uint8 pixels [B, 3, S, S] on `device` that gives the floats of `normalise`."""
    # Divisors are tensors, because CUDA replaces the division by a Python number by a product with its reciprocal.
    largest = torch.tensor([255.0], device=device)
    mean, std = (
        torch.tensor(values, dtype=torch.float32, device=device).view(3, 1, 1)
        for values in (normalise.mean, normalise.std)
    )
    return lambda pixels: pixels.float().div_(largest).sub_(mean).div_(std)


def resize_crops(crops: Sequence[Tensor], make_matrices: Callable[[slice], tuple[Tensor, Tensor]]) -> Tensor:
    """Resize crops [A, 3, L] uint8 to [B, 3, S, S], in groups that `make_matrices` makes both matrices of."""
    parts = []
    longest, widest = (max(crop.shape[axis] for crop in crops) for axis in (0, 2))
    step = max(1, GROUP_PIXELS // (longest * widest))
    for start in range(0, len(crops), step):
        group = slice(start, start + step)
        first, second = make_matrices(group)
        # Memory around a crop stays uninitialised: its coefficients are 0, and uint8 holds no NaN or infinity.
        canvas = torch.empty(len(first), second.shape[2], 3, first.shape[2], dtype=torch.uint8, device=first.device)
        for target, crop in zip(canvas, crops[group], strict=True):
            target[: crop.shape[0], :, : crop.shape[2]].copy_(crop)
        parts.append(_resize(canvas, first, second))
    return torch.cat(parts)


def _resize(canvas: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Resize crops [G, A, 3, L] by matrices [G, 2 S, L] and then [G, 2 S, A] to [G, 3, S, S] uint8."""
    # With `out=`, autocast does not change the precision of the product; in bfloat16 it would not be exact.
    # [G, 3 A, L] times [G, L, 2 S] is [G, 3 A, 2 S], rounded to [G, 3 A, S]; all rows of all colours in one product.
    pixels = canvas.flatten(1, 2).float()
    sums = torch.bmm(pixels, first.transpose(1, 2), out=pixels.new_empty(*pixels.shape[:2], first.shape[1]))
    half = _round(*sums.chunk(2, dim=2)).unflatten(1, (-1, 3)).flatten(2).float()
    # [G, 2 S, A] times [G, A, 3 S] is [G, 2 S, 3 S], rounded to [G, S, 3 S].
    sums = torch.bmm(second, half, out=half.new_empty(*second.shape[:2], half.shape[2]))
    return _round(*sums.chunk(2, dim=1)).unflatten(2, (3, -1)).transpose(1, 2)


def _round(high: Tensor, low: Tensor) -> Tensor:
    """Combine the two halves of Pillow's sum to uint8: (4096 high + low + 2^21) >> 22, clipped. Overwrites both.

    Because floor((m a + b) / (m n)) = floor((a + floor(b / m)) / n), nothing larger than 2^24 comes up.
    """
    total = high.add_(low.floor_(), alpha=2.0**-HIGH_BITS)
    return total.add_(0.5).clamp_(0, 255).to(torch.uint8, memory_format=torch.contiguous_format)
