"""Simulate the paper's Table 1 on clusters of several sizes: makespan, GPU-hours, and work lost when nodes fail.

    python -m benchmarks.studies.cluster_simulation                          1 to 512 GPUs
    python -m benchmarks.studies.cluster_simulation --mtbf-hours 24          nodes that fail once a day
    python -m benchmarks.studies.cluster_simulation --out docs/results       write cluster.md and cluster.json

Discrete events: runs start in the order of the list, each as soon as a GPU is free. Nodes fail on their own after
exponential times and are replaced. A run on a failed node returns to its place in the list and restarts from its last
checkpoint; an evaluation restarts from its beginning. Durations come from `benchmarks.suites.cost`.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.console.parse import parse_integers
from benchmarks.results.profiles import PAPER
from benchmarks.studies.record import describe_run, write_record
from benchmarks.suites import load_suite
from benchmarks.suites.cost import CLUSTER_SIZES, START_SECONDS, CostModel, Machine
from benchmarks.tables.render import markdown_grid
from procap.errors import UsageError, UserError
from runner.config import RunConfig, RuntimeConfig, Target, plan_run
from runner.progress import format_duration

TABLE = load_suite("base-to-novel")
A100_PUBLISHED_PACE = 7.73e12
"""Operations per second: counted operations of a step over the seconds of the paper's runtime.csv, median of four."""
FAILING_HOURS = (24.0, 168.0, 1000.0)
START = START_SECONDS["cuda"]


@dataclass(frozen=True)
class SimulatedRun:
    """One run: seconds of `training`, which saves checkpoints, of `evaluations`, which do not, and of every `start`."""

    training: float
    evaluations: tuple[float, ...] = ()
    start: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of work without the start."""
        return self.training + sum(self.evaluations)

    def saved(self, worked: float, checkpoint: float) -> float:
        """Return the seconds of work that are kept if the run is lost after `worked` seconds of work."""
        if worked < self.training:
            return math.floor(worked / checkpoint) * checkpoint
        saved = self.training
        for evaluation in self.evaluations:
            if saved + evaluation > worked:
                break
            saved += evaluation
        return saved


@dataclass(frozen=True)
class Conditions:
    """The cluster; all times in seconds except `mtbf_hours`, the mean time between failures of a node (None: never).

    checkpoint: between checkpoints of a training. notice: until a lost node is noticed. replace: until another node has
    taken its place.
    """

    per_node: int = 8
    mtbf_hours: float | None = 6000.0
    checkpoint: float = 30.0
    notice: float = 30.0
    replace: float = 600.0


@dataclass(frozen=True)
class Outcome:
    """One simulation. GPU seconds of `useful` work, `lost` work, `starting`; floor: lower bound of the makespan."""

    gpus: int
    makespan: float
    useful: float
    lost: float
    starting: float
    failures: int
    interrupted: int
    floor: float

    @property
    def gpu_hours(self) -> float:
        """Hours of all GPUs until the last run has ended, busy or not."""
        return self.gpus * self.makespan / 3600

    @property
    def utilization(self) -> float:
        return self.useful / (self.gpus * self.makespan) if self.makespan else 1.0


def simulate(runs: Sequence[SimulatedRun], gpus: int, given: Conditions, seed: int = 0) -> Outcome:
    """Simulate `runs` on `gpus` GPUs. Raises UsageError if nodes fail before any run can save something."""
    _refuse_endless(runs, given)
    draw = random.Random(seed)
    sizes = {node: min(given.per_node, gpus - first) for node, first in enumerate(range(0, gpus, given.per_node))}
    free, waiting = dict(sizes), list(range(len(runs)))
    saved = [0.0] * len(runs)
    attempts: dict[int, tuple[int, int, float]] = {}
    events: list[tuple[float, int, str]] = []
    now, left, started, failures, interrupted, lost, starting = 0.0, len(runs), 0, 0, 0, 0.0, 0.0

    def plan_failure(node: int) -> None:
        if given.mtbf_hours is not None:
            heapq.heappush(events, (now + draw.expovariate(1 / (3600 * given.mtbf_hours)), node, "fail"))

    for node in sizes:
        plan_failure(node)
    while True:
        for node in free:
            while free[node] and waiting:
                run = waiting.pop(0)
                free[node] -= 1
                started += 1
                works_from = now + runs[run].start
                attempts[started] = (run, node, works_from)
                heapq.heappush(events, (works_from + runs[run].seconds - saved[run], started, "end"))
        if not left:
            break
        now, number, kind = heapq.heappop(events)
        if kind == "end" and number in attempts:
            run, node, _ = attempts.pop(number)
            free[node] += 1
            left -= 1
            starting += runs[run].start
        elif kind == "fail":
            failures += 1
            free.pop(number)
            heapq.heappush(events, (now + given.replace, number, "replaced"))
            for attempt in [attempt for attempt, (_, node, _) in attempts.items() if node == number]:
                run, _, works_from = attempts.pop(attempt)
                interrupted += 1
                starting += min(runs[run].start, max(0.0, now - works_from + runs[run].start))
                worked = saved[run] + max(0.0, now - works_from)
                kept = max(saved[run], runs[run].saved(worked, given.checkpoint))
                lost, saved[run] = lost + worked - kept, kept
                heapq.heappush(events, (now + given.notice, run, "notice"))
        elif kind == "replaced":
            free[number] = sizes[number]
            plan_failure(number)
        elif kind == "notice":
            waiting = sorted([*waiting, number])
    useful = sum(run.seconds for run in runs)
    evenly = (useful + sum(run.start for run in runs)) / gpus
    floor = max([evenly, *(run.seconds + run.start for run in runs)])
    return Outcome(gpus, now, useful, lost, starting, failures, interrupted, floor)


def _refuse_endless(runs: Sequence[SimulatedRun], given: Conditions) -> None:
    needs = [run.start + max(min(run.training, given.checkpoint), *run.evaluations, 0.0) for run in runs]
    least = max(needs, default=0)
    if given.mtbf_hours is not None and 3600 * given.mtbf_hours < least:
        raise UsageError(
            f"nodes that fail every {given.mtbf_hours:g} hours never finish a run that needs {format_duration(least)} "
            f"without a failure; {math.ceil(least / 36) / 100:g} hours at least"
        )


class PublishedA100(Machine):
    """An A100 at the speed of the paper's own code."""

    def pace(self, precision: str) -> float:
        return A100_PUBLISHED_PACE


