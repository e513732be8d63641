"""Write the notes of a runtime report: what was measured, on what machine, how, and what restricts the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.tables.notes import note_options

EXTRAPOLATED = "≈"
WARNINGS = (
    "THE MACHINE WAS BUSY",
    EXTRAPOLATED,
    "Accuracy is left out",
    "Options of methods",
    "†",
    "FAILED",
    "published:",
)
"""Prefixes of the notes that also concern what is compared with published numbers."""
BUSY = 0.25
"""Load of other programs on each core above which a warning is written under the table."""


def list_runtime_notes(report: dict[str, Any]) -> list[str]:
    """List what the numbers are of, and how they were measured."""
    settings, machine, rows = report["settings"], report["environment"], report["rows"]
    where = machine["gpu"] or f"{machine['cpu']['name']}, {machine['cpu']['threads']} threads"
    before, after = report["load_average"]
    weights = "random weights" if settings["pretrained"] == "random" else f"weights {report['backbone']['weights']}"
    peaks = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {name}" for name, rate in report["matmul_peak"].items())
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
    notes.append(_describe_accelerations(settings, rows))
    if before > BUSY * machine["cpu"]["cores"]:
        notes.append(f"THE MACHINE WAS BUSY before this began (load {before}): these numbers are not to be quoted.")
    if (difference := _loss_difference(rows)) is not None:
        notes.append(f"The first losses of reference and fast differ by {difference:.0e} of their value at most.")
    parts = [f"{describe_case(row)}: {row['steps_measured']} of {row['steps']}" for row in rows if row["extrapolated"]]
    if parts:
        notes.append(f"{EXTRAPOLATED} EXTRAPOLATED from the steps that were run: {'; '.join(parts)}.")
    for why in dict.fromkeys(row["accuracy_note"] for row in rows if row["accuracy_note"]):
        notes.append(f"Accuracy is left out where it means nothing: {why}.")
    if any(row["test_images"] < row["test_images_all"] for row in rows):
        notes.append("† limited: the first images of the test set only.")
    notes.append(
        "published: the paper's rows, measured by its authors on an A100 with mixed precision, ViT-B/16, and their own "
        "code; it names neither the classes nor whether its FPS includes decoding."
    )
    notes += [f"FAILED and left out: {name} ({reason})." for name, reason in report["failed"].items()]
    return notes


def list_warnings(report: dict[str, Any]) -> list[str]:
    """List what was measured, on what machine, and warnings about ratios between methods."""
    work, recipe, *others = list_runtime_notes(report)
    return [work, recipe, *(note for note in others if note.startswith(WARNINGS))]


def describe_case(row: dict[str, Any]) -> str:
    """Describe a row: `digits ProCAP fast fp32`."""
    return f"{row['dataset']} {row['title']} {row['mode']} {row['precision']}"


def _describe_classes(rows: Sequence[dict[str, Any]]) -> str:
    """Describe the classes trained and tested on, by data set if they differ; older reports are of all classes."""
    chosen: dict[str, dict[str, None]] = {}
    for row in rows:
        chosen.setdefault(f"{row.get('class_choice', 'all')} classes", {})[row["dataset"]] = None
    if len(chosen) == 1:
        return next(iter(chosen))
    return " and ".join(f"{classes} ({', '.join(datasets)})" for classes, datasets in chosen.items())


def _describe_accelerations(settings: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Describe the accelerations of fast mode, and the seconds of its starts."""
    on = [name for name, chosen in settings["accelerations"].items() if chosen]
    text = f"Accelerations of fast mode: {', '.join(on) or 'none'} (`--accelerate`); of reference mode: none."
    starts = [
        f"{describe_case(row)} {' + '.join(f'{one:.1f}' for one in row['start_seconds'].values() if one)}"
        for row in rows
        if row["mode"] == "fast"
    ]
    return text + (f" Seconds of start, training + evaluation: {'; '.join(starts)}." if starts else "")


def _loss_difference(rows: Sequence[dict[str, Any]]) -> float | None:
    """Compute the largest relative difference between the modes in the loss of the first batch."""
    losses: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        if row["first_loss"] is not None:
            losses.setdefault((row["dataset"], row["method"], row["precision"]), []).append(row["first_loss"])
    return max(((max(pair) - min(pair)) / abs(max(pair)) for pair in losses.values() if len(pair) == 2), default=None)
