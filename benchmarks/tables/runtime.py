"""Make the tables of the runtime benchmark: of a whole report, and of the suite beside the paper's with ratios."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.results.metrics import Metric
from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import display_name
from benchmarks.results.runtime import load_runtime_reports
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.render import render
from benchmarks.tables.rows import BACKBONE, in_paper, published_title
from benchmarks.tables.runtime_notes import EXTRAPOLATED, describe_case, list_notes
from benchmarks.tables.table import Cell, Column, Row, Table
from runner.results import write_bytes

# Extrapolated times have a separate column, so that they cannot be marked the best.
SUITE_COLUMNS = (
    Column("training s", "low", digits=1),
    Column(f"{EXTRAPOLATED} training s", "", digits=1),
    Column("FPS encoder", digits=1),
    Column("FPS end to end", digits=1),
    Column("Accuracy"),
    Column("Steps measured", ""),
)
REPORT_COLUMNS = (
    *SUITE_COLUMNS,
    Column("step ms", "low", digits=1),
    Column("MB train", "low", digits=0),
    Column("MB eval", "low", digits=0),
    Column("GFLOP/s train", "", digits=0),
    Column("% of peak, train", "", digits=0),
    Column("GFLOP/s eval", "", digits=0),
    Column("% of peak, eval", "", digits=0),
)
RATIO_COLUMNS = (
    Column("training s", "low"),
    Column(f"{EXTRAPOLATED} training s", ""),
    Column("FPS encoder"),
    Column("FPS end to end"),
)
SIZE_COLUMNS = (
    Column("reference ms", "", digits=1),
    Column("fast ms", "", digits=1),
    Column("ratio", ""),
    Column("counted", ""),
    Column("reached %", "", digits=0),
)
PHASES = ("load", "start", "data", "forward", "backward", "optimizer", "evaluation")
TITLE, LABELS = "Training time and speed of inference", ("Data set", "Method", "Mode")
RATIO, RATIO_TITLE = ("procap", "maple"), "ProCAP / MaPLe-style"

Measurement = dict[str, Any]
"""A `runtime.json`, see `benchmarks.runtime`."""


def write_report(report: Measurement, folder: Path) -> str:
    """Write runtime.md, .csv, .tex and .json to `folder`; returns the Markdown."""
    speed, *others = report_tables(report)
    text = "\n\n".join(render(table, "md") for table in (*others, speed))
    files = {
        "md": text,
        "csv": render(speed, "csv"),
        "tex": render(speed, "latex"),
        "json": json.dumps(report, ensure_ascii=False, allow_nan=False, indent=1),
    }
    for suffix, content in files.items():
        write_bytes(folder / f"runtime.{suffix}", f"{content}\n".encode())
    return text


def report_tables(report: Measurement) -> list[Table]:
    """Make the table of speed with its notes, and those of sizes and phases."""
    datasets = dict.fromkeys(row["dataset"] for row in report["rows"])
    rows = [row for dataset in datasets for row in _measured_rows(report, dataset)]
    rows += [row for dataset in dict.fromkeys(one.dataset for one in published.runtime())
             for row in _published_rows(dataset)]  # fmt: skip
    tables = [Table("runtime", TITLE, LABELS, REPORT_COLUMNS, tuple(rows), tuple(list_notes(report)), wide=True)]
    if report["scaling"]:
        sizes = []
        for one in report["scaling"]:
            point, seconds = one["point"], one["seconds"]
            work = {"train": "training step", "eval": "evaluation"}[point["kind"]]
            labels = work, str(point["classes"]), str(point["batch"]), point["precision"]
            milliseconds = (_metric(seconds[mode]["median"], 1e3) for mode in ("reference", "fast"))
            ratios = _metric(one["ratio"]), _metric(one["counted"]), _metric(one["reached"], 100)
            sizes.append(Row(labels, (*milliseconds, *ratios), group=f"{labels}"))
        labels = "Work", "Classes", "Batch", "Precision"
        tables.append(Table("sizes", "Time against classes and images", labels, SIZE_COLUMNS, tuple(sizes)))
    phases = tuple(
        Row((describe_case(row),), tuple(_metric(row["phases"][name]) for name in PHASES)) for row in report["rows"]
    )
    columns = tuple(Column(name, "") for name in PHASES)
    return [*tables, Table("phases", "Seconds of the measured steps", ("Case",), columns, phases)]


def runtime_tables(suite: SuiteResults) -> list[Table]:
    """Make measurements and ratios; no table if these methods were not measured on these data sets."""
    report = newest_measurement(suite)
    if report is None:
        return []
    rows: list[Row] = []
    for dataset in suite.options.datasets:
        rows += _published_rows(dataset) if in_paper(suite) else ()
        rows += _measured_rows(report, dataset)
    others = ("GFLOP/s", "MB:", "Phases:", *(() if in_paper(suite) else ("published:",)))
    notes = tuple(note for note in list_notes(report) if not note.startswith(others))
    own_rows = tuple(replace(row, cells=row.cells[: len(SUITE_COLUMNS)]) for row in rows)
    tables = [Table(suite.name, TITLE, LABELS, SUITE_COLUMNS, own_rows, notes, wide=True).without_empty_columns()]
    if ratios := [row for dataset in suite.options.datasets for row in _ratio_rows(suite, report, dataset)]:
        remarks = [
            "What ProCAP takes or does over what MaPLe-style does on the same machine; a machine is in no ratio."
        ]
        if any(row.cells[1] for row in ratios):
            remarks.append(f"{EXTRAPOLATED} of trainings that were not run to their end.")
        if any(row.source == "published" for row in ratios) and (why := why_unlike(report)):
            remarks.append(f"These ratios do not compare with published ones: {why}.")
        table = Table(f"{suite.name}-ratios", RATIO_TITLE, LABELS[::2], RATIO_COLUMNS, tuple(ratios), tuple(remarks))
        tables.append(table.without_empty_columns())
    return tables


def newest_measurement(suite: SuiteResults) -> Measurement | None:
    """Find the newest measurement with every data set and method of the suite, on its backbone."""
    from procap.weights.loading import canonical_name

    backbone, _ = canonical_name(suite.options.backbone or suite.options.profile.backbone)
    found: list[tuple[float, str, Measurement]] = []
    for file, report in load_runtime_reports(suite.results):
        sets, methods = ({row[name] for row in report["rows"]} for name in ("dataset", "method"))
        complete = sets >= set(suite.options.datasets) and methods >= set(suite.options.methods)
        if report["backbone"]["name"] == backbone and complete:
            found.append((file.stat().st_mtime, str(file), report))
    return max(found, key=lambda one: one[:2])[2] if found else None


def compute_ratios(rows: Sequence[dict[str, Any]]) -> tuple[float | None, float | None, float | None]:
    """Compute training seconds, encoder and end-to-end speed of ProCAP over MaPLe-style, from rows of one mode."""
    own, other = (next((row for row in rows if row["method"] == method), None) for method in RATIO)
    if own is None or other is None:
        return None, None, None
    trained = own["train_seconds"] is not None and other["train_seconds"]
    seconds = own["train_seconds"] / other["train_seconds"] if trained else None
    encoder, whole = (own[name]["median"] / other[name]["median"] for name in ("encoder_fps", "end_to_end_fps"))
    return seconds, encoder, whole


def published_ratios(dataset: str) -> tuple[float, float] | None:
    """Compute published training seconds and speed of ProCAP over MaPLe-style; None for other data sets."""
    by_method = {one.key: one for one in published.runtime() if one.dataset == dataset}
    if set(RATIO) - set(by_method):
        return None
    own, other = (by_method[key] for key in RATIO)
    return own.train_seconds / other.train_seconds, own.images_per_second / other.images_per_second


def why_unlike(report: Measurement) -> str:
    """Explain why the measurement differs from the work that the paper measured; empty if it does not."""
    backbone = report["backbone"]["name"]
    return "" if backbone == BACKBONE else f"the backbone is {backbone}, not {BACKBONE}"


def is_extrapolated(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a training used in the ratio was not run to its end."""
    return any(row["extrapolated"] for row in rows if row["method"] in RATIO)