def machines() -> dict[str, Machine]:
    """Return the slow and the fast assumption about a GPU, by their names in the report."""
    slow = f"A100, published: {A100_PUBLISHED_PACE / 1e12:.1f} TFLOP/s by the paper's training seconds"
    fast = "H200, assumed: 40% of its 989 TFLOP/s reached"
    return {fast: Machine("H200", "cuda"), slow: PublishedA100("A100", "cuda")}


def table_one() -> list[RunConfig]:
    """List every run of the paper's Table 1, each method with its published recipe."""
    return [
        plan_run(method=method, dataset=dataset, seed=seed, backbone="ViT-B-16", precision="bf16")
        for dataset, method, seed in product(PAPER.datasets, TABLE.methods, TABLE.seeds)
    ]


def runs_of(configs: Sequence[RunConfig], machine: Machine, start: float) -> list[SimulatedRun]:
    """Compute the durations of `configs`, tested on base and novel classes."""
    nowhere = Path("/nonexistent")
    model = CostModel(RuntimeConfig(nowhere, nowhere), machine)
    base = model.work(configs[0], [], trained=1.0)
    found = []
    for config in configs:
        targets = [Target(config.dataset, half) for half in ("base", "novel")]
        evaluations = tuple(model.work(config, [target], trained=1.0) - base for target in targets)
        found.append(SimulatedRun(model.work(config, []) - base, evaluations, start))
    return found


def study(flags: argparse.Namespace) -> dict[str, Any]:
    """Run all simulations; returns plain JSON. Raises UsageError for unusable flags."""
    sizes = sorted(parse_integers(flags.gpus, "--gpus", "1,8,64"))
    for name, value, least in (
        ("gpus", sizes[0], 1), ("gpus-per-node", flags.gpus_per_node, 1), ("seeds", flags.seeds, 1),
        ("mtbf-hours", flags.mtbf_hours, 0), ("replace", flags.replace, 0), ("start", flags.start, 0),
    ):  # fmt: skip
        if not least <= value < math.inf:
            raise UsageError(f"--{name} {value:g}: at least {least} is needed")
    given = Conditions(flags.gpus_per_node, flags.mtbf_hours or None, replace=flags.replace)
    conditions = {"start": flags.start, **asdict(given)}
    cases = [_simulate_case(name, machine, sizes, given, flags) for name, machine in machines().items()]
    return {"conditions": conditions, "seeds": flags.seeds, "cases": cases}


def _simulate_case(
    name: str, machine: Machine, sizes: Sequence[int], given: Conditions, flags: argparse.Namespace
) -> dict[str, Any]:
    """Simulate Table 1 with one assumption about a GPU."""
    hours = sorted({*FAILING_HOURS, *([given.mtbf_hours] if given.mtbf_hours else [])})
    runs = sorted(runs_of(table_one(), machine, flags.start), key=lambda run: -run.seconds)
    return {
        "name": name,
        "runs": len(runs),
        "gpu_hours": sum(run.seconds + run.start for run in runs) / 3600,
        "sizes": [_row(runs, size, given, flags) for size in sizes],
        "failing": [
            {"mtbf_hours": one} | _row(runs, size, replace(given, mtbf_hours=one), flags)
            for size in sorted({min(8, sizes[-1]), sizes[-1]})
            for one in hours
        ],
    }


