"""Make the tables of the runtime benchmark: of a report, and of the suite with the paper's rows and ratios."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.console.output import plural
from benchmarks.experiment import published
from benchmarks.experiment.published import display_name
from benchmarks.results.metrics import Metric
from benchmarks.results.runtime import explain_broken_report, load_runtime_reports
from benchmarks.results.suite import BACKBONE, SuiteResults
from benchmarks.tables.render import render
from benchmarks.tables.rows import published_title
from benchmarks.tables.table import Column, Row, Table
from runner.results import write_bytes

BUSY = 0.25
"""Load of other programs on each core above which a warning is written under the table."""
SUITE_COLUMNS = (
    Column("training s", "low", digits=1),
    Column("FPS encoder", digits=1),
    Column("FPS end to end", digits=1),
    Column("Accuracy"),
)
REPORT_COLUMNS = (
    *SUITE_COLUMNS,
    Column("step ms", "low", digits=1),
    *(Column(title, "low", digits=0) for title in ("MB train", "MB eval")),
)
RATIO_COLUMNS = tuple(replace(column, digits=2) for column in SUITE_COLUMNS[:3])
TITLE, LABELS = "Training time and speed of inference", ("Data set", "Method", "Mode")
RATIO, RATIO_TITLE = ("procap", "maple"), "ProCAP / MaPLe-style"

Measurement = dict[str, Any]
"""A `runtime.json`, see `benchmarks.runtime`."""


def write_report(report: Measurement, folder: Path) -> str:
    """Write runtime.md, .csv, .tex and .json to `folder`; returns the Markdown."""
    table = report_table(report)
    text = render(table, "md")
    files = {
        "md": text,
        "csv": render(table, "csv"),
        "tex": render(table, "latex"),
        "json": json.dumps(report, ensure_ascii=False, allow_nan=False, indent=1),
    }
    for suffix, content in files.items():
        write_bytes(folder / f"runtime.{suffix}", f"{content}\n".encode())
    return text


def report_table(report: Measurement) -> Table:
    """Make the table of one measurement."""
    datasets = dict.fromkeys(row["dataset"] for row in report["rows"])
    rows = [row for dataset in datasets for row in _measured_rows(report, dataset)]
    details = (*describe_measurement(report), "MB: most memory of tensors alive at once, beyond weights and data.")
    table = Table("runtime", TITLE, LABELS, REPORT_COLUMNS, rows, list_runtime_notes(report), details, wide=True)
    return table.without_empty_columns()


@explain_broken_report()
def runtime_tables(suite: SuiteResults) -> list[Table]:
    """Make measurements and ratios; no table if these methods were not measured on these data sets."""
    report = newest_measurement(suite)
    if report is None:
        return []
    rows: list[Row] = []
    for dataset in suite.options.datasets:
        rows += _published_rows(dataset) if suite.in_paper else ()
        rows += _measured_rows(report, dataset, printed_accuracies(suite, report, dataset))
    notes = list_runtime_notes(report)
    if suite.in_paper and (reason := suite.why_incomparable or why_unlike(report)):
        notes.append(f"Not comparable with published numbers: {reason}.")
    details = [*describe_measurement(report), "Published: one A100, mixed precision, ViT-B/16, the authors' code."]
    rows = [replace(row, cells=row.cells[: len(SUITE_COLUMNS)]) for row in rows]
    table = Table(suite.name, TITLE, LABELS, SUITE_COLUMNS, rows, notes, details, wide=True)
    tables = [table.without_empty_columns()]
    if ratios := [row for dataset in suite.options.datasets for row in _ratio_rows(suite, report, dataset)]:
        remarks = ["ProCAP's value divided by MaPLe-style's on the same machine."]
        if any(row.source == "published" for row in ratios) and (reason := why_unlike(report)):
            remarks.append(f"Not comparable with published ratios: {reason}.")
        table = Table(f"{suite.name}-ratios", RATIO_TITLE, LABELS[::2], RATIO_COLUMNS, ratios, remarks)
        tables.append(table.without_empty_columns())
    return tables


@explain_broken_report()
def newest_measurement(suite: SuiteResults) -> Measurement | None:
    """Return the newest measurement of the suite's data sets, methods, backbone, classes and options."""
    from procap.weights.architectures import canonical_name

    backbone, _ = canonical_name(suite.options.backbone or suite.options.profile.backbone)
    expected = backbone, suite.suite.trained_classes(suite.options), dict(suite.options.options)
    reports: list[tuple[str, str, Measurement]] = []
    for file, report in load_runtime_reports(suite.results):
        sets, methods = ({row[name] for row in report["rows"]} for name in ("dataset", "method"))
        complete = sets >= set(suite.options.datasets) and methods >= set(suite.options.methods)
        settings = report["backbone"]["name"], report["settings"]["classes"], report["settings"].get("options", {})
        if settings == expected and complete:
            reports.append((report["written"], str(file), report))
    return max(reports, key=lambda entry: entry[:2])[2] if reports else None


def compute_ratios(rows: Sequence[dict[str, Any]]) -> tuple[float | None, float | None, float | None]:
    """Compute training seconds, encoder and end-to-end speed of ProCAP over MaPLe-style, from rows of one mode."""
    by_method = {row["method"]: row for row in rows}
    if set(RATIO) - set(by_method):
        return None, None, None
    procap, other = (by_method[method] for method in RATIO)
    seconds = procap["train_seconds"] / other["train_seconds"] if other["train_seconds"] else None
    encoder, whole = (procap[name]["median"] / other[name]["median"] for name in ("encoder_fps", "end_to_end_fps"))
    return seconds, encoder, whole


