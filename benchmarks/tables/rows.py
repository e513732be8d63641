"""Make rows of suite tables: their titles, and whether published numbers may be shown beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.results.metrics import Metric
from benchmarks.results.profiles import PAPER
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import SHOTS, Variant
from benchmarks.tables.table import Cell, Column, Row, Table

BACKBONE = "ViT-B-16"
"""The backbone of every published number, with its default weights, which are OpenAI's."""
HALVES = (Column("Base"), Column("Novel"), Column("HM"))
REPRODUCED = ", reproduced"
DELTA = "Δ vs ProCAP"
WIDEST = 8
"""In tables with more columns than this the Δ column is shown in CSV and JSON only."""


def in_paper(suite: SuiteResults) -> bool:
    """Whether the suite ran on the paper's data sets, so that published rows are in the same tables."""
    return suite.options.profile.name == PAPER.name


def why_incomparable(suite: SuiteResults) -> str:
    """Explain why no result of the suite is comparable with published numbers; empty if they are."""
    if not in_paper(suite):
        return "they are of generated data sets"
    backbones = {(run.spec.config.backbone, run.spec.config.pretrained) for run in suite.runs}
    others = sorted(f"{name} with {weights or 'its own'} weights" for name, weights in backbones - {(BACKBONE, None)})
    if others:
        return f"the backbone is {', '.join(others)}, not {BACKBONE} with OpenAI's weights"
    if suite.options.quick:
        return "the schedules are the short ones of --quick"
    if suite.options.shots not in ((), (SHOTS,)) and any(variant.shots is None for variant in suite.variants):
        return f"the shots are {suite.options.shots[0] or 'all'}, not {SHOTS}"
    if suite.options.overrides:
        changed = ", ".join(f"{name} {value}" for name, value in suite.options.overrides.items())
        return f"the recipes are changed: {changed}"
    return ""


def is_control(suite: SuiteResults, variant: Variant) -> bool:
    """Whether a method runs in ProCAP's recipe by choice, while its published numbers are of its own recipe."""
    chosen = in_paper(suite) and suite.options.recipe == "procap" and not variant.recipe
    return chosen and variant.method not in ("procap", "zeroshot")


def has_controls(suite: SuiteResults) -> bool:
    return any(is_control(suite, variant) for variant in suite.variants)


def is_comparable(suite: SuiteResults, variant: Variant, datasets: Iterable[str]) -> bool:
    """Whether results of `variant` on `datasets` are comparable with published ones: same images and recipe."""
    changed = suite.changed_sets.keys() & set(datasets)
    return not (why_incomparable(suite) or is_control(suite, variant) or changed)


def with_published(
    suite: SuiteResults, variant: Variant, datasets: Iterable[str], metric: Metric | None, published: float | None
) -> Metric | None:
    """Attach the published number to a result if they are comparable; limited results get none."""
    if metric is None or metric.limited or not is_comparable(suite, variant, datasets):
        return metric
    return replace(metric, published=published)


def covers_paper(datasets: Sequence[str]) -> bool:
    """Whether these are the eleven data sets of the published averages."""
    return set(datasets) == set(PAPER.datasets)


def title_of(suite: SuiteResults, variant: Variant, name: str = "") -> str:
    """Return the title of a row in a table that has a column for what varies. name: instead of the variant's."""
    return f"{name or variant.name} (ProCAP's recipe)" if is_control(suite, variant) else name or variant.name


def unique_title(suite: SuiteResults, variant: Variant) -> str:
    """Return the title of a row in a table without a column for what varies."""
    return next(title for title, other in variants_by_title(suite).items() if other == variant)


def variants_by_title(suite: SuiteResults) -> dict[str, Variant]:
    """Return the variants by title; what varies is added to titles that would be equal."""
    return {title: variants[0] for title, variants in group_by_title(suite).items()}


def group_by_title(suite: SuiteResults, column: str = "") -> dict[str, list[Variant]]:
    """Group the variants by title; what varies, except the key `column`, is added to titles that would be equal."""
    varied = [", ".join(f"{key} {value}" for key, value in one.key.items() if key != column) for one in suite.variants]
    names = [name for name, _ in {(variant.name, words) for variant, words in zip(suite.variants, varied, strict=True)}]
    found: dict[str, list[Variant]] = {}
    for variant, words in zip(suite.variants, varied, strict=True):
        title = f"{variant.name} ({words})" if names.count(variant.name) > 1 and words else variant.name
        found.setdefault(title_of(suite, variant, title), []).append(variant)
    return found


def mark_reproduced(title: str, cells: Iterable[Cell]) -> str:
    """Mark `title` if any cell of its row has a published number beside it."""
    return title + REPRODUCED * any(isinstance(cell, Metric) and cell.published is not None for cell in cells)


def published_title(method: str, venue: str = "") -> str:
    return f"{method} ({'published' if venue in ('', 'Ours') else venue})"


def published_group(suite: SuiteResults, group: str = "") -> str:
    """Return the group of published rows: a separate one, with its own best, if ours are not comparable.

    Also if there are controls, which are compared with each other because all of them have the same recipe.
    """
    return f"{group} published" if why_incomparable(suite) or has_controls(suite) else group


def published_row(labels: Sequence[str], cells: Iterable[float | Cell], **more: Any) -> Row:
    """Make a row of the paper's numbers, beside which a cell may also be a metric or text."""
    metrics = tuple(Metric(cell) if isinstance(cell, float) else cell for cell in cells)
    return Row(tuple(labels), metrics, source="published", **more)


def add_delta_column(suite: SuiteResults, table: Table, column: str) -> Table:
    """Add a column with our ProCAP's number in `column` minus that of every other row, published ones included.

    Only rows with equal labels except the last are compared. The table is unchanged unless it has one ProCAP row that
    is comparable with published numbers.
    """
    place = [one.title for one in table.columns].index(column)
    procap = [unique_title(suite, variant) for variant in suite.variants if variant.method == "procap"]
    metrics = [table.metric(number, place) for number in range(len(table.rows))]
    own: dict[tuple[str, ...], Metric] = {}
    for row, metric in zip(table.rows, metrics, strict=True):
        is_procap = row.source == "ours" and [row.labels[-1].removesuffix(REPRODUCED)] == procap
        if is_procap and metric and metric.published is not None:
            own[row.labels[:-1]] = metric
    rows = []
    for row, metric in zip(table.rows, metrics, strict=True):
        ours = own.get(row.labels[:-1])
        delta = None
        if metric and ours and metric is not ours and not metric.limited:
            delta = Metric(ours.mean - metric.mean)
        rows.append(replace(row, cells=(*row.cells, delta)))
    if not any(row.cells[-1] for row in rows):
        return table
    added = Column(DELTA, "", detail=len(table.columns) > WIDEST)
    where = " (in CSV and JSON alone)" if added.detail else ""
    note = f"{DELTA}{where}: {column} of our ProCAP minus that of the row."
    return replace(table, columns=(*table.columns, added), rows=tuple(rows), notes=(*table.notes, note))
