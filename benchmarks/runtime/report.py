"""The runtime benchmark's report as a table beside the paper's: Markdown, CSV, LaTeX and JSON files of one folder."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results.published.tables import PUBLISHED
from benchmarks.tables.latex_text import escape
from benchmarks.tables.latex_text import row as latex_row
from benchmarks.tables.pipes import pipes
from benchmarks.tables.text import MISSING
from runner.results import write_bytes

HEADERS = (
    "Data set", "Method", "Mode", "training s", "step ms", "FPS encoder", "FPS end to end", "Accuracy %",
    "MB train", "MB eval", "GFLOP/s train", "of peak", "GFLOP/s eval", "of peak",
)  # fmt: skip
SCALING_HEADERS = ("Work", "Classes", "Batch", "Precision", "reference ms", "fast ms", "ratio", "counted", "reached")
WAYS_HEADERS = (
    "What makes it fast", "Classes", "Batch", "Precision", "with", "start s", "ms", "lowest-highest", "over off",
    "images/s", "of peak",
)  # fmt: skip
PHASES = ("load", "start", "decode", "augment", "data", "forward", "backward", "optimizer", "evaluation")
WORK = {"train": "training step", "eval": "evaluation"}
GUESSED = "≈"
BUSY = 0.25
"""Other programs' load for each core above which a warning is written under the table."""


