"""The words of a printed Sheet, the same in every format: figures, headers, labels, and what the marks mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from benchmarks.tables.table import Item, Line, Sheet, Value

ARROWS = {"high": " ↑", "low": " ↓", "": ""}
MISSING = "-"
MINUS = re.compile(r"(?<![\w.$])-(?=\d)")
"""The sign of a number, where type would have a hyphen; 1e-05 and dates have none."""


def figure(sheet: Sheet, item: Item, place: int, frame: str = "{}", escape: Callable[[str], str] = str) -> str:
    """An item of the column at `place` as printed, 82.28 ± 0.18 (n=3) (+1.02) †, with n where seeds differ.

    frame: what is put around the mean; escape: for texts.
    """
    if item is None:
        return MISSING
    if isinstance(item, str):
        return escape(item)
    digits = sheet.columns[place].digits
    text = frame.format(rounded(item.mean, digits))
    if item.std is not None:
        text += f" ± {item.std:.{digits}f}"
    if sheet.seeds_differ and item.seeds:
        text += f" (n={len(item.seeds)})"
    if item.delta is not None:
        text += f" ({rounded(item.delta, digits, '+')})"
    return text + (" †" if item.limited else "")


def rounded(number: float, digits: int, sign: str = "") -> str:
    """With the sign of what is printed: what rounds to nothing is 0.00, never -0.00. sign: as in a format."""
    return f"{round(number, digits) or 0.0:{sign}.{digits}f}"


def headers(sheet: Sheet) -> list[str]:
    """The first line: labels, and columns with an arrow to their better end."""
    return [*sheet.labels, *(column.title + ARROWS[column.better] for column in sheet.columns)]


def names(sheet: Sheet, line: Line, before: Line | None, frame: str, escape: Callable[[str], str]) -> list[str]:
    """The labels of a line; the first of several is said once for all lines in a row that have it.

    frame: around those of a published line among ours, but for a label that stands for ours below it as well.
    """
    again = before is not None and len(line.labels) > 1 and line.labels[0] == before.labels[0]
    found = [escape(label) for label in line.labels]
    if line.source == "published" and mixed(sheet):
        shared = {other.labels[0] for other in sheet.lines if other.source == "ours"}
        apart = 1 if line.labels[0] in shared else 0
        found = [frame.format(name) if place >= apart else name for place, name in enumerate(found)]
    return ["", *found[1:]] if again else found


def mixed(sheet: Sheet) -> bool:
    """Whether published lines stand among ours and have to be told apart."""
    return len({line.source for line in sheet.lines}) > 1


def legend(sheet: Sheet, best: str, second: str, published: str) -> list[str]:
    """What the marks of a printed sheet mean, in words for the way in which it shows them."""
    values: Sequence[Value] = [item for line in sheet.lines for item in line.items if isinstance(item, Value)]
    marks = set(sheet.marks().values())
    found = []
    if marks:
        alike = " of each group of lines" if len(sheet.groups) > 1 else ""
        also = f", second {second}" if "second" in marks else ""
        found.append(f"Best{alike} in {best}{also}.")
    if mixed(sheet):
        found.append(f"Lines in {published} are published figures, as printed.")
    if sheet.seeds_differ:
        found.append("Seeds differ: (n=...) says of how many a figure is; figures of different seeds are not ranked.")
    if any(value.delta is not None for value in values):
        found.append("In brackets: ours minus published.")
    return found
