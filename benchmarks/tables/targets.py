"""Make the tables of suites that train on one data set and test on others: a row per method, a column per test set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.results.metrics import Metric, average
from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import display_name
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import Variant
from benchmarks.tables.comparison import comparison_tables
from benchmarks.tables.notes import suite_notes
from benchmarks.tables.rows import (
    add_delta_column,
    in_paper,
    mark_reproduced,
    published_group,
    published_row,
    published_title,
    unique_title,
    with_published,
)
from benchmarks.tables.table import Column, Row, Table
from runner.config import Target

TARGET_MEAN = "Target mean"


def cross_dataset_tables(suite: SuiteResults) -> list[Table]:
    """Make one table for each data set that was trained on, then the comparison."""
    return _tables(suite, "Cross-dataset transfer", published.cross_dataset())


def domain_generalization_tables(suite: SuiteResults) -> list[Table]:
    """Make the same tables as `cross_dataset_tables`, for shifted test sets."""
    return _tables(suite, "Domain generalization", published.domain_generalization())


def target_metrics(
    suite: SuiteResults, variant: Variant, source: str
) -> tuple[Metric | None, Mapping[str, Metric | None], Metric | None]:
    """Return the accuracy on the source, on each target by name, and the mean of the targets if all exist."""
    targets = {name: suite.metric(variant, source, Target(name)) for name in list_targets(suite, source)}
    return suite.metric(variant, source, Target(source)), targets, average(list(targets.values())) if targets else None


def list_targets(suite: SuiteResults, source: str) -> list[str]:
    """List the test sets of runs that were trained on `source`, without `source` itself."""
    targets = [target for run in suite.runs if run.dataset == source for target in run.spec.targets]
    names = dict.fromkeys(Target.recorded(target).dataset for target in targets)
    return [name for name in names if name != source]


def find_transfer(paper: Sequence[Any], variant: Variant, source: str) -> Any:
    """Find the paper's row of a method, which trains on ImageNet alone; None if it has none."""
    if variant.changed or source != "imagenet":
        return None
    return next((row for row in paper if row.key == variant.method), None)


def _tables(suite: SuiteResults, title: str, paper: Sequence[Any]) -> list[Table]:
    first, *others = suite.datasets
    tables = []
    for source in suite.datasets:
        name = suite.name if source == first else f"{suite.name}-from-{source}"
        heading = f"{title}, trained on {display_name(source)}" if others else title
        tables.append(_table(suite, name, heading, source, paper))
    # Compare each source separately: over several sources a target would count more than once.
    sources = suite.datasets if others else ("",)
    return [*tables, *(table for source in sources for table in comparison_tables(suite, source=source))]


def _table(suite: SuiteResults, name: str, title: str, source: str, paper: Sequence[Any]) -> Table:
    targets = list_targets(suite, source)
    columns = [Column(f"{display_name(source)} (source)"), *(Column(display_name(target)) for target in targets)]
    columns += [Column(TARGET_MEAN)] if targets else []
    rows = []
    for row in paper if in_paper(suite) and source == "imagenet" else ():
        numbers = printed_transfer(row, targets)
        rows.append(published_row([published_title(row.method, row.venue)], numbers, group=published_group(suite)))
    for variant in suite.variants:
        own, metrics, mean = target_metrics(suite, variant, source)
        numbers = printed_transfer(find_transfer(paper, variant, source), targets)
        cells = [
            with_published(suite, variant, sets, metric, number)
            for sets, metric, number in zip(
                [[source], *([name] for name in targets), targets],
                [own, *metrics.values(), mean],
                numbers,
                strict=False,
            )
        ]
        rows.append(Row((mark_reproduced(unique_title(suite, variant), cells),), tuple(cells)))
    mean_note = f"{TARGET_MEAN}: over {len(targets)} data sets, without the source." if len(targets) > 1 else ""
    notes = suite_notes(suite, f"Trained on {display_name(source)}, tested on all classes of each data set.", mean_note)
    table = Table(name, title, ("Method",), tuple(columns), tuple(rows), notes, wide=True)
    return add_delta_column(suite, table, columns[-1].title)


def printed_transfer(row: Any, targets: Sequence[str]) -> list[float | None]:
    """List what a row of the paper has for the source, each target, and their mean if it is over the same targets."""
    if row is None:
        return [None] * (len(targets) + bool(targets) + 1)
    mean = row.target_mean if set(targets) == set(row.targets) else None
    return [row.source, *map(row.targets.get, targets), *([mean] if targets else [])]
