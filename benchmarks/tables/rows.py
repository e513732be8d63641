"""Make rows of suite tables: their titles, and whether published numbers may be shown beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.results.metrics import Metric
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.table import Cell, Column, Row, Table

HALVES = (Column("Base"), Column("Novel"), Column("HM"))
REPRODUCED = ", reproduced"
DELTA = "Δ vs ProCAP"
WIDEST = 8
"""In tables with more columns than this the Δ column is shown in CSV and JSON only."""


def mark_reproduced(title: str, cells: Iterable[Cell]) -> str:
    """Mark `title` if any cell of its row has a published number beside it."""
    return title + REPRODUCED * any(isinstance(cell, Metric) and cell.published is not None for cell in cells)


def published_title(method: str, venue: str = "") -> str:
    return f"{method} ({'published' if venue in ('', 'Ours') else venue})"


def published_group(suite: SuiteResults, group: str = "") -> str:
    """Return the group of published rows: a separate one, with its own best, if ours are not comparable or controls."""
    return f"{group} published" if suite.why_incomparable or suite.has_controls else group


def published_row(labels: Sequence[str], cells: Iterable[float | Cell], **more: Any) -> Row:
    """Make a row of the paper's numbers, beside which a cell may also be a metric or text."""
    metrics = tuple(Metric(cell) if isinstance(cell, float) else cell for cell in cells)
    return Row(tuple(labels), metrics, source="published", **more)


def add_delta_column(suite: SuiteResults, table: Table, column: str) -> Table:
    """Add our ProCAP's number in `column` minus that of rows with equal labels but the last, if it is comparable."""
    place = [one.title for one in table.columns].index(column)
    procap = [title for title, variant in suite.by_title.items() if variant.method == "procap"]
    own: dict[tuple[str, ...], Metric] = {}
    for number, row in enumerate(table.rows):
        metric = table.metric(number, place)
        is_procap = row.source == "ours" and [row.labels[-1].removesuffix(REPRODUCED)] == procap
        if is_procap and metric and metric.published is not None:
            own[row.labels[:-1]] = metric
    rows = []
    for number, row in enumerate(table.rows):
        metric, ours = table.metric(number, place), own.get(row.labels[:-1])
        delta = None
        if metric and ours and metric is not ours and not metric.limited:
            delta = Metric(ours.mean - metric.mean)
        rows.append(replace(row, cells=(*row.cells, delta)))
    if not any(row.cells[-1] for row in rows):
        return table
    added = Column(DELTA, "", detail=len(table.columns) > WIDEST)
    where = " (in CSV and JSON alone)" if added.detail else ""
    note = f"{DELTA}{where}: {column} of our ProCAP minus that of the row."
    return replace(table, columns=(*table.columns, added), rows=rows, notes=(*table.notes, note))
