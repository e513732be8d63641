"""Average over seeds and data sets. A mean with a missing part is missing: nothing is averaged over fewer values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from runner.results import harmonic_mean


@dataclass(frozen=True)
class Metric:
    """A number that tables and plots show, usually a percentage.

    std: sample standard deviation (ddof = 1), None for one seed. seeds: those of `values`, none for a published number.
    published: what the paper prints for the same setting. limited: only the first images of a test set were evaluated.
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


def make_metric(values: Sequence[float], seeds: tuple[int, ...], limited: bool, mean: float | None = None) -> Metric:
    """Make a metric of one value per seed. mean: if it is not that of the values."""
    std = stdev(values) if len(values) > 1 else None
    return Metric(fmean(values) if mean is None else mean, std, seeds, None, limited, tuple(values))


def harmonic(base: Metric | None, novel: Metric | None) -> Metric | None:
    """Compute the harmonic mean of base and novel accuracy; None if one is missing or their seeds or limits differ."""
    if not base or not novel or (base.seeds, base.limited) != (novel.seeds, novel.limited):
        return None
    values = [harmonic_mean(b, n) for b, n in zip(base.values, novel.values, strict=True)]
    return make_metric(values, base.seeds, base.limited, harmonic_mean(base.mean, novel.mean))


def average(metrics: Sequence[Metric | None]) -> Metric | None:
    """Average over data sets, seed by seed; None if one is missing or they differ in seeds or limits."""
    present = [metric for metric in metrics if metric is not None]
    if len(present) < len(metrics) or len({(metric.seeds, metric.limited) for metric in present}) != 1:
        return None
    values = [fmean(column) for column in zip(*(metric.values for metric in present), strict=True)]
    return make_metric(values, present[0].seeds, present[0].limited, fmean(metric.mean for metric in present))


def format_seeds(seeds: Sequence[int]) -> str:
    """Format seeds: `seed 1`, `seeds 1, 2`."""
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
