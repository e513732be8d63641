"""Show a progress bar, update MLflow and collect the outcomes of runs that are executed together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.run import Report, RunSpec
from runner.progress import ProgressDisplay, format_duration


class Forecast(Protocol):
    """Estimates how long runs take; finished runs improve the estimates."""

    def seconds(self, run: RunSpec) -> float: ...

    def learn(self, run: RunSpec, taken: float) -> None: ...

    def remaining(self, left: Iterable[float], at_once: int) -> float:
        """Return the seconds until all runs have ended, given the seconds `left` of each in their order."""
        ...


class Tracker(Protocol):
    """The tracker of one collection of runs, or of several."""

    def update(self, runs: Iterable[str], metrics: Mapping[str, float] | None = None) -> None: ...


@dataclass
class Outcome:
    """Indices of the finished runs, and the errors of the failed ones; runs in neither were stopped."""

    done: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)


class RunProgress:
    """Follow runs by their number; `with RunProgress(...) as progress: launch(..., progress)`."""

    def __init__(
        self,
        runs: Sequence[RunSpec],
        forecast: Forecast,
        max_concurrent: int = 1,
        tracker: Tracker | None = None,
        *,
        trace: Callable[[str], None] | None = None,
        quiet: bool = False,
    ) -> None:
        """trace: called with the traceback of an internal error."""
        self.runs = runs
        self.outcome = Outcome()
        self._forecast, self._max_concurrent, self._trace = forecast, max_concurrent, trace
        self._tracker = tracker
        self._running: dict[int, tuple[float, Report]] = {}
        self._interrupted: set[int] = set()
        self._display = ProgressDisplay("runs", len(runs), unit="done", quiet=quiet, timed=False)

    def __enter__(self) -> RunProgress:
        self._display.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._display.__exit__(kind, error, trace)

    def started(self, trial: str, config: Mapping[str, Any]) -> None:
        number = config["number"]
        if number in self._running:
            self._interrupted.add(number)
            self._display.say(format_lost(self.runs[number].path))
        self._running[number] = (time.monotonic(), Report())
        self._show()

    def reported(self, trial: str, config: Mapping[str, Any], report: Report) -> None:
        number = config["number"]
        began, before = self._running.get(number, (time.monotonic(), Report()))
        self._running[number] = (began, report)
        if report.state == "waiting" and before.state != "waiting":
            self._interrupted.add(number)
            self._display.say(f"waiting: {report.why}")
        self._track(number)
        self._show()

    def ended(self, trial: str, config: Mapping[str, Any], report: Report) -> None:
        number = config["number"]
        run = self.runs[number]
        self._running.pop(number, None)
        if report.state == "done":
            self.outcome.done.append(number)
            # An interrupted run only reports the seconds of its last attempt, which would mislead the forecast.
            if number not in self._interrupted:
                self._forecast.learn(run, report.seconds)
        elif report.state == "failed":
            self.outcome.failed[number] = report.why
            if report.trace and self._trace:
                self._trace(report.trace)
        ended = len(self.outcome.done) + len(self.outcome.failed)
        how = {"done": f"in {report.seconds:.1f} s on {report.host}", "failed": f"failed: {report.why}"}
        self._display.say(f"[{ended}/{len(self.runs)}] {run.path} {how.get(report.state, 'was stopped')}")
        self._track(number)
        self._show()

    def _track(self, number: int) -> None:
        if self._tracker is not None:
            self._tracker.update([self.runs[number].path])

    def _show(self) -> None:
        now = time.monotonic()
        ended = {*self.outcome.done, *self.outcome.failed}
        left = []
        for number, run in enumerate(self.runs):
            if number in self._running:
                left.append(max(0.0, self._forecast.seconds(run) - (now - self._running[number][0])))
            elif number not in ended:
                left.append(self._forecast.seconds(run))
        remaining = self._forecast.remaining(left, self._max_concurrent)
        about = f"about {format_duration(remaining)}" if math.isfinite(remaining) else "unknown"
        facts = {"running": f"{len(self._running)}", "left": about}
        if self.outcome.failed:
            facts["failed"] = f"{len(self.outcome.failed)}"
        self._display.update(len(ended), **facts)


def format_lost(run: str) -> str:
    """Format the message shown when Ray restarts a run."""
    return f"lost the process of {run}; it goes on from its last saved state"
