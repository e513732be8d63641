"""Show the progress of a sweep: a bar with the best score, a line for each configuration, updates to MLflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.sweeps.table import SHOWN, find_best, format_configuration
from cluster.configuration import Configuration
from cluster.progress import format_lost
from cluster.run import Report
from cluster.sweep import Sweep
from runner.collection import Status
from runner.progress import ProgressDisplay
from runner.tracking.background import CollectionTracker


class SweepProgress:
    """Handle the events of a `Sweep`; a context manager around its execution."""

    def __init__(self, tracker: CollectionTracker, trace: Callable[[str], None] | None) -> None:
        """trace: called with the traceback of an internal error."""
        self.sweep: Sweep | None = None
        self._trace = trace
        self._tracker = tracker
        self._running: list[str] = []
        self._waiting: set[str] = set()
        self._settled = 0
        self._display = ProgressDisplay("configurations", 0, unit="done", timed=False)

    def __enter__(self) -> SweepProgress:
        self._display.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._display.__exit__(*exception)

    def close(self, status: Status) -> None:
        """Send everything to MLflow, with the final status."""
        assert self.sweep is not None
        configurations = self.sweep.configurations.values()
        failures = {run: why for one in configurations for run, why in one.failures.items() if one.state == "failed"}
        self._tracker.update([run for one in configurations for run in one.runs])
        self._tracker.close(status, self._metrics(), failures)

    def on_event(self, event: str, configuration: Configuration, report: Report) -> None:
        assert self.sweep is not None
        if event == "started":
            self._running.append(configuration.key)
        elif event == "lost":
            self._display.say(format_lost((configuration.runs or ("?",))[0]))
        elif event == "reported" and report.state == "waiting" and report.run not in self._waiting:
            self._waiting.add(report.run)
            self._display.say(f"waiting: {report.why}")
        elif event == "ended":
            self._running.remove(configuration.key)
            if report.trace and self._trace:
                self._trace(report.trace)
        elif event == "settled":
            self._settled += 1
            total = self.sweep.settings.size
            count = f"{self._settled}/{total}" if total else f"{self._settled}"
            self._display.say(f"[{count}] {format_configuration(configuration)}")
        self._tracker.update(configuration.runs, self._metrics() if event == "settled" else None)
        facts = {"running": f"{len(self._running)}"}
        if best := find_best(self.sweep.settings, self.sweep.configurations.values()):
            facts["best"] = f"{best.score:.2f}"
        self._display.total = self.sweep.settings.size or self._settled + len(self._running)
        self._display.update(self._settled, **facts)

    def _metrics(self) -> dict[str, float]:
        assert self.sweep is not None
        configurations = list(self.sweep.configurations.values())
        states: list[str] = [one.state for one in configurations]
        metrics = {f"configurations_{state}": float(states.count(state)) for state in SHOWN}
        if (best := find_best(self.sweep.settings, configurations)) and best.score is not None:
            metrics[f"best/{self.sweep.settings.metric}"] = best.score
        return metrics
