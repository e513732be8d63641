"""A cluster of GPUs carries out a list of runs: how long it takes, what it costs and how much of it is lost.

    python -m benchmarks.cluster_simulation                           the paper's Table 1 on 1 to 512 GPUs
    python -m benchmarks.cluster_simulation --mtbf-hours 24           on nodes that fail once a day
    python -m benchmarks.cluster_simulation --out benchmarks/results  written as cluster.md, .json, .png and .pdf

Events are simulated, as runs that Ray Tune is given meet them: they begin in the order of the list, each as soon as
enough GPUs are free, those of several GPUs as one group and overtaken by smaller ones while they wait. Nodes fail on
their own after exponential times and are replaced. A run that loses a node ends on all of its GPUs, goes back to its
place in the list and begins again from its last checkpoint; a training loses what it did since then, an evaluation all
of it. How long runs are is the word of `benchmarks.cost`.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from procap.errors import UserError

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Job:
    """A run: seconds of `training`, which leaves checkpoints, and of `evaluations`, which do not, on `gpus` at once."""

    training: float
    evaluations: tuple[float, ...] = ()
    gpus: int = 1

    @property
    def seconds(self) -> float:
        return self.training + sum(self.evaluations)

    def kept(self, done: float, worked: float, checkpoint: float) -> float:
        """Seconds of work that are behind the run for good, when it had `done` of them and is lost after `worked`."""
        if done + worked < self.training:
            return done + math.floor(worked / checkpoint) * checkpoint
        kept = self.training
        for evaluation in self.evaluations:
            if kept + evaluation > done + worked:
                break
            kept += evaluation
        return kept


@dataclass(frozen=True)
class Conditions:
    """What runs meet on a cluster; in seconds, but for `mtbf_hours`, after which a node fails on average (None: never).

    per_node: GPUs of a node. start: of every attempt at a run, before it works. checkpoint: from one of a training to
    the next. notice: until the others know of a lost node. replace: until another node has taken its place. hand_out:
    the driver's, for every attempt, one after another.
    """

    per_node: int = 8
    mtbf_hours: float | None = None
    start: float = 40.0
    checkpoint: float = 30.0
    notice: float = 30.0
    replace: float = 600.0
    hand_out: float = 0.1


@dataclass(frozen=True)
class Outcome:
    """What came of it. GPU-seconds: `useful` of work that counted, `lost` of work that did not, `starting`.

    failures: nodes lost; struck: attempts ended by that. floor: seconds that no order of runs without failures can
    undercut: all work and starts evenly over all GPUs, or the longest run.
    """

    gpus: int
    makespan: float
    useful: float
    lost: float
    starting: float
    failures: int
    struck: int
    floor: float

    @property
    def gpu_hours(self) -> float:
        """Of all GPUs until the last run has ended, busy or not."""
        return self.gpus * self.makespan / 3600

    @property
    def utilisation(self) -> float:
        """The share of these in which work was done that counted."""
        return self.useful / (self.gpus * self.makespan) if self.makespan else 1.0


@dataclass(frozen=True)
class _Attempt:
    """A job on GPUs, counted by node; it works from a time on."""

    job: int
    at: dict[int, int]
    works_from: float


@dataclass
class _Cluster:
    """Everything that changes while time goes by. `sizes`: GPUs by node; `free`: of the nodes that are there."""

    jobs: Sequence[Job]
    given: Conditions
    sizes: dict[int, int]
    random: random.Random
    free: dict[int, int] = field(default_factory=dict)
    now: float = 0.0
    driver_free: float = 0.0
    waiting: list[int] = field(default_factory=list)
    done: dict[int, float] = field(default_factory=dict)
    attempts: dict[int, _Attempt] = field(default_factory=dict)
    struck: dict[int, _Attempt] = field(default_factory=dict)
    events: list[tuple[float, int, str]] = field(default_factory=list)
    begun: int = 0
    failures: int = 0
    lost: float = 0.0
    starting: float = 0.0
    hit: int = 0

    def plan(self, after: float, number: int, kind: str) -> None:
        heapq.heappush(self.events, (self.now + after, number, kind))

    def join(self, node: int) -> None:
        """A node is there; what its predecessor's groups still hold of it is not free yet."""
        held = [attempt.at.get(node, 0) for attempt in self.struck.values()]
        self.free[node] = self.sizes[node] - sum(held)
        if self.given.mtbf_hours is not None:
            self.plan(self.random.expovariate(1 / (3600 * self.given.mtbf_hours)), node, "fail")

    def begin(self) -> None:
        """Give GPUs to waiting jobs in their order."""
        still: list[int] = []
        for place, job in enumerate(self.waiting):
            if not any(self.free.values()):
                still += self.waiting[place:]
                break
            at = self._place(self.jobs[job].gpus)
            if at is None:
                still.append(job)
                continue
            self._hold(at, 1)
            self.driver_free = max(self.now, self.driver_free) + self.given.hand_out
            works_from = self.driver_free + self.given.start
            self.begun += 1
            self.attempts[self.begun] = _Attempt(job, at, works_from)
            left = self.jobs[job].seconds - self.done.get(job, 0.0)
            self.plan(works_from - self.now + left, self.begun, "end")
        self.waiting = still

    def end(self, number: int) -> bool:
        """Whether a job has come to its end; an attempt that was struck has none."""
        attempt = self.attempts.pop(number, None)
        if attempt is None:
            return False
        self.starting += self.jobs[attempt.job].gpus * self.given.start
        self._hold(attempt.at, -1)
        return True

    def fail(self, node: int) -> None:
        """A node is lost with its attempts, whose other GPUs are free once that is noticed."""
        self.failures += 1
        del self.free[node]
        self.plan(self.given.replace, node, "join")
        for number in [number for number, attempt in self.attempts.items() if node in attempt.at]:
            attempt = self.attempts.pop(number)
            self.struck[number] = attempt
            self.hit += 1
            self.plan(self.given.notice, number, "notice")
            job, before = self.jobs[attempt.job], self.done.get(attempt.job, 0.0)
            worked = self.now - attempt.works_from
            self.starting += job.gpus * min(self.given.start, max(0.0, self.given.start + worked))
            if worked > 0:
                self.done[attempt.job] = job.kept(before, worked, self.given.checkpoint)
                self.lost += job.gpus * (before + worked - self.done[attempt.job])

    def notice(self, number: int) -> None:
        """The driver knows that an attempt is lost: its job waits again, in its place."""
        attempt = self.struck.pop(number)
        self._hold(attempt.at, -1)
        self.waiting = sorted((*self.waiting, attempt.job))

    def _place(self, gpus: int) -> dict[int, int] | None:
        """GPUs by node for a group: on the node that it fills best, else on as few nodes as can be."""
        fitting = [(count, node) for node, count in self.free.items() if count >= gpus]
        if fitting:
            return {min(fitting)[1]: gpus}
        if sum(self.free.values()) < gpus:
            return None
        at: dict[int, int] = {}
        for count, node in sorted(((count, node) for node, count in self.free.items() if count), reverse=True):
            at[node] = min(count, gpus)
            gpus -= at[node]
            if not gpus:
                break
        return at

    def _hold(self, at: dict[int, int], sign: int) -> None:
        for node, count in at.items():
            if node in self.free:
                self.free[node] -= sign * count


