"""A cluster of GPUs carries out a list of runs: how long it takes, what it costs and how much of it is lost.

Events are simulated, as runs that Ray Tune is given meet them: they begin in the order of the list, each as soon as
enough GPUs are free, those of several GPUs as one group and overtaken by smaller ones while they wait. Nodes fail on
their own after exponential times and are replaced. A run that loses a node ends on all of its GPUs, goes back to its
place in the list and begins again from its last checkpoint; a training loses what it did since then, an evaluation all
of it. How long runs are is the word of `benchmarks.cost.estimate`.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from procap.errors import UsageError
from runner.progress import duration

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PER_NODE = 8
MTBF_HOURS = 6000.0
"""Assumed between failures of a node: Llama 3's training lost 419 times a part of 16,384 GPUs in 54 days, which is
6,300 hours for each 8."""


@dataclass(frozen=True)
class Job:
    """A run: seconds of `training`, which leaves checkpoints, and of `evaluations`, which do not, on `gpus` at once.

    start: seconds of every attempt at it, before it works.
    """

    training: float
    evaluations: tuple[float, ...] = ()
    gpus: int = 1
    start: float = 0.0

    @property
    def seconds(self) -> float:
        """Of work."""
        return self.training + sum(self.evaluations)

    def unsaved(self, checkpoint: float) -> float:
        """The longest that an attempt has to last for the run to get on at all."""
        return self.start + max(min(self.training, checkpoint), *self.evaluations, 0.0)

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

    per_node: GPUs of a node. checkpoint: from one of a training to the next. notice: until the others know of a lost
    node. replace: until another node has taken its place. hand_out: the driver's, for every attempt, one after another.
    """

    per_node: int = PER_NODE
    mtbf_hours: float | None = None
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
            works_from = self.driver_free + self.jobs[job].start
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
        job = self.jobs[attempt.job]
        self.starting += job.gpus * job.start
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
            self.starting += job.gpus * min(job.start, max(0.0, job.start + worked))
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

    Raises ValueError for a run of more GPUs than there are, UsageError for nodes that fail before a run gets on.
    """
    given = given or Conditions()
    jobs = [one if isinstance(one, Job) else Job(float(one)) for one in durations]
    if any(job.gpus > gpus for job in jobs):
        raise ValueError(f"a run of {max(job.gpus for job in jobs)} GPUs on a cluster of {gpus}")
    _refuse_endless(jobs, given)
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
    evenly = (useful + sum(job.gpus * job.start for job in jobs)) / gpus
    longest = max((job.seconds + job.start for job in jobs), default=0.0)
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


def _refuse_endless(jobs: Sequence[Job], given: Conditions) -> None:
    """Raise UsageError where a run would be lost again and again before anything of it is saved."""
    nodes = (math.ceil(job.gpus / given.per_node) for job in jobs)
    least = max((count * job.unsaved(given.checkpoint) for count, job in zip(nodes, jobs, strict=True)), default=0.0)
    if given.mtbf_hours is not None and 3600 * given.mtbf_hours < least:
        raise UsageError(
            f"nodes that fail every {given.mtbf_hours:g} hours let no run get on that needs {duration(least)} without "
            f"a failure; {math.ceil(least / 36) / 100:g} hours at least"
        )


def outcomes_by_size(
    jobs: Sequence[Job], sizes: Iterable[int], given: Conditions, seeds: int
) -> dict[int, list[Outcome]]:
    """Outcomes by cluster size, one for every simulated seed; one is enough where nothing fails."""
    seeds = seeds if given.mtbf_hours is not None else 1
    return {gpus: [simulate(jobs, gpus, given, f"{seed}") for seed in range(seeds)] for gpus in sizes}


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
