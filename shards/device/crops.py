"""Resize images on the device: from uint8 pixels to normalised images, bit for bit those of Pillow and numpy.

Pillow's bicubic resize works in whole numbers: coefficients in units of 2^-22, one direction first, then the other,
each rounded to 8 bits. `coefficients` follows Resample.c operation by operation, because the order of the doubles'
operations matters.

Either direction of a resize is a batched matrix product of pixels with coefficients in two digits, 4096 high + low.
Digits have at most 11 significant bits and pixels 8, and no sum of their products reaches 2^24, whatever its order. So
every product and every partial sum is a number that float32 holds exactly, and TF32, which keeps 11 bits of a factor
and sums in float32, changes nothing: no global setting of precision is read or written.

Cost, counted for B = 32 photographs of 500 x 375 to S = 224: 30 GFLOP. The forward pass of ViT-B/16 on such a batch
alone is 1,100 GFLOP. Shapes: B images, G of them at a time, S image size, H and W pixels of an image, K taps (source
pixels that make up one new pixel), L pixels a row is padded to.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shards.images import shorter_side
from shards.transfer import upload
from shards.transforms import EvalTransform

COEFFICIENT_BITS = 22
LOW_BITS = 12
HIGH_BITS = COEFFICIENT_BITS - LOW_BITS
# Largest ratio of source to new pixels. It allows 31 taps, so no sum of low digits times pixels reaches 2^24:
# 31 x 2048 x 255 < 2^24.
REDUCTION = 7.5


def fits(width: int, height: int, size: int) -> bool:
    """Whether float32 holds the digit sums of an image of this size exactly."""
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


# Pixels of the images that are resized in one matrix product, after padding them to the largest.
GROUP_PIXELS = 8_000_000


class DeviceResize:
    """Resize and normalise whole batches on `device`, as `transform` does by Pillow; the host does not wait for it."""

    def __init__(self, transform: EvalTransform, device: torch.device) -> None:
        self.size, self.device = transform.image_size, device
        # Divisors are tensors, because CUDA replaces the division by a Python number by a product with its reciprocal.
        self._largest = torch.tensor([255.0], device=device)
        columns = torch.tensor((transform.mean, transform.std), dtype=torch.float32, device=device)
        self._mean, self._std = columns[..., None, None]
        # Sums of products with pixels are then in units of a pixel's value, and those of low digits of 2^-10 of that.
        self._scale = torch.tensor([2.0**-HIGH_BITS, 2.0**-LOW_BITS], device=device).view(2, 1, 1)

    def make_centres(self, images: Sequence[Tensor]) -> Tensor:
        """Compute [B, 3, S, S] float32: the centres of images [H, W, 3] uint8 on the device that `fits` allows."""
        # Pixels (now, then) of the side that is resized first, and of the other. Where that is the height, the image is
        # transposed: [A, 3, L] each has L pixels along that side.
        along, across, turned, inputs = [], [], [], []
        for image in images:
            height, width, _ = image.shape
            new_width, new_height = shorter_side((width, height), self.size)
            # Pillow resizes by columns before rows if the height shrinks much more.
            turn = height > new_height and height - new_height > 2 * (width - new_width)
            columns, rows = (width, new_width), (height, new_height)
            along.append(rows if turn else columns)
            across.append(columns if turn else rows)
            turned.append(turn)
            inputs.append(image.permute(1, 2, 0) if turn else image.transpose(1, 2))
        parts = []
        # Each group is padded to the largest image.
        step = max(1, GROUP_PIXELS // (max(along)[0] * max(across)[0]))
        for start in range(0, len(inputs), step):
            group = slice(start, start + step)
            first, second = self._make_matrices(along[group]), self._make_matrices(across[group])
            # Memory around an image stays uninitialised: its coefficients are 0, and uint8 holds no NaN or infinity.
            canvas = torch.empty(len(first), second.shape[2], 3, first.shape[2], dtype=torch.uint8, device=self.device)
            for target, image in zip(canvas, inputs[group], strict=True):
                target[: image.shape[0], :, : image.shape[2]].copy_(image)
            parts.append(_multiply(canvas, first, second))
        pixels = torch.cat(parts)
        are_turned = upload(torch.tensor(turned), self.device)[..., None, None, None]
        # `torch.where` keeps the memory layout of its first tensor.
        pixels = torch.where(~are_turned, pixels, pixels.transpose(2, 3))
        return pixels.float().div_(self._largest).sub_(self._mean).div_(self._std)

    def _make_matrices(self, lengths: Sequence[tuple[int, int]]) -> Tensor:
        """Make the matrices [G, 2 S, L] of rows resized to (now, then) pixels, of which the central S are made.

        High digits come before low ones. L has room for surplus taps, whose digits are 0, and is a multiple of 16.
        """
        rows = [taps(*length) for length in lengths]
        count = max(digits.shape[2] for _, digits in rows)
        firsts = torch.empty(len(rows), 1, self.size, 1, dtype=torch.int64)
        digits = torch.zeros(len(rows), 2, self.size, count)
        for number, ((_, new), (first, values)) in enumerate(zip(lengths, rows, strict=True)):
            # Rounded as `EvalTransform.crop` does.
            begin = round((new - self.size) / 2)
            centre = slice(begin, begin + self.size)
            firsts.numpy()[number, 0, :, 0] = first[centre]
            digits.numpy()[number, :, :, : values.shape[2]] = values[:, centre]
        positions = upload(firsts, self.device) + torch.arange(count, device=self.device)
        width = -(-(max(lengths)[0] + count) // 16) * 16
        matrices = torch.zeros(len(rows), 2, self.size, width, device=self.device)
        scaled = upload(digits, self.device) * self._scale
        return matrices.scatter_(3, positions.expand(-1, 2, -1, -1), scaled).flatten(1, 2)


def _multiply(canvas: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Resize images [G, A, 3, L] by matrices [G, 2 S, L] and then [G, 2 S, A] to [G, 3, S, S] uint8."""
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
