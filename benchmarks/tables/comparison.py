"""Make the table of paired comparisons: how much better one row is than each other, and whether that may be chance."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import TYPE_CHECKING

from benchmarks.console.output import plural
from benchmarks.experiment.suite import Variant
from benchmarks.results.metrics import Metric, make_metric, marks_of
from benchmarks.results.statistics import DRAWS, compare, holm, measure_of
from benchmarks.results.suite_results import SuiteResults, reference_title
from benchmarks.tables.table import Column, Row, Table

if TYPE_CHECKING:
    import pandas as pd

LEAST_TASKS = 6
"""With five, p of the permutation test is at least 2^(1 - 5) = 0.06, whatever the differences are."""


def comparison_tables(
    results: SuiteResults, variants: Mapping[str, Variant] | None = None, reference: str | None = None
) -> list[Table]:
    """Make one table called <suite>-comparison; none if fewer than two rows have comparable results.

    variants: by title; None: all. reference: the title that the others are compared with; None: see `reference_title`.
    """
    titled = variants or results.by_title
    frames = {title: results.complete_rows(variant) for title, variant in titled.items()}
    compared = {title: variant for title, variant in titled.items() if len(frames[title])}
    if len(compared) < 2:
        return []
    if reference not in compared:
        reference = reference_title(compared, results.options.reference)
    table = comparison_table(frames, reference, f"{results.name}-comparison")
    return [table] if table.metrics else []


def comparison_table(
    variants: Mapping[str, pd.DataFrame], reference: str, name: str = "comparison", *, draws: int = DRAWS
) -> Table:
    """Make a row for each variant, with dashes unless it has results of the same images as the reference.

    variants: parts of the frame by title. Limited results are not compared.
    """
    # A is the reference in every comparison, so that a positive difference is in its favour.
    comparisons = {title: compare(variants, reference, title, draws=draws) for title in variants if title != reference}
    tested = [title for title, comparison in comparisons.items() if len(comparison.tasks) >= LEAST_TASKS]
    corrected = dict(zip(tested, holm([comparisons[title].p for title in tested]), strict=True))
    tasks, measure = {"hm": ("data sets", "mean of HMs"), "accuracy": ("targets", "accuracy")}[measure_of(variants)]
    titles = (f"{measure} of {reference}", measure, "Difference", "95 % interval", "p", "p (Holm)")
    columns, rows = [Column(title, "") for title in titles], []
    for title, comparison in comparisons.items():
        if comparison.tasks.empty:
            rows.append(Row((title, "0"), (None,) * len(columns)))
            continue
        means, seeds = comparison.tasks[["a", "b"]].mean(), comparison.seeds
        ours = make_metric((), seeds, float(means.a), **marks_of(variants[reference]))
        theirs = make_metric((), seeds, float(means.b), **marks_of(variants[title]))
        difference = Metric(comparison.difference, comparison.std, comparison.seeds)
        interval = "{:.2f} to {:.2f}".format(*comparison.interval) if comparison.interval else None
        p = (f"{comparison.p:.2g}", f"{corrected[title]:.2g}") if title in corrected else (None, None)
        cells = (ours, theirs, difference, interval, *p)
        rows.append(Row((title, str(len(comparison.tasks))), cells))
    holm_note = f"Holm's correction for {plural(len(tested), 'comparison')}."
    few_note = f"- below {LEAST_TASKS} {tasks}, with which no p is under 0.05."
    note = (
        f"Difference: {reference} minus the row, in points, on the test images of both; ± over seeds. Interval: "
        f"bootstrap over test images, {draws:,} draws. p: permutation test over {tasks}, "
    )
    note += " ".join(compress((holm_note, few_note), (tested, len(tested) < len(comparisons))))
    heading = f"{reference} compared with every other row, {measure}"
    return Table(name, heading, ("Against", tasks.capitalize()), columns, rows, [note])
