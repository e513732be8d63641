"""How long jobs take, by the cost model: which go first, and what the progress bar says is left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.cli.plan import plan
from benchmarks.cost.estimate import CostModel, Estimate, Machine, here, makespan
from benchmarks.studies.cluster_simulation.cluster import Job as SimulatedJob
from cluster.job import Job, RunSpec
from cluster.ray_cluster import Node
from procap.errors import UserError
from runner.config import RuntimeConfig, Target


class CostForecast:
    """Implements `cluster.job_progress.Forecast`: what was left of a job when it was first looked at."""

    def __init__(self, costs: CostModel, at: RuntimeConfig, processes: int = 1, *, force: bool = False) -> None:
        """processes: that train a run together. force: what is there already is repeated."""
        self.costs, self.at, self.processes, self.force = costs, at, processes, force
        self._first: dict[str, list[Estimate]] = {}

    def seconds(self, job: Job) -> float:
        """By what is known now; a correction since the first look counts, a second look costs nothing."""
        pairs = zip(job.pieces, self._estimates(job), strict=True)
        return sum(one.uncorrected * self.costs.correction(piece.config) for piece, one in pairs)

    def learn(self, job: Job, taken: float) -> None:
        """From a job that did all that was left of it in one attempt."""
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

    def simulated(self, job: Job) -> Iterator[SimulatedJob]:
        """What is left of its runs, for a cluster to carry out."""
        for piece, one in zip(job.pieces, self._estimates(job), strict=True):
            factor = self.costs.correction(piece.config)
            evaluations = tuple(factor * seconds for seconds in one.evaluations)
            yield SimulatedJob(factor * one.training, evaluations, self.processes, factor * one.start)

    def _estimates(self, job: Job) -> list[Estimate]:
        if job.name not in self._first:
            self._first[job.name] = [self._left_of(piece) for piece in job.pieces]
        return self._first[job.name]

    def _left_of(self, piece: RunSpec) -> Estimate:
        targets = [Target.recorded(target) for target in piece.targets]
        try:
            [run] = plan([piece.config], self.at, lambda config: targets, force=self.force)
        except UserError:
            # What cannot be read is told by whoever does the run.
            return self.costs.estimate(piece.config, targets, limit=self.at.limit, ranks=self.processes)
        return self.costs.of_plan(run, self.processes)


def forecast(nodes: Sequence[Node], at: RuntimeConfig, *, processes: int = 1) -> CostForecast:
    """For runs on `nodes`, or without any on this machine; results that are there correct it from the beginning."""
    gpu = next((node.accelerator for node in nodes if node.gpus), None)
    machine = here(at.device) if gpu is None else Machine(gpu, "cuda")
    return forecast_on(machine, at, processes=processes)


def forecast_on(machine: Machine, at: RuntimeConfig, *, processes: int = 1, force: bool = False) -> CostForecast:
    """For runs on machines like `machine`."""
    return CostForecast(CostModel.of(at.results, machine, at.data), at, processes, force=force)