def simulate(
    durations: Sequence[float | Job], gpus: int, given: Conditions | None = None, seed: int | str = 0
) -> Outcome:
    """Runs on `gpus` GPUs, begun in the order given; numbers are seconds of training. Long ones first is best.

    Raises ValueError for a run of more GPUs than there are.
    """
    given = given or Conditions()
    jobs = [one if isinstance(one, Job) else Job(float(one)) for one in durations]
    if any(job.gpus > gpus for job in jobs):
        raise ValueError(f"a run of {max(job.gpus for job in jobs)} GPUs on a cluster of {gpus}")
    sizes = {node: min(given.per_node, gpus - first) for node, first in enumerate(range(0, gpus, given.per_node))}
    cluster = _Cluster(jobs, given, sizes, random.Random(f"{seed}"), waiting=list(range(len(jobs))))
    for node in sizes:
        cluster.join(node)
    cluster.begin()
    left = len(jobs)
    while left:
        cluster.now, number, kind = heapq.heappop(cluster.events)
        if kind == "end":
            left -= cluster.end(number)
        else:
            {"fail": cluster.fail, "join": cluster.join, "notice": cluster.notice}[kind](number)
        cluster.begin()
    useful = sum(job.gpus * job.seconds for job in jobs)
    evenly = (useful + given.start * sum(job.gpus for job in jobs)) / gpus
    longest = max((job.seconds + given.start for job in jobs), default=0.0)
    return Outcome(
        gpus=gpus,
        makespan=cluster.now,
        useful=useful,
        lost=cluster.lost,
        starting=cluster.starting,
        failures=cluster.failures,
        struck=cluster.hit,
        floor=max(evenly, longest),
    )


