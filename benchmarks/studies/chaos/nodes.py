"""Real Ray nodes on this machine, each a `ray start --block` whose processes can be killed."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.studies.chaos.hosts import Host
from benchmarks.studies.chaos.ports import free_port

REPOSITORY = Path(__file__).parents[3]
START_SECONDS = 300.0
END_SECONDS = 60.0
TRIES = 5
# Where much else is done, parts of Ray take longer to come up than it waits, and memory that others fill makes it kill
# its own workers.
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_prestart_worker_first_driver": "0",
    "OMP_WAIT_POLICY": "passive",
}


def without_settings(home: Path) -> dict[str, str]:
    """An environment without any setting of Ray, and without a token in `home`."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"HOME": str(home)}


@dataclass
class Node:
    """One `ray start --block` and everything that it started."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    host: Host | None = None

    def processes(self) -> list[psutil.Process]:
        # The PID of a process that was waited for may be reused.
        if self.process.poll() is not None:
            return []
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            return [*top.children(recursive=True), top]
        return []

    def kill(self) -> None:
        """Send SIGKILL to all its processes at once."""
        found = self.processes()
        # Stopped first, so that none of them starts another while the rest dies.
        for how in (signal.SIGSTOP, signal.SIGKILL):
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(how)
        self.process.wait()
        # Its ports and files are free only when the last of them is gone.
        deadline = time.monotonic() + END_SECONDS
        while not all(map(_gone, found)) and time.monotonic() < deadline:
            time.sleep(0.02)


def _answers(port: int) -> bool:
    """Whether something listens at a port of this machine."""
    with closing(socket.socket()) as visitor:
        return visitor.connect_ex(("127.0.0.1", port)) == 0


def _gone(process: psutil.Process) -> bool:
    """Whether it is dead, also as a zombie."""
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@dataclass
class Nodes:
    """A cluster of nodes; `with Nodes(folder) as nodes: nodes.head(cpus=1); nodes.add(cpus=1)`.

    hosts: where they run in turn; without any all of them are on 127.0.0.1.
    """

    folder: Path
    port: int = field(default_factory=free_port)
    dashboard_port: int = field(default_factory=free_port)
    environment: Mapping[str, str] = field(default_factory=dict)
    hosts: Sequence[Host] = ()
    nodes: list[Node] = field(default_factory=list)
    scratch: Path = field(default_factory=lambda: Path(f"/tmp/ray-{os.getpid()}-{secrets.token_hex(4)}"))
    """What Ray itself writes. Sockets of Unix have short names only."""

    @property
    def address(self) -> str:
        """What `ray.init` takes."""
        return f"{self.hosts[0].address if self.hosts else '127.0.0.1'}:{self.port}"

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes if node.process.poll() is None]

    @property
    def dashboard(self) -> str:
        """What `ray job submit` takes."""
        return f"http://127.0.0.1:{self.dashboard_port}"

    def head(self, cpus: float = 1, *, dashboard: bool = False, **environment: str) -> Node:
        # A head that comes back would take the nodes that it sees in our table of processes for another head.
        (self.scratch / "ray_current_cluster").unlink(missing_ok=True)

        def words() -> list[str]:
            found = ["--head", "--port", str(self.port), "--include-dashboard", str(dashboard).lower()]
            if dashboard:
                found += ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(self.dashboard_port)]
            return [*found, "--temp-dir", str(self.scratch)]

        return self._start("head", words, cpus, environment, ())

    def add(self, cpus: float = 1, hidden: Sequence[Path] = (), **environment: str) -> Node:
        """One more node; hidden: folders that it cannot see, which takes a host of its own."""
        return self._start(f"node{len(self.nodes)}", lambda: ["--address", self.address], cpus, environment, hidden)

    def _start(
        self,
        name: str,
        words: Callable[[], list[str]],
        cpus: float,
        environment: Mapping[str, str],
        hidden: Sequence[Path],
    ) -> Node:
        """Tried several times: a raylet gives the agents of its node 15 seconds, too few where much else is done."""
        for _ in range(TRIES - 1):
            with suppress(RuntimeError):
                return self._try_start(name, words(), cpus, environment, hidden)
            if not self.nodes:
                # Not used by other nodes yet; another process may have taken them.
                self.port, self.dashboard_port = free_port(), free_port()
        return self._try_start(name, words(), cpus, environment, hidden)

    def _try_start(
        self, name: str, words: list[str], cpus: float, environment: Mapping[str, str], hidden: Sequence[Path]
    ) -> Node:
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / f"{name}.log"
        command = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())", "start"]
        busy = [node.host for node in self.alive]
        host = next(host for host in self.hosts if host not in busy) if self.hosts else None
        command += [*words, "--block", "--num-cpus", str(cpus)]
        command += ["--node-ip-address", host.address if host else "127.0.0.1"]
        command += ["--object-store-memory", str(100 * 2**20), "--node-name", name, "--disable-usage-stats"]
        # Jobs go through this port, which clusters on one machine would else fight for.
        agent = free_port()
        command += ["--dashboard-agent-listen-port", str(agent)]
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
        while b"Ray runtime started" not in log.read_bytes() or ("--dashboard-port" in words and not _answers(agent)):
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
