"""Render a table as LaTeX `table` environments that need only booktabs; a table larger than a page is split.

Text is escaped for pdfLaTeX (with its default encoding, UTF-8), XeLaTeX and LuaLaTeX.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.tables.table import MINUS, Mark, Table, format_rows, list_headers, list_legend

MARKED: dict[Mark | None, str] = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", None: "{}"}
SIZES = (("", 1.0), (r"\small", 0.925), (r"\footnotesize", 0.85), (r"\scriptsize", 0.8))
"""LaTeX's size commands, and the width of characters relative to 10 pt."""
CHARACTER, GAP = 4.8, 8.0
"""Mean width of a character at 10 pt and space between two columns, in points."""
NARROW, WIDE = 340.0, 465.0
"""Text width in points of a `table` (LaTeX's article class) and a `table*` (a two-column page)."""
PAGE = 36
"""Rows of a table on a page."""

SIGNS = {
    **{sign: f"\\{sign}" for sign in "{}$&#_%"},
    **{sign: f"${sign}$" for sign in "<>|"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    '"': "''",
    "`": r"\textquoteleft{}",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "†": r"$^\dagger$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≈": r"$\approx$",
    "−": r"$-$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "β": r"$\beta$",
    "λ": r"$\lambda$",
    "τ": r"$\tau$",
    "Δ": r"$\Delta$",
}
NEEDS = r"% needs \usepackage{booktabs}"
PUNCTUATION = "–—‘’“”…"


def to_latex(table: Table) -> str:
    """Render as many environments as pages are needed; the notes are comments below the last."""
    table = table.without_details()
    labels = len(table.labels)
    title = table.title.rstrip(".")
    caption = " ".join([f"{title}.", *list_legend(table)])
    headers, plain = list_headers(table), format_rows(table)
    widths = [CHARACTER * (max(len(row[place]) for row in [headers, *plain]) + 1) for place in range(len(headers))]
    room = (WIDE if table.wide else NARROW) - GAP * (len(headers) - 1)
    size, scale = next((one for one in SIZES if sum(widths) * one[1] <= room), SIZES[-1])
    body = format_rows(table, MARKED, r"\textit{{{}}}", escape)
    for texts in body:
        signed = (text.replace(" ± ", r" $\pm$ ").replace(" †", r" $^\dagger$") for text in texts[labels:])
        texts[labels:] = [MINUS.sub("$-$", text) for text in signed]
    headers = [escape(header) for header in headers]
    name = "table*" if table.wide else "table"
    parts: list[str] = []
    for columns in _split_columns(table, [width * scale for width in widths]):
        # Numbers to the right, texts to the left.
        sides = "".join("l" if place < labels or table.has_text(place - labels) else "r" for place in columns)
        for rows in _split_rows(table):
            lines = [rf"\begin{{{name}}}", rf"\centering{size}", rf"\setlength{{\tabcolsep}}{{{GAP / 2:g}pt}}"]
            lines += [rf"\begin{{tabular}}{{@{{}}{sides}@{{}}}}", r"\toprule"]
            lines += [_join([headers[place] for place in columns]), r"\midrule"]
            for number in rows:
                row, before = table.rows[number], table.rows[number - 1]
                cells = [body[number][place] for place in columns]
                if number == rows[0]:
                    # On a further page the first label is repeated.
                    cells[0] = cells[0] or escape(row.labels[0])
                elif row.group != before.group or row.average > before.average:
                    lines.append(r"\midrule")
                elif row.source != before.source:
                    lines.append(r"\addlinespace")
                lines.append(_join(cells))
            words = escape(f"{title}, continued." if parts else caption)
            lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{words}}}", rf"\end{{{name}}}"]
            parts.append("\n".join(lines))
    notes = "\n".join(f"% {' '.join(note.split())}" for note in table.notes)
    return "\n\n".join(filter(None, [NEEDS, *parts, notes]))


def _split_rows(table: Table) -> list[list[int]]:
    """Return the row numbers of each page; a group that fits on one page is not split."""
    pages: list[list[int]] = [[]]
    for group in table.groups:
        rows = [number for number, row in enumerate(table.rows) if row.group == group]
        for place, row in enumerate(rows):
            needed = len(rows) if place == 0 and len(rows) <= PAGE else 1
            if pages[-1] and len(pages[-1]) + needed > PAGE:
                pages.append([])
            pages[-1].append(row)
    return pages


def _split_columns(table: Table, widths: Sequence[float]) -> list[list[int]]:
    """Split the columns into parts that fit the page; every part repeats the labels."""
    labels = list(range(len(table.labels)))
    room = WIDE if table.wide else NARROW
    parts = [labels.copy()]
    for place in range(len(labels), len(widths)):
        used = sum(widths[one] for one in parts[-1]) + GAP * len(parts[-1])
        if len(parts[-1]) > len(labels) and used + widths[place] > room:
            parts.append(labels.copy())
        parts[-1].append(place)
    return parts


def escape(text: str) -> str:
    """Escape `text` for LaTeX, rare signs as U+1F600; text between backticks is set in typewriter type."""
    parts = " ".join(text.split()).split("`")
    if len(parts) % 2 == 0:
        # An unpaired backtick is an ordinary character.
        parts = ["`".join(parts)]
    found = ""
    for place, part in enumerate(parts):
        ordinary = {sign: sign if sign < "\u0180" or sign in PUNCTUATION else f"U+{ord(sign):04X}" for sign in part}
        plain = "".join((ordinary | SIGNS)[sign] for sign in part)
        # LaTeX would join the two hyphens of a flag to a dash.
        plain = plain.replace("--", "-{}-")
        found += rf"\texttt{{{plain}}}" if place % 2 else plain
    return found


def _join(cells: Sequence[str]) -> str:
    # LaTeX would read a bracket at the start of a row as an argument of the previous line break.
    return " & ".join(["{}" + cells[0] if cells[0].startswith("[") else cells[0], *cells[1:]]) + r" \\"
