"""Time single training steps and evaluated batches of synthetic images, over numbers of classes and images.

python -m tools.sizes                     ProCAP at ViT-B/16 with random weights on a CPU; about eight minutes
python -m tools.sizes --backbone mini     a minute, to see that it works
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import normalize

from benchmarks.console.output import note
from benchmarks.runtime.measure import REPEATS, summarize, time_interleaved
from benchmarks.runtime.settings import Settings, make_settings, run_config
from benchmarks.runtime.workload import MODES, Evaluation, Models, ModeName, Preparation, Training, Work, models_by_mode
from benchmarks.tables.render import markdown_grid
from procap.weights.loading import load_clip
from runner.config import RuntimeConfig
from tools.synthetic import synthetic_case

TEACHERS = ("promptsrc", "mmlop")
"""Methods that once compute features of 60 templates; a step takes the same time with any others."""


@dataclass(frozen=True)
class Size:
    """One training step or evaluated batch: its number of classes and images."""

    kind: Work
    classes: int
    batch: int
    precision: str = "fp32"


def measure_sizes(
    models: Models, method: str, sizes: Sequence[Size], settings: Settings, rounds: int
) -> list[dict[str, Any]]:
    """Measure `sizes` in both modes. ratio, counted: of reference over fast."""
    results = []
    for size in sizes:
        results.append(result := _measure_size(models, method, size, settings, rounds))
        described = f"{size.kind} {size.classes} classes, batch {size.batch}, {size.precision}"
        note(f"  {described}: {result['ratio']:.2f}x, counted {result['counted']:.2f}x")
    return results


def _measure_size(models: Models, method: str, size: Size, settings: Settings, rounds: int) -> dict[str, Any]:
    """Measure one size in both modes."""
    device = models["fast"].device
    prepared, runs = zip(*(prepare_size(models, method, size, settings, mode) for mode in MODES), strict=True)
    seconds = dict(zip(MODES, time_interleaved(runs, rounds, device, REPEATS[device.type]), strict=True))
    return {
        "point": asdict(size),
        "seconds": {mode: summarize(values) for mode, values in seconds.items()},
        "flops": {mode: work.flops for mode, work in zip(MODES, prepared, strict=True)},
        "peaks": {mode: work.peak for mode, work in zip(MODES, prepared, strict=True)},
        "starts": {mode: work.seconds for mode, work in zip(MODES, prepared, strict=True)},
        "ratio": statistics.median(slow / quick for slow, quick in zip(*seconds.values(), strict=True)),
        "counted": prepared[0].flops / prepared[1].flops,
    }


def prepare_size(
    models: Models, name: str, size: Size, settings: Settings, mode: ModeName
) -> tuple[Preparation, Callable[[], object]]:
    """Prepare the work of one mode; returns its preparation and the call to time, which always has the same images."""
    config = run_config(name, size.precision, settings, batch=size.batch)
    method, images, labels = synthetic_case(models[mode], name, size.classes, size.batch)
    if name in TEACHERS:
        features = normalize(torch.ones(size.classes, method.clip.geometry.embed_dim), dim=-1).to(method.clip.device)
        method.constant("teacher", lambda: features)
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


def main(argv: Sequence[str] | None = None) -> None:
    """Measure SIZES on this machine's CPU and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.sizes", description=__doc__.splitlines()[0])
    parser.add_argument("--backbone", default="ViT-B/16")
    parser.add_argument("--method", default="procap")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    runtime, device = RuntimeConfig(Path("data"), Path("results"), device="cpu"), torch.device("cpu")
    weights = None if arguments.backbone == "mini" else "random"
    settings = make_settings(runtime, device, backbone=arguments.backbone, pretrained=weights)
    models = models_by_mode(load_clip(settings.backbone, settings.pretrained), settings.accelerations)
    print(format_sizes(measure_sizes(models, arguments.method, SIZES, settings, arguments.rounds)))


if __name__ == "__main__":
    main()
