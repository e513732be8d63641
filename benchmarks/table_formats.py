"""A table as Markdown, CSV, LaTeX or JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.scores import Cell
from benchmarks.tables import Row, Table, TargetRow, mean_of_hms

HEADERS = ("Data set", "Method", "Base ↑", "Novel ↑", "HM ↑", "FPS ↑", "training s")
OTHER_HEADERS = ("Trained on", "Method", "Tested on", "Accuracy ↑")
MISSING = "-"


def render(table: Table, form: str) -> str:
    """The table in one of FORMATS."""
    return FORMATS[form](table)


def markdown(table: Table) -> str:
    """Pipes and dashes, the best of each data set in bold, the notes below."""
    parts = []
    if table.rows:
        parts.append(pipes(HEADERS, _body(table, bold="**{}**", plus_minus=" ± "), left=2))
    if table.others:
        parts.append(pipes(OTHER_HEADERS, [_other(row, table, " ± ") for row in table.others], left=3))
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in table.notes)])


def latex(table: Table) -> str:
    """A booktabs `table` whose caption holds the notes."""
    parts = []
    if table.rows:
        body = _body(table, bold=r"\textbf{{{}}}", plus_minus=r" $\pm$ ")
        parts.append(_tabular(HEADERS, body, "llrrrrr"))
    if table.others:
        parts.append(_tabular(OTHER_HEADERS, [_other(row, table, r" $\pm$ ") for row in table.others], "lllr"))
    caption = _escape(" ".join(table.notes))
    lines = [r"\begin{table}", r"\centering", *parts, rf"\caption{{{caption}}}", r"\end{table}"]
    return "\n".join(lines)


def comma_separated(table: Table) -> str:
    """One line per cell-complete row, plain numbers, empty where there is none; no notes."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    stats = [f"{name}{suffix}" for name in ("base", "novel", "hm") for suffix in ("", "_std", "_n")]
    writer.writerow(
        [
            "data_set",
            "method",
            "title",
            *stats,
            "images_per_second",
            "images_per_second_model",
            "train_seconds",
            "limited",
            "variant",
        ]
    )
    for row in (*table.rows, *table.averages):
        numbers = [value for cell in row.cells() for value in _csv_cell(cell)]
        speed = [_two(value) for value in (row.images_per_second, row.images_per_second_model, row.train_seconds)]
        limited = any(cell.limited for cell in row.cells() if cell)
        writer.writerow(
            [row.dataset, row.method, row.title, *numbers, *speed, str(limited).lower(), _variant(table, row.dataset)]
        )
    if table.others:
        writer.writerow([])
        writer.writerow(
            ["trained_on", "method", "title", "target", "accuracy", "accuracy_std", "accuracy_n", "limited", "variant"]
        )
        for other in table.others:
            cell = other.accuracy
            marks = (str(cell.limited).lower(), _variant(table, *_sets(other)))
            writer.writerow([other.trained_on, other.method, other.title, other.target, *_csv_cell(cell), *marks])
    return file.getvalue().rstrip("\n")


def as_json(table: Table) -> dict[str, Any]:
    """Full precision, with the values of the single seeds."""
    return {
        "rows": [{**_json_row(row), "variant": _variant(table, row.dataset)} for row in table.rows],
        "averages": [
            {**_json_row(row), "mean_of_hms": _json_cell(mean_of_hms(table.rows, row.title))} for row in table.averages
        ],
        "others": [
            {
                "trained_on": row.trained_on,
                "method": row.method,
                "title": row.title,
                "target": row.target,
                "accuracy": _json_cell(row.accuracy),
                "variant": _variant(table, *_sets(row)),
            }
            for row in table.others
        ],
        "notes": list(table.notes),
    }


def _json_text(table: Table) -> str:
    import json

    return json.dumps(as_json(table), ensure_ascii=False, allow_nan=False)


FORMATS: dict[str, Callable[[Table], str]] = {
    "md": markdown,
    "csv": comma_separated,
    "latex": latex,
    "json": _json_text,
}


