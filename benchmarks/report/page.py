"""Render a report as one HTML page without external resources, and write its tables and pictures as files beside it."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.report.model import Block, Picture, Report
from benchmarks.tables.html import html_notes, to_html
from benchmarks.tables.render import SUFFIXES, render, write_tables
from benchmarks.tables.table import Table
from runner.results import write_bytes

TEMPLATE = Path(__file__).with_name("page.html")
GENERATOR = "procap report"
FOLDED_FROM = 36
"""Rows from which a table is folded."""
WIDE_FROM = 10
"""Columns from which a table is set in smaller type."""
SCALE = 1.3
"""Size of plots in the page, relative to print."""


@dataclass
class PageWriter:
    """Numbers tables and pictures, gives each a unique name, and writes their files below `folder`."""

    folder: Path
    names: set[str] = field(default_factory=set)
    tables: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    pictures: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def name(self, title: str) -> str:
        """`title` as an id and file name, unique in the page."""
        plain = re.sub(r"[^A-Za-z0-9]+", "-", title).strip("-").lower() or "part"
        tries = itertools.chain([plain], (f"{plain}-{number}" for number in itertools.count(2)))
        unique = next(name for name in tries if name not in self.names)
        self.names.add(unique)
        return unique

    def table(self, table: Table, *, fold: bool | None = None) -> dict[str, Any]:
        """Write the files of a table; returns what the template shows. fold: None depends on the number of rows."""
        name = self.name(table.name)
        write_tables([replace(table, name=name)], self.folder / "tables")
        table = table.without_details()
        return {
            "id": f"table-{name}",
            "number": f"Table {next(self.tables)}.",
            "title": table.title,
            "html": to_html(table, f"table-{name}-title"),
            "notes": html_notes(table),
            "rows": len(table.rows),
            "wide": len(table.labels) + len(table.columns) >= WIDE_FROM,
            "folded": len(table.rows) >= FOLDED_FROM if fold is None else fold,
            "latex": render(table, "latex"),
            "files": [(form, f"tables/{name}.{form}") for form in SUFFIXES.values()],
        }

    def picture(self, picture: Picture) -> dict[str, Any]:
        """Write the files of a picture; returns what the template shows."""
        name = self.name(picture.name)
        for form, content in picture.files.items():
            write_bytes(self.folder / "figures" / f"{name}.{form}", content)
        kind = {"svg": "image/svg+xml", "png": "image/png"}[picture.kind]
        return {
            "id": f"figure-{name}",
            "number": f"Figure {next(self.pictures)}.",
            "caption": picture.caption,
            "alt": picture.alt,
            "width": round(picture.width * SCALE),
            "source": f"data:{kind};base64,{base64.b64encode(picture.shown).decode()}",
            "files": [(form, f"figures/{name}.{form}") for form in sorted(picture.files)],
        }

    def block(self, block: Block) -> dict[str, Any]:
        return {
            "title": block.title,
            "text": block.text,
            "tables": [
                self.table(table, fold=False if place == 0 and block.leads else None)
                for place, table in enumerate(block.tables)
            ],
            "pictures": [self.picture(picture) for picture in block.pictures],
        }


def write_page(report: Report, folder: Path) -> None:
    """Write index.html and the folders `tables` and `figures` into `folder`."""
    from jinja2 import Environment, StrictUndefined

    writer = PageWriter(folder)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["digest"] = _digest
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    # In the order of the page, so that tables and pictures are numbered in it.
    headline = replace(report.headline, leads=True) if report.headline else None
    shown: dict[str, Any] = {"headline": writer.block(headline) if headline else None}
    shown["sections"] = [
        {
            **vars(section),
            "id": writer.name(f"suite {section.name}"),
            "blocks": [writer.block(block) for block in section.blocks],
        }
        for section in report.sections
    ]
    shown["work"] = [writer.table(table) for table in report.work]
    values = {**vars(report), **shown, "complete": report.complete, "generator": GENERATOR}
    write_bytes(folder / "index.html", template.render(values).encode())


def _digest(script: str) -> str:
    """The hash by which the page's Content-Security-Policy allows its one script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
