"""Average over seeds and data sets. A mean with a missing part is missing: nothing is averaged over fewer values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from procap.methods.data_use import FURTHER_IMAGES
from runner.results import harmonic_mean

if TYPE_CHECKING:
    import pandas as pd

MARKS: Mapping[str, str] = {
    "limited": "† --limit: evaluated on the first images only; never averaged with whole test sets, never bold.",
    "chosen_on_test": "‡ weights or settings chosen by test accuracy, as the method's public code does; never bold.",
    "sees_unlabelled": "§ methods that look at further images without labels; ranked apart.",
}
"""Fields of a metric that hold for every metric made from it, and what they mean; the first character marks cells."""


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


def make_metric(values: Sequence[float], seeds: tuple[int, ...], mean: float | None = None, **marks: bool) -> Metric:
    """Make a metric of one value per seed. mean: if it is not that of the values. marks: of MARKS."""
    std = stdev(values) if len(values) > 1 else None
    return Metric(fmean(values) if mean is None else mean, std, seeds, values=tuple(values), **marks)


def harmonic(base: Metric | None, novel: Metric | None) -> Metric | None:
    """Compute the harmonic mean of base and novel accuracy; None if one is missing or their seeds or limits differ."""
    # The deviation is that of the seeds' HMs, but the mean is the HM of the means, as papers print it: it is not the
    # mean of the values.
    return _combine([base, novel], lambda pair: harmonic_mean(*pair))


def average(metrics: Sequence[Metric | None]) -> Metric | None:
    """Average over data sets, seed by seed; None if one is missing or they differ in seeds or limits."""
    # Deviation over seeds of the average, not the average of the data sets' deviations. Without values there is none.
    return _combine(metrics, fmean)


def _combine(metrics: Sequence[Metric | None], combine: Callable[[Sequence[float]], float]) -> Metric | None:
    """Combine the values of each seed, and the means; None if a metric is missing or they differ in seeds or limits."""
    present = [metric for metric in metrics if metric is not None]
    if len(present) < len(metrics) or len({(metric.seeds, metric.limited) for metric in present}) != 1:
        return None
    values = [combine(column) for column in zip(*(metric.values for metric in present), strict=True)]
    marks = {mark: any(getattr(metric, mark) for metric in present) for mark in MARKS}
    return make_metric(values, present[0].seeds, combine([metric.mean for metric in present]), **marks)


def metric_over_seeds(rows: pd.DataFrame, column: str = "accuracy", needed: Sequence[int] = ()) -> Metric | None:
    """Average a column of a target over seeds; None if it has a NaN, or lacks one of the `needed` seeds.

    Limited results count if all are limited.
    """
    limited = bool(rows.limited.all())
    # By seed, as metrics are paired seed by seed in harmonic means and averages.
    rows = (rows if limited else rows[~rows.limited]).sort_values("seed")
    if rows.empty or rows[column].isna().any() or not {*needed} <= {*rows.seed}:
        return None
    values, seeds = list(map(float, rows[column])), tuple(map(int, rows.seed))
    return make_metric(values, seeds, limited=limited, **marks_of(rows))


def marks_of(rows: pd.DataFrame) -> dict[str, bool]:
    """Return the marks of a metric made from these rows, without `limited`."""
    return {
        "chosen_on_test": bool(rows.chosen_on_test.any()),
        "sees_unlabelled": bool(rows.unlabelled.isin(FURTHER_IMAGES).any()),
    }


def describe_seeds(cells: Iterable[Metric | None], *, std: bool = True) -> str:
    """Describe the seeds of metrics: "mean ± std of 3 seeds", "mean of 3 seeds", "seed 1"; "" without seeds."""
    seeds = {cell.seeds for cell in cells if cell is not None and cell.seeds}
    if len(seeds) != 1:
        return "seeds differ" if seeds else ""
    (only,) = seeds
    return f"mean{' ± std' * std} of {len(only)} seeds" if len(only) > 1 else f"seed {only[0]}"
