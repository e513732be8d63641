"""A Ray cluster: how one connects to it, and what of it each run gets."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cluster.address import LOCAL, current_cluster, ray_folder, settle_auth
from cluster.local_capacity import VISIBLE, gpus_hold, times
from procap.errors import UsageError, UserError
from runner.environment import library_defaults

NAMESPACE = "procap"
MOST_CPUS = 16
"""More than so many cores bring a process with a GPU nothing: they decode images."""
ANSWER_SECONDS = 5.0
PARCEL_SECONDS = 60.0
OWN_TRIES = 3
"""Of a Ray of our own: a node waits 15 seconds for its parts to come up, too few where much else is done."""
ACCELERATOR = "accelerator_type:"
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
"""Nothing is restored from what Ray Tune writes, so that it writes as little as it can. A run stays in the folder where
its process began: relative names, as of $PROCAP_HOME, mean there what they meant."""


@dataclass(frozen=True)
class Resources:
    """What one run gets: `processes`, each with so many CPUs and GPUs; a part of a GPU is shared with other runs."""

    processes: int = 1
    cpus: float = 1.0
    gpus: float = 0.0

    def __str__(self) -> str:
        each = f"{self.cpus:g} CPU{'s' * (self.cpus != 1)}"
        each += f" and {self.gpus:g} GPU{'s' * (self.gpus != 1)}" if self.gpus else ""
        return each if self.processes == 1 else f"{self.processes} processes with {each} each"


@dataclass(frozen=True)
class Node:
    """A machine of the cluster and what it has in all.

    name: as Ray was told, else `host`. accelerator: what Ray calls its GPUs, "" where it has none.
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

    def fits(self, share: Resources) -> int:
        """How many processes of `share` it can hold."""
        by_cpu = [times(self.cpus, share.cpus)] if share.cpus else []
        by_gpu = [gpus_hold(self.gpus, share.gpus)] if share.gpus else []
        return min([*by_cpu, *by_gpu], default=1)


@contextmanager
def connected(address: str, cpus: int | None = None, gpu: str | None = None) -> Iterator[None]:
    """Be a driver of the cluster at `address` while the block lasts.

    address: "auto" for the cluster that this machine belongs to or RAY_ADDRESS names, host:port, or "local" for a
    Ray of our own with `cpus` that ends with the block. gpu: the only one that a Ray of our own is to see, as in
    $CUDA_VISIBLE_DEVICES. Raises UserError where nobody answers.
    """
    library_defaults()
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    own = address == LOCAL
    if own:
        settle_auth(private=True)
    else:
        _refuse_silent(address)
    import ray

    before = signal.getsignal(signal.SIGTERM)
    more: dict[str, Any] = {"num_cpus": cpus, "include_dashboard": False} if own else {}
    try:
        with _showing(gpu):
            _begin(address, more)
    finally:
        if threading.current_thread() is threading.main_thread():
            # Ray takes SIGTERM for itself, ends the process with exit code 15, and prints a page of C++ frames before.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
    try:
        if not own:
            _wait_for_parcels()
        yield
    finally:
        ray.shutdown()


@contextmanager
def _showing(gpu: str | None) -> Iterator[None]:
    """What starts in the block sees one GPU alone; this process has looked already, and goes on as before."""
    before = os.environ.get(VISIBLE)
    if gpu is not None:
        os.environ[VISIBLE] = gpu
    try:
        yield
    finally:
        if gpu is not None:
            os.environ.pop(VISIBLE)
            os.environ.update({} if before is None else {VISIBLE: before})


def _begin(address: str, more: dict[str, Any]) -> None:
    """Raises UserError where Ray refuses, and where one of our own is still too late when it has had its tries."""
    import ray

    tries = OWN_TRIES if address == LOCAL else 1
    for left in reversed(range(tries)):
        try:
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                # What a driver sets reaches workers of its own Ray; those of a cluster have their nodes' environment.
                runtime_env={"env_vars": {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}},
                **more,
            )
            return
        except Exception as error:
            refused = isinstance(error, (ConnectionError, RuntimeError, ValueError, OSError))
            # Ray has no kind of its own for a node that came up too late.
            if not refused and address != LOCAL:
                raise
            if refused or not left:
                raise _unreached(address, " ".join(str(error).split())[:200]) from None
            ray.shutdown()


