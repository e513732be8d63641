"""Train three seeds of a method in one step, and compare time and losses with training each of them alone.

    python -m tools.seed_packing                      ViT-B/16, random weights, 10, 51 and 200 classes; 15 minutes
    python -m tools.seed_packing --backbone mini      a minute

A step encodes the images of all seeds as one batch, each under its seed's tokens, and the class prompts under one token
set per seed. `launches` counts the operations that a GPU would launch; the arithmetic is the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.console.output import show
from benchmarks.console.parse import parse_integers
from benchmarks.runtime.measure import summarize, time_interleaved
from benchmarks.runtime.settings import METHOD_OPTIONS, make_settings, run_config
from benchmarks.runtime.synthetic import class_names
from benchmarks.tables.render import markdown_grid
from procap.clip import CLIP
from procap.methods import build_method
from procap.plan import Plan
from procap.text import LabelSpace
from procap.weights.loading import load_clip
from runner.config import RuntimeConfig
from runner.engine import Batch, Engine
from runner.threads import fitting_threads
from shards.rng import generator
from tools.record import describe_machine, describe_run

SEEDS, BATCH, STEPS = (1, 2, 3), 4, 3


class LaunchCounter(TorchDispatchMode):
    """Count the operations that are not views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def make_engines(clip: CLIP, name: str, classes: int) -> list[Engine]:
    """Make an untrained method of each seed with its optimizer."""
    runtime = RuntimeConfig(Path("data"), Path("results"))
    settings = make_settings(runtime, clip.device, backbone=clip.name, pretrained=clip.pretrained)
    config, space = run_config(name, "fp32", settings, batch=BATCH), LabelSpace(class_names(classes))
    options = METHOD_OPTIONS.get(name, {})
    return [Engine(build_method(name, clip, space, options, generator(seed, "init")), config) for seed in SEEDS]


def make_batch(engine: Engine, classes: int, seed: int, step: int) -> Batch:
    """Make the images, labels and noise of one step of one seed."""
    draw, size = generator(seed, "batch", step), engine.method.clip.geometry.image_size
    images = torch.randn(BATCH, 3, size, size, generator=draw)
    return Batch(images, torch.randint(classes, (BATCH,), generator=draw), engine.method.draw(draw))


def step_alone(engine: Engine, batch: Batch) -> Tensor:
    """Take one step of one seed; returns its loss."""
    terms = engine.terms(batch)
    engine.backward(terms)
    engine.update()
    return terms.detach().sum()


def step_packed(engines: Sequence[Engine], batches: Sequence[Batch]) -> Tensor:
    """Take one step of every seed, with one pass of each tower; returns their losses [S]."""
    first, pairs = engines[0].method, list(zip(engines, batches, strict=True))
    plans = [engine.method.plans(engine.method.prompts, batch.noise) for engine, batch in pairs]
    image_plans, text_plans = zip(*plans, strict=True)
    images = torch.cat([batch.images for batch in batches])
    encoded = first.clip.encode_image(images, join(image_plans, per_image=True)).chunk(len(engines))
    classes = first.clip.encode_text(first.prompts.tokenized, join(text_plans, per_image=False))
    losses = []
    for (engine, batch), *features in zip(pairs, encoded, classes, strict=True):
        engine.optimizer.zero_grad(set_to_none=True)
        engine.method.features = lambda *_, both=tuple(features): both  # type: ignore[method-assign]
        losses.append(engine.terms(batch).sum())
    torch.stack(losses).sum().backward()
    for engine in engines:
        engine.update()
    return torch.stack(losses).detach()


def join(plans: Sequence[Plan], *, per_image: bool) -> Plan:
    """Join the tokens [P, D] of one plan per seed: to [S B, P, D], or to token sets [S, 1, P, D]."""
    joined = []
    for operations in zip(*(plan.tokens for plan in plans), strict=True):
        tokens = torch.stack([op.tokens for op in operations])
        tokens = tokens.repeat_interleave(BATCH, 0) if per_image else tokens[:, None]
        joined.append(replace(operations[0], tokens=tokens))
    return Plan(tuple(joined))


def measure(clip: CLIP, name: str, classes: int, rounds: int) -> list[str]:
    """Compare losses over three steps, then seconds and launches of a step; returns a row of the table."""
    alone, packed = (make_engines(clip, name, classes) for _ in range(2))
    difference = 0.0
    for step in range(STEPS):
        batches = [make_batch(engine, classes, seed, step) for engine, seed in zip(alone, SEEDS, strict=True)]
        losses = torch.stack([step_alone(*pair) for pair in zip(alone, batches, strict=True)])
        difference = max(difference, float((step_packed(packed, batches) - losses).abs().max()))

    def each_alone() -> None:
        with fitting_threads(clip, BATCH):
            for pair in zip(alone, batches, strict=True):
                step_alone(*pair)

    def all_packed() -> None:
        with fitting_threads(clip, BATCH * len(SEEDS)):
            step_packed(packed, batches)

    works, counts = (each_alone, all_packed), []
    for work in works:
        with LaunchCounter() as counter:
            work()
        counts.append(counter.count)
    before, after = (summarize(seconds)["median"] for seconds in time_interleaved(works, rounds, clip.device, 1))
    numbers = f"{before:.3f}", f"{after:.3f}", f"{before / after:.2f}", *map(str, counts), f"{difference:.1e}"
    return [name, str(classes), *numbers]


def main() -> None:
    """Measure ProCAP and MaPLe on this machine's CPU and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.seed_packing", description=__doc__.splitlines()[0])
    parser.add_argument("--backbone", default="ViT-B/16", help="with random weights; mini with its own")
    parser.add_argument("--classes", default="10,51,200")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    backbone, counts = arguments.backbone, parse_integers(arguments.classes, "--classes")
    clip = load_clip(backbone, None if backbone == "mini" else "random")
    rows = [measure(clip, name, classes, arguments.rounds) for name in ("procap", "maple") for classes in counts]
    headers = ("method", "classes", "alone s", "packed s", "ratio", "launches alone", "packed", "loss difference")
    machine = describe_machine(describe_run("seed_packing", None))
    show(f"{markdown_grid(headers, rows, left=range(1))}\n\n{backbone}, float32, {machine}")


if __name__ == "__main__":
    main()
