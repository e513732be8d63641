"""Execute runs in this process, several at a time on this machine, or on a Ray cluster."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cluster.ray_cluster import LOCAL, Capacity, Node, Resources, count_runs, default_resources, nodes, ray_connection
from cluster.trial import StoragePaths
from procap.errors import UsageError, unknown_name
from runner.acceleration import Acceleration
from runner.config import RuntimeConfig
from runner.devices import available_cores, available_memory, count_gpus, resolve_device
from runner.run_state import RunSpec

if TYPE_CHECKING:
    from cluster.tune_runner import TrialListener

KINDS = ("local", "ray")
RUN_BYTES = 3 * 2**30
"""Main memory of a process: 0.7 GiB for the program, up to 2.3 GiB for a ViT-B/16 and its activations on a CPU."""


@dataclass(frozen=True)
class Launcher:
    """The flags of a launch; None chooses by the available hardware.

    processes: train one run together, each with `cpus` and `gpus`. autoscale: nodes are started on demand.
    """

    kind: str = "local"
    address: str = ""
    processes: int = 1
    cpus: float | None = None
    gpus: float | None = None
    max_concurrent: int | None = None
    autoscale: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown_name("launcher", self.kind, KINDS)
        if self.kind == "local" and (self.address or self.autoscale):
            raise UsageError("--address and --autoscale apply to a Ray cluster: add --launcher ray")
        for name, amount in (("cpus", self.cpus), ("gpus", self.gpus)):
            if amount is not None and not (0 <= amount <= 1 or (1 < amount < math.inf and amount == int(amount))):
                raise UsageError(f"--{name} {amount:g}: at most 1, or a whole number")


@contextmanager
def connect(launcher: Launcher, paths: StoragePaths, *, always_ray: bool = False) -> Iterator[Capacity]:
    """Connect to the launcher's machines for the duration of the block.

    always_ray: start Ray on this machine even if only one run at a time fits, as Ray Tune's searchers need it.
    """
    device, limit = paths.runtime.device, launcher.max_concurrent
    if launcher.kind == "ray":
        if device.startswith("cuda:"):
            raise UsageError(f"--device {device}: on a node Ray chooses the GPU of a run: use --device cuda")
        # Ray sets $RAY_ADDRESS in a job; "auto" is a cluster that `ray start` made on this machine.
        with ray_connection(launcher.address or os.environ.get("RAY_ADDRESS") or "auto"):
            cluster = nodes()
            # With the default, a CPU per run, the autoscaler would never start a node with a GPU.
            if launcher.autoscale and launcher.gpus is None and device != "cpu" and not any(n.gpus for n in cluster):
                raise UsageError("--autoscale, and no node has a GPU yet: add --gpus 1 or --gpus 0")
            resources = default_resources(cluster, launcher.processes, launcher.cpus, launcher.gpus)
            # With an autoscaler the number of nodes has no known limit; Tune needs some number.
            fits = limit or 1000 if launcher.autoscale else count_runs(cluster, resources)
            yield Capacity(resources, min(fits, limit or fits), ray=True)
        return
    # Report a missing device once, before any run starts.
    resolve_device(device)
    local = local_capacity(launcher, device)
    # Raises for an acceleration that the device does not have.
    Acceleration.parse(paths.runtime.accelerate, resolve_device(local.device(device)))
    if local.max_concurrent == 1 and launcher.processes == 1 and not always_ray:
        yield local
        return
    if device.startswith("cuda:"):
        raise UsageError(
            f"--device {device} holds one run: set CUDA_VISIBLE_DEVICES={device[5:]} and use --device cuda"
        )
    # Ray's CPUs are tokens, not cores: a local Ray gets as many as the runs of --max-concurrent reserve.
    cpus = max(available_cores(), math.ceil(local.max_concurrent * launcher.processes * local.resources.cpus))
    with ray_connection(LOCAL, cpus=cpus):
        fits = count_runs(nodes(), local.resources)
        yield Capacity(local.resources, min(local.max_concurrent, fits), ray=True)


def launch(runs: Sequence[RunSpec], paths: StoragePaths, capacity: Capacity, listener: TrialListener) -> None:
    """Execute `runs` in their order; the listener identifies each by its index, `drawn["number"]`."""
    # These import torch, which a wrong flag need not wait for.
    from cluster.executor import TrialWork
    from cluster.tune_runner import execute_trial, run_trials
    from runner.backbones import Backbones

    def runs_of(drawn: Mapping[str, Any], _: RuntimeConfig) -> Sequence[RunSpec]:
        return [runs[drawn["number"]]]

    work = TrialWork.on(capacity, paths, runs_of)
    if capacity.ray:
        from ray.tune.search import grid_search
        from ray.tune.search.basic_variant import BasicVariantGenerator

        # The generator keeps the order of a grid, so the first runs start first.
        space = {"number": grid_search(list(range(len(runs))))}
        generator = BasicVariantGenerator(max_concurrent=capacity.max_concurrent)
        run_trials(space, work, capacity, listener, search_alg=generator)
        return
    # One for all runs: it keeps their backbone and the digests of weights.
    backbones = Backbones()
    for number in range(len(runs)):
        drawn, trial = {"number": number}, f"{number}"
        listener.started(trial, drawn)
        report_to = partial(listener.reported, trial, drawn)
        listener.ended(trial, drawn, execute_trial(drawn, work, report_to, backbones))


def local_capacity(launcher: Launcher, device: str) -> Capacity:
    """Compute how many runs fit on this machine by its cores, memory and GPUs, without Ray."""
    cpus = 1.0 if launcher.cpus is None else launcher.cpus
    count = 0 if device == "cpu" else count_gpus()
    if device.startswith("cuda:"):
        count = min(count, 1)
    gpus = float(min(count, 1)) if launcher.gpus is None else launcher.gpus
    if gpus > count:
        raise UsageError(f"--gpus {gpus:g}: on this machine there are {count} with --device {device}")
    resources = Resources(launcher.processes, cpus, gpus)
    # With --cpus 0, which reserves no core, runs are counted as if each had one.
    fit = Node("", "", "", available_cores(), count).count(replace(resources, cpus=cpus or 1.0))
    fit = min(fit, available_memory() // RUN_BYTES)
    return Capacity(resources, launcher.max_concurrent or max(1, fit // launcher.processes), ray=False)
