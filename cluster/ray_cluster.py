"""Connect to a Ray cluster and compute the resources of each run."""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from procap.errors import UsageError, UserError
from runner.environment_defaults import set_environment_defaults
from runner.stop_signals import Interrupted

NAMESPACE = "procap"
LOCAL = "local"
"""The address of a cluster of this machine that ends with the command."""
MOST_CPUS = 16
"""Default limit of CPUs per process with a GPU; they decode images, and more do not make training faster."""
CONNECT_SECONDS = 5.0
START_ATTEMPTS = 3
"""Attempts to start a local Ray: its raylet waits only 15 seconds for its agents, too few on a busy machine."""
SETTINGS = {
    # Tune's newer output prints paths and a table even at `verbose=0`.
    "RAY_AIR_NEW_OUTPUT": "0",
    # A local Ray would start a process for every core at once, however few trials run at a time.
    "RAY_prestart_worker_first_driver": "0",
    # By default Tune writes every report as CSV, JSON and TensorBoard events, here into a folder that is deleted.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    # No warning that checkpoints of the experiment follow each other too fast: nothing reads them.
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    # Sweeps resume from the results of runs, not from Ray Tune's own checkpoints, so Tune need not write them.
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",
    # With Tune's own handler Ctrl-C lets `fit` return normally, as if all trials had ended.
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

    def __post_init__(self) -> None:
        if not self.cpus and not self.gpus:
            raise UsageError("--cpus 0 without a GPU: a run needs a CPU or a GPU")

    def __str__(self) -> str:
        each = f"{self.cpus:g} CPU{'s' * (self.cpus != 1)}"
        each += f" and {self.gpus:g} GPU{'s' * (self.gpus != 1)}" if self.gpus else ""
        return each if self.processes == 1 else f"{self.processes} processes with {each} each"


@dataclass(frozen=True)
class Capacity:
    """How many runs execute at a time, with `resources` each; without Ray one run in this process."""

    resources: Resources
    max_concurrent: int
    ray: bool

    def device(self, name: str) -> str:
        """Return the --device of a run: `name`, or what it means for a process with `resources`."""
        # Ray masks CUDA_VISIBLE_DEVICES only for processes that ask for a GPU; the others would share the first.
        return "cpu" if name == "auto" and not self.resources.gpus else name


@dataclass(frozen=True)
class Node:
    """A machine of the cluster and its total resources."""

    name: str
    address: str
    identifier: str
    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{self.address} ({self.name})"

    def count(self, resources: Resources) -> int:
        """Return how many processes with such resources fit on this node; a part of a GPU is of a single one."""
        gpus = resources.gpus
        by_cpu = [divide(self.cpus, resources.cpus)] if resources.cpus else []
        by_gpu = [int(self.gpus) * divide(1, gpus) if gpus < 1 else divide(self.gpus, gpus)] if gpus else []
        return min(by_cpu + by_gpu)


def divide(amount: float, part: float) -> int:
    """Return how many times `part` fits into `amount`; 0.1 fits into 1 ten times, as in Ray."""
    return math.floor(amount / part + 1e-6)


def set_auth_mode(*, private: bool = False) -> None:
    """Set $RAY_AUTH_MODE, which Ray otherwise guesses differently in every command; call it before Ray is imported.

    What the user has set is kept, a token that is set is used. private: this process starts the cluster for itself; it
    gets its own token, because some of Ray's ports listen on every network of the machine.
    """
    if os.environ.get("RAY_AUTH_MODE"):
        return
    assert "ray" not in sys.modules, "Ray was imported before its authentication was set up"
    has_token = bool(os.environ.get("RAY_AUTH_TOKEN"))
    if not has_token:
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token")
        with suppress(OSError, ValueError, RuntimeError):
            has_token = bool(path.expanduser().read_text(encoding="utf-8").strip())
    if private and not has_token:
        os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ["RAY_AUTH_MODE"] = "token" if private or has_token else "disabled"


@contextmanager
def ray_connection(address: str, cpus: int | None = None) -> Iterator[None]:
    """Connect this process to the cluster at `address` for the duration of the block; UserError if none answers.

    address: "auto" (this machine's cluster or $RAY_ADDRESS), host:port, or "local" for a Ray that ends with the block.
    cpus: the number of CPUs of a local Ray.
    """
    set_environment_defaults()
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    local = address == LOCAL
    if not local:
        check_listening(address)
    # `sys.modules` first, so that a command without Ray does not import it.
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        # Nested use: the outer block ends the connection.
        yield
        return
    set_auth_mode(private=local)
    if local:
        # Starting and stopping Ray take several seconds.
        print("starting Ray on this machine ...", file=sys.stderr, flush=True)
    import ray

    before = signal.getsignal(signal.SIGTERM)
    try:
        _init(address, {"num_cpus": cpus, "include_dashboard": False} if local else {})
        if local:
            # A local Ray has no nodes to add. If SIGTERM reaches the whole process group, as from Slurm, its autoscaler
            # would send a traceback to our stdout; Ray has no public option to start without it.
            ray._private.worker._global_node.kill_monitor()  # type: ignore[attr-defined]
    except SystemExit:
        # By Ray's own handler of SIGTERM, which is in place until here.
        raise Interrupted(signal.SIGTERM, "Ray was starting; repeat the command to resume") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            # Ray installs its own SIGTERM handler, which prints C++ frames and exits with code 15; restore ours.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
    try:
        yield
    finally:
        if local:
            print("ending Ray ...", file=sys.stderr, flush=True)
        ray.shutdown()


def _init(address: str, options: dict[str, Any]) -> None:
    """Call `ray.init`. Raises UserError if Ray rejects it, or a local cluster does not start in `START_ATTEMPTS`."""
    import ray

    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            # `log_to_driver` would print what all workers print between the lines of the progress bar.
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **options)
            return
        except Exception as error:
            # Ray raises a plain Exception if a local node starts too late.
            if type(error) is not Exception or address != LOCAL or attempt == START_ATTEMPTS:
                raise _unreachable(address, str(error)) from None
            ray.shutdown()


