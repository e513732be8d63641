"""Time single training steps and evaluated batches of synthetic images, over numbers of classes and images.

python -m tools.sizes                     ProCAP at ViT-B/16 with random weights on a CPU; about eight minutes
python -m tools.sizes --backbone mini     a minute, to see that it works
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.console.output import note
from benchmarks.runtime.data import synthetic_case
from benchmarks.runtime.measure import REPEATS, Summary, time_in_turns
from benchmarks.runtime.settings import Settings, make_settings, run_config
from benchmarks.runtime.workload import MODES, Evaluation, Models, ModeName, Preparation, Training, Work, models_by_mode
from benchmarks.tables.render import markdown_grid
from procap.weights.loading import load_clip
from runner.config import RuntimeConfig


@dataclass(frozen=True)
class Size:
    """One training step or evaluated batch: its number of classes and images."""

    kind: Work
    classes: int
    batch: int
    precision: str = "fp32"


def measure_sizes(
    models: Models, method: str, sizes: Sequence[Size], settings: Settings, rounds: int, seconds: float | None
) -> list[dict[str, Any]]:
    """Measure `sizes` in both modes for about `seconds`. ratio, counted: of reference over fast."""
    found: list[dict[str, Any]] = []
    began = time.perf_counter()
    for size in sizes:
        left = None if seconds is None else seconds - (time.perf_counter() - began)
        if left is not None and left <= 0:
            note(f"  {len(sizes) - len(found)} of {len(sizes)} sizes left out: the time is used up")
            break
        one = _measure_size(models, method, size, settings, rounds, left)
        found.append(one)
        described = f"{size.kind} {size.classes} classes, batch {size.batch}, {size.precision}"
        note(f"  {described}: {one['ratio']:.2f}x, counted {one['counted']:.2f}x")
    return found


def _measure_size(
    models: Models, method: str, size: Size, settings: Settings, rounds: int, left: float | None
) -> dict[str, Any]:
    """Measure one size; runs fewer rounds if they would take more than half of `left` seconds."""
    device = models["fast"].device
    prepared, runs = zip(*(_prepare(models, method, size, settings, mode) for mode in MODES), strict=True)
    once = sum(one.once for one in prepared)
    repeats = REPEATS[device.type]
    if left is not None:
        rounds = max(1, min(rounds, int(left / 2 / (repeats * once))))
    seconds = dict(zip(MODES, time_in_turns(runs, rounds, device, repeats), strict=True))
    ratio = statistics.median(slow / quick for slow, quick in zip(*seconds.values(), strict=True))
    counted = prepared[0].flops / prepared[1].flops
    return {
        "point": asdict(size),
        "method": method,
        "backbone": models["fast"].name,
        "seconds": {mode: asdict(Summary.of(values)) for mode, values in seconds.items()},
        "flops": {mode: one.flops for mode, one in zip(MODES, prepared, strict=True)},
        "peaks": {mode: one.peak for mode, one in zip(MODES, prepared, strict=True)},
        "starts": {mode: one.seconds for mode, one in zip(MODES, prepared, strict=True)},
        "ratio": ratio,
        "counted": counted,
        "reached": ratio / counted,
    }


def _prepare(
    models: Models, name: str, size: Size, settings: Settings, mode: ModeName
) -> tuple[Preparation, Callable[[], object]]:
    """Prepare the work of one mode; returns its preparation and the call to time, which always has the same images."""
    config = run_config(name, size.precision, settings, batch=size.batch)
    method, images, labels = synthetic_case(models[mode], name, size.classes, size.batch, settings.options.get(name))
    if size.kind == "eval":
        evaluation = Evaluation(method, config, mode, settings.accelerations)
        return evaluation.prepare(images), partial(evaluation, images)
    training = Training(method, config, mode, settings.accelerations)
    # With a learning rate of zero the optimizer still does all its work, but the weights never change.
    training.engine.set_rate(0.0)
    return training.prepare(images, labels), lambda: training(training.batch(images, labels, 0))


SIZES = (
    Size("train", 51, 4), Size("train", 500, 4), Size("train", 102, 32), Size("eval", 51, 100), Size("eval", 1000, 100),
)  # fmt: skip
"""The sizes of docs/runtime.md."""


def format_sizes(measured: Sequence[dict[str, Any]]) -> str:
    """Format the measured sizes as a Markdown table."""
    headers = ["", "reference s", "fast s", "ratio", "counted", "MB reference", "MB fast"]
    rows = []
    for entry in measured:
        size, seconds = entry["point"], entry["seconds"]
        kind = "training step" if size["kind"] == "train" else "evaluation"
        megabytes = [f"{entry['peaks'][mode] / 1e6:,.0f}" for mode in MODES]
        rows.append([
            f"{kind}, {size['classes']} classes, batch {size['batch']}",
            *(f"{seconds[mode]['median']:.2f}" for mode in MODES),
            f"{entry['ratio']:.2f}", f"{entry['counted']:.2f}", *megabytes,
        ])  # fmt: skip
    return markdown_grid(headers, rows, left=range(1))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure SIZES on this machine's CPU and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.sizes", description=__doc__.splitlines()[0])
    parser.add_argument("--backbone", default="ViT-B/16")
    parser.add_argument("--method", default="procap")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    runtime, device = RuntimeConfig(Path("data"), Path("results"), device="cpu"), torch.device("cpu")
    weights = None if arguments.backbone == "mini" else "random"
    settings = make_settings(runtime, device, backbone=arguments.backbone, pretrained=weights or "")
    models = models_by_mode(load_clip(settings.backbone, settings.pretrained), settings.accelerations)
    print(format_sizes(measure_sizes(models, arguments.method, SIZES, settings, arguments.rounds, None)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
