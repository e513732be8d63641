"""Make the table of runs trained on base classes whose test images meet the names of all classes."""

from __future__ import annotations

from functools import partial

from benchmarks.console.output import plural
from benchmarks.experiment.published import AVERAGE
from benchmarks.experiment.suite import Variant
from benchmarks.results.metrics import Metric, average, harmonic
from benchmarks.results.open_world import MEASURES
from benchmarks.results.suite_results import SuiteResults
from benchmarks.tables.rows import HALVES, suite_table
from benchmarks.tables.table import Column, Table
from runner.config import Target

AMONG_ALL = tuple(Column(f"{half.title} of all") for half in HALVES)
COLUMNS = (*HALVES, *AMONG_ALL, Column("AUROC"), Column("FPR95", "low"), Column("OpenworldAUC"))
RULE = (
    "Base, Novel, HM: among the names of each half; of all: among all names. AUROC, FPR95: base against novel images, "
    "by the highest probability of a base name. OpenworldAUC: pairs of a base and a novel image in the right order, "
    "both right in their half."
)


def open_world_tables(results: SuiteResults) -> list[Table]:
    """Make COLUMNS of every variant on each data set and on average."""
    cells, old = partial(open_world_cells, results), _count_old(results)
    repeat = f"WITHOUT PROBABILITIES: {plural(old, 'evaluation')}; `procap eval --force` repeats them." if old else ""
    labels, rules = ["Data set", "Method"], filter(None, (RULE, repeat))
    sets = results.datasets_and_average
    return [suite_table(results, results.name, results.suite.heading, labels, COLUMNS, cells, *rules, datasets=sets)]


def open_world_cells(results: SuiteResults, variant: Variant, dataset: str) -> list[Metric | None]:
    """Return the metrics of COLUMNS; for AVERAGE the means over data sets, of which the harmonic means are taken."""
    if dataset == AVERAGE:
        by_dataset = (_measure(results, variant, name) for name in results.options.datasets)
        measures = [average(column) for column in zip(*by_dataset, strict=True)]
    else:
        measures = _measure(results, variant, dataset)
    base, novel, *detection = measures
    return [*results.halves(variant, dataset), base, novel, harmonic(base, novel), *detection]


def _measure(results: SuiteResults, variant: Variant, dataset: str) -> list[Metric | None]:
    return [results.metric(variant, dataset, Target(dataset), column) for column in MEASURES]


def _count_old(results: SuiteResults) -> int:
    """Count evaluations of all classes that have no probabilities of base classes, as they were made before."""
    joint = results.frame[results.frame.target_classes == "all"]
    return joint[joint.base_confidence.isna()].path.nunique()
