"""Define a table: rows of labels and cells, and how both are formatted in every output format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

from benchmarks.results.metrics import MARKS, Metric

RowSource = Literal["ours", "published"]
Rank = Literal["best", "second"]
ARROWS = {"high": " ↑", "low": " ↓", "": ""}
MISSING = "-"
WIDE = 5
"""A table with more columns than this spans both columns of a paper."""


@dataclass(frozen=True)
class Column:
    """A column of cells. better: which end is the better one, empty for none."""

    title: str
    better: Literal["high", "low", ""] = "high"
    digits: int = 2


Cell = Metric | str | None
"""A number, a text, or nothing: a missing result is printed as a dash."""


@dataclass(frozen=True)
class Row:
    """A row of labels and cells. group: rows of one group are compared. average: it averages the rows above it."""

    labels: tuple[str, ...]
    cells: tuple[Cell, ...]
    source: RowSource = "ours"
    group: str = ""
    average: bool = False

    @property
    def block(self) -> tuple[str, bool]:
        """The group, and whether the row's method looks at unlabelled images: rows of a block are ranked together."""
        return self.group, any(isinstance(cell, Metric) and cell.sees_unlabelled for cell in self.cells)


@dataclass(frozen=True)
class Table:
    """A table of rows. labels: the headings of the rows' labels.

    notes: at most four lines, printed below it. details: further ones, in JSON. matrix: it counts true classes by
    predicted ones; cells of a page are shaded by their share of the row. reference: label of the rows to compare with.
    """

    name: str
    title: str
    labels: tuple[str, ...]
    columns: Sequence[Column]
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    details: Sequence[str] = ()
    matrix: bool = False
    reference: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row.labels) == len(self.labels) and len(row.cells) == len(self.columns), row
        # Within a group, rows whose method looks at unlabelled images are the last.
        groups = list(dict.fromkeys(row.group for row in self.rows))
        ordered = sorted(self.rows, key=lambda row: (groups.index(row.group), row.block))
        object.__setattr__(self, "rows", tuple(ordered))

    @property
    def blocks(self) -> list[tuple[str, bool]]:
        return list(dict.fromkeys(row.block for row in self.rows))

    def starts_block(self, number: int) -> bool:
        """Whether a rule stands above row `number`: it is the first of a block, or averages the rows above it."""
        row, previous = self.rows[number], self.rows[max(0, number - 1)]
        return row.block != previous.block or row.average > previous.average

    @property
    def is_wide(self) -> bool:
        return len(self.labels) + len(self.columns) > WIDE

    @cached_property
    def metrics(self) -> list[Metric]:
        return [cell for row in self.rows for cell in row.cells if isinstance(cell, Metric)]

    @cached_property
    def seeds_differ(self) -> bool:
        """Whether metrics have different seeds, so that each cell must show its number of seeds."""
        return len({metric.seeds for metric in self.metrics if metric.seeds}) > 1

    @property
    def mixed(self) -> bool:
        """Whether the table has both published rows and ours, which must be distinguishable."""
        return len({row.source for row in self.rows}) > 1

    @property
    def text_columns(self) -> list[bool]:
        """Whether each column, the labels first, has text, which is aligned to the left."""
        columns = zip(*(row.cells for row in self.rows), strict=True) if self.rows else [()] * len(self.columns)
        return [True] * len(self.labels) + [any(isinstance(cell, str) for cell in column) for column in columns]

    def ranks(self) -> Mapping[tuple[int, int], Rank]:
        """Find the best and the second of each block and column, by (row, column).

        Limited results and those chosen by test accuracy are left out. There is no rank where results of ours have
        different seeds, as the best of the comparable ones would be read as the best of the block. Numbers that are
        equal as printed share a rank.
        """
        ranks: dict[tuple[int, int], Rank] = {}
        for block, (index, column) in product(self.blocks, enumerate(self.columns)):
            printed: dict[int, float] = {}
            seeds = set()
            for number, row in enumerate(self.rows):
                cell = row.cells[index]
                if row.block == block and isinstance(cell, Metric) and not (cell.limited or cell.chosen_on_test):
                    printed[number] = round(cell.mean, column.digits)
                    # Published numbers are ranked with ours, although their seeds are unknown.
                    seeds |= {cell.seeds} if row.source == "ours" else set()
            # Distinct printed values: two equal numbers are both the best, and the next one is the second.
            order = sorted(set(printed.values()), reverse=column.better == "high")
            if column.better and len(order) > 1 and len(seeds) <= 1:
                of_values: dict[float, Rank] = dict(zip(order, ("best", "second"), strict=False))
                ranks |= {(number, index): of_values[value] for number, value in printed.items() if value in of_values}
        return ranks


