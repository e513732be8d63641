"""A Sheet as `table` environments that need booktabs alone: one that is too long or too wide for a page is cut."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.tables import latex_text as latex
from benchmarks.tables.table import Line, Sheet
from benchmarks.tables.text import MINUS, figure, headers, legend, names

FRAMES = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", None: "{}"}
ITALICS = r"\textit{{{}}}"
SIZES = (("", 1.0), (r"\small", 0.925), (r"\footnotesize", 0.85), (r"\scriptsize", 0.8))
"""Type by size, and how wide its characters are."""
GAP = 8.0
"""Points between two columns."""
NARROW, WIDE = 340.0, 465.0
"""Points of text that a `table` and a `table*` may take: an article as LaTeX has it, and a journal's page."""
PAGE, CAPTION = 36, 90
"""Lines of a table on a page, and characters of a caption that take the room of one."""


def latex_tables(sheet: Sheet) -> str:
    """As many environments as pages are needed; the caption of the first holds the notes."""
    sheet = sheet.printed()
    marks = sheet.marks()
    cells = [
        [
            _mathematics(figure(sheet, item, place, FRAMES[marks.get((number, place))], latex.escape))
            for place, item in enumerate(line.items)
        ]
        for number, line in enumerate(sheet.lines)
    ]
    title = f"{sheet.title.rstrip('.')}"
    caption = " ".join([f"{title}.", *legend(sheet, "bold", "underlined", "italics"), *sheet.notes])
    size, widths = _size(sheet)
    parts: list[str] = []
    for columns in _columns(sheet, size, widths):
        for rows in _pages(sheet, PAGE if parts else PAGE - len(caption) // CAPTION):
            text = caption if not parts else f"{title}, continued."
            parts.append(_environment(sheet, cells, rows, columns, size, latex.escape(text)))
    return "\n\n".join([r"% needs \usepackage{booktabs}", *parts])


def _mathematics(cell: str) -> str:
    """The signs of a figure, which is no text of its own, as LaTeX sets them."""
    return MINUS.sub("$-$", cell.replace(" ± ", r" $\pm$ ").replace(" †", r" $^\dagger$"))


def _environment(
    sheet: Sheet, cells: Sequence[Sequence[str]], rows: Sequence[int], columns: Sequence[int], size: str, caption: str
) -> str:
    name = "table*" if sheet.wide else "table"
    alignment = "l" * len(sheet.labels) + "".join(_side(sheet, place) for place in columns)
    first = headers(sheet)
    kept = [*first[: len(sheet.labels)], *(first[len(sheet.labels) + place] for place in columns)]
    lines = [rf"\begin{{{name}}}", rf"\centering{size}", rf"\setlength{{\tabcolsep}}{{{GAP / 2:g}pt}}"]
    lines += [rf"\begin{{tabular}}{{@{{}}{alignment}@{{}}}}", r"\toprule"]
    lines += [latex.row([latex.escape(header) for header in kept]), r"\midrule"]
    before: Line | None = None
    for number in rows:
        line = sheet.lines[number]
        if before is not None and (line.group != before.group or line.average > before.average):
            lines.append(r"\midrule")
        elif before is not None and line.source != before.source:
            lines.append(r"\addlinespace")
        titles = names(sheet, line, before, ITALICS, latex.escape)
        lines.append(latex.row([*titles, *(cells[number][place] for place in columns)]))
        before = line
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", rf"\caption{{{caption}}}", rf"\end{{{name}}}"])


def _side(sheet: Sheet, place: int) -> str:
    """Figures to the right, texts to the left."""
    return "l" if any(isinstance(line.items[place], str) for line in sheet.lines) else "r"


def _pages(sheet: Sheet, first: int) -> list[list[int]]:
    """The numbers of the lines on each page, `first` on the first; a group that fits on one page is not cut."""
    pages: list[list[int]] = [[]]
    for group in sheet.groups:
        rows = [number for number, line in enumerate(sheet.lines) if line.group == group]
        room = max(first, 1) if len(pages) == 1 else PAGE
        if pages[-1] and len(pages[-1]) + len(rows) > room and len(rows) <= PAGE:
            pages.append([])
        for row in rows:
            if len(pages[-1]) >= (max(first, 1) if len(pages) == 1 else PAGE):
                pages.append([])
            pages[-1].append(row)
    return pages


def _columns(sheet: Sheet, size: str, widths: Sequence[float]) -> list[list[int]]:
    """The columns of each part, which all have the labels."""
    labels = sum(widths[: len(sheet.labels)])
    scale = dict(SIZES)[size]
    parts: list[list[int]] = [[]]
    used = labels
    for place, width in enumerate(widths[len(sheet.labels) :]):
        if parts[-1] and (used + width) * scale + GAP * (len(sheet.labels) + len(parts[-1])) > _room(sheet):
            parts.append([])
            used = labels
        parts[-1].append(place)
        used += width
    return parts


def _size(sheet: Sheet) -> tuple[str, list[float]]:
    """The largest type in which the widest line fits, else the smallest; and the columns' widths in the largest."""
    first = headers(sheet)
    lines = [[*line.labels, *(figure(sheet, item, at) for at, item in enumerate(line.items))] for line in sheet.lines]
    widths = [max(map(_width, (cells[place] for cells in [first, *lines]))) for place in range(len(first))]
    room = _room(sheet) - GAP * (len(first) - 1)
    return next((name for name, scale in SIZES if sum(widths) * scale <= room), SIZES[-1][0]), widths


def _room(sheet: Sheet) -> float:
    return WIDE if sheet.wide else NARROW


def _width(text: str) -> float:
    """Points in Computer Modern of 10 pt, with room for bold digits."""
    wide = sum(sign in "±+=↑↓" for sign in text)
    upper = sum(sign.isupper() for sign in text)
    thin = sum(sign in " .,;:()'|-/il" for sign in text)
    return 7.8 * wide + 7.4 * upper + 3.4 * thin + 5.0 * (len(text) - wide - upper - thin) + 3.0
