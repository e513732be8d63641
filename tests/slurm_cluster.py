"""A Slurm of one node, whose daemons run on this machine; Debian's packages slurm-wlm and munge have the programs."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ports import free_port

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=60
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def can_start_slurm() -> bool:
    return os.geteuid() == 0 and all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch")))


@contextmanager
def start_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start the daemons, and give the environment with which Slurm's programs find them."""
    munge = folder / "munge"
    for path in (munge, folder / "state", folder / "spool"):
        path.mkdir(parents=True)
    munge.chmod(0o711)
    (munge / "key").write_bytes(os.urandom(1024))
    (munge / "key").chmod(0o400)
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            folder=folder,
            controller_port=free_port(),
            node_port=free_port(),
        )
    )
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    # In the foreground they are children, which end with the test.
    daemons = [
        ["munged", "--force", "--foreground", *(f"--{flag}={munge / name}" for flag, name in files.items())],
        ["slurmctld", "-D"],
        ["slurmd", "-D"],
    ]
    processes = [
        subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for words in daemons
    ]
    try:
        wait_for(lambda: " idle " in ask(environment, "sinfo", "--noheader"), folder)
        yield environment
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait()


def ask(environment: dict[str, str], *words: str) -> str:
    """Run one of Slurm's programs, and return what it prints."""
    return subprocess.run(words, env=environment, capture_output=True, text=True).stdout


def wait_for(condition, about: object, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, about
        time.sleep(0.2)
