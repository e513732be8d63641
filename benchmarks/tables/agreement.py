"""Compare the published numbers of a suite with ours, and report whether they agree."""

from __future__ import annotations

from benchmarks.console.output import plural
from benchmarks.results.metrics import Metric
from benchmarks.results.suite_results import SuiteResults
from benchmarks.tables.table import Column, Row, Table, format_number
from procap.errors import UserError
from shards.names import join_first

OK, OUTSIDE = "ok", "OUTSIDE"


def check_table(results: SuiteResults, tolerance: float) -> tuple[Table, bool]:
    """Make a row for each published number of the suite's main table, the largest difference first.

    tolerance: the largest difference in percentage points that agrees; half of the last printed decimal is allowed as
    well. Returns the table, and whether all numbers agree and no result is missing. Raises UserError with the reason
    if nothing can be compared.
    """
    seeds, usual = results.options.seeds, results.suite.seeds
    of_seeds = f"the seeds are {', '.join(map(str, seeds))}, not {', '.join(map(str, usual))}"
    if reason := results.why_incomparable or of_seeds * ({*seeds} != {*usual}):
        raise UserError(f"{results.name}: nothing to check, these results do not compare with published ones: {reason}")
    rows: list[tuple[float, Row]] = []
    # The main table has every published number; the other tables repeat them.
    names = results.name, f"{results.name}-accuracy"
    for table in (table for table in results.suite.tables(results) if table.name in names):
        for row in table.rows:
            for column, cell in zip(table.columns, row.cells, strict=True):
                if isinstance(cell, Metric) and cell.published is not None and cell.delta is not None:
                    verdict = OK if abs(cell.delta) <= tolerance + 0.005 else OUTSIDE
                    # Texts, because a metric would add columns for its published number and difference in CSV.
                    texts = format_number(cell.published, 2), format_number(cell.delta, 2, "+"), verdict
                    cells = (Metric(cell.mean, cell.std), *texts)
                    rows.append((abs(cell.delta), Row((", ".join(row.labels), column.title), cells)))
    if not rows:
        raise UserError(f"{results.name}: nothing to check, no result here has a published number")
    rows.sort(key=lambda row: -row[0])
    agreeing = sum(row.cells[-1] == OK for _, row in rows)
    notes = [f"{agreeing} of {plural(len(rows), 'published number')} agree within {tolerance:g} points."]
    incomplete = [f"{path} on {target}" for path, target in results.missing]
    incomplete += [f"{path} (--limit)" for path in results.frame[results.frame.limited].path.unique()]
    if incomplete:
        notes.append(f"MISSING, not compared: {join_first(incomplete)}.")
    columns = [Column(title, "") for title in ("Ours", "Published", "Difference", "Verdict")]
    title, labels = f"{results.suite.heading}: ours and published", ("Row", "Metric")
    table = Table(f"{results.name}-check", title, labels, columns, [row for _, row in rows], notes)
    return table, agreeing == len(rows) and not incomplete
