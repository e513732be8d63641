"""Statistics of paired differences: two exact tests, a correction for many of them, a bootstrap over test images.

Shapes: n pairs, N test images, K kinds of images, R draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EXACT = 16
"""Up to so many differences all 2^n choices of signs are counted, and no more are drawn beyond that."""

Floats = NDArray[np.float64]


def rounded(differences: Sequence[float]) -> Floats:
    """Differences [n] without the dust of floating point, so that what is equal counts as equal."""
    return np.round(np.asarray(differences, float), 9) + 0.0


def sign_flip_p(differences: Sequence[float], generator: np.random.Generator) -> float:
    """Two-sided p of the mean of n differences where, without an effect, each may as well have the other sign.

    The share of all 2^n choices of signs with a mean at least as far from 0 (Fisher's randomization test); beyond
    `EXACT` differences of 2^`EXACT` drawn ones, what was observed counted among them. 1 without a difference.
    """
    values = rounded(differences)
    values = values[values != 0]
    # Sums of the same numbers in another order differ in the last digits.
    reached = abs(values.sum()) - 1e-9 * np.abs(values).sum()
    if len(values) <= EXACT:
        sums = np.zeros(1)
        for value in values:
            sums = np.concatenate([sums + value, sums - value])
        return float(np.mean(np.abs(sums) >= reached))
    signs = 2 * generator.integers(0, 2, (2**EXACT, len(values)), np.int8) - 1
    return float((1 + np.sum(np.abs(signs @ values) >= reached)) / (1 + len(signs)))


def wilcoxon_p(differences: Sequence[float], generator: np.random.Generator) -> float:
    """Two-sided p of Wilcoxon's signed-rank test; differences of 0 are left out, 1 where nothing is left.

    Exact: scipy's distribution of the ranks; where differences of one size share a rank, `sign_flip_p` of the ranks.
    """
    from scipy.stats import rankdata, wilcoxon

    values = rounded(differences)
    values = values[values != 0]
    if not len(values):
        return 1.0
    sizes = np.abs(values)
    if len(np.unique(sizes)) < len(values):
        return sign_flip_p(np.sign(values) * rankdata(sizes), generator)
    return float(wilcoxon(values, method="exact").pvalue)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """p values after Holm's correction over all that are there, in the same order."""
    there = sorted((value, place) for place, value in enumerate(values) if value is not None)
    corrected: list[float | None] = [None] * len(values)
    highest = 0.0
    for passed, (value, place) in enumerate(there):
        highest = max(highest, min(1.0, (len(there) - passed) * value))
        corrected[place] = highest
    return corrected


@dataclass(frozen=True)
class Kinds:
    """The images of a target by what is known of them: how many seeds of A, and how many of B, were right.

    right: [K, 2] as shares of the seeds. images: how many there are of each kind [K].
    """

    right: Floats
    images: NDArray[np.int64]

    @classmethod
    def of(cls, a: NDArray[np.bool_], b: NDArray[np.bool_]) -> Kinds:
        """From what each seed [S] of A and of B had right of each image: [S, N] both."""
        seeds = len(a)
        kind, images = np.unique(a.sum(0) * (seeds + 1) + b.sum(0), return_counts=True)
        return cls(np.stack(np.divmod(kind, seeds + 1), axis=1) / seeds, images)

    def resampled(self, draws: int, generator: np.random.Generator) -> Floats:
        """Accuracy in percent of A and of B [R, 2], mean over seeds, on N images drawn with replacement R times.

        Which image of a kind is drawn makes no difference, and how many of each kind are is multinomial: the same
        distribution as drawing N images one by one, at the cost of K numbers.
        """
        total = int(self.images.sum())
        counts = generator.multinomial(total, self.images / total, size=draws)
        return 100.0 * (counts @ self.right) / total


def percentile_interval(values: Floats) -> tuple[float, float]:
    """The middle 95 % of values [R]."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
