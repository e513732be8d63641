"""Create network namespaces on this machine that act as hosts, each with its own address and name."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NAMES = Path("/etc/netns")
DEVICES = Path("/sys/class/net")


@dataclass(frozen=True)
class Host:
    """A network namespace. name: also its host name."""

    name: str
    address: str

    def command(self, words: Sequence[str | Path], hidden: Sequence[Path] = ()) -> list[str]:
        """Return the command that runs `words` on this host, in the process that is started.

        hidden: folders that are empty there, like a shared disk that is not mounted.
        """
        hide = "".join(f'mount -t tmpfs none "{folder}" && ' for folder in hidden)
        enter = ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c"]
        return [*enter, f'hostname "$0" && {hide}exec "$@"', self.name, *map(str, words)]

    def disconnect(self) -> None:
        """Disconnect the host from the network in both directions; its processes keep running."""
        _run("ip", "-n", self.name, "link", "set", "eth0", "down")

    def reconnect(self) -> None:
        _run("ip", "-n", self.name, "link", "set", "eth0", "up")


def can_create_hosts() -> bool:
    """Whether network namespaces can be created here, which needs root, `ip` and `unshare`."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    name = f"pc{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return tried.returncode == 0


@contextmanager
def create_hosts(count: int) -> Iterator[list[Host]]:
    """Create hosts that reach each other, this machine at `machine_address(hosts)`, and nothing else."""
    # Hosts of other tests, in this process or others, must not share a network.
    number = next(each for each in range(4 * os.getpid(), 4 * os.getpid() + 4) if not (DEVICES / f"pc{each}").exists())
    bridge, network = f"pc{number}", f"10.{64 + number // 250 % 128}.{number % 250}"
    hosts = [Host(f"host{index}-{number}", f"{network}.{index + 1}") for index in range(count)]
    names = "".join(f"{host.address} {host.name}\n" for host in hosts)
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{machine_address(hosts)}/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for index, host in enumerate(hosts):
            (NAMES / host.name).mkdir(parents=True)
            (NAMES / host.name / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            _run("ip", "netns", "add", host.name)
            _run("ip", "link", "add", f"{bridge}-{index}", "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _run("ip", "link", "set", f"{bridge}-{index}", "master", bridge, "up")
            _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", host.name, "link", "set", device, "up")
        yield hosts
    finally:
        for index, host in enumerate(hosts):
            # A process that is still running keeps its namespace, but loses the interface.
            subprocess.run(["ip", "link", "del", f"{bridge}-{index}"], capture_output=True)
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
            shutil.rmtree(NAMES / host.name, ignore_errors=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)
        with suppress(OSError):
            NAMES.rmdir()


def machine_address(hosts: Sequence[Host]) -> str:
    """Return the address at which `hosts` reach this machine; 127.0.0.1 without hosts."""
    return hosts[0].address.rpartition(".")[0] + ".254" if hosts else "127.0.0.1"


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
