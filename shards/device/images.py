"""Random resized crops on the device: from uint8 pixels to normalised images, bit for bit those of Pillow and numpy.

Either direction of a resize is a batched matrix product of pixels with coefficients in two digits, 4096 high + low.
Digits have at most 11 significant bits and pixels 8, and no sum of their products reaches 2^24, whatever its order. So
every product and every partial sum is a number that float32 holds exactly, and TF32, which keeps 11 bits of a factor
and sums in float32, changes nothing: no global setting of precision is read or written.

Most coefficients of such a matrix are 0. The S new pixels are therefore made in four bands, each from the part of the
source that any image of a group needs for it, which is a third of the work on average.

Cost, counted for B = 32 photographs of 500 x 375 to S = 224 and crops of 8 to 100 % of the area, hence 2.6 million
pixels of 3 colours, padded to 4.3 million: 6 GFLOP, 1.2 GB read and written, 32 copies of crops and 70 other kernels.
The forward pass of ViT-B/16 on such a batch alone is 1,100 GFLOP.

Shapes: B images, G images of a group, S image size, H and W pixels of an image, L pixels that a row is padded to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shards.device.pillow_resize import HIGH_BITS, columns_first, known_rule
from shards.device.resize_weights import Rows, TapTable
from shards.transfer import staging, upload
from shards.transforms import TrainAugment, View

# Images are padded to the largest of their group; a group is closed when that would cost more than a second one.
WASTED_PIXELS = 1_500_000
GROUP_PIXELS = 8_000_000


def augments_on_device(augment: TrainAugment) -> bool:
    """Whether `augment` is crop and flip alone, and the installed Pillow resizes by a known rule."""
    return not augment.colour_jitter and not augment.rotation and known_rule() is not None


@dataclass(frozen=True, slots=True)
class _Job:
    """One image of a batch, and the order in which the sides of its crop are resized.

    at: index in the batch. along, across: side of the crop that is resized first, and the other, in pixels.
    turned: columns are resized first, so the crop is transposed.
    """

    at: int
    along: int
    across: int
    turned: bool


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
        longest = max(max(view.width, view.height) for view in views)
        if longest > self._table.longest:
            self._table = TapTable(self.size, longest, self.device)
        groups = list(_groups([self._job(at, view) for at, view in enumerate(views)]))
        along = [self._table.rows([job.along for job in group]) for group in groups]
        across = [self._table.rows([job.across for job in group]) for group in groups]
        plan = self._plan(groups, along, across, views)
        first, second = self._table.matrices(along, plan[0:2]), self._table.matrices(across, plan[2:4])
        parts = [
            _resized(self._canvas(group, images, views, *rows), *matrices, *rows)
            for group, rows, matrices in zip(
                groups, zip(along, across, strict=True), zip(first, second, strict=True), strict=True
            )
        ]
        pixels = torch.cat(parts).index_select(0, plan[4])
        upright, flipped = plan[5:].bool()[..., None, None, None]
        # `torch.where` keeps the memory layout of its first tensor.
        pixels = torch.where(upright, pixels, pixels.transpose(2, 3))
        pixels = torch.where(flipped, pixels.flip(3), pixels)
        return pixels.float().div_(self._range).sub_(self._mean).div_(self._std)

    def _job(self, at: int, view: View) -> _Job:
        if columns_first(view.width, view.height, self.size):
            return _Job(at, view.height, view.width, turned=True)
        return _Job(at, view.width, view.height, turned=False)

    def _plan(self, groups: list[list[_Job]], along: list[Rows], across: list[Rows], views: Sequence[View]) -> Tensor:
        """[7, B] int64 on the device. In the order of the groups: lengths and offsets along, then across. In that of
        the batch: place among the groups, whether it is not turned, whether it is flipped."""
        plan = staging((7, len(views)), torch.int64, self.device)
        numbers = plan.numpy()
        for n, parts in enumerate((along, across)):
            numbers[2 * n] = np.concatenate([rows.lengths for rows in parts])
            numbers[2 * n + 1] = np.concatenate([rows.offsets for rows in parts])
        jobs = [job for group in groups for job in group]
        order = [job.at for job in jobs]
        numbers[4, order] = np.arange(len(jobs))
        numbers[5, order] = [not job.turned for job in jobs]
        numbers[6] = [view.flip for view in views]
        return upload(plan, self.device)

    def _canvas(
        self, group: list[_Job], images: Sequence[Tensor], views: Sequence[View], along: Rows, across: Rows
    ) -> Tensor:
        """Copy the crops to [G, rows, 3, columns] uint8, each in the middle, transposed if they are `turned`."""
        # Memory around a crop stays uninitialised: its coefficients are 0, and uint8 holds no NaN or infinity.
        canvas = torch.empty(len(group), across.room, 3, along.room, dtype=torch.uint8, device=self.device)
        starts = zip(across.offsets.tolist(), along.offsets.tolist(), strict=True)
        for place, job, (top, left) in zip(canvas.unbind(), group, starts, strict=True):
            view = views[job.at]
            crop = images[job.at][view.top : view.top + view.height, :, view.left : view.left + view.width]
            place = place[top : top + job.across, :, left : left + job.along]
            place.copy_(crop.transpose(0, 2) if job.turned else crop)
        return canvas


def _resized(canvas: Tensor, first: Tensor, second: Tensor, along: Rows, across: Rows) -> Tensor:
    """Resize a canvas by the matrices of both directions to [G, 3, S, S] uint8; transposed images stay transposed."""
    # With `out=`, autocast does not change the precision of the product; in bfloat16 it would not be exact.
    count, bands, height = first.shape[:3]
    pixels = canvas.flatten(1, 2).float()
    sums = pixels.new_empty(bands, count, pixels.shape[1], height)
    for n, window in enumerate(along.windows()):
        torch.bmm(pixels[:, :, window], first[:, n, :, window].transpose(1, 2), out=sums[n])
    half = _rounded(*sums.chunk(2, dim=3)).unflatten(2, (-1, 3)).permute(1, 2, 3, 0, 4)
    pixels = half.to(torch.float32, memory_format=torch.contiguous_format).flatten(2)
    sums = pixels.new_empty(bands, count, height, pixels.shape[2])
    for n, window in enumerate(across.windows()):
        torch.bmm(second[:, n, :, window], pixels[:, window], out=sums[n])
    return _rounded(*sums.chunk(2, dim=2)).unflatten(3, (3, -1)).permute(1, 3, 0, 2, 4).flatten(2, 3)


def _rounded(high: Tensor, low: Tensor) -> Tensor:
    """Combine the two halves of Pillow's sum to uint8: (4096 high + low + 2^21) >> 22, clipped. Overwrites both.

    Because floor((m a + b) / (m n)) = floor((a + floor(b / m)) / n), nothing larger than 2^24 comes up.
    """
    total = high.add_(low.floor_(), alpha=2.0**-HIGH_BITS)
    return total.add_(0.5).clamp_(0, 255).to(torch.uint8, memory_format=torch.contiguous_format)


def _groups(jobs: list[_Job]) -> Iterator[list[_Job]]:
    """Divide `jobs`, sorted by falling length, into groups that waste little when padded to their largest."""
    group: list[_Job] = []
    across = used = 0
    for job in sorted(jobs, key=lambda job: -job.along):
        area, widest = job.along * job.across, max(across, job.across)
        if group:
            padded = group[0].along * widest * (len(group) + 1)
            if padded > GROUP_PIXELS or padded - used - area > WASTED_PIXELS:
                yield group
                group, widest, used = [], job.across, 0
        group.append(job)
        across, used = widest, used + area
    if group:
        yield group
