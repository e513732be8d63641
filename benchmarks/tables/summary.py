"""Summarize a table in one line: its best row, and the place of ProCAP."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.experiment.titles import title_method
from benchmarks.results.metrics import Metric
from benchmarks.tables.table import Row, Table


def describe_best(table: Table) -> str:
    """Describe the best of `rank_rows`, and the place of ProCAP; "" for fewer than two rows."""
    measure, numbers = rank_rows(table)
    if len(numbers) < 2:
        return ""
    best = max(numbers.values())
    *others, last = (name for name, number in numbers.items() if number == best)
    winners = f"{', '.join(others)} and {last}" if others else last
    text = f"best ({measure}): {winners} with {best:.2f} %"
    # A method can have several rows, such as one for each number of tokens.
    ours = [number for name, number in numbers.items() if name.partition(",")[0] == title_method("procap")]
    if not ours or max(ours) == best:
        return text
    rank = 1 + sum(number > max(ours) for number in numbers.values())
    return f"{text}; ProCAP is number {rank} of {len(numbers)} with {max(ours):.2f} %"


def rank_rows(table: Table) -> tuple[str, dict[str, float]]:
    """Return the measure of the last ranked column, and its numbers by our rows, of several groups those of averages.

    Rows are those that `Table.ranks` compares: there are none without averages over several groups, or if seeds differ.
    """
    rows = [row for row in table.rows if row.source == "ours"]
    # Of a sweep, only configurations that were stopped have a group.
    rows = [row for row in rows if not row.group] or rows
    ranked = [index for index, column in enumerate(table.columns) if column.better == "high"]
    if not ranked or (len({row.group for row in rows}) > 1 and not rows[-1].average):
        return "", {}
    column, numbers, seeds = table.columns[ranked[-1]], dict[str, float](), set()
    for row in rows:
        cell = row.cells[ranked[-1]]
        if row.group != rows[-1].group or not isinstance(cell, Metric):
            continue
        # Methods that look at unlabelled images have a block of their own.
        if not (cell.limited or cell.chosen_on_test or cell.sees_unlabelled):
            numbers[_name(table, row)] = round(cell.mean, column.digits)
            seeds.add(cell.seeds)
    measure = column.title.removesuffix(", %") + (", average" if rows and rows[-1].average else "")
    return measure, numbers if len(seeds) < 2 else {}


def find_hm(tables: Iterable[Table], name: str) -> Metric | None:
    """Find HM in our row `name` of the first table with such a column, of several groups in the row of averages."""
    for table in tables:
        titles, rows = [column.title for column in table.columns], [row for row in table.rows if row.source == "ours"]
        several = len({row.group for row in rows}) > 1
        for row in rows if "HM" in titles else ():
            cell = row.cells[titles.index("HM")]
            if name in row.labels and row.average >= several and isinstance(cell, Metric):
                return cell
    return None


def _name(table: Table, row: Row) -> str:
    """Return the labels of a row from the method on, else without that of its group: "ProCAP, tokens 4"."""
    start = table.labels.index("Method") if "Method" in table.labels else row.labels[0] == row.group
    (_, name), *more = [*zip(table.labels, row.labels, strict=True)][start:]
    return ", ".join([name, *(f"{heading.lower()} {label}" for heading, label in more)])
