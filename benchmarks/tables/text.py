"""Format cells, headers, labels and the meaning of marks, the same in every output format."""

from __future__ import annotations

import re
from collections.abc import Callable

from benchmarks.tables.table import Cell, Row, Table

ARROWS = {"high": " ↑", "low": " ↓", "": ""}
MISSING = "-"
MINUS = re.compile(r"(?<![\w.$])-(?=\d)")
"""Matches the hyphen of a negative number, to replace it by a minus sign, but not those of 1e-05 and dates."""


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


def format_labels(table: Table, row: Row, before: Row | None, frame: str, escape: Callable[[str], str]) -> list[str]:
    """Format the labels of a row; the first of several is printed only once for adjacent rows that share it.

    frame: format string for labels of published rows among ours, except a label that also applies to our rows below.
    """
    again = before is not None and len(row.labels) > 1 and row.labels[0] == before.labels[0]
    found = [escape(label) for label in row.labels]
    if row.source == "published" and table.mixed:
        shared = {other.labels[0] for other in table.rows if other.source == "ours"}
        apart = 1 if row.labels[0] in shared else 0
        found = [frame.format(name) if place >= apart else name for place, name in enumerate(found)]
    return ["", *found[1:]] if again else found


def explain_marks(table: Table, best: str, second: str, published: str) -> list[str]:
    """Explain the marks of a table, given the words for how a format shows them."""
    marks = set(table.marks().values())
    found = []
    if marks:
        alike = " of each group of rows" if len(table.groups) > 1 else ""
        also = f", second {second}" if "second" in marks else ""
        found.append(f"Best{alike} in {best}{also}.")
    if table.mixed:
        found.append(f"Rows in {published} are published, as printed.")
    if table.seeds_differ:
        found.append("Seeds differ: (n=...) is their number; means over different seeds are not ranked.")
    if any(metric.delta is not None for metric in table.metrics):
        found.append("In brackets: ours minus published.")
    return found
