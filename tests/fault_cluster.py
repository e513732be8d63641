"""Start a cluster of three nodes for fault tests, run `procap` on it, and check the results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import psutil
from hosts import can_create_hosts, create_hosts, machine_address
from nodes import REPOSITORY, Node, Nodes
from object_server import ObjectServer, object_server
from ports import free_port

from runner.run_folders import RunFolder, find_runs
from shards.builtin_sources import builtin_source
from shards.catalogue import find
from shards.pack import pack_source

COMMAND_SECONDS = 1800.0
PROCAP = """
import functools, sys
from benchmarks.cli import main
from runner.config import RuntimeConfig
RuntimeConfig.__init__ = functools.partialmethod(RuntimeConfig.__init__, state_seconds=1.0)
sys.exit(main(sys.argv[1:]))
"""
"""`procap` whose runs save a state every second: by default they would end before the first."""
PROCAP_ON_HOST = f"""
import functools, signal, sys, ray
signal.signal(signal.SIGINT, signal.default_int_handler)
ray.init = functools.partial(ray.init, _node_ip_address=sys.argv.pop(1))
{PROCAP}
"""
"""`procap` in a network namespace, whose address is the first argument. Ray searches the processes of the machine for
the node of a driver; as all namespaces share them, it would find the head instead of the driver's own node. The SIGINT
handler is set because a process that a shell starts in the background ignores SIGINT."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Training:
    """A run that a process is training now."""

    run: RunFolder
    process: psutil.Process


@dataclass
class Command:
    """A running `procap` command."""

    process: subprocess.Popen[str]

    def wait(self, *codes: int) -> tuple[str, str]:
        """Wait until it ends with one of `codes` (default: 0); returns stdout and stderr."""
        out, err = self.process.communicate(timeout=COMMAND_SECONDS)
        allowed = codes or (0,)
        assert self.process.returncode in allowed, f"exit code {self.process.returncode}, not {allowed}: {err[-3000:]}"
        return out, err


