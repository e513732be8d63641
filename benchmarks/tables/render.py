"""Render a table as Markdown, CSV, LaTeX, HTML or JSON, and write the files of several tables."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from benchmarks.console.output import csv_text
from benchmarks.results.metrics import Metric
from benchmarks.tables.html import to_html
from benchmarks.tables.latex import to_latex
from benchmarks.tables.table import Mark, Table, format_rows, list_headers, list_notes
from runner.results import write_bytes

SUFFIXES = {"md": "md", "csv": "csv", "latex": "tex", "json": "json"}
"""The formats, and how their files end."""


def render(table: Table, form: str) -> str:
    """Render the table in one of FORMATS, without a newline at the end."""
    return FORMATS[form](table)


def write_tables(tables: Sequence[Table], folder: Path) -> list[Path]:
    """Write <name>.md, .csv, .tex and .json of every table to `folder`, each file atomically."""
    files = {
        folder / f"{table.name}.{suffix}": render(table, form) for table in tables for form, suffix in SUFFIXES.items()
    }
    for file, text in files.items():
        write_bytes(file, (text + "\n").encode())
    return list(files)


def markdown_grid(headers: Sequence[str], body: Sequence[Sequence[str]], *, left: int) -> str:
    """Render cells as a Markdown table: `left` columns of text, the rest numbers, padded to be readable as source."""
    widths = [max(3, *(len(row[i]) for row in [headers, *body])) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(headers), f"| {' | '.join(rule)} |", *map(line, body)])


def to_markdown(table: Table) -> str:
    """Render a title, the table, and its notes as a list."""
    table = table.without_details()
    marked: dict[Mark | None, str] = {"best": "**{}**", "second": "<u>{}</u>", None: "{}"}
    headers = [_escape_markdown(header) for header in list_headers(table)]
    grid = markdown_grid(headers, format_rows(table, marked, "*{}*", _escape_markdown), left=len(table.labels))
    notes = "\n".join(f"- {_escape_markdown(note)}" for note in list_notes(table))
    return f"**{_escape_markdown(table.title)}**\n\n{grid}\n\n{notes}"


def to_csv(table: Table) -> str:
    """Render plain numbers, empty if missing: for each metric its mean, std, n, published, delta, limited.

    Columns that are empty in all rows are left out.
    """
    header = [*table.labels, "source", "average"]
    numeric = [any(table.metric(row, place) for row in range(len(table.rows))) for place in range(len(table.columns))]
    for column, is_numeric in zip(table.columns, numeric, strict=True):
        parts = ("", " std", " n", " published", " delta", " limited") if is_numeric else ("",)
        header += [column.title + part for part in parts]
    lines = []
    for row in table.rows:
        cells = [*row.labels, row.source, str(row.average).lower()]
        for cell, is_numeric in zip(row.cells, numeric, strict=True):
            if isinstance(cell, Metric):
                numbers = (cell.mean, cell.std, len(cell.seeds) or None, cell.published, cell.delta)
                cells += ["" if number is None else str(round(number, 6)) for number in numbers]
                cells.append(str(cell.limited).lower())
            else:
                cells += [cell or "", *([""] * 5 if is_numeric else [])]
        lines.append(cells)
    used = [place < len(table.labels) or any(line[place] for line in lines) for place in range(len(header))]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows(map(csv_text, compress(line, used)) for line in [header, *lines])
    return file.getvalue().rstrip("\n")


def to_dict(table: Table) -> dict[str, Any]:
    """Convert to JSON with full precision, the values of single seeds and the marks."""
    marks, rows = table.marks(), []
    for number, row in enumerate(table.rows):
        cells: list[Any] = list(row.cells)
        for place, cell in enumerate(row.cells):
            if isinstance(cell, Metric):
                by_seed = dict(zip(map(str, cell.seeds), cell.values, strict=True)) if cell.values else None
                cells[place] = {
                    "mean": cell.mean,
                    "std": cell.std,
                    "n": len(cell.seeds) or None,
                    "seeds": by_seed or list(cell.seeds),
                    "published": cell.published,
                    "delta": cell.delta,
                    "limited": cell.limited,
                    "mark": marks.get((number, place)),
                }
        fields = {name: value for name, value in vars(row).items() if name != "cells"}
        rows.append({**fields, "labels": list(row.labels), "cells": cells})
    columns = [
        {"title": column.title, "better": column.better or None, "digits": column.digits} for column in table.columns
    ]
    lists = {"labels": list(table.labels), "columns": columns, "rows": rows, "notes": list(table.notes)}
    return {"name": table.name, "title": table.title, **lists}


FORMATS: dict[str, Callable[[Table], str]] = {
    "md": to_markdown,
    "csv": to_csv,
    "latex": to_latex,
    "html": to_html,
    "json": lambda table: json.dumps(to_dict(table), ensure_ascii=False, allow_nan=False),
}


def _escape_markdown(text: str) -> str:
    for plain, written in (("\\", r"\\"), ("|", r"\|"), ("*", r"\*"), ("<", "&lt;")):
        text = text.replace(plain, written)
    return " ".join(text.split())
