"""Render a table as LaTeX `table` environments that need only booktabs; a table longer than a page is split.

Text is escaped for pdfLaTeX, XeLaTeX and LuaLaTeX.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from benchmarks.tables.table import Row, Table
from benchmarks.tables.text import MINUS, explain_marks, format_cell, format_labels, list_headers

FRAMES = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", None: "{}"}
ITALICS = r"\textit{{{}}}"
SIZES = (("", 1.0), (r"\small", 0.925), (r"\footnotesize", 0.85), (r"\scriptsize", 0.8))
"""LaTeX's size commands, and the width of characters relative to 10 pt."""
GAP = 8.0
"""Points between two columns."""
NARROW, WIDE = 340.0, 465.0
"""Text width in points of a `table` (LaTeX's article class) and a `table*` (a two-column page)."""
PAGE, CAPTION = 36, 90
"""Rows of a table on a page, and characters of a caption that take the space of one row."""

SIGNS = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_",
    "%": r"\%",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
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
    "·": r"$\cdot$",
    "β": r"$\beta$",
    "γ": r"$\gamma$",
    "λ": r"$\lambda$",
    "μ": r"$\mu$",
    "σ": r"$\sigma$",
    "τ": r"$\tau$",
    "²": r"$^2$",
    "₂": r"$_2$",
    "–": "--",
    "—": "---",
    "…": r"\ldots{}",
    "‘": "`",
    "’": "'",
    "“": "``",
    "”": "''",
    "ß": r"\ss{}",
    "æ": r"\ae{}",
    "Æ": r"\AE{}",
    "œ": r"\oe{}",
    "Œ": r"\OE{}",
    "ø": r"\o{}",
    "Ø": r"\O{}",
    "ł": r"\l{}",
    "Ł": r"\L{}",
}
ACCENTS = {
    "\u0300": "`",
    "\u0301": "'",
    "\u0302": "^",
    "\u0303": "~",
    "\u0308": '"',
    "\u030a": "r",
    "\u030c": "v",
    "\u0327": "c",
}


