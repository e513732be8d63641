"""Connect to a Ray cluster and compute the resources of each run."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from cluster.address import LOCAL, settle_auth
from cluster.paths import StoragePaths
from procap.errors import UsageError, UserError
from runner.environment import library_defaults

NAMESPACE = "procap"
VISIBLE = "CUDA_VISIBLE_DEVICES"
MOST_CPUS = 16
"""Default limit of CPUs per process with a GPU; they decode images, and more do not make training faster."""
CONNECT_SECONDS = 5.0
UNPACK_SECONDS = 60.0
START_ATTEMPTS = 3
"""Attempts to start a local Ray: its raylet waits only 15 seconds for its agents, too few on a busy machine."""
ACCELERATOR = "accelerator_type:"
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    # Sweeps resume from the results of runs, not from Ray Tune's own checkpoints, so Tune need not write them.
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # Keep the working folder, as relative paths (for example $PROCAP_HOME) are relative to it.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


@dataclass(frozen=True)
class Resources:
    """Resources of one run: `processes`, each with so many CPUs and GPUs; a part of a GPU is shared with other runs."""

    processes: int = 1
    cpus: float = 1.0
    gpus: float = 0.0

    def __str__(self) -> str:
        each = f"{self.cpus:g} CPU{'s' * (self.cpus != 1)}"
        each += f" and {self.gpus:g} GPU{'s' * (self.gpus != 1)}" if self.gpus else ""
        return each if self.processes == 1 else f"{self.processes} processes with {each} each"


@dataclass(frozen=True)
class Capacity:
    """How many runs execute at a time, with `resources` each; without Ray one run in this process.

    growing: nodes are started on demand.
    """

    resources: Resources
    max_concurrent: int
    ray: bool
    growing: bool = False

    def place(self, paths: StoragePaths) -> StoragePaths:
        """Return `paths` with the device and absolute files for worker processes, whose working folder may differ."""
        device, file = paths.runtime.device, paths.runtime.deepspeed_json
        if device == "auto" and not self.resources.gpus:
            # Ray masks CUDA_VISIBLE_DEVICES only for processes that ask for a GPU; the others would share the first.
            device = "cpu"
        elif self.ray and device.startswith("cuda:"):
            device = "cuda"
        runtime = replace(paths.runtime, device=device, deepspeed_json=file and file.absolute())
        return replace(paths, runtime=runtime)


@dataclass(frozen=True)
class Node:
    """A machine of the cluster and its total resources.

    name: as given to `ray start`, else `host`. accelerator: Ray's name of its GPUs, "" without any.
    """

    name: str
    address: str
    identifier: str
    cpus: float
    gpus: float
    accelerator: str = ""
    host: str = ""

    def __str__(self) -> str:
        name = f", {self.name}" if self.name not in (self.address, self.host) else ""
        return f"{self.address} ({self.host}{name})"

    def count(self, resources: Resources) -> int:
        """Return how many processes with such resources fit on this node."""
        by_cpu = [divide(self.cpus, resources.cpus)] if resources.cpus else []
        by_gpu = [count_on_gpus(self.gpus, resources.gpus)] if resources.gpus else []
        return min([*by_cpu, *by_gpu], default=1)


def divide(amount: float, part: float) -> int:
    """Return how many times `part` fits into `amount`; 0.1 fits into 1 ten times, as in Ray."""
    return math.floor(amount / part + 1e-6)


def count_on_gpus(gpus: float, part: float) -> int:
    """Return how many processes fit with `part` of a GPU, or several GPUs, each; a part is of a single GPU."""
    return int(gpus) * divide(1, part) if part < 1 else divide(gpus, part)


@contextmanager
def connected(address: str, cpus: int | None = None, gpu: str | None = None) -> Iterator[None]:
    """Connect this process to the cluster at `address` for the duration of the block.

    address: "auto" for the cluster that this machine belongs to or RAY_ADDRESS names, host:port, or "local" for a
    local Ray with `cpus` that ends with the block. gpu: the value of $CUDA_VISIBLE_DEVICES for a local Ray.
    Raises UserError if no cluster answers.
    """
    library_defaults()
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    own = address == LOCAL
    if own and "ray" in sys.modules and sys.modules["ray"].is_initialized():
        # Nested use: this process has already started a local Ray.
        yield
        return
    if own:
        settle_auth(private=True)
    else:
        _check_listening(address)
    import ray

    before = signal.getsignal(signal.SIGTERM)
    more: dict[str, Any] = {"num_cpus": cpus, "include_dashboard": False} if own else {}
    try:
        with _visible(gpu):
            _init(address, more)
    finally:
        if threading.current_thread() is threading.main_thread():
            # Ray installs its own SIGTERM handler, which prints C++ frames and exits with code 15; restore ours.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
    try:
        if not own:
            _wait_for_working_dir()
        yield
    finally:
        ray.shutdown()


@contextmanager
def _visible(gpu: str | None) -> Iterator[None]:
    """Show a single GPU to processes that start in the block; this process has listed its GPUs already."""
    before = os.environ.get(VISIBLE)
    if gpu is not None:
        os.environ[VISIBLE] = gpu
    try:
        yield
    finally:
        if gpu is not None:
            os.environ.pop(VISIBLE)
            os.environ.update({} if before is None else {VISIBLE: before})


def _init(address: str, more: dict[str, Any]) -> None:
    """Call `ray.init`. Raises UserError if Ray rejects it, or a local cluster does not start in `START_ATTEMPTS`."""
    import ray

    tries = START_ATTEMPTS if address == LOCAL else 1
    for left in reversed(range(tries)):
        try:
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                # Workers of a local Ray inherit the driver's environment, those of a cluster their node's.
                runtime_env={"env_vars": {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}},
                **more,
            )
            return
        except Exception as error:
            refused = isinstance(error, (ConnectionError, RuntimeError, ValueError, OSError))
            # Ray raises a plain Exception if a local node starts too late, so retry on any other exception class.
            if not refused and address != LOCAL:
                raise
            if refused or not left:
                raise _unreachable(address, " ".join(str(error).split())[:200]) from None
            ray.shutdown()


def _wait_for_working_dir() -> None:
    """Wait until every node has unpacked the working_dir of a submitted job, before any file is read.

    Nodes of one machine share the folder, and each replaces it when it first starts a process for the job, while it is
    the working folder of this process.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not ray.get_runtime_context().runtime_env.get("working_dir"):
        return
    here = os.environ.get("PWD") or os.getcwd()
    nothing = ray.remote(num_cpus=0, max_retries=0)(lambda: None)
    there = [NodeAffinitySchedulingStrategy(node_id=node.identifier, soft=False) for node in nodes()]
    asked: list[Any] = [nothing.options(scheduling_strategy=one).remote() for one in there]
    # Nodes that do not answer are named later, by the preflight check.
    ray.wait(asked, num_returns=len(asked), timeout=UNPACK_SECONDS)
    os.chdir(here)


