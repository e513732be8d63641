"""Make the table of paired comparisons: how much better one row is than every other, and whether that may be chance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from benchmarks.console.output import plural
from benchmarks.experiment.suite import Variant
from benchmarks.results.metrics import Metric
from benchmarks.results.statistics import DRAWS, Comparison, Measure, compare, holm
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.table import Column, Row, Table
from procap.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

NAMES: Mapping[Measure, str] = {"hm": "mean of HMs", "accuracy": "accuracy"}


def comparison_tables(
    suite: SuiteResults, variants: Mapping[str, Variant] | None = None, reference: str | None = None
) -> list[Table]:
    """Make one table called <suite>-comparison; none if fewer than two rows have results.

    variants: by title; None: all. reference: the title that the others are compared with; None: see
    `choose_reference`, among unchanged variants if there are any.
    """
    titled = {title: variant for title, variant in (variants or suite.by_title).items() if len(suite.rows(variant))}
    if len(titled) < 2:
        return []
    if reference not in titled:
        unchanged = {title: variant for title, variant in titled.items() if not variant.changed} or titled
        reference = choose_reference({title: variant.method for title, variant in unchanged.items()})
    results = {title: suite.rows(variant) for title, variant in titled.items()}
    return [comparison_table(results, reference=reference, name=f"{suite.name}-comparison")]


def choose_reference(methods: Mapping[str, str]) -> str:
    """Choose the first title of ProCAP, or else the last title. methods: by title."""
    return next((title for title, method in methods.items() if method == "procap"), [*methods][-1])


def comparison_table(
    variants: Mapping[str, pd.DataFrame], *, reference: str | None = None, name: str = "comparison", draws: int = DRAWS
) -> Table:
    """Make a row for each variant, a part of the frame by title, but the reference (None: see `choose_reference`)."""
    if len(variants) < 2:
        raise UserError("a comparison needs results of two methods, or of two settings of one")
    if reference is None:
        reference = choose_reference({title: str(frame.method.iloc[0]) for title, frame in variants.items()})
    comparisons = [compare(variants, reference, title, draws=draws) for title in variants if title != reference]
    corrected = holm([comparison.p for comparison in comparisons])
    measure = comparisons[0].measure
    tasks = "data sets" if measure == "hm" else "targets"
    titles = (f"{NAMES[measure]} of {reference}", NAMES[measure], "Difference", "95 % interval", "p", "p (Holm)")
    notes = [
        f"Difference: {reference} minus the row, in points, on the test images of both; ± over seeds. Interval: "
        f"bootstrap over test images, {draws:,} draws. p: permutation test over {tasks}, Holm's correction for "
        f"{plural(len(comparisons), 'comparison')}."
    ]
    notes += ["† --limit: evaluated on the first images only."] if any(row.limited for row in comparisons) else []
    return Table(
        name=name,
        title=f"{reference} compared with every other row, {NAMES[measure]}",
        labels=("Against", tasks.capitalize()),
        columns=tuple(Column(title, "") for title in titles),
        rows=[_row(comparison, p) for comparison, p in zip(comparisons, corrected, strict=True)],
        notes=notes,
        details=list(dict.fromkeys(sentence for comparison in comparisons for sentence in comparison.left_out)),
        wide=True,
        compares=True,
    )


def _row(comparison: Comparison, corrected: float | None) -> Row:
    labels = (comparison.b, str(len(comparison.tasks)))
    if comparison.means is None or comparison.difference is None:
        return Row(labels, (None,) * 6)
    a, b = (Metric(mean, None, comparison.seeds, limited=comparison.limited) for mean in comparison.means)
    difference = Metric(comparison.difference, comparison.std, comparison.seeds, limited=comparison.limited)
    interval = "{:.2f} to {:.2f}".format(*comparison.interval) if comparison.interval else None
    return Row(labels, (a, b, difference, interval, f"{comparison.p:.2g}", f"{corrected:.2g}"))
