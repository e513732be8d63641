"""Random resized crops on the device: from uint8 pixels to normalised images, bit for bit those of Pillow and numpy.

Either direction of a resize is a batched matrix product of pixels with coefficients in two digits, 4096 high + low.
Digits have at most 11 significant bits and pixels 8, and no sum of their products reaches 2^24, whatever its order. So
every product and every partial sum is a number that float32 holds exactly, and TF32, which keeps 11 bits of a factor
and sums in float32, changes nothing: no global setting of precision is read or written.

Cost, counted for B = 32 photographs of 500 x 375 to S = 224: 30 GFLOP. The forward pass of ViT-B/16 on such a batch
alone is 1,100 GFLOP.

Shapes: B images, G of them at a time, S image size, H and W pixels of an image, K taps, L pixels a row is padded to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shards.device.pillow_resize import HIGH_BITS, LOW_BITS, REDUCTION, columns_first, is_pillow_reproduced, taps
from shards.transfer import staging, upload
from shards.transforms import TrainAugment, View

# Pixels of the images that are resized in one matrix product, after padding them to the largest.
GROUP_PIXELS = 8_000_000


def augments_on_device(augment: TrainAugment) -> bool:
    """Whether `augment` is crop and flip alone, and the pixels of the installed Pillow can be reproduced."""
    is_plain = augment.augmentation == "crop" and augment.views == 1
    return is_plain and not augment.colour_jitter and not augment.rotation and is_pillow_reproduced()


class DeviceCrops:
    """Crop, resize, flip and normalise whole batches on `device`, as `augment` does."""

    def __init__(self, augment: TrainAugment, device: torch.device) -> None:
        self.size, self.device = augment.image_size, device
        # Divisors are tensors, because CUDA replaces the division by a Python number by a product with its reciprocal.
        self._range = torch.tensor([255.0], device=device)
        self._mean, self._std = (
            torch.tensor(values, dtype=torch.float32, device=device).view(3, 1, 1)
            for values in (augment.normalise.mean, augment.normalise.std)
        )
        self._table = TapTable(self.size, 1, device)

    def __call__(self, images: Sequence[Tensor], views: Sequence[View]) -> Tensor:
        """Compute views [B, 3, S, S] float32 of images [H, 3, W] uint8 on the device.

        The host waits for the device only for crops that are larger than all before. Images may be larger than `fits`
        allows, crops may not.
        """
        if not views:
            return torch.empty(0, 3, self.size, self.size, device=self.device)
        # The side of a crop that is resized first, and the other. A crop whose columns are resized first is transposed.
        turned = [columns_first(view.width, view.height, self.size) for view in views]
        sides = [(v.height, v.width) if turn else (v.width, v.height) for v, turn in zip(views, turned, strict=True)]
        along, across = (max(lengths) for lengths in zip(*sides, strict=True))
        if max(along, across) > self._table.longest:
            self._table = TapTable(self.size, max(along, across), self.device)
        facts = staging((4, len(views)), torch.int64, self.device)
        facts.numpy()[:] = [*zip(*sides, strict=True), turned, [view.flip for view in views]]
        facts = upload(facts, self.device)
        parts = []
        step = max(1, GROUP_PIXELS // (along * across))
        for start in range(0, len(views), step):
            group = slice(start, start + step)
            first = self._table.make_matrices(facts[0, group], along)
            second = self._table.make_matrices(facts[1, group], across)
            # Memory around a crop stays uninitialised: its coefficients are 0, and uint8 holds no NaN or infinity.
            canvas = torch.empty(len(first), second.shape[2], 3, first.shape[2], dtype=torch.uint8, device=self.device)
            for place, image, view, turn in zip(canvas, images[group], views[group], turned[group], strict=True):
                crop = image[view.top : view.top + view.height, :, view.left : view.left + view.width]
                crop = crop.transpose(0, 2) if turn else crop
                place[: crop.shape[0], :, : crop.shape[2]].copy_(crop)
            parts.append(_resize(canvas, first, second))
        pixels = torch.cat(parts)
        is_turned, is_flipped = facts[2:].bool()[..., None, None, None]
        # `torch.where` keeps the memory layout of its first tensor.
        pixels = torch.where(~is_turned, pixels, pixels.transpose(2, 3))
        pixels = torch.where(is_flipped, pixels.flip(3), pixels)
        return pixels.float().div_(self._range).sub_(self._mean).div_(self._std)


class TapTable:
    """The taps of every length up to `longest`, which is `length` or more, by length."""

    def __init__(self, size: int, length: int, device: torch.device) -> None:
        # The longest length grows with the first images; doubling keeps the number of new tables small.
        self.longest = min(1 << length.bit_length(), int(REDUCTION * size))
        rows = [taps(max(each, 1), size) for each in range(self.longest + 1)]
        # A row can have fewer taps than a shorter one, depending on where the centres of its pixels fall.
        self._counts = np.maximum.accumulate([digits.shape[2] for _, digits in rows])
        table = np.zeros((len(rows), 2, size, self._counts[-1]), np.float32)
        for place, (_, digits) in zip(table, rows, strict=True):
            place[..., : digits.shape[2]] = digits
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
        places = self._first.index_select(0, lengths)[:, None, :, None] + self._taps[:count]
        digits = self._digits[..., :count].index_select(0, lengths)
        matrices = torch.zeros(*digits.shape[:3], -(-(longest + count) // 16) * 16, device=digits.device)
        return matrices.scatter_(3, places.expand(-1, 2, -1, -1), digits).flatten(1, 2)


def _resize(canvas: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Resize crops [G, A, 3, L] by matrices [G, 2 S, L] and then [G, 2 S, A] to [G, 3, S, S] uint8."""
    # With `out=`, autocast does not change the precision of the product; in bfloat16 it would not be exact.
    pixels = canvas.flatten(1, 2).float()
    sums = torch.bmm(pixels, first.transpose(1, 2), out=pixels.new_empty(*pixels.shape[:2], first.shape[1]))
    half = _round(*sums.chunk(2, dim=2)).unflatten(1, (-1, 3)).flatten(2).float()
    sums = torch.bmm(second, half, out=half.new_empty(*second.shape[:2], half.shape[2]))
    return _round(*sums.chunk(2, dim=1)).unflatten(2, (3, -1)).transpose(1, 2)


def _round(high: Tensor, low: Tensor) -> Tensor:
    """Combine the two halves of Pillow's sum to uint8: (4096 high + low + 2^21) >> 22, clipped. Overwrites both.

    Because floor((m a + b) / (m n)) = floor((a + floor(b / m)) / n), nothing larger than 2^24 comes up.
    """
    total = high.add_(low.floor_(), alpha=2.0**-HIGH_BITS)
    return total.add_(0.5).clamp_(0, 255).to(torch.uint8, memory_format=torch.contiguous_format)
