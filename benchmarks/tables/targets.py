"""Tables of suites that train on one data set and test on others: a method is a line, a test set a column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import PublishedTransfer
from benchmarks.results.scores import Cell, average
from benchmarks.tables.comparison import comparison_sheets
from benchmarks.tables.helpers import (
    against_procap,
    group_of,
    in_paper,
    name_of,
    notes,
    ours_alone,
    printed,
    reproduced,
    theirs,
    value,
)
from benchmarks.tables.table import Column, Item, Line, Sheet
from runner.config import Target

if TYPE_CHECKING:
    from benchmarks.results.suite import SuiteResults
    from benchmarks.results.variant import Variant

TARGET_MEAN = "Target mean"


def cross_dataset_sheets(done: SuiteResults) -> list[Sheet]:
    """One table for each data set that was trained on, then the comparison."""
    return _sheets(done, "Cross-dataset transfer", published.cross_dataset())


def domain_generalization_sheets(done: SuiteResults) -> list[Sheet]:
    """Likewise, on shifted test sets."""
    return _sheets(done, "Domain generalization", published.domain_generalization())


def target_cells(
    done: SuiteResults, variant: Variant, source: str
) -> tuple[Cell | None, Mapping[str, Cell | None], Cell | None]:
    """Accuracy on the source, on each target by name, and the mean of the targets, where all are there."""
    cells = {name: done.cell(variant, source, Target(name)) for name in (source, *targets_of(done, source))}
    own = cells.pop(source)
    return own, cells, average(list(cells.values())) if cells else None


def targets_of(done: SuiteResults, source: str) -> list[str]:
    """The test sets of runs that were trained on `source`, without its own."""
    places = [target for entry in done.runs if entry.dataset == source for target in entry.spec.targets]
    names = dict.fromkeys(Target.recorded(place).dataset for place in places)
    return [name for name in names if name != source]


def known_transfer(lines: Sequence[PublishedTransfer], variant: Variant, source: str) -> PublishedTransfer | None:
    """The paper's line of a method, which it has trained on ImageNet alone."""
    if variant.changed or source != "imagenet":
        return None
    return next((line for line in lines if line.key == variant.method), None)


def _sheets(done: SuiteResults, title: str, table: Sequence[PublishedTransfer]) -> list[Sheet]:
    first, *others = done.datasets
    said = f"{title}, trained on {{}}" if others else title
    sheets = [_sheet(done, done.suite.name, said.format(name_of(first)), first, table)]
    sheets += [
        _sheet(done, f"{done.suite.name}-from-{name}", said.format(name_of(name)), name, table) for name in others
    ]
    # A target is one, whatever was trained on: two sources would count it twice.
    sources = done.datasets if others else ("",)
    return [*sheets, *(sheet for source in sources for sheet in comparison_sheets(done, source=source))]


def _sheet(done: SuiteResults, name: str, title: str, source: str, table: Sequence[PublishedTransfer]) -> Sheet:
    targets = targets_of(done, source)
    columns = [Column(f"{name_of(source)} (source)"), *(Column(name_of(target)) for target in targets)]
    columns += [Column(TARGET_MEAN)] if targets else []
    lines = []
    for known in table if in_paper(done) and source == "imagenet" else ():
        alike = set(targets) == set(known.targets)
        figures = [known.source, *map(known.targets.get, targets)]
        figures += [known.target_mean if alike else None] if targets else []
        lines.append(printed([theirs(known.method, known.venue)], figures, group=group_of(done, "", "published")))
    for variant in done.variants:
        lines.append(_line(done, variant, source, targets, known_transfer(table, variant, source)))
    mean = f"{TARGET_MEAN}: over {len(targets)} data sets, without the source." if len(targets) > 1 else ""
    remarks = notes(done, f"Trained on {name_of(source)}, tested on all classes of each data set.", mean)
    sheet = Sheet(name, title, ("Method",), tuple(columns), tuple(lines), remarks, wide=True)
    return against_procap(done, sheet, columns[-1].title)


def _line(
    done: SuiteResults, variant: Variant, source: str, targets: Sequence[str], known: PublishedTransfer | None
) -> Line:
    own, cells, mean = target_cells(done, variant, source)
    items: list[Item] = [value(done, variant, [source], own, known.source if known else None)]
    items += [value(done, variant, [name], cells[name], known.targets.get(name) if known else None) for name in targets]
    if targets:
        alike = known is not None and set(targets) == set(known.targets)
        items.append(value(done, variant, targets, mean, known.target_mean if known and alike else None))
    return Line((reproduced(ours_alone(done, variant), items),), tuple(items))
