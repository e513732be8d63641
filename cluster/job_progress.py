"""What becomes of jobs while they are carried out: a bar for people, MLflow for later, and what is left at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.job import Job, Report
from runner.config import RuntimeConfig
from runner.progress import ProgressDisplay, duration


class Forecast(Protocol):
    """What is known of how long jobs take, corrected by those that have ended."""

    def seconds(self, job: Job) -> float: ...

    def learn(self, job: Job, taken: float) -> None: ...

    def remaining(self, left: Iterable[float], at_once: int) -> float:
        """Seconds until the last of jobs with so many seconds `left`, in their order, ends."""
        ...


class Told(Protocol):
    """Who is told of runs that begin, go on and end: one collection's tracker, or those of several."""

    @property
    def place(self) -> RuntimeConfig: ...

    def update(self, runs: Iterable[str], figures: Mapping[str, float] | None = None) -> None: ...


@dataclass
class Outcome:
    """How jobs ended, by number: the done ones and why the others failed; what is in neither was stopped."""

    done: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)


class JobProgress:
    """Listens to jobs that are carried out by number; `with Ledger(...) as ledger: do_all(..., ledger)`."""

    def __init__(
        self,
        jobs: Sequence[Job],
        forecast: Forecast,
        at_once: int,
        tracker: Told | None = None,
        *,
        quiet: bool = False,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        """trace: gets the traceback of a failure inside the program."""
        self.jobs = jobs
        self.outcome = Outcome()
        self._forecast, self._at_once, self._tracker, self._trace = forecast, at_once, tracker, trace
        self._running: dict[int, tuple[float, Report]] = {}
        self._interrupted: set[int] = set()
        self._display = ProgressDisplay("runs", len(jobs), unit="done", quiet=quiet, timed=False)

    def __enter__(self) -> JobProgress:
        self._display.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._display.__exit__(kind, error, trace)

    def started(self, trial: str, config: Mapping[str, Any]) -> None:
        number = config["number"]
        if number in self._running:
            self._interrupted.add(number)
            self._display.say(lost(self.jobs[number]))
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
        job = self.jobs[number]
        self._running.pop(number, None)
        if report.state == "done":
            self.outcome.done.append(number)
            # Else these seconds are of a part of what was left of it.
            if number not in self._interrupted:
                self._forecast.learn(job, report.seconds)
        elif report.state == "failed":
            self.outcome.failed[number] = report.why
            if report.trace and self._trace:
                self._trace(report.trace)
        ended = len(self.outcome.done) + len(self.outcome.failed)
        words = {"done": f"in {report.seconds:.1f} s on {report.host}", "failed": f"failed: {report.why}"}
        self._display.say(f"[{ended}/{len(self.jobs)}] {job.name} {words.get(report.state, 'was stopped')}")
        self._track(number)
        self._show()

    def _track(self, number: int) -> None:
        if self._tracker is not None:
            self._tracker.update(piece.config.path for piece in self.jobs[number].pieces)

    def _show(self) -> None:
        now = time.monotonic()
        ended = {*self.outcome.done, *self.outcome.failed}
        left = []
        for number, job in enumerate(self.jobs):
            if number in self._running:
                left.append(max(0.0, self._forecast.seconds(job) - (now - self._running[number][0])))
            elif number not in ended:
                left.append(self._forecast.seconds(job))
        remaining = self._forecast.remaining(left, self._at_once)
        facts = {
            "running": f"{len(self._running)}",
            "left": f"about {duration(remaining)}" if math.isfinite(remaining) else "unknown",
        }
        if self.outcome.failed:
            facts["failed"] = f"{len(self.outcome.failed)}"
        self._display.update(len(ended), **facts)


def lost(job: Job) -> str:
    """What people are told when Ray starts a job again."""
    return f"lost the process of {job.name}; it goes on from its last saved state"
