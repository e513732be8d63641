"""Measure every method's training step and evaluation in fast mode against reference mode, and against plain CLIP.

    python -m tools.method_speed --backbone mini --classes 5,20 --rounds 2     a rehearsal, a minute
    python -m tools.method_speed --out speed.json     ViT-B/16, random weights; about 15 minutes

A ratio is the median over rounds, in which the modes alternate. `counted` is the ratio of counted operations.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.console.output import note, show
from benchmarks.console.parse import parse_integers, parse_methods
from benchmarks.experiment.suite import learns_from_features
from benchmarks.runtime.measure import time_interleaved
from benchmarks.runtime.settings import Settings, make_settings
from benchmarks.runtime.workload import Models, Work, models_by_mode
from procap.weights.loading import load_clip
from runner.config import RuntimeConfig
from tools.record import describe_run, write_record
from tools.sizes import Size, measure_sizes, prepare_size

PLAIN = "zeroshot"
ONE_IMAGE = ("cocoop",)
"""Methods that train with one image at a time, because they encode all classes for each image."""


def measure(
    models: Models,
    methods: Sequence[str],
    counts: Sequence[int],
    batch: int,
    images: int,
    rounds: int,
    settings: Settings,
) -> dict[str, Any]:
    """Measure all methods; returns plain JSON with a row for each method and number of classes.

    batch: images of a step and of an evaluated batch in both modes. images: of a batch compared with plain CLIP.
    """
    began, rows = time.perf_counter(), []
    for count in counts:
        for name in methods:
            row: dict[str, Any] = {"method": name, "classes": count}
            works: tuple[Work, ...] = ("eval",) if name == PLAIN else ("train", "eval")
            for work in works:
                size = Size(work, count, 1 if name in ONE_IMAGE else batch)
                [measured] = measure_sizes(models, name, [size], settings, rounds)
                seconds = {mode: value["median"] for mode, value in measured["seconds"].items()}
                row[work] = {"images": size.batch, "flops": measured["flops"], "seconds": seconds}
            row["of_plain"] = _compare_with_plain(models, name, Size("eval", count, images), settings, rounds)
            rows.append(row)
            note(f"{time.perf_counter() - began:6.0f} s  {row}")
            gc.collect()
    facts = {"backbone": models["fast"].name, "batch": batch, "images": images, "rounds": rounds}
    return describe_run("method_speed", None, models["fast"].device) | facts | {"rows": rows}


def _compare_with_plain(models: Models, name: str, size: Size, settings: Settings, rounds: int) -> float:
    """Measure images per second of fast evaluation, as a share of plain CLIP's: the median over rounds."""
    calls = [prepare_size(models, method, size, settings, "fast")[1] for method in (PLAIN, name)]
    plain, chosen = time_interleaved(calls, 2 * rounds + 1, models["fast"].device)
    return statistics.median(first / second for first, second in zip(plain, chosen, strict=True))


def format_tables(measured: dict[str, Any]) -> str:
    """Format the measurements as two Markdown tables."""
    counts = list(dict.fromkeys(row["classes"] for row in measured["rows"]))
    methods = list(dict.fromkeys(row["method"] for row in measured["rows"]))
    rows = {(row["method"], row["classes"]): row for row in measured["rows"]}
    lines = []
    for kind, what in (("train", "training step, s"), ("eval", "evaluated batch, s")):
        head = [f"{what}: {count} classes" for count in counts]
        lines += [f"| method | {' | '.join(f'{title} | ratio | counted' for title in head)} |"]
        if kind == "eval":
            lines[-1] += " of plain CLIP | counted |"
        lines += ["| --- |" + " ---: |" * (3 * len(counts) + 2 * (kind == "eval"))]
        for name in methods:
            if kind not in rows[name, counts[0]]:
                continue
            cells = [cell for count in counts for cell in _mode_cells(rows.get((name, count), {}).get(kind))]
            if kind == "eval":
                first, plain = rows[name, counts[0]], rows.get((PLAIN, counts[0]))
                cells += [f"{first['of_plain']:.2f}", f"{_counted(plain) / _counted(first):.2f}" if plain else "-"]
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
        lines.append("")
    cpu = measured["environment"]["cpu"]
    lines.append(
        f"{measured['backbone']} with random weights, float32, {cpu['name']}, {cpu['threads']} threads, load "
        f"{measured['load_average']} at the end; batch {measured['batch']} ({', '.join(ONE_IMAGE)}: 1), "
        f"{measured['images']} images against plain CLIP; seconds are reference / fast."
    )
    return "\n".join(lines) + "\n"


def _counted(row: dict[str, Any]) -> float:
    """Return the operations of fast evaluation, per image."""
    return row["eval"]["flops"]["fast"] / row["eval"]["images"]


def _mode_cells(work: dict[str, Any] | None) -> list[str]:
    """Format seconds in both modes, the measured and the counted ratio."""
    if work is None:
        return ["-", "-", "-"]
    seconds, flops = work["seconds"], work["flops"]
    slow, fast = seconds["reference"], seconds["fast"]
    return [f"{slow:.2f} / {fast:.2f}", f"{slow / fast:.2f}", f"{flops['reference'] / flops['fast']:.2f}"]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m tools.method_speed", description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default="all")
    parser.add_argument("--backbone", default="ViT-B/16", help="with random weights")
    parser.add_argument("--classes", default="51", help="numbers of classes")
    parser.add_argument("--batch", type=int, default=4, help="images of a step and of an evaluated batch")
    parser.add_argument("--images", type=int, default=8, help="images of a batch that is compared with plain CLIP")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file of the measurements; the tables go into a .md next to it")
    arguments = parser.parse_args(argv)

    runtime, device = RuntimeConfig(Path("data"), Path("results"), device="cpu"), torch.device("cpu")
    settings = make_settings(runtime, device, backbone=arguments.backbone, pretrained="random")
    models = models_by_mode(load_clip(settings.backbone, settings.pretrained), settings.accelerations)
    counts = parse_integers(arguments.classes, "--classes")
    # The others learn from features in seconds, or need a teacher.
    chosen, teachers = parse_methods(arguments.methods), ("kdpl", "kdpl-maple")
    methods = [name for name in chosen if not learns_from_features(name) and name not in teachers]
    measured = measure(models, methods, counts, arguments.batch, arguments.images, arguments.rounds, settings)
    tables = format_tables(measured)
    show(tables)
    if arguments.out:
        write_record(arguments.out, measured, tables)


if __name__ == "__main__":
    main()