def _row(runs: Sequence[SimulatedRun], gpus: int, given: Conditions, flags: argparse.Namespace) -> dict[str, Any]:
    """Average over the seeds; one simulation is enough without failures."""
    seeds = flags.seeds if given.mtbf_hours is not None else 1
    outcomes = [simulate(runs, gpus, given, seed) for seed in range(seeds)]
    spans = [one.makespan for one in outcomes]
    names = ("gpu_hours", "utilization", "failures", "interrupted")
    mean = {name: statistics.fmean(getattr(one, name) for one in outcomes) for name in names}
    deviation = statistics.stdev(spans) if len(spans) > 1 else 0.0
    return mean | {
        "gpus": gpus, "seconds": statistics.fmean(spans), "deviation": deviation, "floor": outcomes[0].floor,
        "lost_gpu_seconds": statistics.fmean(one.lost for one in outcomes),
    }  # fmt: skip


def format_report(report: dict[str, Any]) -> str:
    """Format the report as Markdown."""
    given, cases = report["conditions"], report["cases"]
    mtbf = f"every {given['mtbf_hours']:,.0f} hours" if given["mtbf_hours"] else "never"
    parts = [
        f"# The paper's Table 1 on {cases[0]['sizes'][0]['gpus']} to {cases[0]['sizes'][-1]['gpus']} GPUs: "
        "a simulation, not a measurement",
        f"{cases[0]['runs']} runs: {len(PAPER.datasets)} data sets x {', '.join(TABLE.methods)} x seeds "
        f"{', '.join(map(str, TABLE.seeds))}, ViT-B/16, bf16, 16 shots of the base classes, tested on base and novel. "
        "NO GPU WAS MEASURED: operations are counted, their pace is assumed.",
        f"    {report['command']}",
        f"- means of {report['seeds']} simulations; floor: work and starts evenly over the GPUs, or the longest run.\n"
        f"- assumed: {given['start']:g} s from the start of an attempt to its first step; a node of "
        f"{given['per_node']} GPUs fails {mtbf}, is noticed after {given['notice']:g} s and replaced after "
        f"{given['replace']:g} s; a training is saved every {given['checkpoint']:g} s, an evaluation not at all. "
        "(Llama 3's training lost 419 times a part of 16,384 GPUs in 54 days: 6,300 hours for each 8.)\n"
        "- GPU-hours: of all GPUs until the last run has ended, busy or not.",
    ]
    for case in cases:
        parts += _format_case(case)
    return "\n\n".join(parts) + "\n"


def _format_case(case: dict[str, Any]) -> list[str]:
    """Format one assumption about a GPU: cluster sizes, lengths of runs, and failing nodes."""
    sizes = [
        [str(row["gpus"]), *map(format_duration, (row["seconds"], row["floor"])),
         f"{row['gpu_hours']:.1f}", f"{row['utilization']:.0%}"]
        for row in case["sizes"]
    ]  # fmt: skip
    failing = [
        [str(row["gpus"]), f"{row['mtbf_hours']:,.0f}",
         f"{format_duration(row['seconds'])} ± {format_duration(row['deviation'])}",
         f"{row['failures']:.2f}", f"{row['interrupted']:.2f}", f"{row['lost_gpu_seconds'] / 60:.1f}"]
        for row in case["failing"]
    ]  # fmt: skip
    failing_headers = ("GPUs", "node MTBF, h", "makespan", "nodes lost", "runs interrupted", "GPU-minutes lost")
    return [
        f"## {case['name']}: {case['gpu_hours']:.1f} GPU-hours of work and starts",
        markdown_grid(("GPUs", "makespan", "floor", "GPU-hours", "used"), sizes, left=0),
        "When nodes fail more often:",
        markdown_grid(failing_headers, failing, left=0),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, simulate, print tables; with --out also write tables and numbers."""
    parser = argparse.ArgumentParser(description="Simulate the paper's Table 1 on clusters of several sizes.")
    parser.add_argument("--gpus", default=",".join(map(str, CLUSTER_SIZES)))
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--mtbf-hours", type=float, default=6000.0, help="of a node; 0: nodes never fail")
    parser.add_argument("--replace", type=float, default=600.0, help="seconds until a lost node is replaced")
    parser.add_argument("--start", type=float, default=START, help="seconds of every attempt before it works")
    parser.add_argument("--seeds", type=int, default=100, help="simulations of each case")
    parser.add_argument("--out", type=Path, help="folder of cluster.md, cluster.json")
    flags = parser.parse_args(arguments)
    try:
        report = describe_run("cluster_simulation", arguments) | study(flags)
    except UserError as error:
        print(f"procap: {error}", file=sys.stderr)
        return error.exit_code
    if flags.out:
        write_record(flags.out / "cluster.json", report, format_report(report))
    print(format_report(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
