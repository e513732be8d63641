"""Make the tables of the suite `readings`: every reading of the paper as a difference to the default."""

from __future__ import annotations

from statistics import fmean

from benchmarks.console.output import plural
from benchmarks.results.metrics import Metric, average, harmonic
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import Variant
from benchmarks.tables.notes import suite_notes
from benchmarks.tables.table import Column, Row, Table, format_number
from runner.config import Target

DEFAULT = "default"
"""The title of the variant that the others are compared with."""
MEASURES = ("base val", "held-out HM", "base test", "novel test", "HM test")
"""Accuracies and harmonic means of one variant, those without test images first."""


def readings_tables(suite: SuiteResults) -> list[Table]:
    """Make the differences to the default with their intervals, then the numbers themselves."""
    default = suite.by_title.get(DEFAULT, suite.variants[0])
    reference = {name: measures(suite, default, name) for name in suite.options.datasets}
    differences, numbers = [], []
    for title, variant in suite.by_title.items():
        found = {name: measures(suite, variant, name) for name in suite.options.datasets}
        means = tuple(average(column) for column in zip(*found.values(), strict=True))
        numbers.append(Row((title,), means))
        cells = [
            _format_difference([found[name][place] for name in found], [reference[name][place] for name in found])
            for place in range(len(MEASURES))
        ]
        differences.append(Row((title,), means if variant is default else tuple(cells), group=title))
    rule = (
        "Base val: validation images of the base classes trained on. Held-out HM: trained on half of the base classes, "
        "harmonic mean over the validation images of both halves. Choose by these two; the test columns only report."
    )
    over = plural(len(suite.options.datasets), "data set")
    columns, title = tuple(Column(name, "") for name in MEASURES), suite.suite.heading
    notes = suite_notes(suite, rule, f"Other rows: mean difference to {DEFAULT} over data sets and seeds, in points.")
    numbers_notes = suite_notes(suite, rule, "HM: mean of the data sets' HMs.")
    name, over = f"{suite.name}-accuracy", f"{title}: means over {over}"
    return [
        Table(suite.name, title, ("Reading",), columns, differences, notes.lines, notes.details, wide=True),
        Table(name, over, ("Reading",), tuple(map(Column, MEASURES)), numbers, numbers_notes.lines),
    ]


def measures(suite: SuiteResults, variant: Variant, dataset: str) -> tuple[Metric | None, ...]:
    """Return MEASURES of a variant on one data set; None where results are missing."""
    base_val, dev_base, dev_novel = (
        suite.metric(variant, dataset, Target(dataset, classes, "val")) for classes in ("base", "dev-base", "dev-novel")
    )
    return base_val, harmonic(dev_base, dev_novel), *suite.halves(variant, dataset)


def _format_difference(found: list[Metric | None], reference: list[Metric | None]) -> str | None:
    """Format the mean difference over data sets and seeds with its interval; None if a result is missing."""
    differences: list[float] = []
    for own, other in zip(found, reference, strict=True):
        if own is None or other is None or own.limited != other.limited:
            return None
        differences += (a - b for a, b in zip(own.values, other.values, strict=True))
    return format_number(fmean(differences), 2, "+")
