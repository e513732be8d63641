"""The page of a report: its tables and figures as HTML that needs nothing but itself, and its parts as files."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.figures import Picture
from benchmarks.results.metrics import Metric
from benchmarks.tables.render import SUFFIXES, render, write_tables
from benchmarks.tables.table import Cell, Column, Mark, Row, Table
from benchmarks.tables.text import ARROWS, MINUS, MISSING, explain_marks, format_number
from runner.results import write_bytes

if TYPE_CHECKING:
    from benchmarks.report.report import Part, Report

TEMPLATE = Path(__file__).with_name("page.html")
GENERATOR = "procap report"
FOLDED_FROM = 36
"""Lines from which on a table is folded."""
WIDE_FROM = 10
"""Columns from which on a table is printed in small type."""
SHORT, LONG = 24, 16
"""Characters up to which a text, and a header, is not broken into lines."""
SCALE = 1.3
"""Figures are drawn for print: in a page they are somewhat larger."""
BETTER = {"high": "higher is better", "low": "lower is better"}


@dataclass
class Parts:
    """Counts tables and figures, gives each a name of its own, and writes their files below `folder`."""

    folder: Path
    taken: set[str] = field(default_factory=set)
    tables: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    figures: Iterator[int] = field(default_factory=partial(itertools.count, 1))

    def named(self, name: str) -> str:
        """`name` as it may stand in an address, and only once in the page."""
        plain = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "part"
        tries = itertools.chain([plain], (f"{plain}-{number}" for number in itertools.count(2)))
        found = next(one for one in tries if one not in self.taken)
        self.taken.add(found)
        return found

    def table(self, table: Table, *, fold: bool | None = None) -> dict[str, Any]:
        """What the template shows of a table, whose files are written. fold: None leaves it to its length."""
        name = self.named(table.name)
        write_tables([replace(table, name=name)], self.folder / "tables")
        table = table.without_details()
        grouped = _is_grouped(table)
        labels = table.labels[1:] if grouped else table.labels
        return {
            "id": f"table-{name}",
            "number": f"Table {next(self.tables)}.",
            "title": table.title,
            "labels": labels,
            "columns": [_head(table, place, column) for place, column in enumerate(table.columns)],
            "bodies": _bodies(table, grouped),
            "width": len(labels) + len(table.columns),
            "notes": _notes(table),
            "size": len(table.rows),
            "wide": len(table.labels) + len(table.columns) >= WIDE_FROM,
            "folded": len(table.rows) >= FOLDED_FROM if fold is None else fold,
            "sortable": len(table.rows) > 2,
            "latex": render(table, "latex"),
            "files": [{"name": form, "href": f"tables/{name}.{form}"} for form in SUFFIXES.values()],
        }

    def picture(self, picture: Picture) -> dict[str, Any]:
        """What the template shows of a figure, whose files are written."""
        name = self.named(picture.name)
        for form, content in picture.files.items():
            write_bytes(self.folder / "figures" / f"{name}.{form}", content)
        kind = {"svg": "image/svg+xml", "png": "image/png"}[picture.kind]
        return {
            "id": f"figure-{name}",
            "number": f"Figure {next(self.figures)}.",
            "caption": picture.caption,
            "alt": picture.alt,
            "width": round(picture.width * SCALE),
            "source": f"data:{kind};base64,{base64.b64encode(picture.shown).decode()}",
            "files": [{"name": form, "href": f"figures/{name}.{form}"} for form in picture.forms],
        }


def write_page(report: Report, folder: Path) -> None:
    """Write index.html and the folders tables and figures into `folder`."""
    from jinja2 import Environment, StrictUndefined

    parts = Parts(folder)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["digest"] = _digest
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    shown: Mapping[str, Any] = {
        **vars(report),
        "generator": GENERATOR,
        "work_sheets": [parts.table(table) for table in report.work],
        "parts": [_part(part, parts) for part in report.parts],
    }
    write_bytes(folder / "index.html", template.render(shown).encode())


def _part(part: Part, parts: Parts) -> dict[str, Any]:
    section = parts.named(f"suite {part.name}")
    blocks = [
        {
            "title": block.title,
            "text": block.text,
            "tables": [
                parts.table(table, fold=False if place == 0 and block.leads else None)
                for place, table in enumerate(block.tables)
            ],
            "pictures": [parts.picture(picture) for picture in block.pictures],
        }
        for block in part.blocks
    ]
    return {**vars(part), "id": section, "blocks": blocks}


def _digest(script: str) -> str:
    """What a page's security policy calls the one script that it lets run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _is_mixed(table: Table) -> bool:
    """Whether lines of ours and of the paper stand together and have to be told apart."""
    return len({line.source for line in table.rows}) > 1


def _notes(table: Table) -> list[str]:
    marks = explain_marks(table, "bold", "underlined", "italics")
    return [*(mark for mark in marks if _is_mixed(table) or "italics" not in mark), *table.notes]


def _is_grouped(table: Table) -> bool:
    """Whether lines of one first label stand together and get it as a heading instead."""
    first = [line.labels[0] for line in table.rows if line.labels]
    runs = [label for label, _ in itertools.groupby(first)]
    return len(table.labels) > 1 and len(runs) == len(set(runs)) and 2 * len(runs) <= len(first)


def _bodies(table: Table, grouped: bool) -> list[dict[str, Any]]:
    marks = table.marks()
    numbered = list(enumerate(table.rows))
    bodies = []
    for key, lines in itertools.groupby(numbered, key=lambda one: one[1].labels[0] if grouped else one[1].group):
        shown = [_line(table, number, line, marks, grouped) for number, line in lines]
        bodies.append({"title": key if grouped else None, "lines": shown})
    return bodies


def _line(table: Table, number: int, line: Row, marks: Mapping[tuple[int, int], Mark], grouped: bool) -> dict[str, Any]:
    classes = [*([line.source] if _is_mixed(table) else []), *(["average"] if line.average else [])]
    cells = [_cell(table, item, place, marks.get((number, place))) for place, item in enumerate(line.cells)]
    return {"classes": " ".join(classes), "labels": line.labels[1:] if grouped else line.labels, "cells": cells}


def _is_text(table: Table, place: int) -> bool:
    return any(isinstance(line.cells[place], str) for line in table.rows)


def _cell(table: Table, item: Cell, place: int, mark: Mark | None) -> dict[str, Any]:
    column, text = table.columns[place], _is_text(table, place)
    cell: dict[str, Any] = {"mark": mark, "std": "", "n": None, "delta": "", "limited": False, "sort": None, "kind": ""}
    if not isinstance(item, Metric):
        short = " short" if len(item or "") <= SHORT else ""
        return {**cell, "text": MINUS.sub("−", item or MISSING), "kind": f"text{short}" if text else ""}
    cell |= {
        "text": format_number(item.mean, column.digits).replace("-", "−"),
        "sort": repr(float(item.mean)),
        "limited": item.limited,
    }
    if item.std is not None:
        cell["std"] = f"{item.std:.{column.digits}f}"
    if table.seeds_differ and item.seeds:
        cell["n"] = len(item.seeds)
    if item.delta is not None:
        cell["delta"] = format_number(item.delta, column.digits, "+").replace("-", "−")
    return cell


def _head(table: Table, place: int, column: Column) -> dict[str, Any]:
    classes = [*(["text"] if _is_text(table, place) else []), *(["long"] if len(column.title) > LONG else [])]
    return {
        "title": column.title,
        "arrow": ARROWS[column.better].strip(),
        "better": BETTER.get(column.better, ""),
        "classes": " ".join(classes),
    }
