"""How long jobs take, by the cost model: which go first, and what the progress bar says is left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.cost import CostModel, Estimate, Machine, here, makespan
from cluster.job import Job
from cluster.site import Node
from runner.config import Target

START_SECONDS = {"cpu": 1.0, "cuda": 20.0}
"""Assumed, of a run whose process is there already: weights, and on a GPU recording."""


class CostForecast:
    """Implements `cluster.ledger.Forecast`."""

    def __init__(self, costs: CostModel, processes: int = 1, limit: int | None = None) -> None:
        """processes: that train a run together. limit: images of each target."""
        self.costs, self.processes, self.limit = costs, processes, limit
        self._first: dict[str, list[Estimate]] = {}

    def seconds(self, job: Job) -> float:
        """By what is known now; a correction since the first look counts, a second look costs nothing."""
        pairs = zip(job.pieces, self._estimates(job), strict=True)
        return sum(one.uncorrected * self.costs.correction(piece.config) for piece, one in pairs)

    def learn(self, job: Job, taken: float) -> None:
        if len(job.pieces) == 1:
            [one] = self._estimates(job)
            self.costs.learn(job.pieces[0].config, one, taken)

    def remaining(self, left: Iterable[float], at_once: int) -> float:
        return makespan(left, max(1, at_once))

    def longest_first(self, jobs: Sequence[Job]) -> list[Job]:
        """So that nobody waits at the end for a long one that was begun last."""
        return sorted(jobs, key=self.seconds, reverse=True)

    def basis(self, job: Job) -> str:
        """What its estimate rests on."""
        return self._estimates(job)[0].basis

    def _estimates(self, job: Job) -> list[Estimate]:
        if job.name not in self._first:
            self._first[job.name] = [
                self.costs.estimate(
                    piece.config, map(Target.recorded, piece.targets), limit=self.limit, ranks=self.processes
                )
                for piece in job.pieces
            ]
        return self._first[job.name]


def forecast(
    nodes: Sequence[Node], results: Path, data: Path, *, device: str, processes: int = 1, limit: int | None = None
) -> CostForecast:
    """For runs on `nodes`, or without any on this machine; results that are there correct it from the beginning."""
    gpu = next((node.accelerator for node in nodes if node.gpus), None)
    machine = here(device=device) if gpu is None else Machine(gpu, "cuda")
    return forecast_on(machine, results, data, processes=processes, limit=limit)


def forecast_on(
    machine: Machine, results: Path, data: Path, *, processes: int = 1, limit: int | None = None
) -> CostForecast:
    """For runs on machines like `machine`."""
    return CostForecast(CostModel.of(results, machine, data, start=START_SECONDS[machine.device]), processes, limit)
