"""Measure how a training step scales over processes: several with one thread each against one with one thread.

    python -m benchmarks.studies.scaling                                  mini, 51, 500 and 1,000 classes, two processes
    python -m benchmarks.studies.scaling --backbone ViT-B/16 --random     full size; speed without weights

Steps are those of `procap train`, over synthetic images and class names, on CPUs with gloo, at a learning rate of zero:
every round starts from the same weights. The variants take turns, round by round, in processes that are started once;
while one process works alone, the others wait. With `--out FOLDER` the table and all numbers are written there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import spawn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.console.output import note, show, show_json
from benchmarks.console.parse import parse_integers, parse_methods
from benchmarks.results.runtime import METHOD_TITLES
from benchmarks.runtime.data import synthetic_case
from benchmarks.runtime.measure import peak_bytes
from benchmarks.runtime.settings import METHOD_OPTIONS
from benchmarks.studies.chaos.ports import free_port
from benchmarks.studies.record import describe_machine, describe_run, write_record
from benchmarks.tables.render import markdown_grid
from procap import parallel
from procap.clip import CLIP
from procap.errors import UsageError, UserError
from procap.weights.loading import load_clip, weights_file
from runner.config import plan_run
from runner.distributed.collectives import ProcessGroup
from runner.distributed.process_group import init_process_group
from runner.distributed.ranks import Ranks
from runner.engine import Batch, Engine
from runner.meters import Meter
from runner.results import write_bytes
from runner.step import TrainStep
from shards.rng import generator

WAIT_SECONDS = 600.0
TURN_SECONDS, LEAST_ROUNDS = 0.3, 3
WARM_UPS = 3
"""DDP rebuilds its buckets, with extra messages, within the first three steps."""
HEADERS = (
    "method", "on", "classes", "ms", "lowest-highest", "CPU ms", "speed-up", "efficiency", "MB sent",
    "messages", "MB of a step",
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A way to take steps. sharded: classes are sharded over the processes, else each encodes all of them."""

    name: str
    processes: int
    sharded: bool = True


@dataclass(frozen=True)
class StepSpec:
    """The step to take: a method on a global batch of synthetic images and a number of synthetic classes."""

    method: str
    classes: int
    batch: int


@dataclass(frozen=True)
class Plan:
    """What every process measures. rounds: fewer, if `seconds` are over, but at least `LEAST_ROUNDS`."""

    backbone: str
    pretrained: str | None
    processes: int
    steps: tuple[StepSpec, ...]
    rounds: int
    seconds: float

    @property
    def variants(self) -> tuple[Variant, ...]:
        several = f"{self.processes} processes"
        return (
            Variant("one process", 1),
            Variant(several, self.processes),
            Variant(f"{several}, all classes on each", self.processes, sharded=False),
        )


Answers = list[dict[str, Any]]


class Steps:
    """Take steps of one variant in this process."""

    def __init__(self, spec: StepSpec, variant: Variant, group: ProcessGroup, clip: CLIP) -> None:
        method, images, labels = synthetic_case(clip, spec.method, spec.classes, spec.batch)
        if group.size > 1:
            method.group = group
        # All methods have ProCAP's recipe, so that only the methods differ.
        config = plan_run(
            method=spec.method, dataset="shapes", classes="all", recipe="procap",
            overrides={"epochs": 1, "batch_size": spec.batch}, options=METHOD_OPTIONS.get(spec.method, {}),
        )  # fmt: skip
        self.group, self.variant = group, variant
        self.meter = Meter(clip.device, 0)
        self.engine = Engine(method, config, group)
        self.engine.set_rate(0.0)
        self.batch = Batch(images[group.rank :: group.size], labels, method.draw(generator(config.seed, "noise", 0)))
        self._step = TrainStep(self.engine, self.meter)

    def take(self, times: int) -> dict[str, Any]:
        """Take `times` steps; returns mean seconds and CPU seconds."""
        self._set_sharding()
        worked, began = time.process_time(), time.perf_counter()
        for _ in range(times):
            self._step(self.batch)
        seconds, worked = time.perf_counter() - began, time.process_time() - worked
        self.meter.settle()
        return {"seconds": seconds / times, "cpu": worked / times}

    def inspect(self) -> dict[str, Any]:
        """Measure the loss of a step, what it sends, and the tensors that are alive at once."""
        self._set_sharding()
        for _ in range(WARM_UPS):
            self._step(self.batch)
        sent, messages = count_sent(lambda: self._step(self.batch), self.group.size)
        tensors = peak_bytes(lambda: self._step(self.batch), self.meter.device)
        loss = float(self._step(self.batch)[-1])
        learned = sum(parameter.numel() for parameter in self.engine.method.parameters())
        return {"loss": loss, "sent_bytes": sent, "messages": messages, "tensor_bytes": tensors, "learnables": learned}

    def _set_sharding(self) -> None:
        parallel.SHARED_FROM = 1 if self.variant.sharded else sys.maxsize