def rows_by_mode(report: Measurement, dataset: str) -> dict[str, list[dict[str, Any]]]:
    """Group the rows of one data set by mode, and by precision if there are several."""
    several = len({row["precision"] for row in report["rows"]}) > 1
    found: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        if row["dataset"] == dataset:
            found.setdefault(f"{row['mode']} {row['precision']}" if several else row["mode"], []).append(row)
    return found


def _published_rows(dataset: str) -> Iterator[Row]:
    """Make the published rows; they are of another machine, so none of their cells is marked the best."""
    name = display_name(dataset)
    for one in published.runtime():
        if one.dataset == dataset:
            cells = Metric(one.train_seconds), None, None, Metric(one.images_per_second), Metric(one.accuracy)
            rest = [None] * (len(REPORT_COLUMNS) - len(cells))
            title = published_title(one.method)
            yield Row((name, title, "-"), (*cells, *rest), "published", f"{name} {one.method}")


def _measured_rows(report: Measurement, dataset: str) -> Iterator[Row]:
    name = display_name(dataset)
    for mode, rows in rows_by_mode(report, dataset).items():
        for row in rows:
            rates, shares, peaks = row["flops_per_second"], row["share_of_peak"], row["peak_bytes"]
            limited = row["test_images"] < row["test_images_all"]
            accuracy = None if row["accuracy"] is None else Metric(row["accuracy"], seeds=(1,), limited=limited)
            cells = (
                *_training_cells(_metric(row["train_seconds"]), row["extrapolated"]),
                _metric(row["encoder_fps"]["median"]),
                _metric(row["end_to_end_fps"]["median"]),
                accuracy,
                f"{row['steps_measured']} of {row['steps']}" if row["steps"] else "-",
                _metric(row["step_seconds"] and row["step_seconds"]["median"], 1e3),
                _metric(peaks["train"], 1e-6),
                _metric(peaks["eval"], 1e-6),
                _metric(rates["train"], 1e-9),
                _metric(shares["train"], 100),
                _metric(rates["eval"], 1e-9),
                _metric(shares["eval"], 100),
            )
            yield Row((name, row["title"], mode), cells, group=name)


