"""Measure every method's training step and evaluation in fast mode against reference mode, and against plain CLIP.

    python -m tools.method_speed --backbone mini --classes 5,20 --rounds 2     a rehearsal, a minute
    python -m tools.method_speed --classes 51 --write     ViT-B/16, random weights; about 15 minutes

The modes are those of `benchmarks.runtime.workload`; they take the same batch in turns in one process, and a ratio is
the median over rounds. `counted` is the ratio of counted operations. For the last number of classes, whose reference
takes longest, there is one round, and within `--budget` seconds only. `--write` writes docs/results/method_speed.json,
in which other rows stay, and replaces the tables in docs/results/method_speed.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import normalize

from benchmarks.console.output import note, show
from benchmarks.console.parse import parse_integers, parse_methods
from benchmarks.runtime.data import synthetic_case
from benchmarks.runtime.measure import count_flops
from benchmarks.runtime.settings import METHOD_OPTIONS
from benchmarks.runtime.workload import MODES, Evaluation, Models, ModeName, Training, Work, models_by_mode
from procap.methods import METHODS
from procap.methods.method import Method
from procap.weights.loading import load_clip
from runner.acceleration import Acceleration
from runner.planning import plan_run
from runner.results import write_bytes, write_json
from tools.record import describe_run

PLAIN = "zeroshot"
ONE_IMAGE = ("cocoop",)
"""Methods that train with one image at a time, because they encode all classes for each image."""
TEACHERS = ("promptsrc", "mmlop")
"""Methods that once compute features of 60 templates; a step takes the same time with any others."""
PAGE, DATA = Path("docs/results/method_speed.md"), Path("docs/results/method_speed.json")
MARKS = "<!-- speed: begin -->\n", "<!-- speed: end -->\n"


@dataclass(frozen=True)
class Sizes:
    """batch: images of a step and of an evaluated batch in both modes; images: of a batch compared with plain CLIP."""

    classes: tuple[int, ...]
    batch: int
    images: int
    rounds: int


def measure(models: Models, methods: Sequence[str], sizes: Sizes, budget: float) -> dict[str, Any]:
    """Measure all methods; returns plain JSON with a row for each method and number of classes."""
    began, rows = time.perf_counter(), []
    for count in sizes.classes:
        is_last = count == sizes.classes[-1] and len(sizes.classes) > 1
        for name in methods:
            in_time = not is_last or time.perf_counter() - began < budget
            row = _measure_modes(models, name, count, sizes.batch, 1 if is_last else sizes.rounds, in_time)
            if not is_last:
                row["of_plain"] = _compare_with_plain(models, name, count, sizes)
            rows.append({"method": name, "classes": count, **row})
            note(f"{time.perf_counter() - began:6.0f} s  {rows[-1]}")
            gc.collect()
    found = {"backbone": models["fast"].name, "batch": sizes.batch, "images": sizes.images, "rounds": sizes.rounds}
    return describe_run("method_speed", None, models["fast"].device) | found | {"rows": rows}


@dataclass(frozen=True)
class TimedCall:
    """A call to time, and one that counts its operations and must come after the first `run` of a method."""

    run: Callable[[], object]
    count: Callable[[], float]

    def seconds(self) -> float:
        """Run once and return the wall seconds."""
        began = time.perf_counter()
        self.run()
        return time.perf_counter() - began


def _measure_modes(
    models: Models, name: str, classes: int, batch: int, rounds: int, with_reference: bool
) -> dict[str, Any]:
    """Measure seconds of a step and of an evaluated batch in both modes, in turns, and count their operations."""
    row: dict[str, Any] = {}
    kinds: tuple[Work, ...] = ("eval",) if name == PLAIN else ("train", "eval")
    for kind in kinds:
        images = 1 if name in ONE_IMAGE else batch
        works = _make_works(models, name, classes, images, kind, MODES)
        # The first run computes what never changes, and would count as slow.
        works["fast"].run()
        modes = MODES if with_reference else MODES[1:]
        taken: dict[str, list[float]] = {mode: [] for mode in modes}
        for _ in range(rounds):
            for mode in modes:
                taken[mode].append(works[mode].seconds())
            taken["fast"].append(works["fast"].seconds())
        row[kind] = {
            "images": images,
            "flops": {mode: works[mode].count() for mode in MODES},
            "seconds": {mode: statistics.median(found) for mode, found in taken.items()},
        }
    return row


def _make_works(
    models: Models, name: str, classes: int, batch: int, kind: Work, modes: Sequence[ModeName]
) -> dict[ModeName, TimedCall]:
    """Make the work of `modes`, on the same parameters."""
    method, images, _ = synthetic_case(models["fast"], name, classes, batch)
    if name in TEACHERS:
        made = normalize(torch.ones(classes, method.clip.geometry.embed_dim), dim=-1)
        method.constant("teacher", lambda: made)
    return {mode: _make_work(method.with_clip(models[mode]), name, images, kind, mode) for mode in modes}


def _make_work(method: Method, name: str, images: torch.Tensor, kind: Work, mode: ModeName) -> TimedCall:
    config = plan_run(method=name, dataset="shapes", classes="all", options=METHOD_OPTIONS.get(name, {}))
    if kind == "eval":
        evaluation = Evaluation(method, config, mode, Acceleration())
        evaluation.update_classifier()
        return TimedCall(lambda: evaluation(images), lambda: count_flops(lambda: evaluation(images), method))
    training = Training(method, config, mode, Acceleration())
    # With a rate of zero the optimizer does all its work, but the weights never change.
    training.engine.set_rate(0.0)
    step = training.batch(images, torch.arange(len(images)) % len(method.space.classnames), 0)

    def count() -> float:
        flops = count_flops(lambda: training.engine.terms(step).sum().backward())
        method.zero_grad(set_to_none=True)
        return flops

    return TimedCall(lambda: training(step), count)


def _compare_with_plain(models: Models, name: str, classes: int, sizes: Sizes) -> float:
    """Measure images per second of fast evaluation, as a share of plain CLIP's: the median over rounds."""
    own, plain = (_make_works(models, one, classes, sizes.images, "eval", ["fast"])["fast"] for one in (name, PLAIN))
    own.run()
    plain.run()
    pairs = [(plain.seconds(), own.seconds()) for _ in range(2 * sizes.rounds + 1)]
    return statistics.median(first / mine for first, mine in pairs)