def to_latex(table: Table) -> str:
    """Render as many environments as pages are needed; the caption of the first contains the notes."""
    table = table.without_details()
    marks = table.marks()
    cells = [
        [
            _mathematics(format_cell(table, cell, place, FRAMES[marks.get((number, place))], escape))
            for place, cell in enumerate(row.cells)
        ]
        for number, row in enumerate(table.rows)
    ]
    title = f"{table.title.rstrip('.')}"
    caption = " ".join([f"{title}.", *explain_marks(table, "bold", "underlined", "italics"), *table.notes])
    size, widths = _size(table)
    parts: list[str] = []
    for columns in _columns(table, size, widths):
        for rows in _pages(table, PAGE if parts else PAGE - len(caption) // CAPTION):
            text = caption if not parts else f"{title}, continued."
            parts.append(_environment(table, cells, rows, columns, size, escape(text)))
    return "\n\n".join([r"% needs \usepackage{booktabs}", *parts])


def _mathematics(cell: str) -> str:
    """Replace signs in a formatted number by LaTeX's."""
    return MINUS.sub("$-$", cell.replace(" ± ", r" $\pm$ ").replace(" †", r" $^\dagger$"))


def _environment(
    table: Table, cells: Sequence[Sequence[str]], rows: Sequence[int], columns: Sequence[int], size: str, caption: str
) -> str:
    name = "table*" if table.wide else "table"
    alignment = "l" * len(table.labels) + "".join(_side(table, place) for place in columns)
    first = list_headers(table)
    kept = [*first[: len(table.labels)], *(first[len(table.labels) + place] for place in columns)]
    lines = [rf"\begin{{{name}}}", rf"\centering{size}", rf"\setlength{{\tabcolsep}}{{{GAP / 2:g}pt}}"]
    lines += [rf"\begin{{tabular}}{{@{{}}{alignment}@{{}}}}", r"\toprule"]
    lines += [join_row([escape(header) for header in kept]), r"\midrule"]
    before: Row | None = None
    for number in rows:
        row = table.rows[number]
        if before is not None and (row.group != before.group or row.average > before.average):
            lines.append(r"\midrule")
        elif before is not None and row.source != before.source:
            lines.append(r"\addlinespace")
        labels = format_labels(table, row, before, ITALICS, escape)
        lines.append(join_row([*labels, *(cells[number][place] for place in columns)]))
        before = row
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", rf"\caption{{{caption}}}", rf"\end{{{name}}}"])


def _side(table: Table, place: int) -> str:
    """Return the alignment: numbers to the right, texts to the left."""
    return "l" if any(isinstance(row.cells[place], str) for row in table.rows) else "r"


def _pages(table: Table, first: int) -> list[list[int]]:
    """Return the row numbers of each page, `first` on the first; a group that fits on one page is not split."""
    pages: list[list[int]] = [[]]
    for group in table.groups:
        rows = [number for number, row in enumerate(table.rows) if row.group == group]
        room = max(first, 1) if len(pages) == 1 else PAGE
        if pages[-1] and len(pages[-1]) + len(rows) > room and len(rows) <= PAGE:
            pages.append([])
        for row in rows:
            if len(pages[-1]) >= (max(first, 1) if len(pages) == 1 else PAGE):
                pages.append([])
            pages[-1].append(row)
    return pages


def _columns(table: Table, size: str, widths: Sequence[float]) -> list[list[int]]:
    """Split the columns into parts that fit the page; every part repeats the labels."""
    labels = sum(widths[: len(table.labels)])
    scale = dict(SIZES)[size]
    parts: list[list[int]] = [[]]
    used = labels
    for place, width in enumerate(widths[len(table.labels) :]):
        if parts[-1] and (used + width) * scale + GAP * (len(table.labels) + len(parts[-1])) > _room(table):
            parts.append([])
            used = labels
        parts[-1].append(place)
        used += width
    return parts


def _size(table: Table) -> tuple[str, list[float]]:
    """Return the largest type size in which the widest row fits, else the smallest; and column widths at the first."""
    first = list_headers(table)
    rows = [[*row.labels, *(format_cell(table, cell, at) for at, cell in enumerate(row.cells))] for row in table.rows]
    widths = [max(map(_width, (cells[place] for cells in [first, *rows]))) for place in range(len(first))]
    room = _room(table) - GAP * (len(first) - 1)
    return next((name for name, scale in SIZES if sum(widths) * scale <= room), SIZES[-1][0]), widths


def _room(table: Table) -> float:
    return WIDE if table.wide else NARROW


def _width(text: str) -> float:
    """Return the width in points in Computer Modern of 10 pt, with room for bold digits."""
    wide = sum(sign in "±+=↑↓" for sign in text)
    upper = sum(sign.isupper() for sign in text)
    thin = sum(sign in " .,;:()'|-/il" for sign in text)
    return 7.8 * wide + 7.4 * upper + 3.4 * thin + 5.0 * (len(text) - wide - upper - thin) + 3.0


def escape(text: str) -> str:
    """Escape `text` for LaTeX, with its usual signs and accents; any other sign by its number, as U+1F600.

    Text between backticks is set in typewriter type.
    """
    parts = " ".join(text.split()).split("`")
    if len(parts) % 2 == 0:
        # An unpaired backtick is an ordinary character.
        parts = ["`".join(parts)]
    return "".join(
        rf"\texttt{{{_escape_plain(part)}}}" if place % 2 else _escape_plain(part) for place, part in enumerate(parts)
    )


def _escape_plain(text: str) -> str:
    # LaTeX would join the two hyphens of a flag to a dash.
    return "".join(
        "{}-" if text[place - 1 : place + 1] == "--" else _escape_sign(sign) for place, sign in enumerate(text)
    )


def _escape_sign(sign: str) -> str:
    if sign in SIGNS:
        return SIGNS[sign]
    if " " <= sign <= "\x7e":
        return sign
    letter, *marks = list(unicodedata.normalize("NFD", sign))
    if letter.isascii() and letter.isalpha() and len(marks) == 1 and marks[0] in ACCENTS:
        return rf"\{ACCENTS[marks[0]]}{{{letter}}}"
    return f"U+{ord(sign):04X}"


def join_row(cells: Sequence[str]) -> str:
    """Join cells that are already LaTeX to one row of a tabular."""
    # LaTeX would read a bracket at the start of a row as an argument of the previous line break.
    first, *rest = cells
    return " & ".join(["{}" + first if first.startswith("[") else first, *rest]) + r" \\"