def format_rows(
    table: Table, styles: Mapping[Rank | None, str], italics: str, escape: Callable[[str], str]
) -> list[list[str]]:
    """Format labels and cells of every row. styles, italics: format strings by rank, and of published rows.

    The first of several labels is printed only once for adjacent rows that share it. Labels of published rows among
    ours are in italics, except a first label that also applies to our rows.
    """
    ranks = table.ranks()
    shared = {row.labels[0] for row in table.rows if row.source == "ours"}
    body, previous = [], None
    for number, row in enumerate(table.rows):
        labels = [escape(label) for label in row.labels]
        if row.source == "published" and table.mixed:
            first = int(row.labels[0] in shared)
            labels[first:] = [italics.format(label) for label in labels[first:]]
        elif table.reference in row.labels:
            labels[row.labels.index(table.reference)] += " (reference)"
        # A single label is kept, as a row without any label could not be read.
        if len(labels) > 1 and row.labels[0] == previous:
            labels[0] = ""
        previous = row.labels[0]
        cells = [
            format_cell(table, cell, index, styles[ranks.get((number, index))], escape)
            for index, cell in enumerate(row.cells)
        ]
        body.append([*labels, *cells])
    return body


def format_cell(table: Table, cell: Cell, index: int, template: str, escape: Callable[[str], str]) -> str:
    """Format a cell of a column: 82.28 ± 0.18 (n=3) (+1.02) †; `template` is put around the mean."""
    if not isinstance(cell, Metric):
        return MISSING if cell is None else escape(cell)
    digits = table.columns[index].digits
    text = template.format(format_number(cell.mean, digits))
    if cell.std is not None:
        text += f" ± {format_number(cell.std, digits)}"
    if table.seeds_differ and cell.seeds:
        text += f" (n={len(cell.seeds)})"
    if cell.delta is not None:
        text += f" ({format_number(cell.delta, digits, '+')})"
    return text + "".join(f" {meaning[0]}" for mark, meaning in MARKS.items() if getattr(cell, mark))


def format_number(number: float, digits: int, sign: str = "") -> str:
    """Format 1,234.50 with the sign of the rounded number, so that 0.00 is never -0.00. sign: as in a format string."""
    return f"{round(number, digits) or 0.0:{sign},.{digits}f}"


def list_headers(table: Table) -> list[str]:
    """List labels, and column titles with an arrow to their better end."""
    return [*table.labels, *(column.title + ARROWS[column.better] for column in table.columns)]


def list_notes(table: Table) -> list[str]:
    """List the notes below a table; the first begins with what styles and signs mean."""
    first = " ".join(filter(None, [describe_styles(table), *table.notes[:1]]))
    return [first, *table.notes[1:]] if first else []


def describe_styles(table: Table) -> str:
    """Describe what bold type, italics, brackets and signs mean."""
    ranks = set(table.ranks().values())
    sentences = []
    if ranks:
        per_group = " of each group" if len(table.blocks) > 1 else ""
        second = ", second underlined" if "second" in ranks else ""
        sentences.append(f"Best{per_group} in bold{second}.")
    if table.mixed:
        sentences.append("Italics: published.")
    if any(metric.delta is not None for metric in table.metrics):
        sentences.append("In brackets: ours minus published.")
    if table.seeds_differ:
        sentences.append("n: number of seeds; means over different seeds are not ranked.")
    if any(metric.std is not None for metric in table.metrics):
        sentences.append("±: sample standard deviation of the seeds' values.")
    return " ".join([*sentences, *describe_signs(table)])


def describe_signs(table: Table) -> list[str]:
    """Describe each sign at a number of the table."""
    return [meaning for mark, meaning in MARKS.items() if any(getattr(cell, mark) for cell in table.metrics)]
