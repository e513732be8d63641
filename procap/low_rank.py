"""Low-rank branches next to the projections of a block's attention, and dropout that a seed alone determines.

Shapes: N items of the tower's batch, L rows, D width, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

PROJECTIONS = ("q", "k", "v", "o")
"""Query, key, value and output. Each uses its own byte of a random word, so there can be four."""
STEPS = 256
"""Values of a byte: rates of dropout are multiples of 1 / 256."""


@dataclass(frozen=True)
class Dropout:
    """Masks that follow from a seed and the position of each element, and so from no order of computation.

    An item keeps its masks whichever process or chunk computes it: item i of the batch has number first + i * step.
    rate: share of the elements that become zero; the others are divided by 1 - rate.
    seed: int64 without dimensions, of the training step and the block.
    """

    rate: float
    seed: Tensor
    first: int = 0
    step: int = 1

    def starting_at(self, start: int) -> Dropout:
        """Return the masks of the items from number `start` of this batch on."""
        return replace(self, first=self.first + start * self.step)

    def random_words(self, x: Tensor) -> Tensor:
        """Return an int32 for each element of x [N, L, D]: MurmurHash3's mixing of its number and the seed."""
        items, rows, width = x.shape
        numbers = torch.arange(items, device=x.device)[:, None, None] * self.step + self.first
        # The seed has up to 63 bits: the lower 32 enter with the number of the item, the upper ones in a second round.
        keys = _mix(_mix(numbers.int() + self.seed.int()) ^ (self.seed >> 31).int())
        # With columns below 2^12 and rows below 2^20 no two cells have the same number.
        cells = torch.arange(rows, device=x.device)[:, None] * 4096 + torch.arange(width, device=x.device)
        # 0x9E3779B9, 2^32 over the golden ratio, spreads neighbouring cells; products of int32 wrap around.
        return _mix(cells.int() * -1640531527 ^ keys)

    def factors(self, words: Tensor, projection: str) -> Tensor:
        """Return what the input of a projection is multiplied by, [N, L, D]: 0 or 1 / (1 - rate)."""
        # The shift fills negative words with ones from above, which the mask removes.
        byte = words >> 8 * PROJECTIONS.index(projection) & STEPS - 1
        return (byte >= round(self.rate * STEPS)).float() / (1 - round(self.rate * STEPS) / STEPS)


def _mix(x: Tensor) -> Tensor:
    """Apply MurmurHash3's finalizer to int32 values; shifts of negative values are made logical by a mask."""
    # 0x85EBCA6B and 0xC2B2AE35 as int32.
    x = (x ^ (x >> 16 & 0xFFFF)) * -2048144789
    x = (x ^ (x >> 13 & 0x7FFFF)) * -1028477387
    return x ^ (x >> 16 & 0xFFFF)


@dataclass(frozen=True)
class LowRank:
    """The branches of one block.

    factors: by projection A [R, D] and B [D, R]; the projection W x + b becomes W x + b + B A dropout(x).
    """

    factors: Mapping[str, tuple[Tensor, Tensor]]
    dropout: Dropout | None = None

    def starting_at(self, start: int) -> LowRank:
        """Return the branches for the items from number `start` of the batch on."""
        return replace(self, dropout=self.dropout and self.dropout.starting_at(start))

    def queries_keys_values(self, x: Tensor) -> Tensor:
        """Compute what is added to queries, keys and values [N, L, 3 D] of states x [N, L, D]."""
        words = self.dropout.random_words(x) if self.dropout and {"q", "k", "v"} & self.factors.keys() else None
        return torch.cat([self._branch(name, x, words) for name in ("q", "k", "v")], dim=-1)

    def output(self, mixed: Tensor, like: Tensor, read: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Compute what is added to the output projection of `mixed` [N, Q, D], the rows that `read` selects of L.

        like: any tensor [N, L, D].
        """
        words = self.dropout.random_words(like) if self.dropout and "o" in self.factors else None
        # Words depend on the row's number in the sequence, so they are made for all L rows before some are read.
        return self._branch("o", mixed, words if words is None or read is None else read(words))

    def _branch(self, name: str, x: Tensor, words: Tensor | None) -> Tensor:
        if name not in self.factors:
            return torch.zeros_like(x)
        if self.dropout is not None and words is not None:
            x = x * self.dropout.factors(words, name)
        down, up = self.factors[name]
        return F.linear(F.linear(x, down), up)