def _body(table: Table, *, bold: str, plus_minus: str) -> list[list[str]]:
    """The rows as text; a data set is named once, in its first row."""
    lines = []
    before = None
    for row in (*table.rows, *table.averages):
        block = [other for other in (*table.rows, *table.averages) if other.dataset == row.dataset]
        cells = [
            _accuracy(cell, table, plus_minus, bold if _is_best(cell, [other.cells()[i] for other in block]) else "{}")
            for i, cell in enumerate(row.cells())
        ]
        rate = MISSING if row.images_per_second is None else f"{row.images_per_second:.0f}"
        seconds = MISSING if row.train_seconds is None else f"{row.train_seconds:.1f}"
        lines.append([row.dataset if row.dataset != before else "", row.title, *cells, rate, seconds])
        before = row.dataset
    return lines


def _is_best(cell: Cell | None, column: Sequence[Cell | None]) -> bool:
    """Whether `cell` is the highest of several whole results of the same seeds."""
    alike = [other for other in column if other and cell and (other.seeds, other.limited) == (cell.seeds, False)]
    return cell is not None and len(alike) > 1 and cell.mean == max(other.mean for other in alike) and not cell.limited


def _accuracy(cell: Cell | None, table: Table, plus_minus: str, frame: str = "{}") -> str:
    if cell is None:
        return MISSING
    text = frame.format(f"{cell.mean:.2f}")
    if cell.std is not None:
        text += f"{plus_minus}{cell.std:.2f}"
    if _seeds_differ(table):
        text += f" (n={len(cell.seeds)})"
    return text + (" †" if cell.limited else "")


def _seeds_differ(table: Table) -> bool:
    cells = [cell for row in table.rows for cell in row.cells() if cell] + [row.accuracy for row in table.others]
    return len({cell.seeds for cell in cells}) > 1


def _other(row: TargetRow, table: Table, plus_minus: str) -> list[str]:
    return [row.trained_on, row.title, row.target, _accuracy(row.accuracy, table, plus_minus)]


def pipes(headers: Sequence[str], body: Sequence[Sequence[str]], *, left: int) -> str:
    """`left` columns of text, the rest numbers, padded so that the source reads as a table too."""
    widths = [max(3, *(len(line[i]) for line in [headers, *body])) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(headers), f"| {' | '.join(rule)} |", *map(line, body)])


def _tabular(headers: Sequence[str], body: Sequence[Sequence[str]], alignment: str) -> str:
    def line(cells: Sequence[str]) -> str:
        return " & ".join(map(_escape, cells)) + r" \\"

    lines = [rf"\begin{{tabular}}{{{alignment}}}", r"\toprule", line(headers), r"\midrule"]
    for position, row in enumerate(body):
        if position and row[0] and row[0] != body[position - 1][0]:
            lines.append(r"\midrule")
        lines.append(line(row))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def _escape(text: str) -> str:
    """What LaTeX reads as commands, escaped; arrows and marks as its own signs."""
    for plain, command in (("%", r"\%"), ("&", r"\&"), ("_", r"\_"), ("#", r"\#")):
        text = text.replace(plain, command)
    return text.replace("↑", r"$\uparrow$").replace("†", r"$^\dagger$").replace("±", r"$\pm$")


def _sets(row: TargetRow) -> list[str]:
    """The data sets of a row: trained on, tested on."""
    return [place.partition(":")[0] for place in (row.trained_on, row.target)]


def _variant(table: Table, *datasets: str) -> str:
    """How the data sets of a row differ from published ones; empty where they do not."""
    return "; ".join(dict.fromkeys(f"{name}: {table.variants[name]}" for name in datasets if name in table.variants))


def _csv_cell(cell: Cell | None) -> list[str]:
    if cell is None:
        return ["", "", ""]
    return [_two(cell.mean), _two(cell.std), str(len(cell.seeds))]


def _two(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _json_row(row: Row) -> dict[str, Any]:
    return {
        "dataset": row.dataset,
        "method": row.method,
        "title": row.title,
        "base": _json_cell(row.base),
        "novel": _json_cell(row.novel),
        "hm": _json_cell(row.hm),
        "images_per_second": row.images_per_second,
        "images_per_second_model": row.images_per_second_model,
        "train_seconds": row.train_seconds,
    }


def _json_cell(cell: Cell | None) -> dict[str, Any] | None:
    if cell is None:
        return None
    by_seed = dict(zip(map(str, cell.seeds), cell.values, strict=True))
    return {"mean": cell.mean, "std": cell.std, "seeds": by_seed, "limited": cell.limited}