def merge(found: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """Add the rows of other methods and numbers of classes from an earlier run of the same kind on the same machine."""

    def kind(one: dict[str, Any]) -> tuple[Any, ...]:
        return one["backbone"], one["batch"], one["images"], one["environment"]["cpu"]

    if earlier and kind(earlier) == kind(found):
        rows = {(row["classes"], row["method"]): row for row in [*earlier["rows"], *found["rows"]]}
        order = sorted(rows, key=lambda key: (key[0], [*METHODS].index(key[1])))
        found = {**found, "rows": [rows[key] for key in order]}
    return found


def format_tables(found: dict[str, Any]) -> str:
    """Format the measurements as two Markdown tables."""
    counts = list(dict.fromkeys(row["classes"] for row in found["rows"]))
    methods = list(dict.fromkeys(row["method"] for row in found["rows"]))
    rows = {(row["method"], row["classes"]): row for row in found["rows"]}
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
    cpu = found["environment"]["cpu"]
    lines.append(
        f"{found['backbone']} with random weights, float32, {cpu['name']}, {cpu['threads']} threads, load "
        f"{found['load_average']} at the end; batch {found['batch']} ({', '.join(ONE_IMAGE)}: 1), {found['images']} "
        f"images against plain CLIP; seconds are reference / fast."
    )
    return "\n".join(lines) + "\n"


def _counted(row: dict[str, Any]) -> float:
    """Return the operations of fast evaluation, per image."""
    return row["eval"]["flops"]["fast"] / row["eval"]["images"]


def _mode_cells(one: dict[str, Any] | None) -> list[str]:
    """Format seconds in both modes, the measured and the counted ratio."""
    if one is None:
        return ["-", "-", "-"]
    seconds, flops = one["seconds"], one["flops"]
    slow, fast = seconds.get("reference"), seconds["fast"]
    counted = f"{flops['reference'] / flops['fast']:.2f}"
    if slow is None:
        return [f"- / {fast:.2f}", "-", counted]
    return [f"{slow:.2f} / {fast:.2f}", f"{slow / fast:.2f}", counted]


def write_page(tables: str, page: Path = PAGE) -> None:
    """Replace what is between the marks in `page`."""
    before, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    write_bytes(page, f"{before}{MARKS[0]}\n{tables}\n{MARKS[1]}{after}".encode())


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m tools.method_speed", description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default="all")
    parser.add_argument("--backbone", default="ViT-B/16", help="with random weights")
    parser.add_argument("--classes", default="51,500", help="numbers of classes")
    parser.add_argument("--batch", type=int, default=4, help="images of a step and of an evaluated batch")
    parser.add_argument("--images", type=int, default=8, help="images of a batch that is compared with plain CLIP")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget", type=float, default=1200.0, help="seconds after which references are left out")
    parser.add_argument("--write", action="store_true", help=f"write {DATA} and the tables in {PAGE}")
    arguments = parser.parse_args(argv)

    models = models_by_mode(load_clip(arguments.backbone, "random"), Acceleration())
    counts = tuple(parse_integers(arguments.classes, "--classes", "51,500"))
    sizes = Sizes(counts, arguments.batch, arguments.images, arguments.rounds)
    found = measure(models, parse_methods(arguments.methods), sizes, arguments.budget)
    if arguments.write:
        found = merge(found, json.loads(DATA.read_text()) if DATA.exists() else {})
    tables = format_tables(found)
    show(tables)
    if arguments.write:
        write_json(DATA, found)
        write_page(tables)


if __name__ == "__main__":
    main()
