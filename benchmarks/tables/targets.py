"""Make the tables of suites that train on one data set and test on others: a row per method, a column per test set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.results.metrics import Metric, average
from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import PublishedTransfer, display_name
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
from benchmarks.tables.table import Cell, Column, Row, Table
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


def find_transfer(lines: Sequence[PublishedTransfer], variant: Variant, source: str) -> PublishedTransfer | None:
    """Find the paper's row of a method, which trains on ImageNet alone."""
    if variant.changed or source != "imagenet":
        return None
    return next((line for line in lines if line.key == variant.method), None)


def _tables(suite: SuiteResults, title: str, paper: Sequence[PublishedTransfer]) -> list[Table]:
    first, *others = suite.datasets
    titles = {name: f"{title}, trained on {display_name(name)}" if others else title for name in suite.datasets}
    tables = [_table(suite, suite.name, titles[first], first, paper)]
    tables += [_table(suite, f"{suite.name}-from-{name}", titles[name], name, paper) for name in others]
    # Compare each source separately: over several sources a target would count more than once.
    sources = suite.datasets if others else ("",)
    return [*tables, *(table for source in sources for table in comparison_tables(suite, source=source))]


def _table(suite: SuiteResults, name: str, title: str, source: str, paper: Sequence[PublishedTransfer]) -> Table:
    targets = list_targets(suite, source)
    columns = [Column(f"{display_name(source)} (source)"), *(Column(display_name(target)) for target in targets)]
    columns += [Column(TARGET_MEAN)] if targets else []
    rows = []
    for line in paper if in_paper(suite) and source == "imagenet" else ():
        same_targets = set(targets) == set(line.targets)
        numbers = [line.source, *map(line.targets.get, targets)]
        numbers += [line.target_mean if same_targets else None] if targets else []
        rows.append(published_row([published_title(line.method, line.venue)], numbers, group=published_group(suite)))
    rows += [_row(suite, variant, source, targets, find_transfer(paper, variant, source)) for variant in suite.variants]
    mean = f"{TARGET_MEAN}: over {len(targets)} data sets, without the source." if len(targets) > 1 else ""
    notes = suite_notes(suite, f"Trained on {display_name(source)}, tested on all classes of each data set.", mean)
    table = Table(name, title, ("Method",), tuple(columns), tuple(rows), notes, wide=True)
    return add_delta_column(suite, table, columns[-1].title)


def _row(
    suite: SuiteResults, variant: Variant, source: str, targets: Sequence[str], known: PublishedTransfer | None
) -> Row:
    own, metrics, mean = target_metrics(suite, variant, source)
    cells: list[Cell] = [with_published(suite, variant, [source], own, known.source if known else None)]
    for name in targets:
        printed = known.targets.get(name) if known else None
        cells.append(with_published(suite, variant, [name], metrics[name], printed))
    if targets:
        same_targets = known is not None and set(targets) == set(known.targets)
        cells.append(
            with_published(suite, variant, targets, mean, known.target_mean if known and same_targets else None)
        )
    return Row((mark_reproduced(unique_title(suite, variant), cells),), tuple(cells))