def published_ratios(dataset: str) -> tuple[float, float] | None:
    """Compute published training seconds and speed of ProCAP over MaPLe-style; None for other data sets."""
    by_method = {row.key: row for row in published.runtime() if row.dataset == dataset}
    if set(RATIO) - set(by_method):
        return None
    procap, other = (by_method[key] for key in RATIO)
    return procap.train_seconds / other.train_seconds, procap.images_per_second / other.images_per_second


def printed_accuracies(suite: SuiteResults, report: Measurement, dataset: str) -> dict[str, float]:
    """Return the published accuracy of each method on a data set; empty if what was measured does not compare."""
    other_weights = report["settings"]["pretrained"] is not None
    if not suite.in_paper or suite.why_incomparable or why_unlike(report) or other_weights:
        return {}
    return {row.key: row.accuracy for row in published.runtime() if row.dataset == dataset}


def why_unlike(report: Measurement) -> str:
    """Explain why the measurement differs from the work that the paper measured; empty if it does not."""
    backbone = report["backbone"]["name"]
    return "" if backbone == BACKBONE else f"the backbone is {backbone}, not {BACKBONE}"


def rows_by_mode(report: Measurement, dataset: str) -> dict[str, list[dict[str, Any]]]:
    """Group the rows of one data set by mode, and by precision if there are several."""
    several = len({row["precision"] for row in report["rows"]}) > 1
    modes: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        if row["dataset"] == dataset:
            modes.setdefault(f"{row['mode']} {row['precision']}" if several else str(row["mode"]), []).append(row)
    return modes


def _published_rows(dataset: str) -> Iterator[Row]:
    """Make the published rows; they come from another machine, so none of their cells is marked the best."""
    name = display_name(dataset)
    for row in published.runtime():
        if row.dataset == dataset:
            cells = Metric(row.train_seconds), None, Metric(row.images_per_second), Metric(row.accuracy)
            yield Row((name, published_title(row.method), "-"), cells, "published", f"{name} {row.method}")


def _measured_rows(report: Measurement, dataset: str, printed: Mapping[str, float] | None = None) -> Iterator[Row]:
    """Make the rows of one data set. printed: published accuracies by method."""
    name = display_name(dataset)
    for mode, rows in rows_by_mode(report, dataset).items():
        for row in rows:
            published_accuracy = (printed or {}).get(row["method"])
            accuracy = _metric(row["accuracy"], published=published_accuracy)
            cells = (
                _metric(row["train_seconds"]),
                *(_metric(row[column]["median"]) for column in ("encoder_fps", "end_to_end_fps")),
                accuracy,
                _metric(row["step_seconds"] and row["step_seconds"]["median"], 1e3),
                *(_metric(row["peak_bytes"][part], 1e-6) for part in ("train", "eval")),
            )
            yield Row((name, str(row["title"]), mode), cells, group=name)


def _ratio_rows(suite: SuiteResults, report: Measurement, dataset: str) -> Iterator[Row]:
    """Make rows of ratios between methods; the paper's machine is another one, so only ratios are comparable."""
    name = display_name(dataset)
    paper = published_ratios(dataset) if suite.in_paper else None
    if paper:
        cells = Metric(paper[0]), None, Metric(paper[1])
        yield Row((name, "published"), cells, "published", f"{name} published")
    known = paper if paper and not why_unlike(report) else (None, None)
    for mode, rows in rows_by_mode(report, dataset).items():
        seconds, encoder, whole = compute_ratios(rows)
        ratios = _metric(seconds, published=known[0]), _metric(encoder), _metric(whole, published=known[1])
        if any(ratios):
            yield Row((name, mode), ratios, group=f"{name} {mode}")


def _metric(number: float | None, factor: float = 1.0, published: float | None = None) -> Metric | None:
    return None if number is None else Metric(factor * number, published=published)


def list_runtime_notes(report: Measurement) -> list[str]:
    """List what was measured where, and what limits the numbers."""
    settings, machine = report["settings"], report["environment"]
    device = machine["gpu"] or f"{machine['cpu']['name']}, {plural(machine['cpu']['threads'], 'thread')}"
    weights = "random weights" if settings["pretrained"] == "random" else f"weights {report['backbone']['weights']}"
    notes = [
        f"{report['backbone']['name']}, {weights}, {' and '.join(settings['precisions'])}, on {device}; "
        f"{settings['epochs']} epochs of ProCAP's recipe, 16 shots of {settings['classes']} classes, batches of "
        f"{settings['batch']} and {settings['test_batch']}. reference: as public code works; fast: the same numbers."
    ]
    before, _ = report["load_average"]
    if before > BUSY * machine["cpu"]["cores"]:
        notes.append(f"THE MACHINE WAS BUSY before this began (load {before}): these numbers are not to be quoted.")
    return notes


def describe_measurement(report: Measurement) -> list[str]:
    """Describe how it was measured, for CSV and JSON."""
    settings = report["settings"]
    before, after = report["load_average"]
    options = [
        f"{method}.{name} {value}"
        for method, fields in settings.get("options", {}).items()
        for name, value in fields.items()
    ]
    accelerations = [name for name, chosen in settings["accelerations"].items() if chosen]
    return [
        "FPS encoder: batches on the device; end to end: all test images, with class features and decoding. Medians of "
        "rounds, without warm-up.",
        f"Accelerations of fast: {', '.join(accelerations) or 'none'}. Load before and after: {before}, {after}; torch "
        f"{report['environment']['packages'].get('torch', '?')}.",
        *([f"Options: {', '.join(options)}."] if options else []),
        *dict.fromkeys(f"No accuracy: {row['accuracy_note']}." for row in report["rows"] if row["accuracy_note"]),
    ]
