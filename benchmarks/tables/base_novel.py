"""Make the tables of suites that test on base and novel classes: from the main table to the ablation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.experiment import published
from benchmarks.experiment.published import AVERAGE, display_name
from benchmarks.experiment.suite import Variant
from benchmarks.results.metrics import Metric, average
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.calibration import calibration_tables
from benchmarks.tables.comparison import comparison_tables
from benchmarks.tables.notes import suite_notes
from benchmarks.tables.rows import (
    HALVES,
    NOTE_ON_SPEED,
    SPEEDS,
    add_delta_column,
    mark_reproduced,
    measure_speeds,
    published_group,
    published_row,
    published_title,
)
from benchmarks.tables.table import Cell, Column, Row, Table

LABELS = ("Data set", "Method")
PAPER_TOKENS = 4
"""Prompt tokens of the paper's ProCAP."""
RULE = "HM: harmonic mean of base and novel accuracy."
RULE_OF_AVERAGES = "HM: harmonic mean of base and novel accuracy; of the average: of the averages."
RULE_OF_MEANS = "HM: harmonic mean; of the average: mean of the data sets' HMs."
NOTE_ON_TOKEN_SETS = (
    'Without cross-attention each layer has a token set; "one token set" puts the same tokens into every layer. The '
    'paper\'s MaPLe-style is compared with "All off"; it may also mean MaPLe, whose row has its published recipe.'
)


def base_to_novel_tables(suite: SuiteResults) -> list[Table]:
    """Make the averages if there are several data sets, each data set as in the paper, speeds, and the comparison."""
    main = _halves_table(suite, suite.name, suite.suite.heading, printed="base_to_novel")
    tables = [_averages(suite)] if len(suite.options.datasets) > 1 else []
    rows = {title: suite.rows(variant) for title, variant in suite.by_title.items()}
    fits = calibration_tables(rows, suite_notes(suite), suite.name)
    return [*tables, add_delta_column(suite, main, "HM"), *_speeds(suite), *fits, *comparison_tables(suite)]


def stability_tables(suite: SuiteResults) -> list[Table]:
    """Make mean and standard deviation of every data set; the average's HM is the mean of HMs, as in the paper."""
    averages = _list_means(
        suite, {title: suite.halves(variant, AVERAGE)[2] for title, variant in suite.by_title.items()}
    )
    detail = averages and f"HM of average base and average novel: {averages}."
    rule = RULE_OF_MEANS if len(suite.options.datasets) > 1 else RULE
    main = _halves_table(suite, suite.name, "Stability over seeds", rule, detail, printed="seed_stability")
    return [main, *comparison_tables(suite)]


def ablation_tables(suite: SuiteResults) -> list[Table]:
    """Make harmonic means of every variant by data set, then base and novel accuracies."""
    sets = suite.datasets_and_average
    rows = []
    for row in published.ablation() if suite.in_paper else ():
        numbers = [_ablation_hm(suite, row, name) for name in sets]
        # The paper has no numbers for other data sets.
        if any(number is not None for number in numbers):
            rows.append(published_row([published_title(row.variant)], numbers, group=published_group(suite)))
    for title, variant in suite.by_title.items():
        cells = tuple(_cells(suite, variant, name, "ablation")[2] for name in sets)
        rows.append(Row((mark_reproduced(title, cells),), cells))
    averages = _list_means(
        suite, {title: suite.halves(variant, AVERAGE)[2] for title, variant in suite.by_title.items()}
    )
    details = [averages and f"HM of average base and average novel: {averages}."]
    if any(variant.key.get("variant") != title for title, variant in suite.by_title.items()):
        details.append(NOTE_ON_TOKEN_SETS)
    notes = suite_notes(suite, RULE_OF_MEANS if len(sets) > 1 else RULE, details=details)
    columns = [Column(display_name(name)) for name in sets]
    title = suite.suite.heading
    main = Table(suite.name, title, ("Variant",), columns, rows, notes.lines, notes.details, wide=True)
    halves = _halves_table(suite, f"{suite.name}-halves", f"{title}: both halves", labels=("Data set", "Variant"))
    return [main, halves, *comparison_tables(suite)]