def _ratio_rows(suite: SuiteResults, report: Measurement, dataset: str) -> Iterator[Row]:
    """Make rows of ratios between methods; the paper's machine is another one, so only ratios are comparable."""
    name = display_name(dataset)
    paper = published_ratios(dataset) if in_paper(suite) else None
    if paper:
        cells = (Metric(paper[0]), None, None, Metric(paper[1]))
        yield Row((name, "published"), cells, "published", f"{name} published")
    known = paper if paper and not why_unlike(report) else (None, None)
    for mode, rows in rows_by_mode(report, dataset).items():
        seconds, encoder, whole = compute_ratios(rows)
        extrapolated = is_extrapolated(rows)
        training = _metric(seconds, published=None if extrapolated else known[0])
        speeds = _metric(encoder), _metric(whole, published=known[1])
        row = Row((name, mode), (*_training_cells(training, extrapolated), *speeds), group=f"{name} {mode}")
        if any(row.cells):
            yield row


def _training_cells(training: Cell, extrapolated: bool) -> tuple[Cell, Cell]:
    """Place the seconds of a training, or their ratio, in the column of finished or of extrapolated ones."""
    return (None, training) if extrapolated else (training, None)


def _metric(number: float | None, factor: float = 1.0, published: float | None = None) -> Metric | None:
    return None if number is None else Metric(factor * number, published=published)
