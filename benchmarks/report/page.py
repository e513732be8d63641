"""Render a report as one HTML page without external resources, and write its tables and pictures as files beside it."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.plots.style import describe_seeds
from benchmarks.report.mistakes import Mistakes
from benchmarks.report.pictures import Picture
from benchmarks.report.started_suites import Problem, UnfinishedRun
from benchmarks.tables.html import to_html
from benchmarks.tables.render import SUFFIXES, render, write_tables
from benchmarks.tables.table import Table, list_notes
from runner.results import write_bytes

TEMPLATE = Path(__file__).with_name("page.html")
GENERATOR = "procap report"
FOLDED_FROM = 36
"""Rows from which a table is folded."""
MAX_ROWS = 250
"""Rows of a table in the page; its files have all."""
WIDE_FROM = 10
"""Columns from which a table is set in smaller type."""
PIXELS = 125
"""CSS pixels per printed inch of a picture: 1.3 times its size in print."""


@dataclass(frozen=True)
class Section:
    """One suite, sweep, or the single runs. facts: how it was run, as terms and values.

    command, ui: continue it ("" if no single command does), show its runs in MLflow. leads: its main table and plot are
    the headline of the page. status: how its last command ended, if it failed.
    """

    name: str
    heading: str
    text: str
    paper: str
    command: str
    ui: str
    facts: Sequence[tuple[str, str]]
    links: Sequence[tuple[str, str]]
    tables: Sequence[Table]
    pictures: Sequence[Picture]
    comparisons: Sequence[Table]
    published: Sequence[Table]
    state: str
    status: str
    unfinished: Sequence[UnfinishedRun]
    mistakes: Sequence[Mistakes] = ()
    mistakes_left: str = ""
    leads: bool = False

    @property
    def is_finished(self) -> bool:
        return not (self.unfinished or self.status)


@dataclass(frozen=True)
class PageContents:
    """The contents of the page. caveats: what a reader has to know before any number, and a short form or "".

    claims: a sentence and the table of the paper's claims; it has no rows on own data.
    """

    lead: str
    state: str
    shown: str
    sections: Sequence[Section]
    headline: tuple[Table, Picture | None] | None
    claims: tuple[str, Table] | None
    problems: Sequence[Problem]
    caveats: Sequence[tuple[str, str]]
    cost: Sequence[str]
    work: Sequence[Table]
    versions: Sequence[tuple[str, str]]


class FileWriter:
    """Write tables and pictures as files below `folder`, with unique names, and number them in the order of calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: set[str] = set()
        self.table_numbers, self.picture_numbers = itertools.count(1), itertools.count(1)

    def _make_name(self, title: str) -> str:
        """Return `title` as an id and file name, unique in the page."""
        plain = re.sub(r"[^A-Za-z0-9]+", "-", title).strip("-").lower() or "part"
        tries = itertools.chain([plain], (f"{plain}-{number}" for number in itertools.count(2)))
        unique = next(name for name in tries if name not in self.names)
        self.names.add(unique)
        return unique

    def table(self, table: Table) -> dict[str, Any]:
        """Write the files of a table; returns what the template shows."""
        name = self._make_name(table.name)
        write_tables([replace(table, name=name)], self.folder / "tables")
        table, rows = table.without_details(), len(table.rows)
        if rows > MAX_ROWS:
            note = f"The first {MAX_ROWS} of {rows:,} rows; the files have all."
            table = replace(table, rows=table.rows[:MAX_ROWS], notes=(note, *table.notes))
        return {
            "id": f"table-{name}",
            "title": f"Table {next(self.table_numbers)}. {table.title}",
            "seeds": f", {seeds}"
            if (seeds := describe_seeds(metric for metric in table.metrics if metric.seeds))
            else "",
            "html": to_html(table, f"table-{name}-title"),
            "notes": list_notes(table),
            "rows": len(table.rows),
            "wide": len(table.labels) + len(table.columns) >= WIDE_FROM,
            "long": len(table.rows) >= FOLDED_FROM,
            "latex": render(table, "latex"),
            "files": [(form, f"tables/{name}.{form}") for form in SUFFIXES.values()],
        }

    def picture(self, picture: Picture) -> dict[str, Any]:
        """Write the files of a picture; returns what the template shows."""
        name = self._make_name(picture.name)
        for form, content in picture.files.items():
            write_bytes(self.folder / "figures" / f"{name}.{form}", content)
        kind = "image/png" if picture.shown.startswith(b"\x89PNG") else "image/svg+xml"
        return {
            "id": f"figure-{name}",
            "caption": f"Figure {next(self.picture_numbers)}. {picture.caption}",
            "alt": picture.alt,
            "width": round(picture.width * PIXELS),
            "source": _to_url(picture.shown, kind),
            "files": [(form, f"figures/{name}.{form}") for form in sorted(picture.files)],
        }


def write_page(contents: PageContents, folder: Path) -> None:
    """Write index.html and the folders `tables` and `figures` into `folder`."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"digest": _digest, "url": _to_url}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    page = template.render(vars(contents), writer=FileWriter(folder), generator=GENERATOR)
    write_bytes(folder / "index.html", page.encode())


def _to_url(content: bytes, kind: str = "image/jpeg") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _digest(script: str) -> str:
    """Return the hash by which the page's Content-Security-Policy allows its one script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