def outcomes_by_size(
    jobs: Sequence[Job], sizes: Iterable[int], given: Conditions, seeds: int
) -> dict[int, list[Outcome]]:
    """Outcomes by cluster size, one for every simulated seed; one is enough where nothing fails."""
    seeds = seeds if given.mtbf_hours is not None else 1
    return {gpus: [simulate(jobs, gpus, given, f"{seed}") for seed in range(seeds)] for gpus in sizes}


def outlook(
    seconds: Iterable[float], sizes: Iterable[int] = SIZES, price: float | None = None, what: str = "GPU"
) -> list[str]:
    """A line for each cluster size: how long runs of so many seconds, starts included, take if nothing fails.

    what: one run at a time is done on.
    """
    jobs = sorted((Job(one) for one in seconds), key=lambda job: -job.seconds)
    lines = []
    for gpus in sizes:
        one = simulate(jobs, gpus, Conditions(start=0.0))
        cost = "" if price is None else f", costs {price * one.gpu_hours:,.2f}"
        shown = f"{duration(one.makespan)}, {one.gpu_hours:.1f} {what}-hours{cost}, {one.utilisation:.0%} used"
        lines.append(f"{gpus:>4} {what}{'s' * (gpus > 1)}: {shown}")
        # More of them than runs are idle.
        if gpus >= len(jobs):
            break
    return lines


def duration(seconds: float) -> str:
    """`45 s`, `12.3 min`, `4.2 h`, `3.1 days`."""
    for unit, size, most in (("s", 1.0, 90.0), ("min", 60.0, 5400.0), ("h", 3600.0, 48 * 3600.0)):
        if seconds < most:
            return f"{seconds / size:.{0 if unit == 's' else 1}f} {unit}"
    return f"{seconds / 86400:.1f} days"


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, simulate, print tables; with --out write them with a figure and the numbers."""
    parser = argparse.ArgumentParser(description="The paper's Table 1 on clusters of 1 to 512 GPUs, simulated.")
    parser.add_argument("--gpus", default=",".join(map(str, SIZES)))
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--mtbf-hours", type=float, default=6000.0, help="of a node; 0: nodes never fail")
    parser.add_argument("--replace", type=float, default=600.0, help="seconds until a lost node is replaced")
    parser.add_argument("--start", type=float, default=40.0, help="seconds of every attempt at a run before it works")
    parser.add_argument("--price", type=float, default=4.0, help="of a GPU's hour, in any currency")
    parser.add_argument("--seeds", type=int, default=200, help="simulations of each case")
    parser.add_argument("--out", type=Path, help="folder of cluster.md, cluster.json and the figure; default: none")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON on stdout")
    flags = parser.parse_args(arguments)
    from benchmarks.cluster_simulation_report import draw, table
    from benchmarks.cluster_simulation_study import study

    try:
        report = study(flags)
        if flags.out:
            from runner.results import write_bytes, write_json

            write_json(flags.out / "cluster.json", report)
            write_bytes(flags.out / "cluster.md", table(report).encode())
            draw(report, flags.out)
    except UserError as error:
        print(f"procap: {error}", file=sys.stderr)
        return error.exit_code
    print(table(report))
    if flags.json:
        print(json.dumps(report, allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
