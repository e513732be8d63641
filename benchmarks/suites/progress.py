"""Show a progress bar, update MLflow and collect the outcomes of runs that are executed together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.suites.cost import CostModel, makespan
from cluster.run import RunSpec, TrialReport
from runner.progress import ProgressDisplay, format_duration
from runner.run_collection import Status
from runner.tracking.background import CollectionTracker


class CollectionTrackers:
    """The trackers of several collections. started: whether a run was started; otherwise they stay unchanged."""

    def __init__(self, trackers: Sequence[CollectionTracker]) -> None:
        self.trackers = trackers
        self.started = False

    def update(self, run: str) -> None:
        for tracker in self.trackers:
            if run in tracker.collection.runs:
                tracker.update([run])

    def close(self, status: Status) -> None:
        for tracker in self.trackers:
            tracker.close(status)


class RunProgress:
    """Listen to the trials of runs, identified by their index in `runs`; enter `display` around their execution.

    done: the finished runs. failed: errors by run; runs in neither were stopped.
    """

    def __init__(
        self,
        runs: Sequence[RunSpec],
        costs: CostModel,
        max_concurrent: int = 1,
        trackers: CollectionTrackers | None = None,
        *,
        trace: Callable[[str], None] | None = None,
        quiet: bool = False,
    ) -> None:
        """trace: called with the traceback of an internal error."""
        self.runs, self.done, self.failed = runs, list[int](), dict[int, str]()
        self._costs, self._max_concurrent, self._trackers, self._trace = costs, max_concurrent, trackers, trace
        self._running: dict[int, float] = {}
        # When places became free: the next run there begins then, as the start of its processes is part of its time.
        self._freed: list[float] = []
        self._waiting: set[int] = set()
        self._interrupted: set[int] = set()
        self.display = ProgressDisplay("runs", len(runs), unit="done", quiet=quiet, timed=False)

    def started(self, trial: str, config: Mapping[str, Any]) -> None:
        number = config["number"]
        if number in self._running:
            self._interrupted.add(number)
            self.display.print(format_lost(self.runs[number].path))
        else:
            self._running[number] = self._freed.pop() if self._freed else time.monotonic()
        self._show()

    def reported(self, trial: str, config: Mapping[str, Any], report: TrialReport) -> None:
        number = config["number"]
        if report.state != "waiting":
            self._waiting.discard(number)
        elif number not in self._waiting:
            self._waiting.add(number)
            self._interrupted.add(number)
            self.display.print(f"waiting: {report.why}")
        self._show(number)

    def ended(self, trial: str, config: Mapping[str, Any], report: TrialReport) -> None:
        number = config["number"]
        run = self.runs[number]
        now = time.monotonic()
        taken = now - self._running.pop(number, now)
        self._freed.append(now)
        how = "was stopped"
        if report.state == "done":
            how = f"in {report.seconds:.1f} s on {report.host}"
            self.done.append(number)
            # The time of an interrupted run would mislead the estimates.
            if number not in self._interrupted:
                self._costs.learn(run, max(taken, report.seconds))
        elif report.state == "failed":
            how = f"failed: {report.why}"
            self.failed[number] = report.why
            if report.trace and self._trace:
                self._trace(report.trace)
        self.display.print(f"[{len(self.done) + len(self.failed)}/{len(self.runs)}] {run.path} {how}")
        self._show(number)

    def _show(self, changed: int | None = None) -> None:
        """Update the display, and the tracker with a changed run."""
        if self._trackers is not None and changed is not None:
            self._trackers.update(self.runs[changed].path)
        now, left = time.monotonic(), []
        for number, run in enumerate(self.runs):
            if number not in self.done and number not in self.failed:
                left.append(max(0.0, self._costs.seconds(run) - (now - self._running.get(number, now))))
        remaining = makespan(left, max(1, self._max_concurrent))
        facts = {"running": f"{len(self._running)}"}
        facts["left"] = f"about {format_duration(remaining)}" if math.isfinite(remaining) else "unknown"
        if self.failed:
            facts["failed"] = f"{len(self.failed)}"
        self.display.update(len(self.done) + len(self.failed), **facts)


def format_lost(run: str) -> str:
    """Format the message shown when Ray restarts a run."""
    return f"lost the process of {run}; it goes on from its last saved state"