def ray_folder() -> Path:
    """Return the folder for the files of Ray's sessions on this machine."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray"


def check_listening(address: str) -> None:
    """Raise UserError if nothing listens at the address: Ray itself would try for five minutes."""
    if address == "auto":
        # Where `ray start` writes its address, which stays there if the cluster dies.
        last_started = ray_folder() / "ray_current_cluster"
        if os.environ.get("RAY_ADDRESS") or not last_started.is_file():
            return
        address = last_started.read_text(encoding="utf-8").strip()
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise _unreachable(address, str(error)) from None


def _unreachable(address: str, reason: str) -> UserError:
    reason = " ".join(reason.split())[:200]
    if address == LOCAL:
        logs, short = ray_folder() / "session_latest" / "logs", "set RAY_TMPDIR to a folder with a short path; "
        short *= "AF_UNIX" in reason
        return UserError(f"Ray did not start on this machine ({reason}); {short}see {logs}")
    location = "on this machine" if address == "auto" else f"at {address}"
    return UserError(
        f"no Ray cluster {location} could be reached ({reason}); start one with `ray start --head`, or name one with "
        "--address"
    )


def nodes() -> list[Node]:
    """List the machines that Ray reports as alive, including the driver's."""
    import ray

    machines = []
    for node in (node for node in ray.nodes() if node["Alive"]):
        resources, address, name = node["Resources"], node["NodeManagerAddress"], node["NodeName"]
        # Without `ray start --node-name` Ray uses the address as the name.
        name = node["NodeManagerHostname"] if name == address else name
        cpus, gpus = float(resources.get("CPU", 0)), float(resources.get("GPU", 0))
        machines.append(Node(name, address, node["NodeID"], cpus, gpus))
    return machines


def require_own_node(alive: Sequence[Node]) -> None:
    """Raise UserError if the driver's node is not `alive`: Ray then starts no process for this driver any more."""
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    if all(node.identifier != node_id for node in alive):
        raise UserError(
            f"Ray has lost the node on {socket.gethostname()} that this command belongs to, and starts nothing more "
            "for it; start Ray there again (`ray start`) and repeat the command to resume"
        )


def default_resources(
    cluster: Sequence[Node], processes: int = 1, cpus: float | None = None, gpus: float | None = None
) -> Resources:
    """Choose the resources of a run: a GPU per process if there are any, with its part of the node's CPUs."""
    with_gpus = [node for node in cluster if node.gpus]
    if gpus is None:
        gpus = 1.0 if with_gpus else 0.0
    if cpus is None:
        # The CPUs that go with a GPU, or with the part of one; the node with the fewest decides.
        parts = [node.cpus * min(gpus, 1) / node.gpus for node in with_gpus] if gpus else []
        cpus = float(max(1, min(MOST_CPUS, int(min(parts))))) if parts else 1.0
        # A whole CPU for each part of a GPU could exceed the node's CPUs, and then fewer runs would share the GPU.
        if 0 < gpus < 1 and parts:
            cpus = min(cpus, min(parts))
    return Resources(processes, cpus, gpus)


def count_runs(cluster: Sequence[Node], resources: Resources) -> int:
    """Return how many runs fit at once. Raises UsageError if none fits: Ray would wait for ever."""
    count = sum(node.count(resources) for node in cluster)
    if count < resources.processes:
        raise UsageError(
            f"a run that asks for {resources} does not fit: all nodes together hold {count} such processes; if nodes "
            "are started on demand, add --autoscale"
        )
    return count // resources.processes
