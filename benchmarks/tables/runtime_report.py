"""Make the tables of a runtime report: speed, accelerations, sizes and phases, with notes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results.metrics import Metric
from benchmarks.results.published import tables as published
from benchmarks.tables.render import render
from benchmarks.tables.table import Cell, Column, Row, Table
from runner.results import write_bytes

SPEED_COLUMNS = (
    Column("training s", "low", digits=1),
    # Extrapolated times have a separate column, so that they cannot be marked the best.
    Column("≈ training s", "", digits=1),
    Column("step ms", "low", digits=1),
    Column("FPS encoder", digits=1),
    Column("FPS end to end", digits=1),
    Column("Accuracy"),
    Column("MB train", "low", digits=0),
    Column("MB eval", "low", digits=0),
    Column("GFLOP/s train", "", digits=0),
    Column("% of peak, train", "", digits=0),
    Column("GFLOP/s eval", "", digits=0),
    Column("% of peak, eval", "", digits=0),
)
SCALING_COLUMNS = (
    Column("reference ms", "", digits=1),
    Column("fast ms", "", digits=1),
    Column("ratio", ""),
    Column("counted", ""),
    Column("reached %", "", digits=0),
)
ABLATION_COLUMNS = (
    Column("start s", "", digits=1),
    Column("ms", "low"),
    Column("lowest-highest", ""),
    Column("over off", ""),
    Column("images/s", digits=0),
    Column("% of peak", "", digits=0),
)
PHASES = ("load", "start", "data", "forward", "backward", "optimizer", "evaluation")
WORK = {"train": "training step", "eval": "evaluation"}
GUESSED = "≈"
BUSY = 0.25
"""Load of other programs on each core above which a warning is written under the table."""


def write_report(report: dict[str, Any], folder: Path) -> str:
    """Write runtime.md, .csv, .tex and .json to `folder`; returns the Markdown."""
    speed, *more = report_tables(report)
    text = "\n\n".join(render(table, "md") for table in (*more, speed))
    rows = [
        {
            "dataset": row.dataset,
            "method": row.method,
            "time_s": row.train_seconds,
            "fps": row.images_per_second,
            "accuracy": row.accuracy,
        }
        for row in published.runtime()
    ]
    files = {
        "md": text,
        "csv": render(speed, "csv"),
        "tex": render(speed, "latex"),
        "json": json.dumps({**report, "published": rows}, ensure_ascii=False, allow_nan=False, indent=1),
    }
    for suffix, content in files.items():
        write_bytes(folder / f"runtime.{suffix}", f"{content}\n".encode())
    return text


def report_tables(report: dict[str, Any]) -> list[Table]:
    """Make the table of speed with its notes, and those of accelerations, sizes and phases in the report."""
    speed = Table(
        "runtime",
        "Training time and speed of inference",
        ("Data set", "Method", "Mode"),
        SPEED_COLUMNS,
        (*_speed_rows(report), *_published_rows()),
        tuple(list_notes(report)),
        wide=True,
    )
    labels = ("Work", "Classes", "Batch", "Precision")
    tables = [speed]
    if report["acceleration_ablation"]:
        lines = tuple(_ablation_row(one) for one in report["acceleration_ablation"])
        tables.append(Table("accelerations", "What makes it fast", (*labels, "Accelerations"), ABLATION_COLUMNS, lines))
    if report["scaling"]:
        lines = tuple(_scaling_row(one) for one in report["scaling"])
        tables.append(Table("sizes", "Time against classes and images", labels, SCALING_COLUMNS, lines))
    columns = tuple(Column(name, "") for name in PHASES)
    lines = tuple(
        Row((describe_case(row),), tuple(_value(row["phases"][name]) for name in PHASES)) for row in report["rows"]
    )
    return [*tables, Table("phases", "Seconds of the measured steps", ("Case",), columns, lines)]


def list_notes(report: dict[str, Any]) -> list[str]:
    """List what the numbers are of, and how they were measured."""
    settings, machine, rows = report["settings"], report["environment"], report["rows"]
    where = machine["gpu"] or f"{machine['cpu']['name']}, {machine['cpu']['threads']} threads"
    before, after = report["load_average"]
    weights = "random weights" if settings["pretrained"] == "random" else f"weights {report['backbone']['weights']}"
    peaks = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {name}" for name, rate in report["matmul_peak"].items())
    notes = [
        f"{report['backbone']['name']}, {weights}, {' and '.join(settings['precisions'])}, on {where}; torch "
        f"{machine['packages'].get('torch', '?')}; load of the machine before and after: {before} and {after}.",
        f"All methods: ProCAP's recipe, {settings['epochs']} epochs, 16 shots of all classes, seed 1, batch "
        f"{settings['batch']} in training and {settings['test_batch']} in evaluation, the same images in the same "
        "order; MaPLe-style has 4 tokens, as ProCAP.",
        "reference: as public code works, 77 tokens of every class, prompts and class features again for every batch, "
        "images decoded in every epoch. fast: the same numbers up to rounding without that work.",
        "FPS encoder: batches that are on the device already; end to end: all test images from packed bytes, class "
        "features and decoding included. Medians of rounds in turns, without warm-up; spreads are in runtime.json.",
        "GFLOP/s and counted: operations as torch's FlopCounterMode counts them in eager code; the peak is that of "
        f"matrix products, measured in this run: {peaks}.",
        "MB: most memory of tensors alive at once, beyond weights and data.",
        "Phases: load is of backbone and data set, start is warm-up, compiling and recording and part of no other "
        "number, data is the wait of the measured steps for images, evaluation is one pass.",
    ]
    if report["device"]["type"] == "cpu":
        notes.append(
            "Threads: all cores, but one for small steps and batches of fast mode (`OMP_NUM_THREADS` sets them all)."
        )
    notes += [_describe_accelerations(report), *_describe_kernels(report)]
    energy = [f"{describe_case(row)} {row['joules_per_image']:.2f}" for row in rows if row["joules_per_image"]]
    if energy:
        notes.append(f"Energy of the GPU in training, joules per image: {'; '.join(energy)}.")
    if before > BUSY * machine["cpu"]["cores"]:
        notes.append(f"THE MACHINE WAS BUSY before this began (load {before}): these numbers are not to be quoted.")
    if (apart := _loss_difference(rows)) is not None:
        notes.append(f"The first losses of reference and fast differ by {apart:.0e} of their value at most.")
    parts = [f"{describe_case(row)}: {row['steps_measured']} of {row['steps']}" for row in rows if row["extrapolated"]]
    if parts:
        notes.append(f"{GUESSED} EXTRAPOLATED from the steps that were run: {'; '.join(parts)}.")
    for why in dict.fromkeys(row["accuracy_note"] for row in rows if row["accuracy_note"]):
        notes.append(f"Accuracy is left out where it means nothing: {why}.")
    if any(row["test_images"] < row["test_images_all"] for row in rows):
        notes.append("† limited: the first images of the test set only.")
    notes.append(
        "published: the paper's rows, measured by its authors on an A100 with mixed precision, ViT-B/16, and their own "
        "code; its FPS does not say whether decoding is included."
    )
    notes += [f"FAILED and left out: {name} ({reason})." for name, reason in report["failed"].items()]
    return notes


def describe_case(row: dict[str, Any]) -> str:
    """Describe a row: `digits ProCAP fast fp32`."""
    return f"{row['dataset']} {row['title']} {row['mode']} {row['precision']}"


def _speed_rows(report: dict[str, Any]) -> Iterator[Row]:
    several = len(report["settings"]["precisions"]) > 1
    for row in report["rows"]:
        mode = f"{row['mode']} {row['precision']}" if several else row["mode"]
        training = _value(row["train_seconds"])
        rates, shares, peaks = row["flops_per_second"], row["share_of_peak"], row["peak_bytes"]
        limited = row["test_images"] < row["test_images_all"]
        accuracy = None if row["accuracy"] is None else Metric(row["accuracy"], seeds=(1,), limited=limited)
        cells = (
            *((None, training) if row["extrapolated"] else (training, None)),
            _value(row["step_seconds"] and row["step_seconds"]["median"], 1e3),
            _value(row["encoder_fps"]["median"]),
            _value(row["end_to_end_fps"]["median"]),
            accuracy,
            _value(peaks["train"], 1e-6),
            _value(peaks["eval"], 1e-6),
            _value(rates["train"], 1e-9),
            _value(shares["train"], 100),
            _value(rates["eval"], 1e-9),
            _value(shares["eval"], 100),
        )
        yield Row((row["dataset"], row["title"], mode), cells, group=row["dataset"])


def _published_rows() -> Iterator[Row]:
    for one in published.runtime():
        cells: list[Cell] = [None] * len(SPEED_COLUMNS)
        cells[0], cells[4], cells[5] = Metric(one.train_seconds), Metric(one.images_per_second), Metric(one.accuracy)
        yield Row((one.dataset, one.method, "-"), tuple(cells), "published", f"{one.dataset} published")


def _scaling_row(one: dict[str, Any]) -> Row:
    milliseconds = (_value(one["seconds"][mode]["median"], 1e3) for mode in ("reference", "fast"))
    ratios = (_value(one["ratio"]), _value(one["counted"]), _value(one["reached"], 100))
    point = one["point"]
    return Row(_size(point), (*milliseconds, *ratios), group=f"{_size(point)}")


def _ablation_row(one: dict[str, Any]) -> Row:
    seconds, name = one["seconds"], one["accelerations"]
    name += " (NOT RECORDED)" if "graphs" in name and not one["recorded"] else ""
    cells = (
        _value(one["start_seconds"]),
        _value(seconds["median"], 1e3),
        f"{1e3 * seconds['lowest']:.2f}-{1e3 * seconds['highest']:.2f}",
        _value(one["gain"]),
        _value(one["images_per_second"]),
        _value(one["share_of_peak"], 100),
    )
    return Row((*_size(one), name), cells, group=f"{_size(one)}")


def _size(one: dict[str, Any]) -> tuple[str, str, str, str]:
    return WORK[one["kind"]], str(one["classes"]), str(one["batch"]), one["precision"]


def _describe_accelerations(report: dict[str, Any]) -> str:
    """Describe the accelerations of fast mode, which of them failed, and the cost of its starts."""
    on = [name for name, chosen in report["settings"]["accelerations"].items() if chosen]
    cache, rows = report["compile_cache"], [row for row in report["rows"] if row["mode"] == "fast"]
    text = f"Accelerations of fast mode: {', '.join(on) or 'none'} (`--accelerate`); of reference mode: none."
    if cache is not None:
        text += f" The cache of compiled programs was {cache['state']} at the start; the first to need one compiles it."
    if "graphs" in on:
        plain = [
            f"{describe_case(row)} ({work})" for row in rows for work, done in row["recorded"].items() if done is False
        ]
        text += f" NOT RECORDED, run eagerly: {'; '.join(plain)}." if plain else " All of fast mode was recorded."
    starts = [
        f"{describe_case(row)} {' + '.join(f'{one:.1f}' for one in row['start_seconds'].values() if one)}"
        for row in rows
    ]
    return text + (f" Seconds of start, training + evaluation: {'; '.join(starts)}." if starts else "")


def _describe_kernels(report: dict[str, Any]) -> list[str]:
    """Describe which attention kernels ran, and how ProCAP's cross-attention was chosen."""
    notes = []
    for one in report["acceleration_ablation"]:
        calls = ", ".join(f"{name} {count}" for name, count in one["attention"].items())
        notes.append(f"Attention of one {WORK[one['kind']]} in {one['precision']}, calls by kernel: {calls}.")
    for one in report["cross_attention"]:
        timed = ", ".join(f"{name} {'-' if ms is None else f'{ms:.3f}'}" for name, ms in one["milliseconds"].items())
        chosen = ["fused" if one[which] else "eager" for which in ("fused_in_graphs", "fused")]
        notes.append(
            f"Cross-attention, {one['tokens']} tokens of {one['widths'][0]} and {one['widths'][1]}, "
            f"{one['autocast'] or one['dtype']}, ms of a level forward and backward: {timed}; "
            f"{chosen[0]} in recordings, {chosen[1]} else."
        )
    return list(dict.fromkeys(notes))


def _loss_difference(rows: Sequence[dict[str, Any]]) -> float | None:
    """Compute the largest relative difference between the modes in the loss of the first batch."""
    losses: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        if row["first_loss"] is not None:
            losses.setdefault((row["dataset"], row["method"], row["precision"]), []).append(row["first_loss"])
    pairs = [(max(pair) - min(pair)) / abs(max(pair)) for pair in losses.values() if len(pair) == 2]
    return max(pairs) if pairs else None


def _value(number: float | None, factor: float = 1.0) -> Metric | None:
    return None if number is None else Metric(factor * number)
