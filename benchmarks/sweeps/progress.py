"""What people see of a sweep while it goes on: a bar with the best so far, a line for each configuration, MLflow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.console.output import note
from benchmarks.sweeps.table import SHOWN
from cluster.configuration import Configuration
from cluster.job import Job, Report
from cluster.job_progress import lost
from cluster.sweep import Sweep
from cluster.sweep_record import SweepSettings, TrialRecord, best
from runner.collection import Status
from runner.progress import ProgressDisplay, duration
from runner.tracking.background import CollectionTracker

if TYPE_CHECKING:
    from benchmarks.suites.cost import CostModel


class SweepProgress:
    """Listens to a sweep; `with` it while the sweep is carried out."""

    def __init__(
        self, settings: SweepSettings, tracker: CollectionTracker, trace: Callable[[str], None] | None
    ) -> None:
        """trace: gets the traceback of a failure inside the program."""
        self.settings = settings
        self._tracker, self._trace = tracker, trace
        self._sweep: Sweep | None = None
        self._forecast: CostModel | None = None
        self._at_once = 1
        self._began = time.monotonic()
        self._jobs: dict[str, tuple[Job, float, str]] = {}
        """By task: two of them may be the same runs."""
        self._interrupted: set[str] = set()
        self._runs = 1
        self._display = ProgressDisplay("configurations", 0, unit="done", timed=False)

    def follow(self, sweep: Sweep, forecast: CostModel | None, at_once: int) -> None:
        """Show how far `sweep` is from now on."""
        self._sweep, self._forecast, self._at_once = sweep, forecast, at_once

    def __enter__(self) -> SweepProgress:
        self._display.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._display.__exit__(kind, error, trace)

    def close(self, status: Status, records: Mapping[str, TrialRecord]) -> None:
        """The sweep has ended as `status` says: everything that waits is sent."""
        runs = [run for record in records.values() for run in record.runs]
        self._tracker.update(runs)
        self._tracker.close(status, self._figures(records), failed_runs(records))

    def begun(self, record: TrialRecord, configuration: Configuration) -> None:
        self._runs = len(configuration.runs)
        self._tracker.update(configuration.runs)

    def heard(self, record: TrialRecord, task: str, job: Job, report: Report) -> None:
        before = self._jobs.get(task)
        self._jobs[task] = (job, before[1] if before else time.monotonic(), report.state)
        if before is None and self._forecast is not None:
            # The first look at what is left of it, while it is all left.
            self._forecast.seconds(job)
        if before and not report.host:
            # It starts once more: every report that a process makes names its host.
            self._interrupted.add(task)
            self._display.say(lost(job))
        if report.state == "waiting" and (before is None or before[2] != "waiting"):
            self._interrupted.add(task)
            self._display.say(f"waiting: {report.why}")
        self._tell_of(job)
        self._show()

    def over(self, record: TrialRecord, task: str, job: Job, report: Report) -> None:
        self._jobs.pop(task, None)
        if report.state == "done" and self._forecast is not None and task not in self._interrupted:
            self._forecast.learn(job, report.seconds)
        if report.trace and self._trace:
            self._trace(report.trace)
        self._tell_of(job)

    def _tell_of(self, job: Job) -> None:
        self._tracker.update(piece.config.path for piece in job.pieces)

    def settled(self, record: TrialRecord) -> None:
        ended = f"[{self._count()}] {said(record)}"
        self._display.say(ended)
        if self._sweep is not None:
            self._tracker.update(record.runs, self._figures(self._sweep.records))
        self._show()

    def _figures(self, records: Mapping[str, TrialRecord]) -> dict[str, float]:
        """For MLflow, to compare sweeps by."""
        states: list[str] = [record.state for record in records.values()]
        figures = {f"configurations_{state}": float(states.count(state)) for state in SHOWN}
        if (first := best(self.settings, records)) and first[1].figure is not None:
            figures[f"best/{self.settings.metric}"] = first[1].figure
        return figures

    def _count(self) -> str:
        settled = self._sweep.settled if self._sweep else 0
        total = self._sweep.total if self._sweep else None
        return f"{settled}/{total}" if total else f"{settled}"

    def _show(self) -> None:
        sweep = self._sweep
        if sweep is None:
            return
        facts = {"running": f"{len(self._jobs)}"}
        if (first := best(self.settings, sweep.records)) and first[1].figure is not None:
            facts["best"] = f"{first[1].figure:.2f}"
        if (left := self._left(sweep)) is not None:
            facts["left"] = f"about {duration(left)}"
        self._display.total = sweep.total or sweep.settled + len(self._jobs)
        self._display.update(sweep.settled, **facts)

    def _left(self, sweep: Sweep) -> float | None:
        """Seconds, by what runs cost that are under way; those to come are taken to be like them."""
        now, ends = time.monotonic(), []
        if self.settings.hours is not None:
            ends.append(max(0.0, self._began + 3600 * self.settings.hours - now))
        if self._forecast is not None and self._jobs and sweep.total is not None:
            costs = {task: self._forecast.seconds(job) for task, (job, *_) in self._jobs.items()}
            going = [max(0.0, costs[task] - (now - began)) for task, (_, began, _) in self._jobs.items()]
            mean = sum(costs.values()) / sum(len(job.pieces) for job, *_ in self._jobs.values())
            to_come = max(0, sweep.total - sweep.begun) * self._runs + sweep.queued
            left = self._forecast.remaining([*going, *[mean] * to_come], self._at_once)
            ends += [left] if math.isfinite(left) else []
        return min(ends, default=None)


def failed_runs(records: Mapping[str, TrialRecord]) -> dict[str, str]:
    """Why, of every run that failed."""
    failed = [record for record in records.values() if record.state == "failed"]
    return {run: why.removeprefix(f"{run}: ") for record in failed for run, why in record.failures.items()}


def said(record: TrialRecord) -> str:
    """A configuration that has ended, in a line."""
    values = ", ".join(f"{field.rpartition('.')[2]} {value}" for field, value in record.values.items()) or "as it is"
    if record.state == "failed":
        return f"{values}: failed: {record.why}"
    figure = "" if record.figure is None else f"{record.figure:.2f} %"
    return f"{values}: {figure}{f', stopped after epoch {record.epoch}' if record.state == 'stopped' else ''}"


def tell_failures(failed: Mapping[str, TrialRecord], done: int) -> None:
    """What failed and why, at the end."""
    note(f"procap: {done} done, {len(failed)} failed:")
    for record in failed.values():
        note(f"  {said(record)}")
