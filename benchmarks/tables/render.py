"""Render a table as Markdown, CSV, LaTeX, HTML or JSON, and write the files of several tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from html import escape
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.console.output import csv_text, to_json
from benchmarks.results.metrics import Metric, describe_seeds
from benchmarks.tables.table import Rank, Table, describe_signs, describe_styles, format_rows, list_headers, list_notes
from runner.results import write_bytes

if TYPE_CHECKING:
    from pandas.io.formats.style import Styler

SUFFIXES = {"md": "md", "csv": "csv", "latex": "tex", "json": "json"}
"""The formats, and how their files end."""
NEEDS, NEEDS_LONG = r"% needs \usepackage{booktabs}", r"% needs \usepackage{booktabs,longtable}"
PAGE = 45
"""Rows of a LaTeX table on a page."""
MINUS = re.compile(r"(?<![\w.$-])-(?=\d)")
"""Matches the hyphen of a negative number, to replace it by a minus sign, but not those of 1e-05 and dates."""
SIGNS = {"±": r"$\pm$", "†": r"$^\dagger$", "‡": r"$^\ddagger$", "§": r"$^\S$"}
"""Signs of the cells of numbers."""
LATEX = {
    **{sign: f"\\{sign}" for sign in "{}$&#_%"},
    **{sign: f"${sign}$" for sign in "<>|"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    **SIGNS,
    "β": r"$\beta$",
    "λ": r"$\lambda$",
    "τ": r"$\tau$",
}


def render(table: Table, form: str) -> str:
    """Render the table in one of FORMATS, without a newline at the end."""
    return FORMATS[form](table)


def show_notes_once(tables: Iterable[Table]) -> Iterator[Table]:
    """Keep each note of tables that are printed together below the first of them."""
    printed: set[str] = set()
    for table in tables:
        yield replace(table, notes=[line for line in table.notes if line not in printed])
        printed |= {*table.notes}


def write_tables(tables: Sequence[Table], folder: Path) -> list[Path]:
    """Write <name>.md, .csv, .tex and .json of every table to `folder`, each file atomically."""
    files = {
        folder / f"{table.name}.{suffix}": render(table, form) for table in tables for form, suffix in SUFFIXES.items()
    }
    for file, text in files.items():
        write_bytes(file, (text + "\n").encode())
    return list(files)


def markdown_grid(headers: Sequence[str], body: Sequence[Sequence[str]], left: Collection[int]) -> str:
    """Render cells as a Markdown table, padded to be readable as source. left: indices of left-aligned columns."""
    widths = [max(3, *map(len, column)) for column in zip(headers, *body, strict=True)]
    rule = ["-" * width if index in left else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    lines = []
    for cells in (headers, rule, *body):
        padded = [f"{cell:{'<' if index in left else '>'}{widths[index]}}" for index, cell in enumerate(cells)]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)


def to_markdown(table: Table) -> str:
    """Render a title, the table, and its notes as a list."""
    # Markdown has no underline; renderers of Markdown accept this HTML element.
    styles: dict[Rank | None, str] = {"best": "**{}**", "second": "<u>{}</u>", None: "{}"}
    headers = [_escape_markdown(header) for header in list_headers(table)]
    body = format_rows(table, styles, "*{}*", _escape_markdown)
    # Markdown has no rule between rows: a row without text stands for that above rows that see unlabelled images.
    for number in reversed([i for i, row in enumerate(table.rows) if row.block[1] and table.starts_block(i)]):
        body.insert(number, [""] * len(headers))
    grid = markdown_grid(headers, body, [index for index, is_text in enumerate(table.text_columns) if is_text])
    notes = "\n".join(f"- {_escape_markdown(note)}" for note in list_notes(table))
    return "\n\n".join(filter(None, [f"**{_escape_markdown(table.title)}**", grid, notes]))


def to_latex(table: Table) -> str:
    """Render a booktabs table, or a longtable if it has more than PAGE rows, with a caption and without notes."""
    styles: dict[Rank | None, str] = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", None: "{}"}
    signs = {ord(sign): code for sign, code in SIGNS.items()}
    body = format_rows(table, styles, r"\textit{{{}}}", escape_latex)
    for number, cells in enumerate(body):
        # `format_rows` escapes texts only: the ± and † of numbers are still plain.
        cells[:] = [MINUS.sub("$-$", cell).translate(signs) for cell in cells]
        # LaTeX would read a bracket at the start of a row as an argument of the previous line break.
        cells[0] = "{}" + cells[0] if cells[0].startswith("[") else cells[0]
        if table.starts_block(number):
            cells[0] = "\\midrule\n" + cells[0]
    is_long, seeds = len(table.rows) > PAGE, describe_seeds(table.metrics, std=False)
    text = _style(table, body, [*map(escape_latex, list_headers(table))]).to_latex(
        hrules=True,
        environment="longtable" if is_long else "table*" if table.is_wide else "table",
        column_format="@{}" + "".join("l" if is_text else "r" for is_text in table.text_columns) + "@{}",
        # pandas raises ValueError for a position in a longtable, which is always centred.
        position_float=None if is_long else "centering",
        caption=escape_latex(f"{table.title.rstrip('.')}{seeds and ', '}{seeds}. {describe_styles(table)}".strip()),
        label=f"tab:{table.name}",
    )
    return f"{NEEDS_LONG if is_long else NEEDS}\n{text.strip()}"


def to_html(table: Table, labelled_by: str) -> str:
    """Render a `<table>` with all texts escaped; the CSS is part of the page that contains it.

    labelled_by: the id of the element with its title.
    """
    import pandas as pd

    styles: dict[Rank | None, str] = {"best": "<strong>{}</strong>", "second": "<u>{}</u>", None: "{}"}
    body = format_rows(table, styles, "<em>{}</em>", escape)
    is_text, classes = table.text_columns, []
    for number, (row, cells) in enumerate(zip(table.rows, body, strict=True)):
        shared = f"{row.source * table.mixed} {'average' * row.average} {'first' * table.starts_block(number)}"
        # Sorting takes rows apart, so each has all labels.
        cells[: len(row.labels)] = [cell or escape(label) for cell, label in zip(cells, row.labels, strict=False)]
        cells[:] = [MINUS.sub("−", cell) for cell in cells]
        names = ["text" * text for text in is_text]
        if table.matrix:
            counts = [cell.mean if isinstance(cell, Metric) else 0 for cell in row.cells]
            total = sum(counts) or 1
            # Ten shades, by the share of the row; cells without an image have none.
            names[1:] = [f"wrong share{round(9 * count / total)}" if count else "" for count in counts]
            names[1 + number] = names[1 + number].replace("wrong", "right") or "right"
        classes.append([f"{name} {shared}".strip() for name in names])
    headers = [escape(header) for header in list_headers(table)]
    headers = [
        f'<span class="text">{name}</span>' if text else name for name, text in zip(headers, is_text, strict=True)
    ]
    styler = _style(table, body, headers)
    styler.set_td_classes(pd.DataFrame(classes, styler.index, styler.columns))
    style_class = "matrix" if table.matrix else "sortable"
    styler.set_table_attributes(f'class="{style_class}" aria-labelledby="{escape(labelled_by)}"')
    return styler.to_html().strip()


def _style(table: Table, body: Sequence[Sequence[str]], headers: Sequence[str]) -> Styler:
    """Make a Styler of formatted cells; its columns are numbers, because titles may be equal."""
    import pandas as pd
    from pandas.io.formats.style import Styler

    frame = pd.DataFrame([*body], columns=range(len(headers)))
    # Without a `uuid` pandas draws a random one, and equal results would give different pages.
    styler = Styler(frame, uuid=re.sub(r"\W", "-", table.name), cell_ids=False).hide(axis="index")
    return styler.format_index(lambda number: headers[number], axis="columns")


def mark_code(text: str) -> str:
    """Escape a text for HTML, and mark what stands between backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def escape_latex(text: str) -> str:
    """Escape a text for LaTeX."""
    # LaTeX prints two hyphens as a dash, in which flags such as --limit are not recognised.
    return "".join(LATEX.get(sign, sign) for sign in " ".join(text.split())).replace("--", "-{}-")


