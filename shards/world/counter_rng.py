"""Counter-based random draws: every number is a hash of (image key, name of the draw, position).

So an image does not depend on its batch, nor on further draws. Shapes: B images, H = W = SIZE pixels.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIZE = 64

# float32 throughout; numpy's stubs widen `float32 * float` to float64, numpy itself does not.
Floats = NDArray[Any]
Words = NDArray[np.uint64]


@cache
def salt(*names: str | int) -> int:
    """Hash a sequence of names to a 64-bit number."""
    digest = hashlib.sha256("\x1f".join(map(str, names)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def mix(words: Words) -> Words:
    """Apply the splitmix64 finaliser (Steele et al. 2014), a bijection of 64-bit words, as a hash."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class Draws:
    """Named random draws for a batch of images; `keys` is uint64 [B]."""

    def __init__(self, keys: Words) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def words(self, name: str, shape: tuple[int, ...] = ()) -> Words:
        """Draw uniform 64-bit words [B, *shape]."""
        count = int(np.prod(shape))
        # The increment of splitmix64, 2^64 divided by the golden ratio; it overflows on purpose.
        steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        starts = mix(self.keys ^ np.uint64(salt("draw", name)))
        return mix(starts[:, None] + steps).reshape(len(self.keys), *shape)

    def uniform(self, name: str, low: float = 0.0, high: float = 1.0, shape: tuple[int, ...] = ()) -> Floats:
        """Draw uniform floats in [low, high), [B, *shape]."""
        # 24 bits, as many as float32 holds: more would be rounded, up to 1.
        unit = (self.words(name, shape) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        return np.float32(low) + unit * np.float32(high - low)

    def integers(self, name: str, choices: int) -> NDArray[np.int64]:
        """Draw integers in [0, choices), [B]."""
        # The upper 53 bits: all 64 could be negative as int64.
        return (self.words(name) >> np.uint64(11)).astype(np.int64) % choices

    def normal(self, name: str, shape: tuple[int, ...] = ()) -> Floats:
        """Draw nearly normal values [B, *shape]: the scaled sum of the four 16-bit quarters of a word."""
        words = self.words(name, shape)
        total = (words & np.uint64(0xFFFF)) + (words >> np.uint64(48))
        total += ((words >> np.uint64(16)) & np.uint64(0xFFFF)) + ((words >> np.uint64(32)) & np.uint64(0xFFFF))
        # The sum of four uniform numbers has mean 2 and variance 1/3.
        return (total.astype(np.float32) * np.float32(2.0**-16) - np.float32(2)) * np.float32(3.0**0.5)

    def clouds(self, name: str, cells: int) -> Floats:
        """Draw smooth value noise in [0, 1] with `cells` lattice cells per side, [B, H, W]."""
        lattice = self.uniform(name, shape=(cells + 1, cells + 1))
        position = (np.arange(SIZE, dtype=np.float32) + np.float32(0.5)) * np.float32(cells / SIZE)
        low = position.astype(np.int64)
        part = position - low.astype(np.float32)
        # Flat at both ends, so that no lines of the lattice show.
        part = part * part * (3 - 2 * part)
        # Bilinear: [B, cells + 1, cells + 1] to [B, H, cells + 1], then to [B, H, W].
        rows = lattice[:, low] * (1 - part)[:, None] + lattice[:, low + 1] * part[:, None]
        return rows[:, :, low] * (1 - part) + rows[:, :, low + 1] * part
