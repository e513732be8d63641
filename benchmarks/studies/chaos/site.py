"""A cluster for fault tests: three hosts, `procap` started on one of them, and checks of the results."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import psutil

from benchmarks.studies.chaos.hosts import Host, can_make_hosts, make_hosts, outside_address
from benchmarks.studies.chaos.nodes import REPOSITORY, Node, Nodes
from benchmarks.studies.chaos.object_server import ObjectServer, object_server
from benchmarks.studies.chaos.ports import free_port
from runner.run_folders import RunFolder, find_runs
from shards.builtin_sources import builtin_source
from shards.catalogue import find
from shards.pack import pack_source

INSTALLED = Path(sys.executable).parent / "procap"
PROCAP = (
    [str(INSTALLED)]
    if INSTALLED.exists()
    else [sys.executable, "-c", "import sys; from benchmarks.cli import main; sys.exit(main(sys.argv[1:]))"]
)
RUNNING_SECONDS = 1800.0
TYPED = """
import functools, signal, sys, ray
signal.signal(signal.SIGINT, signal.default_int_handler)
ray.init = functools.partial(ray.init, _node_ip_address=sys.argv.pop(1))
from benchmarks.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""`procap` on a host of its own. Ray seeks the node of a command among the processes of the machine, which hosts share
here, and takes the head's; where it is typed on another machine it belongs to the node there. Ctrl-C counts also when
the tests themselves run in the background of a shell, which ignores it."""


@dataclass(frozen=True)
class Held:
    """A run in training: its folder and the process."""

    run: RunFolder
    process: psutil.Process


@dataclass
class Command:
    """A running `procap` command."""

    process: subprocess.Popen[str]
    began: float = field(default_factory=time.monotonic)

    def end(self, *codes: int, seconds: float = RUNNING_SECONDS) -> tuple[str, str]:
        """Wait for its end with one of `codes` (default: 0); returns stdout and stderr."""
        out, err = self.process.communicate(timeout=seconds)
        allowed = codes or (0,)
        assert self.process.returncode in allowed, f"exit code {self.process.returncode}, not {allowed}: {err[-3000:]}"
        return out, err


@dataclass
class Site:
    """Nodes with one processor each; commands run on the second one, which no test kills."""

    folder: Path
    nodes: Nodes
    environment: Mapping[str, str]
    server: ObjectServer | None
    own: Mapping[str, str]
    """What the head alone has in its environment."""
    typed: list[subprocess.Popen[str]] = field(default_factory=list)

    def procap(self, *words: str | Path, on: int = 1, **environment: str) -> Command:
        """Start it on the host number `on`, with the environment of the nodes and more."""
        command = [*PROCAP, *map(str, words)]
        if self.nodes.hosts:
            host = self.nodes.hosts[on]
            command = host.command([sys.executable, "-c", TYPED, host.address, *words])
        process = subprocess.Popen(
            command,
            env={**os.environ, **self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
        )
        self.typed.append(process)
        return Command(process)

    def clear(self) -> None:
        """Kill the commands that a test has not waited for."""
        for process in self.typed:
            process.kill()
            process.wait()

    def start(self, more: Mapping[str, str] | None = None) -> None:
        """One more node, the head if that is not there."""
        self.nodes.environment = {**self.environment, **(more or {})}
        if any(node.name == "head" for node in self.nodes.alive):
            self.nodes.add(cpus=1)
        else:
            self.nodes.environment = {**self.nodes.environment, **self.own}
            self.nodes.head(cpus=1)
        self.nodes.environment = self.environment

    def node_on(self, number: int) -> Node:
        """The living node on the host of that number."""
        if not self.nodes.hosts:
            return self.nodes.alive[number]
        return next(node for node in self.nodes.alive if node.host == self.nodes.hosts[number])

    @property
    def cluster(self) -> list[str]:
        return ["--launcher", "ray", "--address", self.nodes.address]

    def heal(self) -> None:
        """Three nodes again."""
        while len(self.nodes.alive) < 3:
            self.start()

    def held(self, results: Path, node: Node | None = None, state: bool = True) -> list[Held]:
        """Runs that are being trained on `node`, or anywhere; state: only those that have saved one."""
        pids = {process.pid for one in ([node] if node else self.nodes.alive) for process in one.processes()}
        found = []
        for run in find_runs(results):
            with suppress(OSError, psutil.NoSuchProcess):
                holder = re.search(r"pid (\d+)", (run.path / ".lock").read_text())
                if run.train_file.exists() or holder is None or int(holder[1]) not in pids:
                    continue
                if not state or any(run.state.glob("step-*")):
                    found.append(Held(run, psutil.Process(int(holder[1]))))
        return found


Found = TypeVar("Found")


def until(what: Callable[[], Found], seconds: float = 600.0) -> Found:
    """Poll until the condition is true, and return its value."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)
    return found