def prompt_length_tables(suite: SuiteResults) -> list[Table]:
    """Make base, novel and HM by the number of tokens, for every data set and on average."""
    main = _halves_table(suite, suite.name, "Number of prompt tokens", key="n_ctx", labels=(*LABELS, "Tokens"))
    unchanged = [title for title, variant in suite.by_title.items() if variant.key.get("n_ctx") == PAPER_TOKENS]
    return [main, *comparison_tables(suite, reference=unchanged[0] if unchanged else None)]


def duration_tables(suite: SuiteResults) -> list[Table]:
    """Make results by the number of epochs: on average, as in the paper, and for every data set."""
    return [*_average_first(suite, ("Method", "Epochs"), "epochs"), *comparison_tables(suite)]


def _average_first(suite: SuiteResults, labels: tuple[str, ...], key: str = "") -> list[Table]:
    """Make the averages if there are several data sets, with the paper's, and the table of every data set."""
    title, tables = suite.suite.heading, []
    if len(suite.options.datasets) > 1:
        rows = _rows(suite, AVERAGE, suite.suite.published, key, single=True)
        notes = suite_notes(suite, RULE_OF_AVERAGES, details=[_other_reading(suite)])
        main = f"{title}, on average over {len(suite.options.datasets)} data sets"
        tables = [Table(suite.name, main, labels, HALVES, rows, notes.lines, notes.details, suite.in_paper)]
    name = f"{suite.name}-datasets" if tables else suite.name
    return [*tables, _halves_table(suite, name, title, key=key, labels=(LABELS[0], *labels))]


def _other_reading(suite: SuiteResults) -> str:
    """List the means of the data sets' HMs, where the table has HMs of averages."""
    means = _list_means(suite, {title: suite.mean_of_hms(variant) for title, variant in suite.by_title.items()})
    return means and f"Mean of the data sets' HMs: {means}."


def _list_means(suite: SuiteResults, means: Mapping[str, Metric | None]) -> str:
    """List means over several data sets by title, without those that are missing."""
    if len(suite.options.datasets) < 2:
        return ""
    return "; ".join(f"{title} {mean.mean:.2f}" for title, mean in means.items() if mean)


def pair_halves(
    suite: SuiteResults, variant: Variant, dataset: str, printed: str = ""
) -> list[tuple[Metric | None, float | None]]:
    """List our base, novel and HM on a data set or on average, each with that of the paper's table `printed`."""
    base, novel, hm = suite.halves(variant, dataset)
    if dataset == AVERAGE and printed in ("seed_stability", "ablation"):
        hm = suite.mean_of_hms(variant)
    return list(zip((base, novel, hm), printed_halves(suite, variant, dataset, printed), strict=True))


def printed_halves(suite: SuiteResults, variant: Variant, dataset: str, printed: str) -> Sequence[float | None]:
    """Return what the paper's table `printed` has for a variant on a data set, or on average over the same ones."""
    if printed == "ablation":
        rows = [row for row in published.ablation() if row.variant == variant.key.get("variant")]
        return None, None, _ablation_hm(suite, rows[0], dataset) if rows else None
    by_key = printed == "training_duration"
    epochs = variant.key.get("epochs", 0) if by_key else 0
    row = published.halves(variant.method, dataset, printed, epochs)
    other_average = dataset == AVERAGE and not suite.covers_paper
    if row is None or other_average or (variant.changed and not by_key):
        return None, None, None
    return row.base, row.novel, row.hm


def _ablation_hm(suite: SuiteResults, row: Any, dataset: str) -> float | None:
    """Return HM of a row of the paper's ablation on a data set, or on average over the same ones."""
    if dataset == AVERAGE:
        return row.average if set(suite.options.datasets) == set(row.hm) else None
    return row.hm.get(dataset)


def _halves_table(
    suite: SuiteResults,
    name: str,
    heading: str,
    rule: str = "",
    detail: str = "",
    *,
    printed: str = "",
    key: str = "",
    labels: tuple[str, ...] = LABELS,
) -> Table:
    """Make base, novel and HM of every variant, for every data set and on average. printed, key: see `_rows`."""
    rows = [row for dataset in suite.datasets_and_average for row in _rows(suite, dataset, printed, key)]
    if not rule:
        rule = RULE_OF_AVERAGES if len(suite.options.datasets) > 1 else RULE
        detail = _other_reading(suite)
    notes = suite_notes(suite, rule, details=[detail])
    wide = bool(key) or (bool(printed) and suite.in_paper)
    return Table(name, heading, labels, HALVES, rows, notes.lines, notes.details, wide)


