"""Make the tables of suites: a row for each variant on each data set, below the paper's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

from benchmarks.experiment.published import AVERAGE, display_name
from benchmarks.experiment.suite import Variant
from benchmarks.results.metrics import Metric
from benchmarks.results.suite_results import SuiteResults
from benchmarks.tables.notes import suite_notes
from benchmarks.tables.table import Column, Row, Table


class PrintedRow(NamedTuple):
    """A row of the paper. twin: identifies the variant that is compared with this row; None: no variant is."""

    labels: Sequence[str]
    numbers: Sequence[Metric | float | None]
    twin: Any = None


@dataclass(frozen=True)
class Heading:
    """What stands around the cells of a suite's table.

    rules: what the cells are, for the notes; empty ones are left out. varied: a name in `Variant.key`, whose values are
        the last column of labels.
    """

    name: str
    title: str
    labels: Sequence[str]
    columns: Sequence[Column]
    rules: Sequence[str] = ()
    varied: str = ""
    details: Sequence[str] = ()


def suite_table(
    results: SuiteResults,
    heading: Heading,
    cells: Callable[[Variant, str], Iterable[Metric | None]],
    *,
    datasets: Sequence[str] = (),
    printed: Callable[[str], Iterable[PrintedRow]] = lambda dataset: (),
    twin_of: Callable[[Variant], Any] = lambda variant: None if variant.changed else variant.method,
) -> Table:
    """Make a table with a row for each variant, once or for each of `datasets`.

    cells: makes the cells of a variant on a data set, "" without `datasets`. printed: makes the paper's rows of a data
    set, whose numbers are compared with those of the variant with that `twin_of`, by default its unchanged method.
    """
    rows, varied = [], heading.varied
    for dataset in datasets or ("",):
        group, first = display_name(dataset), (display_name(dataset),) if dataset else ()
        is_average = dataset == AVERAGE
        # Published rows have their own best if ours are not comparable with them.
        apart = " published" if results.why_incomparable else ""
        published: dict[Any, Iterable[Metric | None]] = {}
        for words, numbers, twin in printed(dataset) if results.in_paper else ():
            # Numbers are plain floats, or Metrics already if they have a deviation; None is a missing cell.
            metrics = tuple(Metric(number) if isinstance(number, float) else number for number in numbers)
            rows.append(Row((*first, *words), metrics, "published", group + apart, is_average))
            published.setdefault(twin, metrics)
        published.pop(None, None)
        for variant_title, variants in results.group_by_title(varied).items():
            for variant in variants:
                words = (variant_title, str(variant.key.get(varied) or "-")) if varied else (variant_title,)
                beside = published.get(twin_of(variant), repeat(None))
                ours = tuple(map(results.with_published, cells(variant, dataset), beside))
                rows.append(Row((*first, *words), ours, group=group, average=is_average))
    notes = suite_notes(results, *filter(None, heading.rules))
    details, labels = (*heading.details, *notes.details), tuple(heading.labels)
    about = (heading.name, heading.title, labels, heading.columns)
    return Table(*about, rows, notes.lines, details, reference=results.reference(varied))


def published_title(method: str, venue: str = "") -> str:
    return f"{method} ({'published' if venue in ('', 'Ours') else venue})"