@dataclass
class FaultCluster:
    """Nodes with one CPU each; commands run on the second one unless another is given.

    environment: of nodes and commands. server: the S3 server. head_environment: additions for the head.
    """

    folder: Path
    nodes: Nodes
    environment: Mapping[str, str]
    server: ObjectServer | None = None
    head_environment: Mapping[str, str] = field(default_factory=dict)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def procap(self, *words: str | Path, on: int = 1, **environment: str) -> Command:
        """Start a command on the host number `on`, with additions to the environment."""
        command = [sys.executable, "-c", PROCAP, *map(str, words)]
        if self.nodes.hosts:
            host = self.nodes.hosts[on]
            command = host.command([sys.executable, "-c", PROCAP_ON_HOST, host.address, *words])
        process = subprocess.Popen(
            command,
            env={**os.environ, **self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
        )
        self.started.append(process)
        return Command(process)

    def kill_commands(self) -> None:
        """Kill the commands that are still running."""
        for process in self.started:
            process.kill()
            process.wait()

    def start_node(self, **environment: str) -> None:
        """Start another node: the head, if there is none."""
        if any(node.name == "head" for node in self.nodes.alive):
            self.nodes.add(cpus=1, hidden=(), **environment)
        else:
            self.nodes.start_head(cpus=1, dashboard=False, **self.head_environment, **environment)

    def restore(self) -> None:
        """Start nodes until there are three."""
        while len(self.nodes.alive) < 3:
            self.start_node()

    def node_on(self, number: int) -> Node:
        """Return the running node on the host of that number."""
        if not self.nodes.hosts:
            return self.nodes.alive[number]
        return next(node for node in self.nodes.alive if node.host == self.nodes.hosts[number])

    @property
    def flags(self) -> list[str]:
        """The flags of `procap` for this cluster."""
        return ["--launcher", "ray", "--address", self.nodes.address]

    def find_trainings(self, results: Path, node: Node | None = None, *, saved: bool = True) -> list[Training]:
        """Find the runs that are being trained on `node` (None: on any). saved: only those with a saved state."""
        pids = {process.pid for each in ([node] if node else self.nodes.alive) for process in each.processes()}
        found = []
        for run in find_runs(results):
            with suppress(OSError, psutil.NoSuchProcess):
                owner = re.search(r"pid (\d+)", (run.path / ".lock").read_text())
                if run.train_file.exists() or owner is None or int(owner[1]) not in pids:
                    continue
                if not saved or any(run.state_folder.glob("step-*")):
                    found.append(Training(run, psutil.Process(int(owner[1]))))
        return found


def wait_for(condition: Callable[[], Value], seconds: float = 600.0) -> Value:
    """Call `condition` until its value is true, and return the value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)
    return value


def prepare_environment(folder: Path) -> dict[str, str]:
    """Pack a few digits in `folder`, and return the environment of nodes and commands that use them."""
    digits = replace(builtin_source(find("digits")), counts={"train": 120, "val": 40, "test": 60})
    pack_source(digits, folder / "data")
    settings = {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return settings | {"PROCAP_HOME": str(folder / "home"), "PROCAP_DATA": str(folder / "data")}


def without_cluster(folder: Path) -> FaultCluster:
    """Return a "cluster" without nodes, for commands that run on this machine alone."""
    return FaultCluster(folder, Nodes(folder / "nodes"), prepare_environment(folder))


@contextmanager
def start_cluster(
    folder: Path, *, objects: bool = False, redis: bool = False, settings: Mapping[str, str] | None = None
) -> Iterator[FaultCluster]:
    """Start three nodes with a few digits as data, each on its own host if network namespaces can be created here.

    objects: start an S3 server, and give each node a cache of its own. redis: keep the state of the head in Redis, so
    that the head can be restarted. settings: additions to the environment of nodes and commands.
    """
    environment = prepare_environment(folder) | dict(settings or {})
    with ExitStack() as stack:
        hosts = stack.enter_context(create_hosts(3)) if can_create_hosts() else []
        address = machine_address(hosts)
        server = stack.enter_context(object_server(folder, address)) if objects else None
        environment |= server.environment if server else {}
        nodes = stack.enter_context(Nodes(folder / "nodes", hosts=hosts, environment=environment))
        of_head = {"RAY_REDIS_ADDRESS": stack.enter_context(redis_server(address))} if redis else {}
        cluster = FaultCluster(folder, nodes, environment, server, of_head)
        stack.callback(cluster.kill_commands)
        for number in range(3):
            cluster.start_node(**({"PROCAP_HOME": str(folder / f"home{number}")} if objects else {}))
        yield cluster


@contextmanager
def redis_server(address: str) -> Iterator[str]:
    """Run a Redis server without persistence; yields host:port."""
    port = free_port()
    words = ["redis-server", "--bind", address, "--port", str(port), "--save", "", "--protected-mode", "no"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        yield f"{address}:{port}"
    finally:
        process.kill()
        process.wait()


def load_outcomes(results: Path) -> dict[str, tuple[str, list[tuple[str, int, int]]]]:
    """Load the digest of the learned weights and the counts of every finished run, by path."""
    return {
        run.path.relative_to(results).as_posix(): (
            done.checkpoint_sha256,
            [(each.target, each.correct, each.total) for each in run.read_evaluations()],
        )
        for run in find_runs(results)
        if (done := run.read_training())
    }


def find_leftovers(results: Path) -> list[str]:
    """List files that only an unfinished run, a killed writer or a preflight check leaves."""
    names = [path.relative_to(results).as_posix() for path in results.rglob("*") if "mlartifacts" not in path.parts]
    return [name for name in names if re.search(r"\.tmp$|/state(/|$)|progress\.json$|\.preflight", name)]


def count_tracked(results: Path) -> tuple[Counter[str], list[str]]:
    """Count how often MLflow has each run of `results`, and return the status of each parent run.

    Asserts that every run is finished and has a parent.
    """
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{results}/mlflow.db")
    tracked = [run for each in client.search_experiments() for run in client.search_runs([each.experiment_id])]
    parents = {run.info.run_id: run for run in tracked if {"suite", "sweep"} & run.data.tags.keys()}
    runs = [run for run in tracked if run.info.run_id not in parents]
    assert all(run.data.tags["mlflow.parentRunId"] in parents for run in runs)
    assert all(run.info.status == "FINISHED" for run in runs)
    paths = [Path(run.data.tags["folder"]).relative_to(results.resolve()).as_posix() for run in runs]
    return Counter(paths), [run.info.status for run in parents.values()]
