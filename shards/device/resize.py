"""Resize images on the device: from uint8 pixels to normalised images, bit for bit those of Pillow and numpy.

Pillow's bicubic resize works in whole numbers: coefficients in units of 2^-22, one direction first, then the other,
each rounded to 8 bits. `coefficients` follows Resample.c operation by operation, because the order of the doubles'
operations matters. Either direction is a batched matrix product in float64, which holds every partial sum of pixels
times coefficients exactly, whatever the order, and which no setting of precision changes.

Cost, counted for B = 32 photographs of 500 x 375 to S = 224: 15 GFLOP. Shapes: B images, G of them at a time, S image
size, H and W pixels of an image, K taps (source pixels that make up one new pixel), L pixels a row is padded to.
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
REDUCTION = 7.5
"""Largest ratio of source to new pixels: larger images would take much memory on the device."""
GROUP_PIXELS = 8_000_000
"""Pixels of the images that are resized in one matrix product, after padding them to the largest."""


def fits(width: int, height: int, size: int) -> bool:
    """Whether an image is small enough to be resized on the device."""
    return max(width, height) <= REDUCTION * size


@lru_cache(maxsize=4096)
def coefficients(length: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
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
    return first, np.where(scaled < 0, scaled - 0.5, scaled + 0.5).astype(np.int32)


def _bicubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    # Pillow's parameter; OpenCV's is -0.75.
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


class DeviceResize:
    """Resize and normalise whole batches on `device`, as `transform` does by Pillow; the host does not wait for it."""

    def __init__(self, transform: EvalTransform, device: torch.device) -> None:
        self.size, self.device = transform.image_size, device
        # Divisors are tensors, because CUDA replaces the division by a Python number by a product with its reciprocal.
        self._largest = torch.tensor([255.0], device=device)
        columns = torch.tensor((transform.mean, transform.std), dtype=torch.float32, device=device)
        self._mean, self._std = columns[..., None, None]

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
            # [G, A, 3, L] to [G, A, 3, S], then with all colours in a row [G, A, 3 S] to [G, S, 3 S].
            half = _round(canvas.flatten(1, 2).double() @ first.mT).unflatten(1, (-1, 3)).flatten(2)
            parts.append(_round(second @ half).unflatten(2, (3, -1)).transpose(1, 2))
        pixels = torch.cat(parts)
        are_turned = upload(torch.tensor(turned), self.device)[:, None, None, None]
        # `torch.where` keeps the memory layout of its first tensor.
        pixels = torch.where(~are_turned, pixels, pixels.transpose(2, 3))
        return pixels.float().div_(self._largest).sub_(self._mean).div_(self._std)

    def _make_matrices(self, lengths: Sequence[tuple[int, int]]) -> Tensor:
        """Make the matrices [G, S, L] of rows resized to (now, then) pixels, of which the central S are made.

        L has room for the surplus taps behind the end of a row, whose coefficients are 0.
        """
        rows = [coefficients(*length) for length in lengths]
        count = max(values.shape[1] for _, values in rows)
        firsts = torch.empty(len(rows), self.size, 1, dtype=torch.int64)
        weights = torch.zeros(len(rows), self.size, count, dtype=torch.float64)
        for number, ((_, new), (first, values)) in enumerate(zip(lengths, rows, strict=True)):
            # Rounded as `EvalTransform.crop` does.
            begin = round((new - self.size) / 2)
            centre = slice(begin, begin + self.size)
            firsts.numpy()[number, :, 0] = first[centre]
            weights.numpy()[number, :, : values.shape[1]] = values[centre]
        positions = upload(firsts, self.device) + torch.arange(count, device=self.device)
        matrices = torch.zeros(len(rows), self.size, max(lengths)[0] + count, dtype=torch.float64, device=self.device)
        return matrices.scatter_(2, positions, upload(weights, self.device))


def _round(sums: Tensor) -> Tensor:
    """Round Pillow's sums to pixels in place: (sum + 2^21) >> 22, clipped."""
    return sums.mul_(2.0**-COEFFICIENT_BITS).add_(0.5).floor_().clamp_(0, 255)