def _check_listening(address: str) -> None:
    """Raise UserError if nothing listens at the address: Ray itself would try for five minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        # "auto": Ray itself looks for a cluster on this machine.
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise _unreachable(address, (error.strerror or str(error)).lower()) from None


def _unreachable(address: str, why: str) -> UserError:
    if address == LOCAL:
        return UserError(
            f"Ray did not start on this machine ({why}); see /tmp/ray/session_latest/logs; "
            "one run at a time needs no Ray: --max-concurrent 1, without --processes"
        )
    where = "on this machine" if address == "auto" else f"at {address}"
    return UserError(
        f"no Ray cluster {where} could be reached ({why}); start one with `ray start --head`, name one with "
        "--address, or leave out --launcher ray"
    )


def nodes() -> list[Node]:
    """List the machines that Ray reports as alive, including the driver's."""
    import ray

    return [
        Node(
            name=str(node.get("NodeName") or node["NodeManagerHostname"]),
            address=str(node["NodeManagerAddress"]),
            identifier=str(node["NodeID"]),
            cpus=float(node["Resources"].get("CPU", 0)),
            gpus=float(node["Resources"].get("GPU", 0)),
            accelerator=next(
                (name.partition(":")[2] for name in node["Resources"] if name.startswith(ACCELERATOR)), ""
            ),
            host=str(node["NodeManagerHostname"]),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def require_own_node() -> None:
    """Raise UserError if the driver's node is dead: Ray then starts no process for this driver any more."""
    import ray

    mine = ray.get_runtime_context().get_node_id()
    if all(node.identifier != mine for node in nodes()):
        raise UserError(
            f"Ray has lost the node on {socket.gethostname()} that this command belongs to, and starts nothing more "
            "for it; start Ray there again (`ray start`) and repeat the command to go on"
        )


def default_resources(
    there: Sequence[Node], processes: int = 1, cpus: float | None = None, gpus: float | None = None
) -> Resources:
    """Choose the resources of a run: a GPU per process if there are any, with its part of the node's CPUs."""
    with_gpus = [node for node in there if node.gpus]
    gpus = (1.0 if with_gpus else 0.0) if gpus is None else gpus
    if cpus is None:
        parts = [node.cpus * min(gpus, 1) / node.gpus for node in with_gpus] if gpus else []
        cpus = float(max(1, min(MOST_CPUS, int(min(parts))))) if parts else 1.0
        if 0 < gpus < 1 and parts:
            cpus = min(cpus, min(parts))
    return Resources(processes, cpus, gpus)


def processes_held(there: Iterable[Node], resources: Resources) -> int:
    """Return how many processes with such resources fit on all nodes together."""
    return sum(node.count(resources) for node in there)


def runs_held(there: Sequence[Node], resources: Resources, *, own: bool = False) -> int:
    """Return how many runs fit at once. Raises UsageError if none fits: Ray would wait for ever.

    own: the nodes are only this machine, not a cluster that could grow.
    """
    count = processes_held(there, resources)
    if count < resources.processes:
        largest = max(there, key=lambda node: (node.gpus, node.cpus))
        more = "" if own else ", or add --autoscale if nodes are started on demand"
        raise UsageError(
            f"a run that asks for {resources} does not fit: {len(there)} node{'s' * (len(there) > 1)}, the largest "
            f"{largest.name} with {largest.cpus:g} CPUs and {largest.gpus:g} GPUs, hold {count} such "
            f"process{'es' * (count != 1)}; ask for less{more}"
        )
    return count // resources.processes