def environment(folder: Path) -> dict[str, str]:
    """Of nodes and commands: a few digits in `folder` are their data."""
    digits = replace(builtin_source(find("digits")), counts={"train": 120, "val": 40, "test": 60})
    pack_source(digits, folder / "data")
    settings = {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return settings | {"PROCAP_HOME": str(folder / "home"), "PROCAP_DATA": str(folder / "data")}


def no_cluster(folder: Path) -> Site:
    """This machine alone."""
    return Site(folder, Nodes(folder / "nodes"), environment(folder), None, {})


@contextmanager
def site(
    folder: Path, *, objects: bool = False, redis: bool = False, more: Mapping[str, str] | None = None
) -> Iterator[Site]:
    """Three nodes, each on a host of its own where this machine lets us make some, and a few digits for all of them.

    objects: with an S3 server, and nothing else that the nodes have in common.
    redis: what the head knows is kept there, which outlives it. more: environment of nodes and commands.
    """
    settings = environment(folder) | dict(more or {})
    with ExitStack() as stack:
        there = stack.enter_context(make_hosts(3)) if can_make_hosts() else []
        server = stack.enter_context(object_server(folder, outside_address(there))) if objects else None
        settings |= server.environment if server else {}
        nodes = stack.enter_context(Nodes(folder / "nodes", hosts=there, environment=settings))
        own = {"RAY_REDIS_ADDRESS": stack.enter_context(redis_server(outside_address(there)))} if redis else {}
        found = Site(folder, nodes, settings, server, own)
        stack.callback(found.clear)
        for number in range(3):
            found.start({"PROCAP_HOME": str(folder / f"home{number}")} if objects else {})
        yield found


@contextmanager
def redis_server(address: str) -> Iterator[str]:
    """Run a Redis without persistence; yields host:port."""
    port = free_port()
    words = ["redis-server", "--bind", address, "--port", str(port), "--save", "", "--protected-mode", "no"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        yield f"{address}:{port}"
    finally:
        process.kill()
        process.wait()


def facts(results: Path) -> dict[str, tuple[str, list[tuple[str, int, int]]]]:
    """Learned weights and counts of every finished run, by path."""
    return {
        run.path.relative_to(results).as_posix(): (
            done.checkpoint_sha256,
            [(each.target, each.correct, each.total) for each in run.evaluations()],
        )
        for run in find_runs(results)
        if (done := run.train())
    }


def stray(results: Path) -> list[str]:
    """Files that only an unfinished run, a killed writer or a preflight check leaves."""
    names = [path.relative_to(results).as_posix() for path in results.rglob("*") if "mlartifacts" not in path.parts]
    return [name for name in names if re.search(r"\.tmp$|/state(/|$)|progress\.json$|\.preflight", name)]


def tracked(results: Path) -> tuple[Counter[str], list[str]]:
    """How often MLflow has each run of the results, and the status of each parent; every run is below a parent."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{results}/mlflow.db")
    everything = [run for each in client.search_experiments() for run in client.search_runs([each.experiment_id])]
    parents = {run.info.run_id: run for run in everything if "procap.collection" in run.data.tags}
    runs = [run for run in everything if run.info.run_id not in parents]
    assert all(run.data.tags["mlflow.parentRunId"] in parents for run in runs)
    assert all(run.info.status == "FINISHED" for run in runs)
    paths = [Path(run.data.tags["folder"]).relative_to(results.resolve()).as_posix() for run in runs]
    return Counter(paths), [run.info.status for run in parents.values()]


def left_behind(nodes: Sequence[Node]) -> list[str]:
    """Processes of trials that still live on `nodes`, as Ray names them."""
    found = []
    for node in nodes:
        for process in node.processes():
            with suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline())
                if re.match(r"ray::(?!IDLE|Dashboard|RuntimeEnv)", title):
                    found.append(title)
    return found


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)


def host_of(node: Node) -> Host:
    assert node.host is not None
    return node.host
