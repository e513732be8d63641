"""Execute the runs of suites, on this machine or on a cluster, and record their progress."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from benchmarks.cli.flags import OutputFlags, RuntimeFlags
from benchmarks.console.output import note, plural
from benchmarks.console.packing import ensure_packed, find_unpacked
from benchmarks.suites.checks import check_code, check_training_images, check_weights
from benchmarks.suites.cost import SHORT_SECONDS, CostModel, find_machine
from benchmarks.suites.progress import CollectionTrackers, RunProgress
from cluster.launcher import Launcher, connect, launch
from cluster.preflight import TRAINING_SPLITS, check_nodes
from cluster.ray_cluster import Capacity, nodes
from cluster.run import RunSpec, StoragePaths
from runner.config import RuntimeConfig, Target
from runner.remote_results import RemoteResults
from runner.run_folders import RunFolder


def execute(
    runs: Sequence[RunSpec],
    runtime: RuntimeConfig,
    flags: RuntimeFlags,
    launcher: Launcher,
    trackers: CollectionTrackers,
    output: OutputFlags,
    *,
    force: bool,
) -> dict[str, str]:
    """Execute runs, the longest first; returns the error of each failed run by its path."""
    # Workers print nothing and do not send to MLflow: this process does both for all runs.
    paths = StoragePaths.with_absolute_paths(
        flags.data, flags.results, replace(runtime, quiet=True, tracking_uri="off")
    )
    configs = [run.config for run in runs]
    if not force:
        check_code((config.path for config in configs), runtime.results)
    splits: dict[str, set[str]] = {}
    for run in runs:
        splits.setdefault(run.config.dataset, set()).update(TRAINING_SPLITS)
        for target in map(Target.parse_unchecked, run.targets):
            splits.setdefault(target.dataset, set()).add(target.split)
    backbones = [(config.backbone, config.pretrained) for config in configs]
    find_unpacked(splits, runtime.data)
    if launcher.kind == "local":
        check_weights(backbones)
    ensure_packed(splits, runtime.data)
    check_training_images(configs, runtime.data)
    methods = {config.method for config in configs}
    if launcher == Launcher():
        costs = CostModel(runtime, find_machine(runtime.device), force=force)
        launcher = replace(launcher, max_concurrent=1 if sum(map(costs.seconds, runs)) < SHORT_SECONDS else None)
    with connect_checked(launcher, paths, splits, backbones, methods) as capacity:
        hosts = nodes() if capacity.ray else []
        costs = CostModel(runtime, find_machine(runtime.device, hosts), processes=launcher.processes)
        if capacity.ray:
            machines = f"on {plural(len(hosts), 'node')}" if launcher.kind == "ray" else "on this machine"
            note(f"{plural(capacity.max_concurrent, 'run')} at once {machines}, a run has {capacity.resources}")
            note("loading the program on the workers ...")
        else:
            note("one run at a time, in this process (--max-concurrent N for more)")
        if force:
            # Once, in the driver, so that a restarted run resumes.
            delete_runs((run.path for run in runs), runtime)
        # Greedy packing of the longest first ends early.
        work = {run.path: costs.seconds(run) for run in runs}
        ordered = sorted(runs, key=lambda run: work[run.path], reverse=True)
        trackers.started = True
        trace = note if output.verbose else None
        progress = RunProgress(ordered, [work[run.path] for run in ordered], trackers, trace=trace)
        with progress.display:
            launch(ordered, paths, capacity, progress)
    return {ordered[number].path: reason for number, reason in progress.failed.items()}


def delete_runs(paths: Iterable[str], runtime: RuntimeConfig) -> None:
    """Delete runs, here and at the URL of the results."""
    remote = RemoteResults.from_runtime(runtime)
    for path in paths:
        folder = RunFolder(runtime.results / path)
        with folder.locked():
            remote.delete_run(path)
            folder.clear()


@contextmanager
def connect_checked(
    launcher: Launcher,
    paths: StoragePaths,
    datasets: Mapping[str, Collection[str]],
    backbones: Iterable[tuple[str, str | None]],
    methods: Iterable[str],
    *,
    always_ray: bool = False,
) -> Iterator[Capacity]:
    """Connect to the launcher's machines and check that they have what runs need, see `check_nodes`."""
    if launcher.kind == "local":
        check_weights(backbones)
    with connect(launcher, paths, always_ray=always_ray) as capacity:
        if launcher.kind == "ray":
            check_nodes(paths, datasets, methods, autoscale=launcher.autoscale)
        yield capacity
