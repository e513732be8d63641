"""A Sheet as Markdown, CSV, LaTeX or JSON, and the files of many."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables.latex import latex_tables
from benchmarks.tables.pipes import pipes
from benchmarks.tables.table import Item, Line, Mark, Sheet, Value
from benchmarks.tables.text import ARROWS, figure, headers, legend, names
from runner.results import write_bytes

__all__ = ["ARROWS", "FORMATS", "SUFFIXES", "as_json", "legend", "render", "write_sheets"]

SUFFIXES = {"md": "md", "csv": "csv", "latex": "tex", "json": "json"}
"""The formats, and how their files end."""


def render(sheet: Sheet, form: str) -> str:
    """The sheet in one of FORMATS, without a newline at the end."""
    return FORMATS[form](sheet)


def write_sheets(sheets: Sequence[Sheet], folder: Path) -> list[Path]:
    """Write <name>.md, .csv, .tex and .json of every sheet to `folder`, each file whole or not at all."""
    written = []
    for sheet in sheets:
        for form, suffix in SUFFIXES.items():
            text = json.dumps(as_json(sheet), ensure_ascii=False, indent=1) if form == "json" else render(sheet, form)
            file = folder / f"{sheet.name}.{suffix}"
            write_bytes(file, (text + "\n").encode())
            written.append(file)
    return written


def markdown(sheet: Sheet) -> str:
    """A heading, pipes and dashes, the notes below."""
    sheet = sheet.printed()
    marks, frames = sheet.marks(), {"best": "**{}**", "second": "<u>{}</u>", None: "{}"}
    body = []
    before: Line | None = None
    for number, line in enumerate(sheet.lines):
        items = [
            figure(sheet, item, place, frames[marks.get((number, place))], _markdown_text)
            for place, item in enumerate(line.items)
        ]
        body.append([*names(sheet, line, before, "*{}*", _markdown_text), *items])
        before = line
    first = [_markdown_text(header) for header in headers(sheet)]
    parts = [f"**{_markdown_text(sheet.title)}**", pipes(first, body, left=len(sheet.labels))]
    notes = [*legend(sheet, "bold", "underlined", "italics"), *sheet.notes]
    return "\n\n".join([*parts, "\n".join(f"- {_markdown_text(note)}" for note in notes)])


def comma_separated(sheet: Sheet) -> str:
    """One line each with plain numbers, empty where there is none: for every column its value and what belongs to it.

    Columns of text have no more than their text. Notes are left out.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    wide = [any(isinstance(line.items[place], Value) for line in sheet.lines) for place in range(len(sheet.columns))]
    header = [*sheet.labels, "source", "average"]
    for column, numeric in zip(sheet.columns, wide, strict=True):
        parts = ("", " std", " n", " published", " delta", " limited") if numeric else ("",)
        header += [column.title + part for part in parts]
    writer.writerow(header)
    for line in sheet.lines:
        cells = [*line.labels, line.source, str(line.average).lower()]
        for item, numeric in zip(line.items, wide, strict=True):
            cells += _plain(item) if numeric else [item if isinstance(item, str) else ""]
        writer.writerow(cells)
    return file.getvalue().rstrip("\n")


def as_json(sheet: Sheet) -> dict[str, Any]:
    """Full precision, with the values of the single seeds and the marks."""
    marks = sheet.marks()
    return {
        "name": sheet.name,
        "title": sheet.title,
        "labels": list(sheet.labels),
        "columns": [
            {"title": column.title, "better": column.better or None, "digits": column.digits}
            for column in sheet.columns
        ],
        "lines": [
            {
                "labels": list(line.labels),
                "source": line.source,
                "group": line.group,
                "average": line.average,
                "items": [_json(item, marks.get((number, place))) for place, item in enumerate(line.items)],
            }
            for number, line in enumerate(sheet.lines)
        ],
        "notes": list(sheet.notes),
    }


def _json_text(sheet: Sheet) -> str:
    return json.dumps(as_json(sheet), ensure_ascii=False, allow_nan=False)


FORMATS: dict[str, Callable[[Sheet], str]] = {
    "md": markdown,
    "csv": comma_separated,
    "latex": latex_tables,
    "json": _json_text,
}


def _markdown_text(text: str) -> str:
    for plain, written in (("\\", r"\\"), ("|", r"\|"), ("*", r"\*"), ("<", "&lt;")):
        text = text.replace(plain, written)
    return " ".join(text.split())


def _plain(item: Item) -> list[str]:
    if not isinstance(item, Value):
        return [item or "", "", "", "", "", ""]
    numbers = [item.mean, item.std, len(item.seeds) or None, item.published, item.delta]
    return [*("" if number is None else str(round(number, 6)) for number in numbers), str(item.limited).lower()]


def _json(item: Item, mark: Mark | None) -> Any:
    if not isinstance(item, Value):
        return item
    by_seed = dict(zip(map(str, item.seeds), item.values, strict=True)) if item.values else None
    return {
        "mean": item.mean,
        "std": item.std,
        "n": len(item.seeds) or None,
        "seeds": by_seed or list(item.seeds),
        "published": item.published,
        "delta": item.delta,
        "limited": item.limited,
        "mark": mark,
    }
