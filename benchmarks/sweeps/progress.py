"""Show the progress of a sweep: a bar with the best score, a line for each configuration, updates to MLflow."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.suites.progress import format_lost
from benchmarks.sweeps.table import count_states, find_best, format_configuration
from cluster.configuration import Configuration, SweepFolder, SweepSettings
from cluster.run import TrialReport
from cluster.sweep import Sweep
from runner.config import RuntimeConfig
from runner.progress import ProgressDisplay
from runner.run_collection import Collection, Status
from runner.tracking.background import CollectionTracker


class SweepProgress:
    """Handle the events of a `Sweep`; enter `display` around its execution."""

    def __init__(
        self,
        settings: SweepSettings,
        runtime: RuntimeConfig,
        folder: SweepFolder,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        """trace: called with the traceback of an internal error."""
        self.sweep = Sweep(settings, runtime, folder, self._on_event)
        shown = {name: str(value) for name, value in settings.model_dump(mode="json").items()}
        self._tracker = CollectionTracker(runtime, Collection(kind="sweep", name=settings.name, settings=shown))
        self._trace = trace
        self._running: list[str] = []
        self._waiting: set[str] = set()
        self._settled = 0
        self.display = ProgressDisplay("configurations", 0, unit="done", timed=False)

    def close(self, status: Status) -> None:
        """Send everything to MLflow, with the final status."""
        configurations = self.sweep.configurations.values()
        failures = {run: why for one in configurations for run, why in one.failures.items() if one.state == "failed"}
        self._tracker.update([run for one in configurations for run in one.runs])
        self._tracker.close(status, self._metrics(), failures)

    def _on_event(self, event: str, configuration: Configuration, report: TrialReport) -> None:
        total = self.sweep.settings.size
        if event == "started":
            self._running.append(configuration.key)
        elif event == "lost":
            self.display.print(format_lost((configuration.runs or ("?",))[0]))
        elif event == "reported" and report.state == "waiting" and report.run not in self._waiting:
            self._waiting.add(report.run)
            self.display.print(f"waiting: {report.why}")
        elif event == "ended":
            self._running.remove(configuration.key)
            if report.trace and self._trace:
                self._trace(report.trace)
        elif event == "settled":
            self._settled += 1
            count = f"{self._settled}/{total}" if total else f"{self._settled}"
            self.display.print(f"[{count}] {format_configuration(configuration)}")
        metrics = self._metrics()
        self._tracker.update(configuration.runs, metrics if event == "settled" else None)
        best = {name: f"{score:.2f}" for name, score in metrics.items() if name.startswith("best")}
        self.display.total = total or self._settled + len(self._running)
        self.display.update(self._settled, running=f"{len(self._running)}", **best)

    def _metrics(self) -> dict[str, float]:
        settings, configurations = self.sweep.settings, list(self.sweep.configurations.values())
        metrics = {f"configurations_{state}": float(count) for state, count in count_states(configurations).items()}
        best = [] if settings.varies_data else find_best(settings, configurations)
        return metrics | {f"best/{settings.metric}": one.score for one in best if one.score is not None}
