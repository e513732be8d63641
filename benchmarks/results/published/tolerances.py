"""How far a result may lie from a published figure and still agree with it: every number with its reason.

Ours is a mean over our seeds, theirs one over the paper's: both would be others with other seeds. How much, the paper
prints of ProCAP alone, from three seeds, which is a rough measure; so it is pooled with what is typical of the printed
table and with the deviation of our own seeds. The critical value is Student's, of all figures that are checked
together (Bonferroni's correction): each of them alone may be outside far more seldom than one of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.results.published.tables import AVERAGE, PublishedSpread

PUBLISHED_SEEDS = 3
"""Seeds of the paper's means; its ablation is of one."""
ALARMS = 0.05
"""The share of correct reproductions that chance may take outside, in one figure or more."""
PRINTED_DF = PUBLISHED_SEEDS - 1
TYPICAL_DF = 4
"""Of a column's typical deviation, a choice of ours.

The printed ones differ no more than those of three seeds do where the true one is the same everywhere, so more weight
could be argued for; less is safe where data sets differ after all.
"""
OTHERS = 2.0
"""How much more than ProCAP in its main table anything without a printed deviation varies, a choice of ours.

It keeps what is known of data sets, single ones above averages, noisy ones above quiet ones; a deviation of our own
seeds that is larger widens it further.
"""
LEAST, UNTRAINED = 0.5, 0.3
"""Percentage points that no seed explains, readings of ours."""
NO_SEED = "other weights files, other decoding of JPEG, bf16 instead of fp16"
PRINTED = (
    f"where the paper prints a deviation, of ProCAP: s pools the printed one ({PRINTED_DF} degrees of freedom), the "
    f"root mean square of its column ({TYPICAL_DF}) and the one over our seeds (n - 1); of an average the printed one, "
    f"twice what data sets that vary independently give, counts {PRINTED_DF + TYPICAL_DF}"
)
CHOSEN = (
    f"where the paper prints none: s likewise, with {OTHERS:g} times ProCAP's deviation on the same data set "
    "instead of the printed ones, that of novel classes for figures of all classes; a choice of ours"
)


@dataclass(frozen=True)
class Tolerance:
    """The largest difference that is no disagreement: what no seed explains, or chance where that reaches further.

    least: percentage points, or a part of what is published if `relative`. error: standard error of ours minus
    published, known by `df` degrees of freedom; 0: nothing is drawn at random. theirs: seeds of the published mean.
    """

    least: float
    reason: str
    relative: bool = False
    error: float = 0.0
    df: int = 0
    theirs: int = PUBLISHED_SEEDS

    def limit(self, among: int = 1) -> float:
        """What is allowed where so many figures are checked together."""
        return max(self.least, student(self.df, among) * self.error) if self.error else self.least

    def allows(self, ours: float, published: float, among: int = 1) -> bool:
        """Whether `ours` is near enough; what is printed with two decimals is known to half of the last one alone."""
        allowed = self.limit(among) * (published if self.relative else 1.0)
        return abs(ours - published) <= allowed + 0.005

    def printed(self, among: int = 1) -> str:
        return f"{100 * self.limit(among):.0f} %" if self.relative else f"{self.limit(among):.2f}"


OF_UNTRAINED = Tolerance(
    UNTRAINED, f"{UNTRAINED:.2f} points where nothing is trained: only decoding and rounding differ"
)
OF_RATIO = Tolerance(0.25, "25 %: a ratio of two methods on one machine, on another machine than the paper's", True)


@dataclass(frozen=True)
class Spread:
    """The standard deviation of single runs over seeds, and the degrees of freedom that it is known by."""

    std: float
    df: int

    def pooled(self, std: float | None, seeds: int) -> Spread:
        """With the sample deviation over `seeds` of ours, which is None for a single one."""
        if std is None:
            return self
        df = self.df + seeds - 1
        return Spread(math.sqrt((self.df * self.std**2 + (seeds - 1) * std**2) / df), df)


def expected(dataset: str, figure: str, table: Sequence[PublishedSpread]) -> Spread:
    """What the paper says of a figure ("base", "novel" or "hm") of ProCAP, on a data set or AVERAGE.

    The printed deviation of an average is twice what data sets that vary independently give, so that it is taken as
    it is, and as well known as those of data sets, a choice of ours. A data set that the table does not have varies as
    is typical of the column.
    """
    column = {line.dataset: getattr(line, f"{figure}_std") for line in table}
    typical = fmean(std**2 for name, std in column.items() if name != AVERAGE)
    df = PRINTED_DF + TYPICAL_DF
    if dataset == AVERAGE:
        return Spread(column[AVERAGE], df)
    if dataset not in column:
        return Spread(math.sqrt(typical), TYPICAL_DF)
    return Spread(math.sqrt((PRINTED_DF * column[dataset] ** 2 + TYPICAL_DF * typical) / df), df)


def of_means(
    spread: Spread, seeds: int, *, std: float | None, printed: bool, theirs: int = PUBLISHED_SEEDS
) -> Tolerance:
    """Of a mean over `seeds` of ours, whose sample deviation is `std`, against one over `theirs` of the paper.

    printed: whether `spread` is of this very figure; else it is of ProCAP in its main table.
    """
    known = spread if printed else Spread(OTHERS * spread.std, spread.df)
    known = known.pooled(std, seeds)
    error = known.std * math.sqrt(1 / seeds + 1 / theirs)
    return Tolerance(LEAST, PRINTED if printed else CHOSEN, error=error, df=known.df, theirs=theirs)


@functools.cache
def student(df: int, among: int) -> float:
    """The two-sided critical value of Student's t that ALARMS of `among` tests together exceed at most."""
    from scipy.stats import t

    return float(t.isf(ALARMS / (2 * among), df))
