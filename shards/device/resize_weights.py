"""Compute the resizing coefficients on the device: a table of taps by row length, and matrices for groups of rows.

Shapes: B rows of a batch, G rows of a group, S image size, N bands that S is cut into, K taps, L pixels a row is padded
to. A matrix is [G, N, 2 S / N, L] float32: for each band the high digits of its coefficients, then the low ones. High
digits are in units of 2^-10 and low ones of 2^-12, so that sums of products with pixels are in units of a pixel's value
and of 2^-10 of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shards.device.pillow_resize import HIGH_BITS, LOW_BITS, REDUCTION, taps


@dataclass(frozen=True)
class Rows:
    """Rows of `lengths` [G] pixels, each in the middle of `room`, that become `size` pixels by at most `most` taps."""

    lengths: NDArray[np.int64]
    size: int
    bands: int
    most: int

    @cached_property
    def room(self) -> int:
        """Padded length for the longest row and its surplus taps, which are scattered too; a multiple of 16."""
        return -(-(int(self.lengths.max()) + self.most) // 16) * 16

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """First pixel of each row. Rows are centred, because the bands of rows of different lengths are closer then."""
        return (self.lengths.max() - self.lengths) // 2

    def windows(self) -> list[slice]:
        """Return for each band the source pixels that any of the rows needs; other coefficients are 0."""
        scale = self.lengths[:, None] / self.size
        # Taps reach 2 pixels (source pixels, or new ones if these are larger) from the centre of a new pixel, and this
        # centre lies half a pixel inside the band.
        reach = 1.5 * np.maximum(scale, 1)
        edges = self.offsets[:, None] + scale * np.arange(0, self.size + 1, self.size // self.bands)
        # Rounded to multiples of 4, because 4 float32 values are one memory access.
        starts = np.maximum((edges[:, :-1] - reach).min(0) // 4 * 4, 0).astype(int).tolist()
        stops = np.minimum(-(-(edges[:, 1:] + reach).max(0) // 4) * 4, self.room).astype(int).tolist()
        return [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]


class TapTable:
    """The taps of every length up to `longest`, which is `length` or more, by length."""

    def __init__(self, size: int, length: int, device: torch.device) -> None:
        self.size = size
        self.bands = next(bands for bands in (4, 2, 1) if size % bands == 0)
        # The longest length grows with the first images; doubling keeps the number of new tables small.
        self.longest = min(1 << length.bit_length(), int(REDUCTION * size))
        ways = [taps(max(each, 1), size) for each in range(self.longest + 1)]
        # A row can have fewer taps than a shorter one, depending on where the centres of its pixels fall.
        self._counts = np.maximum.accumulate([way.digits.shape[2] for way in ways])
        digits = np.zeros((len(ways), 2, size, self._counts[-1]), np.float32)
        for row, way in zip(digits, ways, strict=True):
            row[..., : way.digits.shape[2]] = way.digits
        digits *= np.array([2.0**-HIGH_BITS, 2.0**-LOW_BITS], np.float32).reshape(2, 1, 1)
        first = np.stack([way.first for way in ways]).astype(np.int64)
        self._first = torch.from_numpy(first).to(device)
        banded = torch.from_numpy(digits).unflatten(2, (self.bands, -1)).transpose(1, 2)
        self._digits = banded.to(device, memory_format=torch.contiguous_format)
        self._arange = torch.arange(digits.shape[3], device=device)

    def rows(self, lengths: list[int]) -> Rows:
        """Make `Rows` of `lengths`, none of which exceeds `longest`."""
        return Rows(np.array(lengths), self.size, self.bands, int(self._counts[max(lengths)]))

    def matrices(self, parts: list[Rows], plan: Tensor) -> list[Tensor]:
        """Make the matrix of each of `parts`; `plan` [2, B] int64 on the device holds their lengths and offsets."""
        most = max(rows.most for rows in parts)
        first = self._first.index_select(0, plan[0]).add_(plan[1, :, None])
        places = first.view(-1, self.bands, 1, self.size // self.bands, 1) + self._arange[:most]
        digits = self._digits[..., :most].index_select(0, plan[0])
        counts = [len(rows.lengths) for rows in parts]
        chosen = zip(parts, places.split(counts), digits.split(counts), strict=True)
        return [_matrix(place[..., : rows.most], digit[..., : rows.most], rows.room) for rows, place, digit in chosen]


def _matrix(places: Tensor, digits: Tensor, room: int) -> Tensor:
    """Scatter the digits [G, N, 2, S / N, K] of the taps to their places [G, N, 1, S / N, K] in the rows."""
    matrix = torch.zeros(*digits.shape[:4], room, device=digits.device)
    return matrix.scatter_(4, places.expand(-1, -1, 2, -1, -1), digits).flatten(2, 3)
