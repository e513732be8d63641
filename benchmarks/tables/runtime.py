"""Make the runtime tables: the newest measurement of the suite's data sets beside the paper's, and ratios."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.results.metrics import Metric
from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import display_name
from benchmarks.results.runtime import load_runtime_reports
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.rows import BACKBONE, in_paper, published_title
from benchmarks.tables.runtime_report import GUESSED, list_notes
from benchmarks.tables.table import Cell, Column, Row, Table

COLUMNS = (
    Column("training s", "low", digits=1),
    # Extrapolated times have a separate column, so that they cannot be marked the best.
    Column(f"{GUESSED} training s", "", digits=1),
    Column("FPS encoder", digits=1),
    Column("FPS end to end", digits=1),
    Column("Accuracy"),
    Column("Steps measured", ""),
)
RATIOS = (
    Column("training s", "low"),
    Column(f"{GUESSED} training s", ""),
    Column("FPS encoder"),
    Column("FPS end to end"),
)
RATIO, RATIO_TITLE = ("procap", "maple"), "ProCAP / MaPLe-style"
PUBLISHED_WORK = {"epochs": 10, "batch": 32, "test_batch": 100}
"""The paper's settings, by the names of a measurement's settings."""
WARNINGS = ("THE MACHINE WAS BUSY", GUESSED, "†", "FAILED", "published:")
"""Prefixes of the notes of a measurement that also concern its ratios."""

Measurement = dict[str, Any]
"""A `runtime.json`, see `benchmarks.runtime`."""


def runtime_tables(suite: SuiteResults) -> list[Table]:
    """Make measurements and ratios; no table if these methods were not measured on these data sets."""
    report = newest_measurement(suite)
    if report is None:
        return []
    rows = [row for dataset in suite.datasets for row in (*_published(suite, dataset), *_ours(report, dataset))]
    title, labels = "Training time and speed of inference", ("Data set", "Method", "Mode")
    notes = _notes(suite, report)
    tables = [Table(suite.name, title, labels, COLUMNS, tuple(rows), notes, wide=True).without_empty_columns()]
    if ratios := [row for dataset in suite.datasets for row in _ratios(suite, report, dataset)]:
        remarks = [
            "What ProCAP takes or does over what MaPLe-style does on the same machine; a machine is in no ratio."
        ]
        if any(row.cells[1] for row in ratios):
            remarks.append(f"{GUESSED} of trainings that were not run to their end.")
        if any(row.source == "published" for row in ratios) and (why := why_unlike(report)):
            remarks.append(f"These ratios do not compare with published ones: {why}.")
        table = Table(f"{suite.name}-ratios", RATIO_TITLE, labels[::2], RATIOS, tuple(ratios), tuple(remarks))
        tables.append(table.without_empty_columns())
    return tables


def newest_measurement(suite: SuiteResults) -> Measurement | None:
    """Find the newest measurement with every data set and method of the suite, on its backbone."""
    from procap.weights.loading import canonical_name

    backbone, _ = canonical_name(suite.options.backbone or suite.options.profile.backbone)
    found: list[tuple[float, str, Measurement]] = []
    for file, report in load_runtime_reports(suite.results):
        sets, methods = ({row[name] for row in report["rows"]} for name in ("dataset", "method"))
        if (
            report["backbone"]["name"] == backbone
            and sets >= set(suite.datasets)
            and methods >= set(suite.options.methods)
        ):
            found.append((file.stat().st_mtime, str(file), report))
    return max(found, key=lambda one: one[:2])[2] if found else None


def compute_ratios(rows: Sequence[dict[str, Any]]) -> tuple[float | None, float | None, float | None]:
    """Compute training seconds, encoder and end-to-end speed of ProCAP over MaPLe-style, from rows of one mode."""
    pair = [next((row for row in rows if row["method"] == method), None) for method in RATIO]
    if pair[0] is None or pair[1] is None:
        return None, None, None
    seconds = [row["train_seconds"] for row in pair if row]
    speeds = [[row[name]["median"] for row in pair if row] for name in ("encoder_fps", "end_to_end_fps")]
    return _divide(seconds), _divide(speeds[0]), _divide(speeds[1])


def published_ratios(dataset: str) -> tuple[float, float] | None:
    """Compute published training seconds and speed of ProCAP over MaPLe-style; None for other data sets."""
    lines = {line.key: line for line in published.runtime() if line.dataset == dataset}
    if set(RATIO) - set(lines):
        return None
    own, other = (lines[key] for key in RATIO)
    return own.train_seconds / other.train_seconds, own.images_per_second / other.images_per_second


def why_unlike(report: Measurement) -> str:
    """Explain why the measurement differs from the work that the paper measured; empty if it does not."""
    if (backbone := report["backbone"]["name"]) != BACKBONE:
        return f"the backbone is {backbone}, not {BACKBONE}"
    settings = report["settings"]
    others = (
        f"{name.replace('_', ' ')} is {settings[name]}, not {known}"
        for name, known in PUBLISHED_WORK.items()
        if settings[name] != known
    )
    return ", ".join(others)


def is_extrapolated(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a training used in the ratio was not run to its end."""
    return any(row["extrapolated"] for row in rows if row["method"] in RATIO)


