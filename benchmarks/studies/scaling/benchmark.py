"""Measure how a training step scales over processes: several with one thread each against one with one thread.

    python -m benchmarks.studies.scaling                                  mini, 51, 500 and 1,000 classes, two processes
    python -m benchmarks.studies.scaling --classes 8,16,32,64 --batch 8      where dealing out classes begins to pay
    python -m benchmarks.studies.scaling --engine ddp,deepspeed,deepspeed:2  beside DeepSpeed, at ZeRO stage 0 and 2
    python -m benchmarks.studies.scaling --backbone ViT-B/16 --random        full size; speed without weights

Steps are those of `procap train`, over synthetic images and class names, on CPUs with gloo. In every
round each group of processes takes its steps once while the others sleep. Below what is measured stands a model of many
GPUs (`model.py`): an estimate, not a measurement. With `--out FOLDER` tables, figures and numbers are written there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.console.parse import parse_integers, parse_methods, split_names
from benchmarks.studies.scaling.model import (
    A100,
    ETHERNET,
    H200,
    Accelerator,
    Links,
    Parts,
    counted_parts,
    pays_up_to,
    step_cost,
)
from benchmarks.studies.scaling.ranks import Group, Parallelism, StepSpec, start_groups
from procap.errors import UsageError, UserError

ALONE = Parallelism("one process")
LOOK_SECONDS, LEAST_ROUNDS = 0.3, 3
SMALL_PING = 256
GPUS = (H200, A100, ETHERNET)
GPU_CLASSES, GPU_BATCHES, GPU_RANKS = (51, 500, 1000), (32, 256), (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Measured:
    """The measurements of a job in one variant.

    seconds: of every round, by the slowest process; cpu: of the processor, by the process that used most.
    speedup: one process's seconds over these, median over the rounds.
    communication: share of a step in messages and waiting, mean of the processes; None if messages are not seen.
    sent_bytes, messages: of one process a step. tensor_bytes: alive at once in a step, process_bytes: the process's
    peak in a step; both of the process that has most. expected: seconds by the model. loss: the same in all variants.
    """

    job: StepSpec
    variant: Parallelism
    seconds: list[float]
    cpu: list[float]
    speedup: float
    communication: float | None
    sent_bytes: float
    messages: int
    tensor_bytes: int
    process_bytes: int
    loss: float
    expected: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def as_json(self) -> dict[str, Any]:
        """As JSON."""
        cpu = statistics.median(self.cpu)
        return {
            **asdict(self),
            "median": self.median,
            "cpu_median": cpu,
            "efficiency": self.speedup / self.variant.processes,
        }


def list_parallelisms(processes: Sequence[int], engines: Sequence[str]) -> list[Parallelism]:
    """List one process, and every variant of several: engines are "ddp", "deepspeed" or "deepspeed:STAGE"."""
    variants = [ALONE]
    for count in processes:
        if count < 2:
            raise UsageError(f"--processes {count}: one process is always there, name 2 or more")
        for engine in engines:
            name, _, stage = engine.partition(":")
            if name not in ("ddp", "deepspeed") or (stage and (name == "ddp" or stage not in "012")):
                raise UsageError(f"--engine {engine}: known are ddp, deepspeed, deepspeed:0, deepspeed:1, deepspeed:2")
            zero = int(stage) if stage else None
            label = f"{count} processes" + ("" if name == "ddp" else f", DeepSpeed, ZeRO {zero or 0}")
            variants.append(Parallelism(label, count, name, zero))
            if name == "ddp":
                variants.append(Parallelism(f"{label}, all classes on each", count, name, sharded=False))
    return variants


def measure(
    groups: Sequence[Group], jobs: Sequence[StepSpec], rounds: int, budget: float, tell: Callable[[str], None]
) -> tuple[list[Measured], dict[StepSpec, Parts], Links]:
    """Measure every job in every variant; the first group has one process. Runs fewer rounds if time is short."""
    links = _links(groups)
    found: list[Measured] = []
    parts: dict[StepSpec, Parts] = {}
    began = time.perf_counter()
    for number, job in enumerate(jobs):
        left = budget - (time.perf_counter() - began)
        rows, parts[job] = _measure(groups, job, links, rounds, left / (len(jobs) - number))
        found += rows
        shown = ", ".join(f"{row.variant.name} {1e3 * row.median:.0f} ms" for row in rows)
        tell(f"{job.method}, {job.classes} classes, batch {job.batch}: {shown}")
    return found, parts, links


def _measure(
    groups: Sequence[Group], job: StepSpec, links: Links, rounds: int, budget: float
) -> tuple[list[Measured], Parts]:
    began = time.perf_counter()
    fewer = StepSpec(job.method, job.classes, job.batch // 2), StepSpec(job.method, job.classes // 2, job.batch)
    looks = {group: group.ask("build", job) for group in groups}
    for part in fewer:
        groups[0].ask("build", part)
    work = [(group, job) for group in groups] + [(groups[0], part) for part in fewer]
    times = [max(1, int(LOOK_SECONDS / _slowest(group.ask("step", one, times=1)))) for group, one in work]
    once = sum(_slowest(group.ask("step", one, times=n)) * n for (group, one), n in zip(work, times, strict=True))
    rounds = max(LEAST_ROUNDS, min(rounds, int((budget - (time.perf_counter() - began)) / once)))
    seconds: list[list[float]] = [[] for _ in work]
    cpu: list[list[float]] = [[] for _ in work]
    waited: list[list[float]] = [[] for _ in work]
    for number in range(rounds):
        for place in range(len(work)):
            turn = (place + number) % len(work)
            group, one = work[turn]
            answers = group.ask("step", one, times=times[turn])
            seconds[turn].append(_slowest(answers))
            cpu[turn].append(max(answer["cpu"] for answer in answers))
            if all(answer["waited"] is not None for answer in answers):
                waited[turn].append(statistics.mean(answer["waited"] / answer["seconds"] for answer in answers))
    for group in groups:
        group.ask("clear")
    alone, images, classes = seconds[0], seconds[-2], seconds[-1]
    parts = split(job, alone, images, classes, looks[groups[0]][0]["learnables"])
    rows = [
        Measured(
            job=job,
            variant=group.variant,
            seconds=mine,
            cpu=used,
            speedup=statistics.median(one / own for one, own in zip(alone, mine, strict=True)),
            communication=statistics.median(shares) if shares else None,
            sent_bytes=looks[group][0]["sent_bytes"],
            messages=looks[group][0]["messages"],
            tensor_bytes=max(look["tensor_bytes"] for look in looks[group]),
            process_bytes=max(look["process_bytes"] for look in looks[group]),
            loss=looks[group][0]["loss"],
            expected=step_cost(parts, links, group.variant.processes, sharded=group.variant.sharded).total,
        )
        for group, mine, used, shares in zip(groups, seconds, cpu, waited, strict=False)
    ]
    return rows, parts


def split(
    job: StepSpec, whole: Sequence[float], half_images: Sequence[float], half_classes: Sequence[float], learnables: int
) -> Parts:
    """Split a step into parts for images, classes and the rest, by steps over half the images and half the classes."""

    def part(half: Sequence[float], items: int) -> float:
        saved = statistics.median(all_of - some for all_of, some in zip(whole, half, strict=True))
        return max(0.0, saved * items / (items - items // 2))

    image, text = part(half_images, job.batch), part(half_classes, job.classes)
    return Parts(
        classes=job.classes,
        image=image,
        text=text,
        every=max(0.0, statistics.median(whole) - image - text),
        features=0.0,
        class_features=0.0,
        gradients=4.0 * learnables,
    )


def _links(groups: Sequence[Group]) -> Links:
    """Measure the connections between processes of this machine by all-reduces of few and of many numbers."""
    group = next(group for group in groups if group.variant.processes > 1)
    ranks, many = group.variant.processes, 1_000_000
    few, more = (_slowest(group.ask("ping", size=size)) for size in (SMALL_PING, many))
    traffic = 2 * (ranks - 1) / ranks * 4 * (many - SMALL_PING)
    return Links(rate=traffic / max(1e-9, more - few), latency=0.0, start=few, per_host=1024)


def _slowest(answers: Sequence[dict[str, Any]]) -> float:
    return max(answer["seconds"] for answer in answers)


def launched(method: str) -> int:
    """Count the operations that a step launches one by one, on mini, whose towers have the depth of ViT-B/16's."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from benchmarks.runtime.data import synthetic_case
    from benchmarks.studies.scaling.ranks import run_config
    from procap.weights.mini import load_mini
    from runner.engine import Batch, Engine
    from runner.meters import Meter
    from runner.step import TrainStep
    from shards.rng import generator

    found: list[str] = []

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not function.is_view and not function._opname.startswith("empty"):
                found.append(function._opname)
            return function(*args, **(kwargs or {}))

    job = StepSpec(method, 40, 4)
    built, images, labels = synthetic_case(load_mini(), method, job.classes, job.batch)
    config = run_config(job)
    step = TrainStep(Engine(built, config), Meter(built.clip.device, 0))
    batch = Batch(images, labels, built.draw(generator(config.seed, "noise", 0)))
    step(batch)
    with Launches():
        step(batch)
    return len(found)