def count_sent(work: Callable[[], object], size: int) -> tuple[float, int]:
    """Count the bytes that one of `size` processes sends while `work` runs, and the messages.

    Counted from the tensors of the messages, as rings send them: a gather W - 1 parts of W, an all-reduce twice that.
    """
    found: list[float] = []

    class Messages(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.namespace == "c10d" and function._opname not in ("barrier", "monitored_barrier_"):
                # The full tensor is the first argument of a gather (output) and the second of a scatter (input).
                whole = args[1] if function._opname.startswith(("reduce_scatter", "_reduce_scatter")) else args[0]
                size_of = sum(leaf.nbytes for leaf in tree_leaves(whole) if isinstance(leaf, Tensor))
                found.append(size_of * (2 if "allreduce" in function._opname else 1))
            return function(*args, **(kwargs or {}))

    with Messages():
        work()
    return sum(found) * (size - 1) / size, len(found)


def measure_step(spec: StepSpec, plan: Plan, seconds: float, group: ProcessGroup, clip: CLIP) -> list[dict[str, Any]]:
    """Measure a step in every variant, the first of which has one process; called by all processes together."""
    began, steps = time.perf_counter(), list[Steps | None]()
    for variant in plan.variants:
        takes_part = variant.processes > 1 or group.ranks.is_first
        members = group if variant.processes > 1 else ProcessGroup()
        steps.append(Steps(spec, variant, members, clip) if takes_part else None)

    def in_turn(turn: int, action: Callable[[Steps], dict[str, Any]]) -> list[dict[str, Any]]:
        """Call `action` in the processes of a variant; returns the answers of all of them to every process."""
        group.barrier()
        own = steps[turn]
        return [answer for answer in group.all_gather_object(action(own) if own else None) if answer]

    turns = range(len(steps))
    inspected = [in_turn(turn, Steps.inspect) for turn in turns]
    first = [_slowest(in_turn(turn, partial(Steps.take, times=1))) for turn in turns]
    times = [max(1, int(TURN_SECONDS / one)) for one in first]
    left = seconds - (time.perf_counter() - began)
    fitting = int(left / sum(one * count for one, count in zip(first, times, strict=True)))
    rounds = group.broadcast_object(max(LEAST_ROUNDS, min(plan.rounds, fitting)))
    answers: list[list[Answers]] = [[] for _ in turns]
    for number in range(rounds):
        for position in turns:
            turn = (position + number) % len(steps)
            answers[turn].append(in_turn(turn, partial(Steps.take, times=times[turn])))
    for own in steps:
        if own:
            own.engine.close()
    alone = [_slowest(answer) for answer in answers[0]]
    rows = zip(plan.variants, inspected, answers, strict=True)
    return [_make_row(spec, variant, looks, found, alone) for variant, looks, found in rows]


def _make_row(
    spec: StepSpec, variant: Variant, inspected: Answers, answers: list[Answers], alone: Sequence[float]
) -> dict[str, Any]:
    """Summarize a variant as JSON.

    seconds: of every round, by the slowest process; cpu: of the processor, by the process that used most.
    speedup: one process's seconds over these, median over the rounds.
    sent_bytes, messages: of one process in a step. tensor_bytes: alive at once, in the process that has most.
    """
    seconds = [_slowest(answer) for answer in answers]
    speedup = statistics.median(one / own for one, own in zip(alone, seconds, strict=True))
    cpu = [max(process["cpu"] for process in answer) for answer in answers]
    return {
        "job": asdict(spec), "variant": asdict(variant), "seconds": seconds, "cpu": cpu, "speedup": speedup,
        "sent_bytes": inspected[0]["sent_bytes"],
        "messages": inspected[0]["messages"], "tensor_bytes": max(one["tensor_bytes"] for one in inspected),
        "loss": inspected[0]["loss"], "learnables": inspected[0]["learnables"],
        "median": statistics.median(seconds), "cpu_median": statistics.median(cpu),
        "efficiency": speedup / variant.processes,
    }  # fmt: skip


def _slowest(answers: Sequence[dict[str, Any]]) -> float:
    return max(answer["seconds"] for answer in answers)


def measure_plan(rank: int, size: int, port: int, plan: Plan, out: Path) -> None:
    """Run one process; the first writes the rows of all steps to `out`."""
    ranks = Ranks(rank, size, rank, size)
    os.environ |= ranks.environment("127.0.0.1", port)
    torch.set_num_threads(1)
    clip, began, rows = load_clip(plan.backbone, plan.pretrained), time.perf_counter(), list[dict[str, Any]]()
    with init_process_group(ranks, torch.device("cpu"), WAIT_SECONDS) as group:
        for number, spec in enumerate(plan.steps):
            left = plan.seconds - (time.perf_counter() - began)
            found = measure_step(spec, plan, left / (len(plan.steps) - number), group, clip)
            rows += found
            if rank == 0:
                shown = ", ".join(f"{row['variant']['name']} {1e3 * row['median']:.0f} ms" for row in found)
                note(f"{spec.method}, {spec.classes} classes, batch {spec.batch}: {shown}")
    if rank == 0:
        write_bytes(out, json.dumps(rows).encode())


def make_plan(flags: argparse.Namespace) -> Plan:
    """Make the plan. Raises UsageError for flags that contradict each other, UserError for unknown weights."""
    methods, classes = parse_methods(flags.methods), parse_integers(flags.classes, "--classes", "51,500")
    if flags.processes < 2:
        raise UsageError(f"--processes {flags.processes}: one process is always there, name 2 or more")
    if flags.batch < 2 or flags.batch % flags.processes:
        raise UsageError(f"--batch {flags.batch} does not divide evenly among {flags.processes} processes")
    if min(classes) < flags.processes:
        raise UsageError(f"--classes {min(classes)}: at least as many as processes are needed")
    if "zeroshot" in methods:
        raise UsageError("--methods zeroshot: it is not trained")
    pretrained = "random" if flags.random else None
    weights_file(flags.backbone, pretrained)
    steps = tuple(StepSpec(method, count, flags.batch) for method in methods for count in classes)
    return Plan(flags.backbone, pretrained, flags.processes, steps, flags.rounds, flags.budget)


def format_report(report: dict[str, Any]) -> str:
    """Format the report as Markdown."""
    rows = report["rows"]
    counts = sorted({len(row["seconds"]) for row in rows})
    rounds = " to ".join(dict.fromkeys((str(counts[0]), str(counts[-1]))))
    notes = [
        "- several processes: each has its share of the images and, unless noted, of the classes.",
        "- speed-up: milliseconds of one process over these, median over the rounds; efficiency: by the number of "
        "processes. CPU ms: of the processor, by the process that used most, without waiting.",
        "- MB sent: by one process in a step, counted from its tensors; MB of a step: tensors alive at once, in the "
        "process that has most.",
    ]
    parts = [
        "# A training step on several processes",
        f"Steps on {report['backbone']} with a global batch of {rows[0]['job']['batch']} synthetic images; processes "
        f"of one thread each, gloo; {describe_machine(report)}; medians of {rounds} interleaved rounds.",
        f"    {report['command']}",
        markdown_grid(HEADERS, [_format_row(row) for row in rows], left=2),
        "\n".join(notes),
    ]
    return "\n\n".join(parts) + "\n"


def _format_row(row: dict[str, Any]) -> list[str]:
    shared = [
        f"{row['speedup']:.2f}", f"{row['efficiency']:.0%}",
        f"{row['sent_bytes'] / 1e6:.2f}", str(row["messages"]),
    ]  # fmt: skip
    return [
        METHOD_TITLES.get(row["job"]["method"], row["job"]["method"]), row["variant"]["name"],
        f"{row['job']['classes']:,}", f"{1e3 * row['median']:.0f}",
        f"{1e3 * min(row['seconds']):.0f}-{1e3 * max(row['seconds']):.0f}", f"{1e3 * row['cpu_median']:.0f}",
        *(shared if row["variant"]["processes"] > 1 else [""] * len(shared)), f"{row['tensor_bytes'] / 1e6:.0f}",
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print the table; with --out also write it."""
    parser = argparse.ArgumentParser(description="Time a training step on several processes beside one.")
    parser.add_argument("--methods", default="procap,maple")
    parser.add_argument("--classes", default="51,500,1000")
    parser.add_argument("--batch", type=int, default=32, help="images of a step, of all processes together")
    parser.add_argument("--processes", type=int, default=2, help="no more than there are cores")
    parser.add_argument("--backbone", default="mini")
    parser.add_argument("--random", action="store_true", help="random weights")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=150.0, help="seconds of measuring, roughly")
    parser.add_argument("--out", type=Path, help="folder of scaling.md and scaling.json; default: none")
    parser.add_argument("--json", action="store_true", help="the report as JSON on stdout, and no table")
    flags = parser.parse_args(argv)
    try:
        plan = make_plan(flags)
    except UserError as error:
        print(f"procap: {error}", file=sys.stderr)
        return error.exit_code
    report = describe_run("scaling", argv) | {"backbone": flags.backbone}
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        out = Path(folder) / "rows.json"
        spawn(measure_plan, (flags.processes, free_port(), plan, out), nprocs=flags.processes)
        report["rows"] = json.loads(out.read_text())
    if flags.out:
        write_record(flags.out / "scaling.json", report, format_report(report))
    if flags.json:
        show_json(report)
    else:
        show(format_report(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
