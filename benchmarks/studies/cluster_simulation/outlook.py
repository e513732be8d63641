"""How long clusters of several sizes take over some runs, in a line for each: what a plan ends with."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from benchmarks.studies.cluster_simulation.cluster import SIZES, Conditions, Job, outcomes_by_size
from runner.progress import duration

SEEDS = 20
"""Simulations of each size."""


def outlook(
    runs: Iterable[Job],
    given: Conditions,
    *,
    sizes: Iterable[int] = SIZES,
    price: float | None = None,
    what: str = "GPU",
    seeds: int = SEEDS,
) -> list[str]:
    """A line for each cluster size that holds the runs: how long they take, long ones first, mean of all seeds.

    price: of an hour of `what`, on which a run of one process is done.
    """
    jobs = sorted(runs, key=lambda job: -job.seconds)
    lines, most = [], sum(job.gpus for job in jobs)
    fitting = [size for size in sizes if all(job.gpus <= size for job in jobs)]
    # More of them than the runs need are idle.
    needed = [size for size in fitting if size < most] + [size for size in fitting if size >= most][:1]
    for gpus, found in outcomes_by_size(jobs, needed, given, seeds).items():
        hours = statistics.fmean(one.gpu_hours for one in found)
        used = statistics.fmean(one.utilisation for one in found)
        cost = "" if price is None else f", costs {price * hours:,.2f}"
        took = duration(statistics.fmean(one.makespan for one in found))
        spent = f"{hours:,.1f}" if hours >= 1 else f"{hours:.2g}"
        lines.append(f"{gpus:>4} {what}{'s' * (gpus > 1)}: {took}, {spent} {what}-hours{cost}, {used:.0%} used")
    return lines
