"""Render a table as an HTML `<table>`; the CSS is part of the page that contains it."""

from __future__ import annotations

import itertools
from html import escape

from benchmarks.results.metrics import Metric
from benchmarks.tables.table import Cell, Mark, Row, Table
from benchmarks.tables.text import ARROWS, MINUS, MISSING, explain_marks, format_number

SHORT_TEXT, SHORT_HEADER, SHORT_LABEL = 24, 16, 12
"""Characters up to which a text cell, a header and a row label stay on one line."""
BETTER = {"high": "higher is better", "low": "lower is better"}
TAGS: dict[Mark | None, str] = {"best": "<strong>{}</strong>", "second": "<u>{}</u>", None: "{}"}


def to_html(table: Table, labelled_by: str = "") -> str:
    """Render the table as HTML, with all texts escaped.

    labelled_by: the id of the element that holds its title; without one the title becomes the caption, and the notes
    follow as a list.

    Classes: `sortable` on tables of more than two rows, `group` on a row that is a heading of those below it, `average`
    and `published` on rows, `text`, `short` and `long` on cells. `data-sort` is the unrounded number of a cell.
    """
    table = table.without_details()
    grouped = _is_grouped(table)
    title = f' aria-labelledby="{escape(labelled_by)}"' if labelled_by else ""
    lines = [f"<table{_classes('sortable' * (len(table.rows) > 2))}{title}>"]
    if not labelled_by:
        lines.append(f"<caption>{escape(table.title)}</caption>")
    lines += [f"<thead><tr>{_render_headers(table, grouped)}</tr></thead>", *_render_bodies(table, grouped), "</table>"]
    if not labelled_by:
        notes = "".join(f"<li>{escape(note)}</li>" for note in html_notes(table))
        lines.append(f'<ul class="notes">{notes}</ul>')
    return "\n".join(lines)


def html_notes(table: Table) -> list[str]:
    """Render the notes below a table: what its marks mean, then its own."""
    return [*explain_marks(table.without_details(), "bold", "underlined", "italics"), *table.notes]


def _is_grouped(table: Table) -> bool:
    """Whether rows with the same first label are adjacent, so that the label can become a heading above them."""
    first = [row.labels[0] for row in table.rows if row.labels]
    adjacent = [label for label, _ in itertools.groupby(first)]
    return len(table.labels) > 1 and len(adjacent) == len(set(adjacent)) and 2 * len(adjacent) <= len(first)


def _is_text(table: Table, place: int) -> bool:
    return any(isinstance(row.cells[place], str) for row in table.rows)


def _classes(*names: str) -> str:
    joined = " ".join(name for name in names if name)
    return f' class="{joined}"' if joined else ""


def _render_headers(table: Table, grouped: bool) -> str:
    cells = [f'<th scope="col" class="text">{escape(label)}</th>' for label in table.labels[grouped:]]
    for place, column in enumerate(table.columns):
        classes = _classes("text" * _is_text(table, place), "long" * (len(column.title) > SHORT_HEADER))
        arrow = ARROWS[column.better].strip()
        arrow = f'<span class="arrow" title="{BETTER[column.better]}">{arrow}</span>' if arrow else ""
        cells.append(f'<th scope="col"{classes}>{escape(column.title)}{arrow}</th>')
    return "".join(cells)


def _render_bodies(table: Table, grouped: bool) -> list[str]:
    """Render a `<tbody>` for each group, whose rows can be sorted within the group."""
    marks = table.marks()
    width = len(table.labels) - grouped + len(table.columns)
    lines = []
    for key, rows in itertools.groupby(
        enumerate(table.rows), lambda one: one[1].labels[0] if grouped else one[1].group
    ):
        lines.append("<tbody>")
        if grouped:
            heading = f'<th colspan="{width}" scope="rowgroup">{escape(key)}</th>'
            lines.append(f'<tr class="group">{heading}</tr>')
        for number, row in rows:
            cells = [
                _render_cell(table, cell, place, marks.get((number, place))) for place, cell in enumerate(row.cells)
            ]
            lines.append(_render_row(table, row, grouped, cells))
        lines.append("</tbody>")
    return lines


def _render_row(table: Table, row: Row, grouped: bool, cells: list[str]) -> str:
    labels = [
        f'<th scope="row"{_classes("long" * (len(label) > SHORT_LABEL))}>{escape(label)}</th>'
        for label in row.labels[grouped:]
    ]
    classes = _classes(row.source if table.mixed else "", "average" * row.average)
    return "".join([f"<tr{classes}>", *labels, *cells, "</tr>"])


def _render_cell(table: Table, cell: Cell, place: int, mark: Mark | None) -> str:
    if not isinstance(cell, Metric):
        short = "short" * (len(cell or "") <= SHORT_TEXT)
        text = MINUS.sub("−", escape(cell or MISSING))
        return f"<td{_classes('text', short) if _is_text(table, place) else ''}>{text}</td>"
    digits = table.columns[place].digits
    text = TAGS[mark].format(format_number(cell.mean, digits).replace("-", "−"))
    if cell.std is not None:
        text += f'<span class="std"> ± {cell.std:.{digits}f}</span>'
    if table.seeds_differ and cell.seeds:
        text += f'<span class="std"> (n={len(cell.seeds)})</span>'
    if cell.delta is not None:
        delta = format_number(cell.delta, digits, "+").replace("-", "−")
        text += f'<span class="delta"> ({delta})</span>'
    dagger = " †" if cell.limited else ""
    return f'<td data-sort="{float(cell.mean)!r}">{text}{dagger}</td>'