def published() -> list[dict[str, str]]:
    """The paper's four rows."""
    with (PUBLISHED / "runtime.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def write_report(report: dict[str, Any], folder: Path) -> str:
    """Write runtime.md, .csv, .tex and .json to `folder`; gives the Markdown."""
    text = markdown(report)
    report["published"] = published()
    files = {
        "md": text + "\n",
        "csv": comma_separated(report),
        "tex": latex(report) + "\n",
        "json": json.dumps(report, ensure_ascii=False, allow_nan=False, indent=1) + "\n",
    }
    for suffix, content in files.items():
        write_bytes(folder / f"runtime.{suffix}", content.encode())
    return text


def markdown(report: dict[str, Any]) -> str:
    """The table, the sizes, and what must be known to read them."""
    parts = [pipes(HEADERS, [*_body(report), *_paper_body()], left=3)]
    if report["ways"]:
        parts.append(pipes(WAYS_HEADERS, [_ways_line(one) for one in report["ways"]], left=1))
    if report["scaling"]:
        parts.append(pipes(SCALING_HEADERS, [_scaling_line(one) for one in report["scaling"]], left=1))
    phases = [[_label(row), *(_number(row["phases"][name], 2) for name in PHASES)] for row in report["rows"]]
    parts.append(pipes(("Seconds of the measured steps", *PHASES), phases, left=1))
    parts.append("\n".join(f"- {line}" for line in notes(report)))
    return "\n\n".join(parts)


def comma_separated(report: dict[str, Any]) -> str:
    """One line per row with plain numbers; the paper's rows last, with the source in the column `mode`."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    spreads = ("step_seconds", "encoder_fps", "end_to_end_fps")
    plain = ("dataset", "method", "mode", "precision", "classes", "train_images", "batch", "epochs", "steps",
             "steps_measured", "train_seconds", "test_images", "accuracy", "accuracy_note")  # fmt: skip
    nested = [("peak_bytes", "train"), ("peak_bytes", "eval"), ("flops", "step"), ("flops", "image"),
              ("flops_per_second", "train"), ("flops_per_second", "eval"), ("share_of_peak", "train"),
              ("share_of_peak", "eval")]  # fmt: skip
    header = [*plain, *(f"{name}_{part}" for name in spreads for part in ("median", "lowest", "highest"))]
    header += [*(f"{name}_{part}" for name, part in nested), "joules_per_image", "accelerations"]
    writer.writerow(header)
    for row in report["rows"]:
        cells = [row[name] for name in plain]
        cells += [(row[name] or {}).get(part) for name in spreads for part in ("median", "lowest", "highest")]
        cells += [row[name][part] for name, part in nested] + [row["joules_per_image"]]
        cells.append("+".join(_on(row["accelerations"])))
        writer.writerow(["" if cell is None else cell for cell in cells])
    for row in published():
        told = {"dataset": row["dataset"], "method": row["method"], "mode": "published", "train_seconds": row["time_s"],
                "accuracy": row["accuracy"], "end_to_end_fps_median": row["fps"]}  # fmt: skip
        writer.writerow([told.get(name, "") for name in header])
    return file.getvalue()


def latex(report: dict[str, Any]) -> str:
    """A booktabs `table*` with the notes as its caption."""
    body = [*_body(report), *_paper_body()]

    def line(cells: Sequence[str]) -> str:
        return latex_row([escape(cell) for cell in cells])

    lines = [r"\begin{table*}", r"\centering\scriptsize", rf"\begin{{tabular}}{{lll{'r' * (len(HEADERS) - 3)}}}"]
    lines += [r"\toprule", line(HEADERS), r"\midrule", *map(line, body), r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*lines, rf"\caption{{{escape(' '.join(notes(report)))}}}", r"\end{table*}"])


def notes(report: dict[str, Any]) -> list[str]:
    """What the numbers are of, and what they are not."""
    settings, machine, rows = report["settings"], report["environment"], report["rows"]
    where = machine["gpu"] or f"{machine['cpu']['name']}, {machine['cpu']['threads']} threads"
    before, after = report["load_average"]
    weights = "random weights" if settings["pretrained"] == "random" else f"weights {report['backbone']['weights']}"
    peaks = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {name}" for name, rate in report["matmul_peak"].items())
    found = [
        f"{report['backbone']['name']}, {weights}, {' and '.join(settings['precisions'])}, on {where}; torch "
        f"{machine['packages'].get('torch', '?')}; load of the machine before and after: {before} and {after}.",
        f"All methods: ProCAP's recipe, {settings['epochs']} epochs, 16 shots of all classes, seed 1, batch "
        f"{settings['batch']} in training and {settings['test_batch']} in evaluation, the same images in the same "
        "order; MaPLe-style has 4 tokens, as ProCAP.",
        "reference: as public code works, 77 tokens of every class, prompts and class features anew for every batch, "
        "images decoded in every epoch. fast: the same numbers up to rounding without that work.",
        "FPS encoder: batches that are on the device already; end to end: all test images from packed bytes, class "
        "features and decoding included. Medians of interleaved rounds without warm-up; the spread is in the CSV.",
        "GFLOP/s and counted: operations of matrix products that the mode needs, without masked or padded ones; the "
        f"peak is measured in this run: {peaks}.",
        "MB: most memory of tensors alive at once, beyond weights and data.",
    ]
    parts = [f"{_label(row)}: {row['steps_measured']} of {row['steps']}" for row in rows if row["extrapolated"]]
    found.append(
        "Phases: load is of backbone and data set, start is warm-up, compiling and recording and not part of any other "
        "figure, decode and augment are work of one core for the measured steps, data is how long these waited for "
        "images, evaluation is one pass."
    )
    if report["device"]["type"] == "cpu":
        found.append(
            "Threads: all cores, but one for steps and batches of fast mode that are too small for more "
            "(`OMP_NUM_THREADS` sets them all)."
        )
    found += [_accelerated(report), *_kernels(report)]
    energy = [f"{_label(row)} {row['joules_per_image']:.2f}" for row in rows if row["joules_per_image"] is not None]
    if energy:
        found.append(f"Energy of the GPU in training, joules per image: {'; '.join(energy)}.")
    if before > BUSY * machine["cpu"]["cores"]:
        found.append(f"THE MACHINE WAS BUSY before this began (load {before}): these figures are not to be quoted.")
    if (apart := _apart(rows)) is not None:
        found.append(f"The first losses of reference and fast differ by {apart:.0e} of their value at most.")
    if parts:
        found.append(f"{GUESSED} EXTRAPOLATED from the steps that were run: {'; '.join(parts)}.")
    for why in dict.fromkeys(row["accuracy_note"] for row in rows if row["accuracy_note"]):
        found.append(f"Accuracy is left out where it means nothing: {why}.")
    if any(row["test_images"] < row["test_images_all"] for row in rows):
        found.append("† limited: the first images of the test set only.")
    found.append(
        "published: the paper's rows, measured by its authors on an A100 with mixed precision, ViT-B/16, and their own "
        "code; its FPS does not say whether decoding is included."
    )
    found += [f"FAILED and left out: {name} ({reason})." for name, reason in report["failed"].items()]
    return found


def _accelerated(report: dict[str, Any]) -> str:
    """What fast mode had beyond its savings, what of it did not work, and what starting cost."""
    ways, cache, rows = report["settings"]["ways"], report["compile_cache"], report["rows"]
    text = f"Accelerations of fast mode: {', '.join(_on(ways)) or 'none'} (`--accelerate`); of reference mode: none."
    if cache is not None:
        text += f" The cache of compiled programs was {cache['state']} at the start; the first to need one compiles it."
    if ways["graphs"]:
        plain = [
            f"{_label(row)} ({work})"
            for row in rows
            for work, done in row["recorded"].items()
            if row["mode"] == "fast" and done is False
        ]
        text += f" NOT RECORDED, run as it is: {'; '.join(plain)}." if plain else " All of fast mode was recorded."
    starts = [
        f"{_label(row)} {' + '.join(_number(seconds, 1) for seconds in row['start_seconds'].values() if seconds)}"
        for row in rows
        if row["mode"] == "fast"
    ]
    return text + (f" Seconds of start, training + evaluation: {'; '.join(starts)}." if starts else "")


def _kernels(report: dict[str, Any]) -> list[str]:
    """Which attention ran, and how ProCAP's cross-attention was chosen."""
    found = []
    for one in report["ways"]:
        calls = ", ".join(f"{name} {count}" for name, count in one["attention"].items())
        line = f"Attention of one {WORK[one['kind']]} in {one['precision']}, calls by kernel: {calls}."
        found += [line] if line not in found else []
    for one in report["cross_attention"]:
        timed = ", ".join(f"{name} {_number(ms, 3)}" for name, ms in one["milliseconds"].items())
        chosen = ["fused" if one[which] else "eager" for which in ("fused_in_graphs", "fused")]
        found.append(
            f"Cross-attention, {one['tokens']} tokens of {one['widths'][0]} and {one['widths'][1]}, "
            f"{one['autocast'] or one['dtype']}, ms of a level forward and backward: {timed}; "
            f"{chosen[0]} in recordings, {chosen[1]} else."
        )
    return found


def _on(ways: dict[str, bool]) -> list[str]:
    return [name for name, on in ways.items() if on]


def _apart(rows: Sequence[dict[str, Any]]) -> float | None:
    """The largest relative difference between the modes in the loss of the first batch."""
    losses: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        if row["first_loss"] is not None:
            losses.setdefault((row["dataset"], row["method"], row["precision"]), []).append(row["first_loss"])
    pairs = [(max(pair) - min(pair)) / abs(max(pair)) for pair in losses.values() if len(pair) == 2]
    return max(pairs) if pairs else None


def _label(row: dict[str, Any]) -> str:
    return f"{row['dataset']} {row['title']} {row['mode']} {row['precision']}"


def _body(report: dict[str, Any]) -> list[list[str]]:
    several = len(report["settings"]["precisions"]) > 1
    lines, before = [], None
    for row in report["rows"]:
        mode = f"{row['mode']} {row['precision']}" if several else row["mode"]
        seconds = _number(row["train_seconds"], 1)
        if row["extrapolated"]:
            seconds = f"{GUESSED} {seconds}"
        limited = " †" if row["test_images"] < row["test_images_all"] else ""
        step = row["step_seconds"]
        peak, rate, share = row["peak_bytes"], row["flops_per_second"], row["share_of_peak"]
        lines.append([
            row["dataset"] if row["dataset"] != before else "",
            row["title"],
            mode,
            seconds,
            _number(step and 1e3 * step["median"], 1),
            _number(row["encoder_fps"]["median"], 1),
            _number(row["end_to_end_fps"]["median"], 1),
            MISSING if row["accuracy"] is None else f"{row['accuracy']:.2f}{limited}",
            _number(peak["train"] and peak["train"] / 1e6, 0),
            _number(peak["eval"] and peak["eval"] / 1e6, 0),
            _number(rate["train"] and rate["train"] / 1e9, 0),
            _percent(share["train"]),
            _number(rate["eval"] and rate["eval"] / 1e9, 0),
            _percent(share["eval"]),
        ])  # fmt: skip
        before = row["dataset"]
    return lines


def _paper_body() -> list[list[str]]:
    lines, before = [], None
    for row in published():
        first = row["dataset"] if row["dataset"] != before else ""
        filled = [first, row["method"], "published", row["time_s"], MISSING, MISSING, row["fps"], row["accuracy"]]
        lines.append(filled + [MISSING] * (len(HEADERS) - len(filled)))
        before = row["dataset"]
    return lines


def _scaling_line(one: dict[str, Any]) -> list[str]:
    point, seconds = one["point"], one["seconds"]
    milliseconds = [f"{1e3 * seconds[mode]['median']:.1f}" for mode in ("reference", "fast")]
    ratios = [f"{one['ratio']:.2f}x", f"{one['counted']:.2f}x", _percent(one["reached"])]
    return [WORK[point["kind"]], str(point["classes"]), str(point["batch"]), point["precision"], *milliseconds, *ratios]


def _ways_line(one: dict[str, Any]) -> list[str]:
    seconds = one["seconds"]
    spread = f"{1e3 * seconds['lowest']:.2f}-{1e3 * seconds['highest']:.2f}"
    way = one["way"] if one["recorded"] or "graphs" not in one["way"] else f"{one['way']} (NOT RECORDED)"
    size = [str(one["classes"]), str(one["batch"]), one["precision"]]
    times = [_number(one["start_seconds"], 1), f"{1e3 * seconds['median']:.2f}", spread, f"{one['gain']:.2f}x"]
    return [WORK[one["kind"]], *size, way, *times, f"{one['images_per_second']:.0f}", _percent(one["share_of_peak"])]


def _number(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.0f} %"
