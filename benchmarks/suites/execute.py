"""Execute the runs of suites, on this machine or on a cluster, show their progress, and collect their outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.console.output import note, note_trace, plural
from benchmarks.console.packing_progress import pack_missing_with_progress
from benchmarks.console.preconditions import check_training_images, check_weights
from cluster.launcher import Launcher, connect, launch
from cluster.preflight import TRAINING_SPLITS, check_nodes
from cluster.ray_cluster import Capacity, nodes
from cluster.trial import StoragePaths, TrialReport
from runner.config import Target
from runner.progress_bar import ProgressDisplay
from runner.run_folders import RunFolder
from runner.run_state import RunSpec
from runner.session import Session
from runner.tracking.exporter import CollectionTracker
from shards.files import check_writable

FEW_IMAGES = 16_000
"""Runs on fewer images in all are executed one after the other: Ray takes as long to start and to load the program."""


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


def execute(
    images_left: Mapping[RunSpec, float],
    paths: StoragePaths,
    session: Session,
    launcher: Launcher,
    trackers: Sequence[CollectionTracker],
    *,
    force: bool,
) -> dict[str, str]:
    """Execute runs, those with the most images first; returns the error of each failed run by its path.

    images_left: those of each run. paths: the folders and the runtime of workers; `session` is that of this process.
    force: delete the runs first.
    """
    runtime, runs = session.runtime, [*images_left]
    check_writable(runtime.results)
    splits: dict[str, set[str]] = {}
    for run in runs:
        splits.setdefault(run.config.dataset, set()).update(TRAINING_SPLITS)
        for target in map(Target.parse_unchecked, run.targets):
            splits.setdefault(target.dataset, set()).add(target.split)
    if launcher.kind == "local":
        check_weights((run.config.backbone, run.config.pretrained) for run in runs)
    pack_missing_with_progress(splits, runtime.data)
    check_training_images((run.config for run in runs), runtime.data)
    # Only if the user has chosen nothing about the launch.
    if launcher == Launcher() and sum(images_left.values()) < FEW_IMAGES:
        launcher = replace(launcher, max_concurrent=1)
    with connect(launcher, paths) as capacity:
        if launcher.kind == "ray":
            check_nodes(paths, splits, autoscale=launcher.autoscale)
        note_capacity(capacity)
        if force:
            # Once, in the driver, so that a restarted run resumes.
            delete_runs((run.path for run in runs), session)
        # Greedy packing of the longest first ends early.
        ordered = sorted(runs, key=images_left.__getitem__, reverse=True)
        progress = RunProgress(ordered, trackers)
        with progress.display:
            launch(ordered, paths, capacity, progress)
    return {ordered[number].path: reason for number, reason in progress.failed.items()}


def note_capacity(capacity: Capacity) -> None:
    """Print how many runs are executed at once, and where."""
    if capacity.ray:
        machines = plural(len(nodes()), "node")
        note(f"{plural(capacity.max_concurrent, 'run')} at once on {machines}, a run has {capacity.resources}")
        note("loading the program on the workers ...")
    else:
        note("one run at a time, in this process (--max-concurrent N for more)")


def delete_runs(paths: Iterable[str], session: Session) -> None:
    """Delete runs, here and at the URL of the results."""
    for path in paths:
        with RunFolder(session.runtime.results / path).locked():
            session.delete_run(path)