def _wait_for_parcels() -> None:
    """In a job that was sent with its files, have every node unpack them before anything is read.

    Nodes of one machine share the folder, and each replaces it when it first starts a process for the job: under the
    feet of this one, whose working folder it is.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not ray.get_runtime_context().runtime_env.get("working_dir"):
        return
    here = os.environ.get("PWD") or os.getcwd()
    nothing = ray.remote(num_cpus=0, max_retries=0)(lambda: None)
    there = [NodeAffinitySchedulingStrategy(node_id=node.identifier, soft=False) for node in nodes()]
    asked: list[Any] = [nothing.options(scheduling_strategy=one).remote() for one in there]
    # Who does not answer is named later, by the check of the nodes.
    ray.wait(asked, num_returns=len(asked), timeout=PARCEL_SECONDS)
    os.chdir(here)


def _refuse_silent(address: str) -> None:
    """Raise UserError where nobody listens: Ray itself would try for five minutes."""
    where = current_cluster() if address == "auto" else address
    host, _, port = where.rpartition(":")
    if not port.isdigit():
        # Ray knows more places to look, and does not wait there.
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()
    except OSError as error:
        raise _unreached(address, f"{where}: {error.strerror or error}".lower()) from None


def _unreached(address: str, why: str) -> UserError:
    if address == LOCAL:
        return UserError(
            f"Ray did not start on this machine ({why}); its logs are in {ray_folder()}/session_latest/logs; one run "
            "at a time needs no Ray: --max-concurrent 1, without --processes, --stop and --hours"
        )
    where = "on this machine" if address == "auto" else f"at {address}"
    return UserError(
        f"no Ray cluster {where} could be reached ({why}); start one with `ray start --head`, name one with "
        "--address, or leave out --launcher ray"
    )


def nodes() -> list[Node]:
    """The machines that Ray says are alive, the one of the driver among them."""
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
    """Raise UserError where the node of this driver is dead: Ray then starts no process for it any more."""
    import ray

    mine = ray.get_runtime_context().get_node_id()
    if all(node.identifier != mine for node in nodes()):
        raise UserError(
            f"Ray has lost the node on {socket.gethostname()} that this command belongs to, and starts nothing more "
            "for it; start Ray there again (`ray start`) and repeat the command to go on"
        )


def fair_share(
    there: Sequence[Node], processes: int = 1, cpus: float | None = None, gpus: float | None = None
) -> Resources:
    """What a run gets where nothing else was said: a GPU per process where there are any, with its part of the CPUs."""
    with_gpus = [node for node in there if node.gpus]
    gpus = (1.0 if with_gpus else 0.0) if gpus is None else gpus
    if cpus is None:
        parts = [node.cpus * min(gpus, 1) / node.gpus for node in with_gpus] if gpus else []
        cpus = float(max(1, min(MOST_CPUS, int(min(parts))))) if parts else 1.0
        if 0 < gpus < 1 and parts:
            cpus = min(cpus, min(parts))
    return Resources(processes, cpus, gpus)


def processes_held(there: Iterable[Node], share: Resources) -> int:
    """How many processes of `share` the nodes hold together."""
    return sum(node.fits(share) for node in there)


def room(there: Sequence[Node], share: Resources, *, own: bool = False) -> int:
    """How many runs of `share` fit at once. Raises UsageError when not even one does: Ray would wait for ever.

    own: there is this machine alone, and no cluster that could grow.
    """
    places = processes_held(there, share)
    if places < share.processes:
        largest = max(there, key=lambda node: (node.gpus, node.cpus))
        more = "" if own else ", or add --autoscale if nodes come when they are asked for"
        raise UsageError(
            f"a run that asks for {share} does not fit: {len(there)} node{'s' * (len(there) > 1)}, the largest "
            f"{largest.name} with {largest.cpus:g} CPUs and {largest.gpus:g} GPUs, hold {places} such "
            f"process{'es' * (places != 1)}; ask for less{more}"
        )
    return places // share.processes
