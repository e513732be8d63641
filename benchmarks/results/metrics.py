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
    chosen_on_test: the weights or a setting were chosen by test accuracy, as some public code does.
    sees_unlabelled: the method looks at further images without labels, of the train or the test split.
    """

    mean: float
    std: float | None = None
    seeds: tuple[int, ...] = ()
    published: float | None = None
    limited: bool = False
    values: tuple[float, ...] = ()
    chosen_on_test: bool = False
    sees_unlabelled: bool = False

    @property
    def delta(self) -> float | None:
        """Our number minus the published one."""
        return None if self.published is None else self.mean - self.published


def make_metric(
    values: Sequence[float],
    seeds: tuple[int, ...],
    limited: bool,
    mean: float | None = None,
    chosen_on_test: bool = False,
    sees_unlabelled: bool = False,
) -> Metric:
    """Make a metric of one value per seed. mean: if it is not that of the values."""
    std = stdev(values) if len(values) > 1 else None
    mean = fmean(values) if mean is None else mean
    return Metric(mean, std, seeds, None, limited, tuple(values), chosen_on_test, sees_unlabelled)


def harmonic(base: Metric | None, novel: Metric | None) -> Metric | None:
    """Compute the harmonic mean of base and novel accuracy; None if one is missing or their seeds or limits differ."""
    if not base or not novel or (base.seeds, base.limited) != (novel.seeds, novel.limited):
        return None
    # The deviation is that of the seeds' HMs, but the mean is the HM of the means, as papers print it: it is not the
    # mean of the values.
    values = [harmonic_mean(b, n) for b, n in zip(base.values, novel.values, strict=True)]
    mean = harmonic_mean(base.mean, novel.mean)
    on_test, unlabelled = base.chosen_on_test or novel.chosen_on_test, base.sees_unlabelled or novel.sees_unlabelled
    return make_metric(values, base.seeds, base.limited, mean, on_test, unlabelled)


def average(metrics: Sequence[Metric | None]) -> Metric | None:
    """Average over data sets, seed by seed; None if one is missing or they differ in seeds or limits."""
    present = [metric for metric in metrics if metric is not None]
    if len(present) < len(metrics) or len({(metric.seeds, metric.limited) for metric in present}) != 1:
        return None
    # Deviation over seeds of the average, not the average of the data sets' deviations. Without values there is none.
    values = [fmean(column) for column in zip(*(metric.values for metric in present), strict=True)]
    mean, on_test = fmean(metric.mean for metric in present), any(metric.chosen_on_test for metric in present)
    unlabelled = any(metric.sees_unlabelled for metric in present)
    return make_metric(values, present[0].seeds, present[0].limited, mean, on_test, unlabelled)