def list_warnings(report: Measurement) -> list[str]:
    """List what was measured, on what machine, and warnings about its ratios."""
    work, recipe, *others = list_notes(report)
    return [work, recipe, *(note for note in others if note.startswith(WARNINGS))]


def rows_by_mode(report: Measurement, dataset: str) -> dict[str, list[dict[str, Any]]]:
    """Group the rows of one data set by mode, and by precision if there are several."""
    several = len({row["precision"] for row in report["rows"]}) > 1
    found: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        if row["dataset"] == dataset:
            found.setdefault(f"{row['mode']} {row['precision']}" if several else row["mode"], []).append(row)
    return found


def _published(suite: SuiteResults, dataset: str) -> Iterator[Row]:
    """Make the published rows; they are of another machine, so none of their cells is marked the best."""
    name = display_name(dataset)
    for line in published.runtime() if in_paper(suite) else ():
        if line.dataset == dataset:
            numbers = (line.train_seconds, None, None, line.images_per_second, line.accuracy)
            cells = tuple(None if number is None else Metric(number) for number in numbers)
            yield Row((name, published_title(line.method), "-"), (*cells, None), "published", f"{name} {line.method}")


def _ours(report: Measurement, dataset: str) -> Iterator[Row]:
    name = display_name(dataset)
    for mode, rows in rows_by_mode(report, dataset).items():
        for row in rows:
            speeds = [Metric(row[kind]["median"]) for kind in ("encoder_fps", "end_to_end_fps")]
            steps = f"{row['steps_measured']} of {row['steps']}" if row["steps"] else "-"
            seconds = row["train_seconds"]
            training = None if seconds is None else Metric(seconds)
            cells = (*_in_column(training, row["extrapolated"]), *speeds, _accuracy(row), steps)
            yield Row((name, row["title"], mode), cells, group=name)


def _ratios(suite: SuiteResults, report: Measurement, dataset: str) -> Iterator[Row]:
    """Make rows of ratios between methods; the paper's machine is another one, so only ratios are comparable."""
    name = display_name(dataset)
    known = published_ratios(dataset) if in_paper(suite) else None
    if known:
        cells = (Metric(known[0]), None, None, Metric(known[1]))
        yield Row((name, "published"), cells, "published", f"{name} published")
    for mode, rows in rows_by_mode(report, dataset).items():
        seconds, encoder, whole = compute_ratios(rows)
        extrapolated = is_extrapolated(rows)
        paper = known if known and not why_unlike(report) else (None, None)
        numbers = ((seconds, None if extrapolated else paper[0]), (encoder, None), (whole, paper[1]))
        training, *speeds = (None if number is None else Metric(number, published=other) for number, other in numbers)
        row = Row((name, mode), (*_in_column(training, extrapolated), *speeds), group=f"{name} {mode}")
        if any(row.cells):
            yield row


def _in_column(training: Cell, extrapolated: bool) -> tuple[Cell, Cell]:
    """Place the seconds of a training, or their ratio, in the column of finished or of extrapolated ones."""
    return (None, training) if extrapolated else (training, None)


def _accuracy(row: dict[str, Any]) -> Cell:
    if row["accuracy"] is None:
        return None
    return Metric(row["accuracy"], seeds=(1,), limited=row["test_images"] < row["test_images_all"])


def _divide(pair: list[float | None]) -> float | None:
    first, second = pair
    return None if first is None or not second else first / second


def _notes(suite: SuiteResults, report: Measurement) -> tuple[str, ...]:
    """Collect the measurement's own notes about these columns."""
    others = ("GFLOP/s", "MB:", "Phases:", *(() if in_paper(suite) else ("published:",)))
    kept = (note for note in list_notes(report) if not note.startswith(others))
    return tuple(note.replace("is in the CSV", "is in runtime.csv") for note in kept)
