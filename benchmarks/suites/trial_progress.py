"""Show a progress bar, update MLflow and collect the outcomes of runs that are executed together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.console.output import note_trace
from cluster.trial import TrialReport
from runner.progress_bar import ProgressDisplay
from runner.run_state import RunSpec
from runner.tracking.exporter import CollectionTracker


class TrialProgress:
    """Print which trials were lost or wait; `running` holds those that run."""

    def __init__(self, display: ProgressDisplay) -> None:
        self.display, self.running, self._waiting = display, set[str](), set[str]()

    def note_start(self, trial: str, run: str) -> None:
        # Tune starts a lost trial again without having reported its end.
        if trial in self.running:
            self.display.print(f"lost the process of {run}; it resumes from its last saved state")
        self.running.add(trial)

    def note_report(self, trial: str, report: TrialReport) -> None:
        if report.state != "waiting":
            self._waiting.discard(trial)
        elif trial not in self._waiting:
            self._waiting.add(trial)
            self.display.print(f"waiting: {report.why}")

    def note_end(self, trial: str, report: TrialReport) -> None:
        self.running.discard(trial)
        note_trace(report.trace)


class RunProgress(TrialProgress):
    """Listen to the trials of runs, identified by their index in `runs`; enter `display` around their execution.

    done: the finished runs. failed: errors by run; runs in neither were stopped.
    """

    def __init__(self, runs: Sequence[RunSpec], trackers: Sequence[CollectionTracker]) -> None:
        super().__init__(ProgressDisplay("runs", len(runs), unit="done"))
        self.runs, self.done, self.failed = runs, list[int](), dict[int, str]()
        self._trackers = trackers

    def started(self, trial: str, drawn: Mapping[str, Any]) -> None:
        self.note_start(trial, self.runs[drawn["number"]].path)
        self._show(drawn["number"])

    def reported(self, trial: str, drawn: Mapping[str, Any], report: TrialReport) -> None:
        self.note_report(trial, report)
        self._show(drawn["number"])

    def ended(self, trial: str, drawn: Mapping[str, Any], report: TrialReport) -> None:
        number = drawn["number"]
        self.note_end(trial, report)
        how = "was stopped"
        if report.state == "finished":
            how = f"in {report.seconds:.1f} s on {report.host}"
            self.done.append(number)
        elif report.state == "failed":
            how = f"failed: {report.why.removeprefix(self.runs[number].path).lstrip(' :')}"
            self.failed[number] = report.why
        self.display.print(f"[{len(self.done) + len(self.failed)}/{len(self.runs)}] {self.runs[number].path} {how}")
        self._show(number)

    def _show(self, changed: int) -> None:
        path = self.runs[changed].path
        for tracker in self._trackers:
            if path in tracker.collection.runs:
                tracker.update([path])
        facts = {"running": f"{len(self.running)}"}
        if self.failed:
            facts["failed"] = f"{len(self.failed)}"
        self.display.update(len(self.done) + len(self.failed), **facts)
