"""Show the progress of a sweep: a bar with the best score, a line for each configuration, updates to MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.suites.execute import TrialProgress
from benchmarks.sweeps.outcome import find_best, format_configuration
from cluster.sweep import Sweep
from cluster.sweep_record import Configuration
from cluster.trial import TrialReport
from runner.progress_bar import ProgressDisplay
from runner.run_collection import Collection, Status
from runner.tracking.exporter import CollectionTracker


class SweepProgress(TrialProgress):
    """Pass the events of the trials on to a `Sweep` and show them; enter `display` around its execution."""

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(ProgressDisplay("configurations", 0, unit="done", timed=False))
        self.sweep, settings = sweep, sweep.settings
        shown = {name: str(value) for name, value in settings.model_dump(mode="json").items()}
        self._tracker = CollectionTracker(
            sweep.session.exporter, Collection(kind="sweep", name=settings.name, settings=shown)
        )
        self._settled = 0

    def close(self, status: Status) -> None:
        """Record the final status."""
        failures: dict[str, str] = {}
        for configuration in self.sweep.configurations.values():
            self._tracker.update(configuration.runs)
            if configuration.state == "failed":
                failures |= dict.fromkeys(configuration.runs, configuration.error)
        self._tracker.close(status, metrics=self._metrics(), failed=failures)

    def started(self, trial: str, drawn: Mapping[str, Any]) -> None:
        configuration = self.sweep.started(trial, drawn)
        self.note_start(trial, (configuration.runs or ("?",))[0])
        self._show(configuration)

    def reported(self, trial: str, drawn: Mapping[str, Any], report: TrialReport) -> None:
        self.note_report(trial, report)
        self._show(self.sweep.reported(trial, drawn, report))

    def ended(self, trial: str, drawn: Mapping[str, Any], report: TrialReport) -> None:
        configuration, is_settled = self.sweep.ended(trial, drawn, report)
        self.note_end(trial, report)
        if is_settled:
            self._settled += 1
            count = f"{self._settled}/{total}" if (total := self.sweep.settings.size) else f"{self._settled}"
            self.display.print(f"[{count}] {format_configuration(configuration)}")
        self._show(configuration)

    def _show(self, configuration: Configuration) -> None:
        metrics = self._metrics()
        self._tracker.update(configuration.runs, metrics=metrics)
        best = {name: f"{score:.2f}" for name, score in metrics.items()}
        # A search that only a time limit ends has no size.
        self.display.total = self.sweep.settings.size or self._settled + len(self.running)
        self.display.update(self._settled, running=f"{len(self.running)}", **best)

    def _metrics(self) -> dict[str, float]:
        best = find_best(self.sweep.configurations.values())
        return {f"best/{self.sweep.settings.metric}": best.score} if best and best.score is not None else {}
