"""Measure every method's training step and evaluation in fast mode against reference mode.

    python -m tools.method_speed --backbone mini --classes 5,20 --rounds 2     a rehearsal, a minute
    python -m tools.method_speed --out speed.json     ViT-B/16, random weights; about 15 minutes

A ratio is the median over rounds, in which the modes alternate. `counted` is the ratio of counted operations.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.console.output import note, show
from benchmarks.console.parse import parse_integers, parse_methods
from benchmarks.experiment.suite import learns_from_features
from benchmarks.runtime.settings import Settings, make_settings
from benchmarks.runtime.workload import Models, Work, models_by_mode
from benchmarks.tables.render import markdown_grid
from procap.weights.loading import load_clip
from runner.config import RuntimeConfig
from tools.record import describe_machine, describe_run, write_record
from tools.sizes import Size, measure_sizes

PLAIN = "zeroshot"
ONE_IMAGE = ("cocoop",)
"""Methods that train with one image at a time, because they encode all classes for each image."""


def measure(
    models: Models,
    methods: Sequence[str],
    counts: Sequence[int],
    batch: int,
    rounds: int,
    settings: Settings,
) -> dict[str, Any]:
    """Measure all methods; returns plain JSON with a row for each method and number of classes.

    batch: images of a step and of an evaluated batch.
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
            rows.append(row)
            note(f"{time.perf_counter() - began:6.0f} s  {row}")
            gc.collect()
    facts = {"backbone": models["fast"].name, "batch": batch, "rounds": rounds}
    return describe_run("method_speed", None, models["fast"].device) | facts | {"rows": rows}


def format_tables(measured: dict[str, Any]) -> str:
    """Format the measurements as two Markdown tables."""
    headers = ("method", "classes", "reference, s", "fast, s", "ratio", "counted")
    tables = []
    for kind, title in (("train", "Training step"), ("eval", "Evaluated batch")):
        rows = [[row["method"], str(row["classes"]), *_cells(row[kind])] for row in measured["rows"] if kind in row]
        tables.append(f"{title}:\n\n{markdown_grid(headers, rows, left=[0])}")
    tables.append(
        f"{measured['backbone']} with random weights, float32, {describe_machine(measured)}; batch {measured['batch']} "
        f"({', '.join(ONE_IMAGE)}: 1)."
    )
    return "\n\n".join(tables) + "\n"


def _cells(work: dict[str, Any]) -> list[str]:
    """Format seconds in both modes, the measured and the counted ratio."""
    [slow, fast], [many, few] = ([work[name][mode] for mode in ("reference", "fast")] for name in ("seconds", "flops"))
    return [f"{slow:.2f}", f"{fast:.2f}", f"{slow / fast:.2f}", f"{many / few:.2f}"]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m tools.method_speed", description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default="all")
    parser.add_argument("--backbone", default="ViT-B/16", help="with random weights")
    parser.add_argument("--classes", default="51", help="numbers of classes")
    parser.add_argument("--batch", type=int, default=4, help="images of a step and of an evaluated batch")
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
    measured = measure(models, methods, counts, arguments.batch, arguments.rounds, settings)
    tables = format_tables(measured)
    show(tables)
    if arguments.out:
        write_record(arguments.out, measured, tables)


if __name__ == "__main__":
    main()
