"""Make the tables of suites that train on one data set and test on others: a row per method, a column per test set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.experiment.published import display_name, load_rows
from benchmarks.experiment.suite import Variant
from benchmarks.results.metrics import Metric, average
from benchmarks.results.suite_results import SuiteResults
from benchmarks.tables.comparison import comparison_tables
from benchmarks.tables.suite_table import Heading, PrintedRow, published_title, suite_table
from benchmarks.tables.table import Column, Table
from runner.config import Target

TARGET_MEAN = "Target mean"


def transfer_tables(results: SuiteResults, *, published: str) -> list[Table]:
    """Make one table for each data set that was trained on, then the comparison.

    published: the file of `published/` with the paper's rows, which are trained on ImageNet.
    """
    tables = [
        _transfer_table(results, source, published if source == "imagenet" else "")
        for source in results.options.datasets
    ]
    # Over several sources a target would count more than once.
    return tables if len(tables) > 1 else [*tables, *comparison_tables(results)]


def _transfer_table(results: SuiteResults, source: str, published: str) -> Table:
    tested = (target for run in results.runs if run.dataset == source for target in run.spec.targets)
    names = dict.fromkeys(Target.parse_unchecked(target).dataset for target in tested)
    targets = [name for name in names if name != source]
    name, title = results.name, results.suite.heading
    if len(results.options.datasets) > 1:
        title += f", trained on {display_name(source)}"
        name += "" if source == results.options.datasets[0] else f"-from-{source}"
    columns = [Column(f"{display_name(source)} (source)"), *(Column(display_name(target)) for target in targets)]
    columns += [Column(TARGET_MEAN)] if targets else []
    rows = load_rows(published) if published else []

    def printed(_: str) -> Iterator[PrintedRow]:
        for row in rows:
            # The printed mean is over all targets of the paper.
            mean = row.target_mean if set(targets) == set(row.targets) else None
            numbers = [row.source, *map(row.targets.get, targets), *([mean] if targets else [])]
            yield PrintedRow([published_title(row.method, row.venue)], numbers, row.key)

    def cells(variant: Variant, _: str) -> Sequence[Metric | None]:
        metrics = [results.metric(variant, source, Target(name)) for name in (source, *targets)]
        return [*metrics, *([average(metrics[1:])] if targets else [])]

    rule = f"Trained on {display_name(source)}, tested on all classes."
    mean_rule = f"{TARGET_MEAN}: without the source." if len(targets) > 1 else ""
    return suite_table(results, Heading(name, title, ["Method"], columns, [rule, mean_rule]), cells, printed=printed)
