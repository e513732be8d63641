"""Render a table as an HTML `<table>`; the CSS is part of the page that contains it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from html import escape

from benchmarks.results.metrics import Metric
from benchmarks.tables.table import ARROWS, MINUS, Cell, Mark, Table, format_cell, list_notes

SHORT = 24
"""Characters up to which a text cell is not wrapped."""
MARKED: dict[Mark | None, str] = {"best": "<strong>{}</strong>", "second": "<u>{}</u>", None: "{}"}


def to_html(table: Table, labelled_by: str = "") -> str:
    """Render the table as HTML, with all texts escaped.

    labelled_by: the id of the element that holds its title; without one the title becomes the caption, and the notes
    follow as a list. `data-sort` is the unrounded number of a cell. Each group is a `<tbody>`, sorted separately.
    """
    table = table.without_details()
    first = [row.labels[0] for row in table.rows if row.labels]
    adjacent = [label for label, _ in itertools.groupby(first)]
    # Rows with the same first label are adjacent: the label becomes a heading above them.
    grouped = len(table.labels) > 1 and len(adjacent) == len(set(adjacent)) and 2 * len(adjacent) <= len(first)
    marks = table.marks()
    title = f' aria-labelledby="{escape(labelled_by)}"' if labelled_by else ""
    kinds = _classes("matrix" * table.matrix, "sortable" * (len(table.rows) > 2 and not table.matrix))
    lines = [f"<table{kinds}{title}>"]
    if not labelled_by:
        lines.append(f"<caption>{escape(table.title)}</caption>")
    headers = [f'<th scope="col" class="text">{escape(label)}</th>' for label in table.labels[grouped:]]
    for place, column in enumerate(table.columns):
        arrow = f'<span class="arrow">{ARROWS[column.better].strip()}</span>' if column.better else ""
        headers.append(f'<th scope="col"{_classes("text" * table.has_text(place))}>{escape(column.title)}{arrow}</th>')
    lines.append(f"<thead><tr>{''.join(headers)}</tr></thead>")
    groups = itertools.groupby(enumerate(table.rows), lambda one: one[1].labels[0] if grouped else one[1].group)
    for group, rows in groups:
        lines.append("<tbody>")
        if grouped:
            width = len(table.labels) - 1 + len(table.columns)
            heading = f'<th colspan="{width}" scope="rowgroup">{escape(group)}</th>'
            lines.append(f'<tr class="group">{heading}</tr>')
        for number, row in rows:
            cells = [f'<th scope="row">{escape(label)}</th>' for label in row.labels[grouped:]]
            for place, cell in enumerate(row.cells):
                if table.matrix:
                    cells.append(_render_count(row.cells, place, right=place == number))
                else:
                    cells.append(_render_cell(table, cell, place, marks.get((number, place))))
            classes = _classes(row.source if table.mixed else "", "average" * row.average)
            lines.append(f"<tr{classes}>{''.join(cells)}</tr>")
        lines.append("</tbody>")
    lines.append("</table>")
    if not labelled_by:
        notes = "".join(f"<li>{mark_code(note)}</li>" for note in list_notes(table))
        lines.append(f'<ul class="notes">{notes}</ul>')
    return "\n".join(lines)


def mark_code(text: str) -> str:
    """Escape a text, and mark what stands between backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _render_count(cells: Sequence[Cell], place: int, *, right: bool) -> str:
    """Render a cell of a matrix; `--share` is its share of the row, from which the page computes the shade."""
    counts = [int(cell.mean) for cell in cells if isinstance(cell, Metric)]
    count = counts[place]
    share = f' style="--share:{count / sum(counts):.2f}"' if count else ""
    return f"<td{_classes('right' if right else 'wrong')}{share}>{count:,}</td>"


def _render_cell(table: Table, cell: Cell, place: int, mark: Mark | None) -> str:
    text = format_cell(table, cell, place, MARKED[mark] + '<span class="std">', escape)
    text = MINUS.sub("−", text)
    if isinstance(cell, Metric):
        return f'<td data-sort="{float(cell.mean)!r}">{text}</span></td>'
    classes = _classes("text", "short" * (len(cell or "") <= SHORT)) if table.has_text(place) else ""
    return f"<td{classes}>{text}</td>"


def _classes(*names: str) -> str:
    joined = " ".join(filter(None, names))
    return f' class="{joined}"' if joined else ""
