"""Make the tables and notes of the runtime benchmark: of a report, and of the suite beside the paper's with ratios."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.results.metrics import Metric
from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import display_name
from benchmarks.results.runtime import explain_broken_report, load_runtime_reports
from benchmarks.results.suite import BACKBONE, SuiteResults
from benchmarks.tables.notes import note_options
from benchmarks.tables.render import render
from benchmarks.tables.rows import published_title
from benchmarks.tables.table import Column, Row, Table
from runner.results import write_bytes

EXTRAPOLATED = "≈"
BUSY = 0.25
"""Load of other programs on each core above which a warning is written under the table."""
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
    *(Column(title, "low", digits=0) for title in ("MB train", "MB eval")),
    *(
        Column(title, "", digits=0)
        for title in ("GFLOP/s train", "% of peak, train", "GFLOP/s eval", "% of peak, eval")
    ),
)
RATIO_COLUMNS = tuple(replace(column, digits=2) for column in SUITE_COLUMNS[:4])
SIZE_COLUMNS = tuple(
    Column(title, "", digits)
    for title, digits in (("reference ms", 1), ("fast ms", 1), ("ratio", 2), ("counted", 2), ("reached %", 0))
)
TITLE, LABELS = "Training time and speed of inference", ("Data set", "Method", "Mode")
RATIO, RATIO_TITLE = ("procap", "maple"), "ProCAP / MaPLe-style"

Measurement = dict[str, Any]
"""A `runtime.json`, see `benchmarks.runtime`."""


def write_report(report: Measurement, folder: Path) -> str:
    """Write runtime.md, .csv, .tex and .json to `folder`; returns the Markdown."""
    *sizes, speed = report_tables(report)
    text = "\n\n".join(render(table, "md") for table in (*sizes, speed))
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
    """Make the table of sizes, if any were measured, and that of speed with its notes."""
    rows = [
        row for dataset in {row["dataset"]: None for row in report["rows"]} for row in _measured_rows(report, dataset)
    ]
    peaks = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {name}" for name, rate in report["matmul_peak"].items())
    notes = (
        *list_runtime_notes(report),
        "GFLOP/s and counted: operations as torch's FlopCounterMode counts them in eager code; the peak is that of "
        f"matrix products, measured in this run: {peaks}.",
        "MB: most memory of tensors alive at once, beyond weights and data.",
    )
    sizes = []
    for one in report["scaling"]:
        point, seconds = one["point"], one["seconds"]
        work = {"train": "training step", "eval": "evaluation"}[point["kind"]]
        labels = work, str(point["classes"]), str(point["batch"]), point["precision"]
        milliseconds = (_metric(seconds[mode]["median"], 1e3) for mode in ("reference", "fast"))
        ratios = _metric(one["ratio"]), _metric(one["counted"]), _metric(one["reached"], 100)
        sizes.append(Row(labels, (*milliseconds, *ratios), group=f"{labels}"))
    title, labels = "Time against classes and images", ("Work", "Classes", "Batch", "Precision")
    tables = [Table("sizes", title, labels, SIZE_COLUMNS, sizes)] if sizes else []
    return [*tables, Table("runtime", TITLE, LABELS, REPORT_COLUMNS, rows, notes, wide=True)]


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
    if suite.in_paper:
        notes.append(
            "published: the paper's rows, measured by its authors on an A100 with mixed precision, ViT-B/16, and their "
            "own code; it names neither the classes nor whether its FPS includes decoding."
        )
        if why := suite.why_incomparable or why_unlike(report):
            notes.append(f"These results do not compare with published ones, which are rows of their own: {why}.")
    own_rows = [replace(row, cells=row.cells[: len(SUITE_COLUMNS)]) for row in rows]
    table = Table(suite.name, TITLE, LABELS, SUITE_COLUMNS, own_rows, notes, wide=True)
    tables = [table.without_empty_columns()]
    if ratios := [row for dataset in suite.options.datasets for row in _ratio_rows(suite, report, dataset)]:
        remarks = ["ProCAP's value divided by MaPLe-style's on the same machine, so machine speed cancels."]
        if any(row.cells[1] for row in ratios):
            remarks.append(f"{EXTRAPOLATED} of trainings that were not run to their end.")
        if any(row.source == "published" for row in ratios) and (why := why_unlike(report)):
            remarks.append(f"These ratios do not compare with published ones: {why}.")
        table = Table(f"{suite.name}-ratios", RATIO_TITLE, LABELS[::2], RATIO_COLUMNS, ratios, remarks)
        tables.append(table.without_empty_columns())
    return tables


@explain_broken_report()
def newest_measurement(suite: SuiteResults) -> Measurement | None:
    """Find the newest measurement of every data set and method of the suite, with its backbone, classes and options."""
    from procap.weights.architectures import canonical_name

    backbone, _ = canonical_name(suite.options.backbone or suite.options.profile.backbone)
    classes = suite.suite.trained_classes(suite.options)
    found: list[tuple[float, str, Measurement]] = []
    for file, report in load_runtime_reports(suite.results):
        sets, methods = ({row[name] for row in report["rows"]} for name in ("dataset", "method"))
        complete = sets >= set(suite.options.datasets) and methods >= set(suite.options.methods)
        # Reports of earlier versions cover all classes.
        settings = (
            report["backbone"]["name"],
            report["settings"].get("classes", "all"),
            report["settings"].get("options", {}),
        )
        if settings == (backbone, classes, suite.options.options) and complete:
            found.append((file.stat().st_mtime, str(file), report))
    return max(found, key=lambda one: one[:2])[2] if found else None


def compute_ratios(rows: Sequence[dict[str, Any]]) -> tuple[float | None, float | None, float | None]:
    """Compute training seconds, encoder and end-to-end speed of ProCAP over MaPLe-style, from rows of one mode."""
    by_method = {row["method"]: row for row in rows}
    if set(RATIO) - set(by_method):
        return None, None, None
    own, other = (by_method[method] for method in RATIO)
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


def printed_accuracies(suite: SuiteResults, report: Measurement, dataset: str) -> dict[str, float]:
    """Return the published accuracy of each method on a data set; empty if what was measured does not compare."""
    other_weights = report["settings"]["pretrained"] is not None
    if not suite.in_paper or suite.why_incomparable or why_unlike(report) or other_weights:
        return {}
    return {one.key: one.accuracy for one in published.runtime() if one.dataset == dataset}


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
            found.setdefault(f"{row['mode']} {row['precision']}" if several else str(row["mode"]), []).append(row)
    return found


def reference_rows(report: Measurement | None, dataset: str) -> list[dict[str, Any]]:
    """Return the rows of one data set in reference mode, of the first precision if there are several."""
    modes = rows_by_mode(report, dataset) if report else {}
    return next((rows for mode, rows in modes.items() if mode.startswith("reference")), [])


def _published_rows(dataset: str) -> Iterator[Row]:
    """Make the published rows; they come from another machine, so none of their cells is marked the best."""
    name = display_name(dataset)
    for one in published.runtime():
        if one.dataset == dataset:
            cells = Metric(one.train_seconds), None, None, Metric(one.images_per_second), Metric(one.accuracy)
            yield Row((name, published_title(one.method), "-"), (*cells, None), "published", f"{name} {one.method}")


def _measured_rows(report: Measurement, dataset: str, printed: Mapping[str, float] | None = None) -> Iterator[Row]:
    """Make the rows of one data set. printed: published accuracies by method, to stand beside ours."""
    name = display_name(dataset)
    for mode, rows in rows_by_mode(report, dataset).items():
        for row in rows:
            seconds = _metric(row["train_seconds"])
            limited = row["test_images"] < row["test_images_all"]
            accuracy = None if row["accuracy"] is None else Metric(1.0 * row["accuracy"], seeds=(1,), limited=limited)
            if accuracy and not limited:
                accuracy = replace(accuracy, published=(printed or {}).get(row["method"]))
            counted = (("flops_per_second", 1e-9), ("share_of_peak", 100))
            cells = (
                *([None, seconds] if row["extrapolated"] else [seconds, None]),
                *(_metric(row[name]["median"]) for name in ("encoder_fps", "end_to_end_fps")),
                accuracy,
                f"{row['steps_measured']} of {row['steps']}" if row["steps"] else "-",
                _metric(row["step_seconds"] and row["step_seconds"]["median"], 1e3),
                *(_metric(row["peak_bytes"][part], 1e-6) for part in ("train", "eval")),
                *(_metric(row[name][part], factor) for part in ("train", "eval") for name, factor in counted),
            )
            yield Row((name, str(row["title"]), mode), cells, group=name)


def _ratio_rows(suite: SuiteResults, report: Measurement, dataset: str) -> Iterator[Row]:
    """Make rows of ratios between methods; the paper's machine is another one, so only ratios are comparable."""
    name = display_name(dataset)
    paper = published_ratios(dataset) if suite.in_paper else None
    if paper:
        cells = (Metric(paper[0]), None, None, Metric(paper[1]))
        yield Row((name, "published"), cells, "published", f"{name} published")
    known = paper if paper and not why_unlike(report) else (None, None)
    for mode, rows in rows_by_mode(report, dataset).items():
        seconds, encoder, whole = compute_ratios(rows)
        extrapolated = is_extrapolated(rows)
        training = [None, _metric(seconds)] if extrapolated else [_metric(seconds, published=known[0]), None]
        speeds = _metric(encoder), _metric(whole, published=known[1])
        row = Row((name, mode), (*training, *speeds), group=f"{name} {mode}")
        if any(row.cells):
            yield row


