"""Make the tables of suites that train on one data set and test on others: a row per method, a column per test set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.experiment import published
from benchmarks.experiment.published import display_name
from benchmarks.experiment.suite import Variant
from benchmarks.results.metrics import Metric, average
from benchmarks.results.suite import SuiteResults
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
    # Over several sources a target would count more than once.
    return [*tables, *([] if others else comparison_tables(suite))]


def _cells(suite: SuiteResults, variant: Variant, source: str, targets: Sequence[str]) -> tuple[Metric | None, ...]:
    """List the accuracies on the source, on each target, and their mean, with the paper's, which trains on ImageNet."""
    metrics = {name: suite.metric(variant, source, Target(name)) for name in (source, *targets)}
    if targets:
        metrics[TARGET_MEAN] = average([metrics[name] for name in targets])
    rows = [row for row in _printed_rows(suite) if row.key == variant.method]
    printed = _numbers_by_name(rows[0], targets) if rows and source == "imagenet" and not variant.changed else {}
    return tuple(
        suite.with_published(variant, targets if name == TARGET_MEAN else [name], metric, printed.get(name))
        for name, metric in metrics.items()
    )


def list_targets(suite: SuiteResults, source: str) -> list[str]:
    """List the test sets of runs that were trained on `source`, without `source` itself."""
    targets = [target for run in suite.runs if run.dataset == source for target in run.spec.targets]
    names = dict.fromkeys(Target.parse_unchecked(target).dataset for target in targets)
    return [name for name in names if name != source]


def _printed_rows(suite: SuiteResults) -> list[Any]:
    """Return the rows of the paper's table of this suite; empty for another suite."""
    name = suite.suite.published
    return getattr(published, name)() if name in ("cross_dataset", "domain_generalization") else []


def _numbers_by_name(row: Any, targets: Sequence[str]) -> dict[str, float]:
    """Map names to the numbers of a row of the paper, whose mean is over all its targets."""
    mean = {TARGET_MEAN: row.target_mean} if set(targets) == set(row.targets) else {}
    return {"imagenet": row.source, **row.targets, **mean}


def _table(suite: SuiteResults, name: str, heading: str, source: str) -> Table:
    targets = list_targets(suite, source)
    names = [source, *targets, *([TARGET_MEAN] if targets else [])]
    columns = [Column(f"{display_name(source)} (source)"), *(Column(display_name(name)) for name in names[1:])]
    rows = []
    for row in _printed_rows(suite) if suite.in_paper and source == "imagenet" else ():
        numbers = _numbers_by_name(row, targets)
        labels = [published_title(row.method, row.venue)]
        rows.append(published_row(labels, map(numbers.get, names), group=published_group(suite)))
    for title, variant in suite.by_title.items():
        cells = _cells(suite, variant, source, targets)
        rows.append(Row((mark_reproduced(title, cells),), cells))
    mean_note = f"{TARGET_MEAN}: without the source." if len(targets) > 1 else ""
    notes = suite_notes(suite, f"Trained on {display_name(source)}, tested on all classes.", mean_note)
    table = Table(name, heading, ("Method",), columns, rows, notes.lines, notes.details, wide=True)
    return add_delta_column(suite, table, columns[-1].title)
