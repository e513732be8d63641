"""Define how far a result may be from a published number and still agree with it, with a reason for every constant.

Our number and the paper's are both means over a few seeds, so both vary by chance. The paper prints the deviation of
ProCAP only, from three seeds; so it is pooled with the typical deviation of the printed table and with that of our own
seeds. The critical value is Student's t with Bonferroni's correction over all numbers that are checked together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.results.published.tables import AVERAGE

PUBLISHED_SEEDS = 3
"""Number of seeds of the paper's means; by its text ablations have one."""
ALARMS = 0.05
"""Probability that a correct reproduction has at least one number outside its tolerance by chance."""
PRINTED_DF = PUBLISHED_SEEDS - 1
TYPICAL_DF = 4
"""Degrees of freedom of a column's typical deviation; our own choice, safe if data sets do differ."""
OTHERS = 2.0
"""Factor on ProCAP's deviation in the main table for results without a printed deviation; our own choice."""
LEAST, UNTRAINED = 0.5, 0.3
"""Differences in percentage points that are allowed even without randomness over seeds; our own choice."""
NO_SEED = "other weights files, other decoding of JPEG, another kind of mixed precision"
PRINTED = (
    f"where the paper prints a deviation, of ProCAP: s pools the printed one ({PRINTED_DF} degrees of freedom), the "
    f"root mean square of its column ({TYPICAL_DF}) and the one over our seeds (n - 1); of an average the printed one, "
    f"twice what data sets that vary independently give, counts {PRINTED_DF + TYPICAL_DF}"
)
CHOSEN = (
    f"where the paper prints none: s likewise, with {OTHERS:g} times ProCAP's deviation on the same data set "
    "instead of the printed ones, that of novel classes for accuracies of all classes; a choice of ours"
)


@dataclass(frozen=True)
class Tolerance:
    """The largest difference that still agrees: a fixed minimum, or the variation by chance if that is larger.

    least: percentage points, or a fraction of the published number if `relative`. error: standard error of ours minus
    published, with `df` degrees of freedom; 0: nothing is random. theirs: seeds of the published mean.
    """

    least: float
    reason: str
    relative: bool = False
    error: float = 0.0
    df: int = 0
    theirs: int = PUBLISHED_SEEDS

    def limit(self, among: int = 1) -> float:
        """Return the allowed difference if `among` numbers are checked together."""
        return max(self.least, student(self.df, among) * self.error) if self.error else self.least

    def allows(self, ours: float, published: float, among: int = 1) -> bool:
        """Whether `ours` is near enough; half of the last printed decimal is allowed as well."""
        allowed = self.limit(among) * (published if self.relative else 1.0)
        return abs(ours - published) <= allowed + 0.005

    def describe(self, among: int = 1) -> str:
        return f"{100 * self.limit(among):.0f} %" if self.relative else f"{self.limit(among):.2f}"


OF_UNTRAINED = Tolerance(
    UNTRAINED, f"{UNTRAINED:.2f} points where nothing is trained: only decoding and rounding differ"
)
OF_RATIO = Tolerance(0.25, "25 %: a ratio of two methods on one machine, on another machine than the paper's", True)


def estimate_deviation(dataset: str, metric: str, table: Sequence[Any]) -> tuple[float, int]:
    """Estimate the deviation of ProCAP over seeds from the paper's table of stability, with its degrees of freedom.

    metric: "base", "novel" or "hm". A data set that is not in the table gets the typical deviation of the column. The
    printed deviation of the average is twice that of independently varying data sets, so it is not pooled; our choice.
    """
    column = {row.dataset: getattr(row, f"{metric}_std") for row in table}
    typical = fmean(std**2 for name, std in column.items() if name != AVERAGE)
    df = PRINTED_DF + TYPICAL_DF
    if dataset == AVERAGE:
        return column[AVERAGE], df
    if dataset not in column:
        return math.sqrt(typical), TYPICAL_DF
    return math.sqrt((PRINTED_DF * column[dataset] ** 2 + TYPICAL_DF * typical) / df), df


def tolerance_of_means(
    deviation: tuple[float, int], seeds: int, *, std: float | None, printed: bool, theirs: int = PUBLISHED_SEEDS
) -> Tolerance:
    """Make the tolerance of a mean over `seeds` with deviation `std`; printed: `deviation` is exactly for this one."""
    pooled, df = deviation
    pooled *= 1 if printed else OTHERS
    if std is not None:
        variance = (df * pooled**2 + (seeds - 1) * std**2) / (df + seeds - 1)
        pooled, df = math.sqrt(variance), df + seeds - 1
    error = pooled * math.sqrt(1 / seeds + 1 / theirs)
    return Tolerance(LEAST, PRINTED if printed else CHOSEN, error=error, df=df, theirs=theirs)


@functools.cache
def student(df: int, among: int) -> float:
    """Compute the two-sided critical value of Student's t that ALARMS of `among` tests together exceed at most."""
    from scipy.stats import t

    return float(t.isf(ALARMS / (2 * among), df))
