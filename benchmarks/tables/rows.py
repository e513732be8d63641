"""Make rows of tables: their titles, speeds, and whether published numbers may be shown next to ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.results.frame import images_per_second
from benchmarks.results.metrics import Metric
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.table import Cell, Column, Row, Table

if TYPE_CHECKING:
    import pandas as pd

HALVES = (Column("Base"), Column("Novel"), Column("HM"))
SPEEDS = (Column("FPS", "", digits=0), Column("training s", "", digits=1))
"""No end is marked better: runs were timed at different times, on any machine, and while other programs ran."""
NOTE_ON_SPEED = (
    "FPS: images per second of the evaluations, with decoding, without warm-up; FPS of the model: without waiting for "
    "images. Training s: of the optimizer's steps and checkpoints. `procap bench runtime` measures methods in the same "
    "conditions."
)
REPRODUCED = ", reproduced"
DELTA = "Δ vs ProCAP"
WIDEST = 8
"""In tables with more columns than this the Δ column is shown in CSV and JSON only."""


def mark_reproduced(title: str, cells: Iterable[Cell]) -> str:
    """Mark `title` if any cell of its row has a published number."""
    return title + REPRODUCED * any(isinstance(cell, Metric) and cell.published is not None for cell in cells)


def published_title(method: str, venue: str = "") -> str:
    return f"{method} ({'published' if venue in ('', 'Ours') else venue})"


def published_group(suite: SuiteResults, group: str = "") -> str:
    """Return the group of published rows: a separate one, with its own best, if ours are not comparable or controls."""
    return f"{group} published" if suite.why_incomparable or suite.has_controls else group


def published_row(labels: Sequence[str], cells: Iterable[float | Cell], **more: Any) -> Row:
    """Make a row of the paper's numbers, where a cell may also be a metric or text."""
    metrics = tuple(Metric(cell) if isinstance(cell, float) else cell for cell in cells)
    return Row(tuple(labels), metrics, source="published", **more)


def measure_speeds(rows: pd.DataFrame) -> tuple[Metric | None, Metric | None, Metric | None]:
    """Return images per second, mean seconds of training, and images per second of the model."""
    seconds = rows.groupby("seed").train_seconds.first().dropna()
    trained = Metric(float(seconds.mean())) if len(seconds) else None
    return images_per_second(rows), trained, images_per_second(rows, "fps_model")


def add_delta_column(suite: SuiteResults, table: Table, column: str) -> Table:
    """Add our ProCAP's number in `column` minus that of rows with equal labels but the last, if it is comparable."""
    index = [header.title for header in table.columns].index(column)
    procap = [title for title, variant in suite.by_title.items() if variant.method == "procap"]
    ours: dict[tuple[str, ...], Metric] = {}
    for number, row in enumerate(table.rows):
        metric = table.metric(number, index)
        is_procap = row.source == "ours" and [row.labels[-1].removesuffix(REPRODUCED)] == procap
        if is_procap and metric and metric.published is not None:
            ours[row.labels[:-1]] = metric
    rows = []
    for number, row in enumerate(table.rows):
        metric, reference = table.metric(number, index), ours.get(row.labels[:-1])
        delta = None
        if metric and reference and metric is not reference and not metric.limited:
            delta = Metric(reference.mean - metric.mean)
        rows.append(replace(row, cells=(*row.cells, delta)))
    if not any(row.cells[-1] for row in rows):
        return table
    note = f"{DELTA}: {column} of our ProCAP minus that of the row."
    columns = (*table.columns, Column(DELTA, "", detail=len(table.columns) > WIDEST))
    return replace(table, columns=columns, rows=rows, details=(note, *table.details))
