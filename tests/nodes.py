"""Start real Ray nodes on this machine, each a `ray start --block` whose processes can be killed."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from hosts import Host
from ports import free_port, is_listening

REPOSITORY = Path(__file__).parents[1]
START_SECONDS = 900.0
END_SECONDS = 600.0
ATTEMPTS = 5
# On a busy machine parts of Ray start more slowly than it waits for them, and it kills workers when memory is short.
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_prestart_worker_first_driver": "0",
    "OMP_WAIT_POLICY": "passive",
}
RAY = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())"]
TRIAL = r"ray::(?!IDLE|Dashboard|RuntimeEnv)"
"""Pattern of the command line of a process that executes a trial, as Ray sets it."""


@dataclass
class Node:
    """One `ray start --block` and all processes that it started. host: None without network namespaces."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    host: Host | None = None

    def processes(self) -> list[psutil.Process]:
        # The PID of a process that was waited for may be reused.
        if self.process.poll() is not None:
            return []
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            return [*parent.children(recursive=True), parent]
        return []

    def find_processes(self, pattern: str) -> list[tuple[str, psutil.Process]]:
        """List the processes whose command line begins with `pattern`, each with its command line."""
        found = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline())
                if re.match(pattern, title):
                    found.append((title, process))
        return found

    def kill(self) -> None:
        """Send SIGKILL to all processes at once, and wait until they have ended."""
        found = self.processes()
        # Stop all of them first, so that none starts another one meanwhile.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        self.process.wait()
        # Ports and files are free only when the last process has ended.
        deadline = time.monotonic() + END_SECONDS
        while not all(map(_has_ended, found)) and time.monotonic() < deadline:
            time.sleep(0.02)

    def disconnect(self) -> None:
        """Disconnect its host from the network; the processes keep running."""
        assert self.host is not None
        self.host.disconnect()

    def reconnect(self) -> None:
        assert self.host is not None
        self.host.reconnect()


def _has_ended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def find_trials(nodes: Sequence[Node]) -> list[str]:
    """List the command lines of the processes on `nodes` that execute trials."""
    return [title for node in nodes for title, _ in node.find_processes(TRIAL)]


@dataclass
class Nodes:
    """A cluster of nodes; `with Nodes(folder) as nodes: nodes.start_head(cpus=1); nodes.add(cpus=1)`.

    hosts: one for each node; without any all nodes are on 127.0.0.1. scratch: the files of Ray itself, with a short
    name because the names of Unix sockets are limited.
    """

    folder: Path
    port: int = field(default_factory=free_port)
    dashboard_port: int = field(default_factory=free_port)
    environment: Mapping[str, str] = field(default_factory=dict)
    hosts: Sequence[Host] = ()
    nodes: list[Node] = field(default_factory=list)
    scratch: Path = field(default_factory=lambda: Path(f"/tmp/ray-{os.getpid()}-{secrets.token_hex(4)}"))

    @property
    def address(self) -> str:
        """The address for `ray.init`."""
        return f"{self.hosts[0].address if self.hosts else '127.0.0.1'}:{self.port}"

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes if node.process.poll() is None]

    @property
    def dashboard(self) -> str:
        """The address for `ray job submit`."""
        return f"http://127.0.0.1:{self.dashboard_port}"

    def start_head(self, cpus: float = 1, *, dashboard: bool = False, **environment: str) -> Node:
        # Otherwise a restarted head takes the nodes in the process table of this machine for those of another head.
        (self.scratch / "ray_current_cluster").unlink(missing_ok=True)
        return self._start("head", cpus, environment, dashboard=dashboard)

    def add(self, cpus: float = 1, hidden: Sequence[Path] = (), **environment: str) -> Node:
        """Start another node. hidden: folders that are empty there, which needs hosts."""
        return self._start(f"node{len(self.nodes)}", cpus, environment, hidden)

    def _start(
        self,
        name: str,
        cpus: float,
        environment: Mapping[str, str],
        hidden: Sequence[Path] = (),
        *,
        dashboard: bool = False,
    ) -> Node:
        """Start a node in several attempts: a raylet waits 15 seconds for its agents, too few on a busy machine."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._try_start(name, cpus, environment, hidden, dashboard)
            except RuntimeError:
                if attempt == ATTEMPTS:
                    raise
                if not self.nodes:
                    # Another process may have bound the ports.
                    self.port, self.dashboard_port = free_port(), free_port()
        raise AssertionError

    def _try_start(
        self, name: str, cpus: float, environment: Mapping[str, str], hidden: Sequence[Path], dashboard: bool
    ) -> Node:
        self.folder.mkdir(parents=True, exist_ok=True)
        log, agent = self.folder / f"{name}.log", free_port()
        busy = [node.host for node in self.alive]
        host = next(host for host in self.hosts if host not in busy) if self.hosts else None
        options = {
            "--num-cpus": cpus,
            "--node-ip-address": host.address if host else "127.0.0.1",
            "--object-store-memory": 100 * 2**20,
            "--node-name": name,
            # Jobs go through this port, which is otherwise the same for all clusters of a machine.
            "--dashboard-agent-listen-port": agent,
        }
        if name == "head":
            options |= {"--port": self.port, "--include-dashboard": str(dashboard).lower(), "--temp-dir": self.scratch}
        else:
            options |= {"--address": self.address}
        if dashboard:
            options |= {"--dashboard-host": "127.0.0.1", "--dashboard-port": self.dashboard_port}
        command = [*RAY, "start", "--block", "--disable-usage-stats", *(["--head"] if name == "head" else [])]
        command += [str(word) for option in options.items() for word in option]
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        with log.open("wb") as output:
            process = subprocess.Popen(
                host.command(command, hidden) if host else command,
                env={**os.environ, **SETTINGS, "PYTHONPATH": path, **self.environment, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        node = Node(name, process, log, host)
        self.nodes.append(node)
        deadline = time.monotonic() + START_SECONDS
        while b"Ray runtime started" not in log.read_bytes() or (dashboard and not is_listening(agent)):
            if process.poll() is not None or time.monotonic() > deadline:
                node.kill()
                self.nodes.remove(node)
                raise RuntimeError(f"{name} did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        return node

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for node in reversed(self.nodes):
            node.kill()
        shutil.rmtree(self.scratch, ignore_errors=True)