def estimates(methods: Sequence[str], gpus: Sequence[Accelerator]) -> list[dict[str, Any]]:
    """Compute the model's estimates for every method, GPU, global batch and number of classes, at 1 to 64 GPUs."""
    found = []
    for method in methods:
        launches = launched(method)
        for classes in GPU_CLASSES:
            for gpu in gpus:
                for batch in GPU_BATCHES:
                    parts = counted_parts(method, classes, batch, gpu, launches)
                    # Skip batches that cannot be divided evenly.
                    counts = tuple(ranks for ranks in GPU_RANKS if batch % ranks == 0)
                    costs = {ranks: step_cost(parts, gpu.links, ranks) for ranks in counts}
                    found.append(
                        {
                            "method": method,
                            "gpu": gpu.name,
                            "batch": batch,
                            "parts": asdict(parts),
                            "launches": launches,
                            "pays_up_to": pays_up_to(parts, gpu.links, counts),
                            "ranks": [
                                {"ranks": ranks, "seconds": cost.total, "speedup": costs[1].total / cost.total}
                                | {"whole_seconds": step_cost(parts, gpu.links, ranks, sharded=False).total}
                                | {"recorded_seconds": step_cost(parts, gpu.links, ranks, recorded=True).total}
                                | asdict(cost)
                                for ranks, cost in costs.items()
                            ],
                        }
                    )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print tables; with --out also write tables, plots and numbers."""
    parser = argparse.ArgumentParser(description="Time a training step on several processes beside one.")
    parser.add_argument("--methods", default="procap,maple")
    parser.add_argument("--classes", default="51,500,1000")
    parser.add_argument("--batch", type=int, default=32, help="images of a step, of all processes together")
    parser.add_argument("--processes", default="2", help="2 or 2,4: no more than there are cores")
    parser.add_argument("--engine", default="ddp", help="ddp, deepspeed, deepspeed:STAGE, or several of them")
    parser.add_argument("--backbone", default="mini")
    parser.add_argument("--random", action="store_true", help="random weights")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=150.0, help="seconds of measuring, roughly")
    parser.add_argument("--out", type=Path, help="folder of scaling.md, scaling.json and figures; default: none")
    parser.add_argument("--note", default="", help="a remark kept in the record")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON on stdout")
    flags = parser.parse_args(arguments)
    try:
        report = run(flags)
    except UserError as error:
        print(f"procap: {error}", file=sys.stderr)
        return error.exit_code
    from benchmarks.studies.scaling.report import draw, table

    if flags.out:
        from runner.results import write_bytes, write_json

        write_json(flags.out / "scaling.json", report)
        write_bytes(flags.out / "scaling.md", table(report).encode())
        draw(report, flags.out)
    print(table(report))
    if flags.json:
        print(json.dumps(report, allow_nan=False))
    return 0


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Make the whole report. Raises UsageError for flags that contradict each other, UserError if a process is lost."""
    from runner.environment import environment

    methods, classes = parse_methods(flags.methods), parse_integers(flags.classes, "--classes", "51,500")
    variants = list_parallelisms(parse_integers(flags.processes, "--processes", "2,4"), split_names(flags.engine))
    for variant in variants:
        if flags.batch < 2 or flags.batch % variant.processes:
            raise UsageError(f"--batch {flags.batch} does not divide evenly among {variant.processes} processes")
        if min(classes) < max(2, variant.processes):
            raise UsageError(f"--classes {min(classes)}: at least as many as processes are needed, and two")
    if "zeroshot" in methods:
        raise UsageError("--methods zeroshot: it is not trained")
    load, began = os.getloadavg()[0], time.perf_counter()
    with ExitStack() as stack:
        groups = start_groups(variants, flags.backbone, "random" if flags.random else None, stack)
        jobs = [StepSpec(method, count, flags.batch) for method in methods for count in classes]
        rows, parts, links = measure(
            groups, jobs, flags.rounds, flags.budget, lambda line: print(line, file=sys.stderr, flush=True)
        )
    given = [f"--{name} {value}" for name, value in vars(flags).items() if _is_changed(name, value)]
    return {
        "command": " ".join(["python -m benchmarks.studies.scaling", *given, *(["--random"] if flags.random else [])]),
        "note": flags.note,
        "environment": environment(),
        "cores": os.cpu_count() or 1,
        "load_average": [round(load, 2), round(os.getloadavg()[0], 2)],
        "seconds": round(time.perf_counter() - began, 1),
        "backbone": flags.backbone,
        "rows": [row.as_json() for row in rows],
        "parts": [{"job": asdict(job), **asdict(found)} for job, found in parts.items()],
        "links": {"rate": links.rate, "start": links.start},
        "gpus": [asdict(gpu) for gpu in GPUS],
        "estimates": estimates(methods, GPUS),
    }


def _is_changed(name: str, value: Any) -> bool:
    defaults = {"methods": "procap,maple", "classes": "51,500,1000", "batch": 32, "processes": "2", "engine": "ddp"}
    defaults |= {"backbone": "mini", "rounds": 9, "budget": 150.0}
    return name in defaults and value != defaults[name]