def to_csv(table: Table) -> str:
    """Render plain numbers, empty if missing: the mean of each metric, and columns for the rest of it.

    Columns that are empty in all rows are left out.
    """
    parts = ("", " std", " n", " published", " delta", " limited", " chosen_on_test", " sees_unlabelled")
    lines = [[*table.labels, "source", "average", *(column.title + part for column in table.columns for part in parts)]]
    for row in table.rows:
        cells = [*row.labels, row.source, str(row.average).lower()]
        for cell in row.cells:
            if isinstance(cell, Metric):
                numbers = (cell.mean, cell.std, len(cell.seeds) or None, cell.published, cell.delta)
                cells += ["" if number is None else str(round(number, 6)) for number in numbers]
                cells += [str(cell.limited).lower(), "true" * cell.chosen_on_test, "true" * cell.sees_unlabelled]
            else:
                cells += [cell or "", *[""] * (len(parts) - 1)]
        lines.append(cells)
    # The first element of a column is its header.
    used = [index < len(table.labels) or any(column[1:]) for index, column in enumerate(zip(*lines, strict=True))]
    return csv_text(compress(line, used) for line in lines).rstrip("\n")


def to_dict(table: Table) -> dict[str, Any]:
    """Convert to JSON with full precision, the values of single seeds and the ranks."""
    ranks, rows = table.ranks(), []
    for number, row in enumerate(table.rows):
        cells: list[Any] = list(row.cells)
        for index, cell in enumerate(row.cells):
            if isinstance(cell, Metric):
                by_seed = dict(zip(map(str, cell.seeds), cell.values, strict=True)) if cell.values else None
                cells[index] = {name: value for name, value in vars(cell).items() if name != "values"} | {
                    "n": len(cell.seeds) or None,
                    "seeds": by_seed or list(cell.seeds),
                    "delta": cell.delta,
                    "mark": ranks.get((number, index)),
                }
        fields = {name: value for name, value in vars(row).items() if name != "cells"}
        rows.append({**fields, "labels": list(row.labels), "cells": cells})
    columns = [{**vars(column), "better": column.better or None} for column in table.columns]
    lists = {"labels": list(table.labels), "columns": columns, "rows": rows}
    lists |= {"notes": [*table.notes, *describe_signs(table)], "details": list(table.details)}
    return {"name": table.name, "title": table.title, **lists}


FORMATS: dict[str, Callable[[Table], str]] = {
    "md": to_markdown,
    "csv": to_csv,
    "latex": to_latex,
    # How their files end, which users type.
    "tex": to_latex,
    "json": lambda table: to_json(to_dict(table)),
}


def _escape_markdown(text: str) -> str:
    """Escape what Markdown reads as markup, so that a name can be no link and no picture."""
    return " ".join(re.sub(r"([\\|*\[\]!`])", r"\\\1", text).replace("<", "&lt;").split())