def _metric(number: float | None, factor: float = 1.0, published: float | None = None) -> Metric | None:
    return None if number is None else Metric(factor * number, published=published)


def list_runtime_notes(report: dict[str, Any]) -> list[str]:
    """List what was measured, and how they were measured."""
    settings, machine, rows = report["settings"], report["environment"], report["rows"]
    where = machine["gpu"] or f"{machine['cpu']['name']}, {machine['cpu']['threads']} threads"
    before, after = report["load_average"]
    weights = "random weights" if settings["pretrained"] == "random" else f"weights {report['backbone']['weights']}"
    plain = any(row["method"] == "procap-off" for row in rows)
    tokens = settings.get("options", {}).get("maple", {}).get("n_ctx", 4)
    notes = [
        f"{report['backbone']['name']}, {weights}, {' and '.join(settings['precisions'])}, on {where}; torch "
        f"{machine['packages'].get('torch', '?')}; load of the machine before and after: {before} and {after}.",
        f"All methods: ProCAP's recipe, {settings['epochs']} epochs, 16 shots of {_describe_classes(rows)}, seed 1, "
        f"batch {settings['batch']} in training and {settings['test_batch']} in evaluation, the same images in the "
        f"same order; MaPLe-style has {tokens} tokens{', as ProCAP has by default' * (tokens == 4)}."
        + (
            " ProCAP, all off: without its components, with tokens of its own for each layer or one set for all."
            if plain
            else ""
        ),
        *note_options(settings.get("options", {})),
        "reference: as public code works, 77 tokens of every class, prompts and class features again for every batch, "
        "images decoded in every epoch. fast: the same numbers up to rounding without that work.",
        "FPS encoder: batches that are on the device already; end to end: all test images from packed bytes, class "
        "features and decoding included. Medians of rounds in turns, without warm-up; spreads are in runtime.json.",
    ]
    if report["device"]["type"] == "cpu":
        notes.append(
            "Threads: all cores, but one for small steps and batches of fast mode (`OMP_NUM_THREADS` sets them all)."
        )
    on = ", ".join(name for name, chosen in settings["accelerations"].items() if chosen)
    starts = [
        f"{describe_case(row)} {' + '.join(f'{one:.1f}' for one in row['start_seconds'].values() if one)}"
        for row in rows
        if row["mode"] == "fast"
    ]
    notes.append(
        f"Accelerations of fast mode: {on or 'none'} (`--accelerate`); of reference mode: none."
        + (f" Seconds of start, training + evaluation: {'; '.join(starts)}." if starts else "")
    )
    if before > BUSY * machine["cpu"]["cores"]:
        notes.append(f"THE MACHINE WAS BUSY before this began (load {before}): these numbers are not to be quoted.")
    losses: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        if row["first_loss"] is not None:
            losses.setdefault((row["dataset"], row["method"], row["precision"]), []).append(row["first_loss"])
    if differences := [(max(pair) - min(pair)) / abs(max(pair)) for pair in losses.values() if len(pair) == 2]:
        text = f"{max(differences):.0e} of their value at most"
        notes.append(f"The first losses of reference and fast differ by {text}.")
    parts = [f"{describe_case(row)}: {row['steps_measured']} of {row['steps']}" for row in rows if row["extrapolated"]]
    if parts:
        notes.append(f"{EXTRAPOLATED} EXTRAPOLATED from the steps that were run: {'; '.join(parts)}.")
    for why in dict.fromkeys(row["accuracy_note"] for row in rows if row["accuracy_note"]):
        notes.append(f"Accuracy is left out where it means nothing: {why}.")
    if any(row["test_images"] < row["test_images_all"] for row in rows):
        notes.append("† limited: the first images of the test set only.")
    notes += [f"FAILED and left out: {name} ({reason})." for name, reason in report["failed"].items()]
    return notes


def describe_case(row: dict[str, Any]) -> str:
    """Describe a row: `digits ProCAP fast fp32`."""
    return f"{row['dataset']} {row['title']} {row['mode']} {row['precision']}"


def _describe_classes(rows: Sequence[dict[str, Any]]) -> str:
    """Describe the classes trained and tested on, by data set if they differ; older reports cover all classes."""
    chosen: dict[str, dict[str, None]] = {}
    for row in rows:
        chosen.setdefault(f"{row.get('class_choice', 'all')} classes", {})[row["dataset"]] = None
    if len(chosen) == 1:
        return next(iter(chosen))
    return " and ".join(f"{classes} ({', '.join(datasets)})" for classes, datasets in chosen.items())
