"""Time single training steps and evaluated batches of synthetic images, in fast mode against reference mode.

    python -m tools.speed                     ProCAP at ViT-B/16 with random weights on a CPU; about eight minutes
    python -m tools.speed --methods coop,maple,mmrl --sizes train:51:4 --rounds 1      two minutes
    OMP_NUM_THREADS=1 python -m tools.speed --backbone mini --sizes train:20:4      a minute, to see that it works

A ratio is the median over rounds, in which the modes alternate. `counted` is the ratio of counted operations. Fast mode
gives small work one thread; two of reference mode wait for each other on a busy machine, ten times as long in all.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

from benchmarks.console.output import note, show
from benchmarks.console.parse import parse_methods
from benchmarks.runtime.measure import REPEATS, summarize, time_interleaved
from benchmarks.runtime.settings import Settings, make_settings, run_config
from benchmarks.runtime.synthetic import synthetic_case
from benchmarks.runtime.workload import MODES, Evaluation, Models, ModeName, Preparation, Training, Work, models_by_mode
from benchmarks.tables.render import markdown_grid
from procap.methods import learns_from_features
from procap.weights.loading import load_clip
from runner.config import RuntimeConfig
from runner.session import Session
from tools.record import describe_machine, describe_run

SIZES = "train:51:4,train:500:4,train:102:32,eval:51:100,eval:1000:100"
"""The sizes of docs/runtime.md."""


@dataclass(frozen=True)
class Size:
    """One training step or evaluated batch: its number of classes and images."""

    kind: Work
    classes: int
    batch: int
    precision: str = "fp32"

    @classmethod
    def parse(cls, text: str) -> Size:
        """Parse "train:51:4" or "eval:51:100"."""
        kind, classes, batch = text.split(":")
        return cls(cast(Work, kind), int(classes), int(batch))


def measure_size(models: Models, method: str, size: Size, settings: Settings, rounds: int) -> dict[str, Any]:
    """Measure one size in both modes. ratio, counted: of reference over fast."""
    device = models["fast"].device
    prepared, runs = zip(*(prepare_size(models, method, size, settings, mode) for mode in MODES), strict=True)
    seconds = dict(zip(MODES, time_interleaved(runs, rounds, device, REPEATS[device.type]), strict=True))
    return {
        "method": method,
        "size": asdict(size),
        "seconds": {mode: summarize(values) for mode, values in seconds.items()},
        "flops": {mode: work.flops for mode, work in zip(MODES, prepared, strict=True)},
        "peaks": {mode: work.peak for mode, work in zip(MODES, prepared, strict=True)},
        "ratio": statistics.median(slow / quick for slow, quick in zip(*seconds.values(), strict=True)),
        "counted": prepared[0].flops / prepared[1].flops,
    }


def prepare_size(
    models: Models, name: str, size: Size, settings: Settings, mode: ModeName
) -> tuple[Preparation, Callable[[], object]]:
    """Prepare the work of one mode; returns its preparation and the call to time, which always has the same images."""
    config = run_config(name, size.precision, replace(settings, batch=size.batch, test_batch=size.batch))
    method, images, labels = synthetic_case(models[mode], name, size.classes, size.batch)
    if size.kind == "eval":
        evaluation = Evaluation(method, config, mode, settings.accelerations)
        return evaluation.prepare(images), partial(evaluation, images)
    training = Training(method, config, mode, settings.accelerations)
    # With a learning rate of zero the optimizer still does all its work, but the weights never change.
    training.engine.set_recipe_rate(0.0)
    return training.prepare(images, labels), lambda: training(training.batch(images, labels, 0))


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the measurements as a Markdown table."""
    headers = ("method", "work", "reference s", "fast s", "ratio", "counted", "MB reference", "MB fast")
    cells = []
    for row in rows:
        size = row["size"]
        work = "training step" if size["kind"] == "train" else "evaluation"
        seconds = [f"{row['seconds'][mode]['median']:.2f}" for mode in MODES]
        ratios = [f"{row[name]:.2f}" for name in ("ratio", "counted")]
        megabytes = [f"{row['peaks'][mode] / 1e6:,.0f}" for mode in MODES]
        label = f"{work}, {size['classes']} classes, batch {size['batch']}"
        cells.append([row["method"], label, *seconds, *ratios, *megabytes])
    return markdown_grid(headers, cells, left=range(2))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure on this machine's CPU and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.speed", description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default="procap")
    parser.add_argument("--sizes", default=SIZES, help="train or eval:CLASSES:IMAGES, separated by commas")
    parser.add_argument("--backbone", default="ViT-B/16", help="with random weights; mini with its own")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    session = Session(RuntimeConfig(Path("data"), Path("results"), device="cpu"))
    weights = None if arguments.backbone == "mini" else "random"
    settings = make_settings(session, backbone=arguments.backbone, pretrained=weights)
    models = models_by_mode(load_clip(settings.backbone, settings.pretrained), settings.accelerations)
    methods = [name for name in parse_methods(arguments.methods) if not learns_from_features(name)]
    rows = []
    for size, name in product(map(Size.parse, arguments.sizes.split(",")), methods):
        rows.append(measure_size(models, name, size, settings, arguments.rounds))
        note(f"  {name} {size}: {rows[-1]['ratio']:.2f}x, counted {rows[-1]['counted']:.2f}x")
        gc.collect()
    show(f"{format_table(rows)}\n\n{arguments.backbone}, float32, {describe_machine(describe_run('speed', argv))}")


if __name__ == "__main__":
    main()
