"""Execute the runs of suites, on this machine or on a cluster, and record their progress."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from benchmarks.console.output import note, plural
from benchmarks.console.packing_progress import pack_missing_with_progress
from benchmarks.suites.plans import count_images
from benchmarks.suites.preconditions import check_training_images, check_weights
from benchmarks.suites.trial_progress import RunProgress
from cluster.launcher import Launcher, connect, launch
from cluster.preflight import TRAINING_SPLITS, check_nodes
from cluster.ray_cluster import Capacity, nodes
from cluster.trial import StoragePaths
from runner.config import Target
from runner.run_folders import RunFolder
from runner.run_state import RunSpec, RunState
from runner.session import Session
from runner.tracking.exporter import CollectionTracker
from shards.files import check_writable

FEW_IMAGES = 16_000
"""Runs on fewer images in all are executed one after the other: Ray takes as long to start and to load the program."""


def execute(
    runs: Sequence[RunSpec],
    states: Mapping[str, RunState],
    paths: StoragePaths,
    session: Session,
    launcher: Launcher,
    trackers: Sequence[CollectionTracker],
    *,
    force: bool,
) -> dict[str, str]:
    """Execute runs, those with the most images first; returns the error of each failed run by its path.

    states: what exists of each run. paths: the folders and the runtime of workers; `session` is that of this process.
    force: delete the runs first.
    """
    runtime = session.runtime
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
    images_left = {run.path: count_images(run, states[run.path], runtime) for run in runs}
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
        ordered = sorted(runs, key=lambda run: images_left[run.path], reverse=True)
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