def _rows(suite: SuiteResults, dataset: str, printed: str, key: str = "", *, single: bool = False) -> list[Row]:
    """Make base, novel and HM of the published methods, then of every variant, on one data set or on average.

    printed: the paper's table whose rows are next to ours. key: of the variants, shown in a column. single: the table
    has no other data set, so this one is neither a label nor a group.
    """
    name = "" if single else display_name(dataset)
    more: dict[str, Any] = {"average": dataset == AVERAGE and not single}
    first = [] if single else [name]
    rows = []
    # A published average is shown only next to one over the same data sets.
    paper = suite.in_paper and (dataset != AVERAGE or suite.covers_paper)
    for row in published.halves_rows(printed) if paper else ():
        if row.dataset == dataset:
            labels = [*first, published_title(row.method, row.venue), *([str(row.epochs)] if key else [])]
            deviations = (getattr(row, f"{half}_std", None) for half in ("base", "novel", "hm"))
            numbers = map(Metric, (row.base, row.novel, row.hm), deviations)
            rows.append(published_row(labels, numbers, group=published_group(suite, name), **more))
    for title, variants in suite.group_by_title(key).items():
        for variant in variants:
            cells = _cells(suite, variant, dataset, printed)
            labels = [*first, mark_reproduced(title, cells), *([str(variant.key.get(key) or "-")] if key else [])]
            rows.append(Row(tuple(labels), cells, group=name, **more))
    return rows


def _averages(suite: SuiteResults) -> Table:
    """Make the table of averages, with both readings of the average HM."""
    means = map(suite.mean_of_hms, suite.by_title.values())
    rows = [
        replace(row, cells=(*row.cells, next(means) if row.source == "ours" else None))
        for row in _rows(suite, AVERAGE, "base_to_novel", single=True)
    ]
    notes = suite_notes(suite, "HM: of the averages; mean of HMs: of the data sets.")
    name, title = (
        f"{suite.name}-average",
        f"{suite.suite.heading}, on average over {len(suite.options.datasets)} data sets",
    )
    columns = (*HALVES, Column("mean of HMs"))
    table = Table(name, title, ("Method",), columns, rows, notes.lines, notes.details, wide=True)
    return add_delta_column(suite, table, "HM")


def _speeds(suite: SuiteResults) -> list[Table]:
    """Make the table of training and evaluation speeds over data sets; no table if no method has all of them."""
    table = []
    for name, variant in suite.by_title.items():
        by_dataset: list[tuple[Metric | None, ...]] = []
        for dataset in suite.options.datasets:
            rows = suite.rows(variant, dataset).drop_duplicates(["path", "target"])
            runs = [run for run in suite.runs if (run.variant, run.dataset) == (variant, dataset)]
            whole = len(rows) == sum(len(run.spec.targets) for run in runs) and not rows.limited.any()
            fps, seconds, fps_model = measure_speeds(rows) if whole else (None, None, None)
            timed = rows.fps.notna().all()
            by_dataset.append((fps if timed else None, fps_model if timed else None, seconds))
        table.append(Row((name,), tuple(average(column) for column in zip(*by_dataset, strict=True))))
    if not any(cell for row in table for cell in row.cells):
        return []
    columns = (SPEEDS[0], Column("FPS of the model", "", digits=0), SPEEDS[1])
    notes = ["Means over data sets; not measured in the same conditions."]
    title = f"{suite.suite.heading}: speed"
    return [Table(f"{suite.name}-speed", title, ("Method",), columns, table, notes, (NOTE_ON_SPEED,))]


def _cells(suite: SuiteResults, variant: Variant, dataset: str, printed: str) -> tuple[Cell, ...]:
    """Make base, novel and HM of one row, with published numbers for the same data sets."""
    sets = suite.options.datasets if dataset == AVERAGE else (dataset,)
    pairs = pair_halves(suite, variant, dataset, printed)
    return tuple(suite.with_published(variant, sets, metric, number) for metric, number in pairs)
