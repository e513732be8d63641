"""Average over seeds and data sets. A mean with a missing part is missing: nothing is averaged over fewer values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from runner.results import harmonic_mean


@dataclass(frozen=True)
class Metric:
    """A number that tables and plots show, usually a percentage.

    std: sample standard deviation (ddof = 1), None for one seed. seeds: the seeds of `values`; both are empty
    for a published number. published: what the paper prints for the same setting. limited: only the first images of a
    test set were evaluated.
    """

    mean: float
    std: float | None = None
    seeds: tuple[int, ...] = ()
    published: float | None = None
    limited: bool = False
    values: tuple[float, ...] = ()

    @property
    def delta(self) -> float | None:
        """Our number minus the published one."""
        return None if self.published is None else self.mean - self.published


Halves = tuple[Metric | None, Metric | None, Metric | None]
"""Accuracy on base classes, on novel classes, and their harmonic mean."""


def mean_over_seeds(values: Mapping[int, float], *, limited: bool = False) -> Metric | None:
    """Average one value per seed; None without any."""
    seeds = tuple(sorted(values))
    return _metric([values[seed] for seed in seeds], seeds, limited) if values else None


def harmonic(base: Metric | None, novel: Metric | None) -> Metric | None:
    """Compute the harmonic mean of mean base and mean novel accuracy; `values` are those of the single seeds.

    None if one is missing or they differ in seeds or in whether they are limited.
    """
    if not base or not novel or (base.seeds, base.limited) != (novel.seeds, novel.limited):
        return None
    values = [harmonic_mean(b, n) for b, n in zip(base.values, novel.values, strict=True)]
    return _metric(values, base.seeds, base.limited, harmonic_mean(base.mean, novel.mean))


def average(metrics: Sequence[Metric | None]) -> Metric | None:
    """Average over data sets, seed by seed; None if one is missing or they differ in seeds or limits."""
    there = [metric for metric in metrics if metric is not None]
    if len(there) < len(metrics) or len({(metric.seeds, metric.limited) for metric in there}) != 1:
        return None
    values = [fmean(column) for column in zip(*(metric.values for metric in there), strict=True)]
    return _metric(values, there[0].seeds, there[0].limited, fmean(metric.mean for metric in there))


def mean_if_complete(numbers: Sequence[float | None]) -> float | None:
    """Average plain numbers; None if one is missing."""
    there = [number for number in numbers if number is not None]
    return fmean(there) if there and len(there) == len(numbers) else None


def _metric(values: Sequence[float], seeds: tuple[int, ...], limited: bool, mean: float | None = None) -> Metric:
    std = stdev(values) if len(values) > 1 else None
    return Metric(fmean(values) if mean is None else mean, std, seeds, None, limited, tuple(values))
