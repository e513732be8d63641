"""Make the tables of suites that train on one data set and test on others: a row per method, a column per test set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.results.metrics import Metric, average
from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import display_name
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import Variant
from benchmarks.tables.comparison import comparison_tables
from benchmarks.tables.notes import suite_notes
from benchmarks.tables.rows import add_delta_column, mark_reproduced, published_group, published_row, published_title
from benchmarks.tables.table import Column, Row, Table
from runner.config import Target

TARGET_MEAN = "Target mean"


def transfer_tables(suite: SuiteResults) -> list[Table]:
    """Make one table for each data set that was trained on, then the comparison."""
    first, *others = suite.options.datasets
    tables = []
    for source in suite.options.datasets:
        name = suite.name if source == first else f"{suite.name}-from-{source}"
        heading = suite.suite.heading + (f", trained on {display_name(source)}" if others else "")
        tables.append(_table(suite, name, heading, source))
    # Compare each source separately: over several sources a target would count more than once.
    sources = suite.options.datasets if others else ("",)
    return [*tables, *(table for source in sources for table in comparison_tables(suite, source=source))]


def target_metrics(suite: SuiteResults, variant: Variant, source: str, targets: Sequence[str]) -> list[Metric | None]:
    """List the accuracy on the source, on each target, and the mean of the targets."""
    metrics = [suite.metric(variant, source, Target(name)) for name in targets]
    return [suite.metric(variant, source, Target(source)), *metrics, *([average(metrics)] if targets else [])]


def list_targets(suite: SuiteResults, source: str) -> list[str]:
    """List the test sets of runs that were trained on `source`, without `source` itself."""
    targets = [target for run in suite.runs if run.dataset == source for target in run.spec.targets]
    names = dict.fromkeys(Target.parse_unchecked(target).dataset for target in targets)
    return [name for name in names if name != source]


def _printed_rows(suite: SuiteResults) -> list[Any]:
    """Return the rows of the paper's table of this suite; empty for another suite."""
    name = suite.suite.published
    return getattr(published, name)() if name in ("cross_dataset", "domain_generalization") else []


def printed_transfer(suite: SuiteResults, variant: Variant, source: str, targets: Sequence[str]) -> list[float | None]:
    """List what the paper has for a variant on the source, each target, and their mean; it trains on ImageNet alone."""
    rows = [row for row in _printed_rows(suite) if row.key == variant.method]
    comparable = rows and source == "imagenet" and not variant.changed
    return _list_numbers(rows[0], targets) if comparable else [None] * (1 + len(targets) + bool(targets))


def _list_numbers(row: Any, targets: Sequence[str]) -> list[float | None]:
    # The mean of the paper is over all its targets.
    mean = row.target_mean if set(targets) == set(row.targets) else None
    return [row.source, *map(row.targets.get, targets), *([mean] if targets else [])]


def _table(suite: SuiteResults, name: str, heading: str, source: str) -> Table:
    targets = list_targets(suite, source)
    columns = [Column(f"{display_name(source)} (source)"), *(Column(display_name(target)) for target in targets)]
    columns += [Column(TARGET_MEAN)] if targets else []
    rows = []
    for row in _printed_rows(suite) if suite.in_paper and source == "imagenet" else ():
        numbers = _list_numbers(row, targets)
        rows.append(published_row([published_title(row.method, row.venue)], numbers, group=published_group(suite)))
    for title, variant in suite.by_title.items():
        metrics = target_metrics(suite, variant, source, targets)
        numbers = printed_transfer(suite, variant, source, targets)
        sets = [[source], *([name] for name in targets), targets]
        cells = [
            suite.with_published(variant, datasets, metric, number)
            for datasets, metric, number in zip(sets, metrics, numbers, strict=False)
        ]
        rows.append(Row((mark_reproduced(title, cells),), tuple(cells)))
    mean_note = f"{TARGET_MEAN}: over {len(targets)} data sets, without the source." if len(targets) > 1 else ""
    notes = suite_notes(suite, f"Trained on {display_name(source)}, tested on all classes of each data set.", mean_note)
    table = Table(name, heading, ("Method",), tuple(columns), tuple(rows), notes, wide=True)
    return add_delta_column(suite, table, columns[-1].title)
