"""Make the table of the runtime benchmark: of one measurement, and of the suite with the paper's rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

from benchmarks.console.output import plural
from benchmarks.experiment.published import display_name, load_rows
from benchmarks.experiment.suite import SHOTS
from benchmarks.results.metrics import Metric
from benchmarks.results.suite_results import BACKBONE, SuiteResults
from benchmarks.tables.suite_table import published_title
from benchmarks.tables.table import Column, Row, Table
from shards.files import read_regular

SCHEMA = 4
"""Version of `runtime.json`; reports of another version are ignored and measured again."""
BUSY = 0.25
"""Load of other programs on each core above which a warning is written under the table."""
WHOLE, QUICK = (10, 5), (2, 2)
"""Epochs of training and rounds of evaluation, without and with `--quick`."""
EARLIER: Mapping[str, Any] = {"shots": SHOTS, "options": {}}
"""What reports of earlier versions do not say of their settings."""
COLUMNS = (
    Column("training s", "low", digits=1),
    Column("FPS encoder", digits=1),
    Column("FPS end to end", digits=1),
    Column("Accuracy"),
    Column("MB train", "low", digits=0),
    Column("MB eval", "low", digits=0),
)

Report = dict[str, Any]
"""A `runtime.json`, see `benchmarks.runtime`."""


def load_runtime_reports(results: Path) -> Iterator[tuple[Path, Report]]:
    """Load each report of this version below `results`, with its file; other files are left out."""
    for file in sorted((results / "runtime").glob("*/runtime.json")):
        try:
            report = json.loads(read_regular(file))
        except (OSError, ValueError):
            continue
        if isinstance(report, dict) and report.get("schema") == SCHEMA:
            yield file, report


def runtime_tables(results: SuiteResults) -> list[Table]:
    """Make the table of the newest measurement; none if these methods were not measured on these data sets."""
    report = find_newest(results)
    if report is None:
        return []
    reason, notes, backbone = "", list_notes(report), report["backbone"]["name"]
    if results.in_paper:
        unlike = "" if backbone == BACKBONE else f"the backbone is {backbone}, not {BACKBONE}"
        if reason := results.why_incomparable or unlike:
            notes.append(f"Not comparable with published numbers: {reason}.")
    rows: list[Row] = []
    for dataset in results.options.datasets:
        printed = [row for row in load_rows("runtime") if row.dataset == dataset and results.in_paper]
        for row in printed:
            # It comes from another machine: none of its cells is marked the best.
            cells = (row.train_seconds, None, row.images_per_second, row.accuracy, None, None)
            labels, group = (display_name(dataset), published_title(row.method), "-"), f"{dataset} {row.method}"
            rows.append(Row(labels, tuple(map(_metric, cells)), "published", group))
        is_comparable = not reason and report["settings"]["pretrained"] is None
        rows += _measured_rows(report, dataset, {row.key: row.accuracy for row in printed if is_comparable})
    # Columns without a number, such as memory on a CPU, are left out. A Metric is true even if its number is 0.
    used = [any(cells) for cells in zip(*(row.cells for row in rows), strict=True)]
    rows = [replace(row, cells=tuple(compress(row.cells, used))) for row in rows]
    title, labels, details = "Training time and speed of inference", ("Data set", "Method", "Mode"), describe(report)
    return [Table(results.name, title, labels, [*compress(COLUMNS, used)], rows, notes, details)]


def choose_settings(results: SuiteResults) -> dict[str, Any]:
    """Return the settings of a measurement that the suite's options choose, apart from its data sets and methods."""
    from procap.weights.architectures import canonical_name

    options, profile = results.options, results.options.profile
    pretrained = options.pretrained or (None if options.backbone else profile.pretrained) or None
    backbone, pretrained = canonical_name(options.backbone or profile.backbone, pretrained)
    epochs, repeats = QUICK if options.quick else WHOLE
    return {
        "backbone": backbone,
        "pretrained": pretrained,
        "precisions": (options.precision or profile.precision,),
        "classes": results.suite.classes,
        "shots": options.shots[0] if options.shots else SHOTS,
        "options": options.options,
        "epochs": options.overrides.get("epochs", epochs),
        "repeats": repeats,
    }


def find_newest(results: SuiteResults) -> Report | None:
    """Return the newest measurement with the suite's settings, of its data sets and methods at least."""
    # Through JSON, in which tuples are lists, as in the report that was read.
    asked = json.loads(json.dumps(choose_settings(results)))
    # Rounds change what a median is of, not what it means.
    del asked["repeats"]
    reports = []
    for _, report in load_runtime_reports(results.results):
        datasets, methods = ({row[name] for row in report["rows"]} for name in ("dataset", "method"))
        settings = EARLIER | report["settings"]
        is_same = all(settings.get(name) == value for name, value in asked.items())
        if is_same and datasets >= {*results.options.datasets} and methods >= {*results.options.methods}:
            reports.append(report)
    # Times in UTC of equal length sort as texts.
    return max(reports, key=lambda report: report["written"], default=None)


def _measured_rows(report: Report, dataset: str, printed: Mapping[str, float]) -> Iterator[Row]:
    """Make the rows of one data set, by mode. printed: published accuracies by method."""
    name, rows = display_name(dataset), [row for row in report["rows"] if row["dataset"] == dataset]
    modes = list(dict.fromkeys((row["mode"], row["precision"]) for row in rows))
    for row in sorted(rows, key=lambda row: modes.index((row["mode"], row["precision"]))):
        cells = (
            _metric(row["train_seconds"]),
            _metric(row["encoder_fps"]["median"]),
            _metric(row["end_to_end_fps"]["median"]),
            _metric(row["accuracy"], published=printed.get(row["method"])),
            *(_metric(row["peak_bytes"][part], 1e-6) for part in ("train", "eval")),
        )
        yield Row((name, row["title"], f"{row['mode']}, {row['precision']}"), cells, group=name)


def _metric(number: float | None, factor: float = 1.0, published: float | None = None) -> Metric | None:
    return None if number is None else Metric(factor * number, published=published)


def list_notes(report: Report) -> list[str]:
    """List what was measured where, and what limits the numbers."""
    settings, machine = EARLIER | report["settings"], report["environment"]
    device = machine["gpu"] or f"{machine['cpu']['name']}, {plural(machine['cpu']['threads'], 'thread')}"
    weights = "random weights" if settings["pretrained"] == "random" else f"weights {report['backbone']['weights']}"
    notes = [
        f"{report['backbone']['name']}, {weights}, {' and '.join(settings['precisions'])}, on {device}; "
        f"{settings['epochs']} epochs of ProCAP's recipe, {settings['shots']} shots of {settings['classes']} classes, "
        f"batches of {settings['batch']} and {settings['test_batch']}. reference: as public code works; fast: the same "
        "numbers."
    ]
    before, _ = report["load_average"]
    if before > BUSY * machine["cpu"]["cores"]:
        notes.append(f"THE MACHINE WAS BUSY before this began (load {before}): these numbers are not to be quoted.")
    return notes


def describe(report: Report) -> list[str]:
    """Describe how it was measured, for JSON."""
    return [
        "FPS encoder: batches on the device; end to end: all test images, with class features and decoding. Medians of "
        "rounds, without warm-up. MB: most memory of tensors alive at once, beyond weights and data.",
        "Published: one A100, mixed precision, ViT-B/16, the authors' code.",
        *dict.fromkeys(f"No accuracy: {row['accuracy_note']}." for row in report["rows"] if row["accuracy_note"]),
    ]
