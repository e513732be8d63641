"""Format cells, headers, labels and the meaning of marks, the same in every output format."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from benchmarks.tables.table import Cell, Mark, Table

ARROWS = {"high": " ↑", "low": " ↓", "": ""}
MISSING = "-"
MINUS = re.compile(r"(?<![\w.$])-(?=\d)")
"""Matches the hyphen of a negative number, to replace it by a minus sign, but not those of 1e-05 and dates."""
PLAIN: Mapping[Mark | None, str] = {"best": "{}", "second": "{}", None: "{}"}


def format_rows(
    table: Table, marked: Mapping[Mark | None, str] = PLAIN, italics: str = "{}", escape: Callable[[str], str] = str
) -> list[list[str]]:
    """Format labels and cells of every row. marked, italics: format strings for marked and for published rows.

    The first of several labels is printed only once for adjacent rows that share it. Labels of published rows among
    ours are in italics, except a first label that also applies to our rows.
    """
    marks = table.marks()
    shared = {row.labels[0] for row in table.rows if row.source == "ours"}
    body, before = [], None
    for number, row in enumerate(table.rows):
        labels = [escape(label) for label in row.labels]
        if row.source == "published" and table.mixed:
            first = int(row.labels[0] in shared)
            labels[first:] = [italics.format(label) for label in labels[first:]]
        if len(labels) > 1 and row.labels[0] == before:
            labels[0] = ""
        before = row.labels[0]
        cells = [
            format_cell(table, cell, place, marked[marks.get((number, place))], escape)
            for place, cell in enumerate(row.cells)
        ]
        body.append([*labels, *cells])
    return body


def format_cell(table: Table, cell: Cell, place: int, frame: str = "{}", escape: Callable[[str], str] = str) -> str:
    """Format a cell of the column at `place`: 82.28 ± 0.18 (n=3) (+1.02) †, with n if seeds differ.

    frame: format string around the mean. escape: function that escapes texts.
    """
    if cell is None:
        return MISSING
    if isinstance(cell, str):
        return escape(cell)
    digits = table.columns[place].digits
    text = frame.format(format_number(cell.mean, digits))
    if cell.std is not None:
        text += f" ± {cell.std:.{digits}f}"
    if table.seeds_differ and cell.seeds:
        text += f" (n={len(cell.seeds)})"
    if cell.delta is not None:
        text += f" ({format_number(cell.delta, digits, '+')})"
    return text + (" †" if cell.limited else "")


def format_number(number: float, digits: int, sign: str = "") -> str:
    """Format with the sign of the rounded number, so that 0.00 is never -0.00. sign: as in a format string."""
    return f"{round(number, digits) or 0.0:{sign}.{digits}f}"


def list_headers(table: Table) -> list[str]:
    """List labels, and column titles with an arrow to their better end."""
    return [*table.labels, *(column.title + ARROWS[column.better] for column in table.columns)]


def list_notes(table: Table) -> list[str]:
    """List the notes below a table: what its marks mean, then its own."""
    marks = set(table.marks().values())
    found = []
    if marks:
        of_each = " of each group of rows" if len(table.groups) > 1 else ""
        second = ", second underlined" if "second" in marks else ""
        found.append(f"Best{of_each} in bold{second}.")
    if table.mixed:
        found.append("Rows in italics are published, as printed.")
    if table.seeds_differ:
        found.append("Seeds differ: (n=...) is their number; means over different seeds are not ranked.")
    if any(metric.delta is not None for metric in table.metrics):
        found.append("In brackets: ours minus published.")
    return [*found, *table.notes]
