"""A printed table: lines of labels and figures, ours and published ones beside each other, whatever prints it.

Which figure is the best of its group is decided here once, so that every format marks the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from benchmarks.results.scores import Cell

Source = Literal["ours", "published"]
Mark = Literal["best", "second"]


@dataclass(frozen=True)
class Column:
    """What stands in one column. better: which end is the better one, empty where there is none.

    detail: it is for programs, in CSV and JSON; what is printed would be too wide with it.
    """

    title: str
    better: Literal["high", "low", ""] = "high"
    digits: int = 2
    detail: bool = False


@dataclass(frozen=True)
class Value:
    """A figure over `seeds`, which a published one does not name.

    std: sample standard deviation (ddof = 1) where there are several seeds. published: what the paper prints for the
    very same thing. limited: only the first images of a test set were looked at. values: one for each of `seeds`.
    """

    mean: float
    std: float | None = None
    seeds: tuple[int, ...] = ()
    published: float | None = None
    limited: bool = False
    values: tuple[float, ...] = ()

    @classmethod
    def of(cls, cell: Cell | None, published: float | None = None) -> Value | None:
        """A cell of our results, None where it is missing."""
        return None if cell is None else cls(cell.mean, cell.std, cell.seeds, published, cell.limited, cell.values)

    @property
    def delta(self) -> float | None:
        """Ours minus published."""
        return None if self.published is None else self.mean - self.published


Item = Value | str | None
"""A figure, a text, or nothing: a result that is missing is printed as a dash."""


@dataclass(frozen=True)
class Line:
    """One line. group: lines of one group are compared with each other. average: it sums up the lines above it."""

    labels: tuple[str, ...]
    items: tuple[Item, ...]
    source: Source = "ours"
    group: str = ""
    average: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table. name: what its files are called; labels: the headers of the columns of text.

    wide: it takes both columns of a paper. compares: its lines are tests of whether lines of another sheet differ.
    """

    name: str
    title: str
    labels: tuple[str, ...]
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    wide: bool = False
    compares: bool = False

    def __post_init__(self) -> None:
        for line in self.lines:
            assert len(line.labels) == len(self.labels) and len(line.items) == len(self.columns), line

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(line.group for line in self.lines))

    @cached_property
    def seeds_differ(self) -> bool:
        """Whether figures are of different seeds, so that each has to say how many it is of."""
        values = (item for line in self.lines for item in line.items if isinstance(item, Value))
        return len({value.seeds for value in values if value.seeds}) > 1

    def printed(self) -> Sheet:
        """The same without its details."""
        places = [place for place, column in enumerate(self.columns) if not column.detail]
        columns = tuple(self.columns[place] for place in places)
        lines = (replace(line, items=tuple(line.items[place] for place in places)) for line in self.lines)
        return replace(self, columns=columns, lines=tuple(lines))

    def value(self, line: int, column: int) -> Value | None:
        item = self.lines[line].items[column]
        return item if isinstance(item, Value) else None

    def marks(self) -> Mapping[tuple[int, int], Mark]:
        """The best and the second of each group and column, by place (line, column).

        Limited results are left out, which their dagger shows. A column whose own results in a group are not all of
        the same seeds has no mark at all: the best of those that are alike may well be below one beside it, and would
        still read as the best of the group. Equal figures, as printed, share a mark.
        """
        found: dict[tuple[int, int], Mark] = {}
        for group in self.groups:
            rows = [number for number, line in enumerate(self.lines) if line.group == group]
            for position, column in enumerate(self.columns):
                if column.better:
                    found |= self._ranked(rows, position, column)
        return found

    def _ranked(self, rows: Iterable[int], position: int, column: Column) -> dict[tuple[int, int], Mark]:
        values = {row: value for row in rows if (value := self.value(row, position)) and not value.limited}
        own = {value.seeds for row, value in values.items() if self.lines[row].source == "ours"}
        if len(values) < 2 or len(own) > 1:
            return {}
        printed = {row: round(value.mean, column.digits) for row, value in values.items()}
        order = sorted(set(printed.values()), reverse=column.better == "high")
        marks: dict[float, Mark] = dict(zip(order, ("best", "second"), strict=False))
        if len(order) == 1:
            return {}
        return {(row, position): marks[value] for row, value in printed.items() if value in marks}
