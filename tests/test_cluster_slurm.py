"""The Slurm file that starts Ray: what it does on a job's nodes, with srun and scontrol of our own that stay here."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "cluster" / "slurm" / "ray.sbatch"

SCONTROL = """#!/bin/sh
[ "$1 $2" = "show hostnames" ] && echo "$3" | tr , '\\n'
"""
SRUN = """#!/bin/bash
# The tasks of a step, with Slurm's variables; as srun does, it passes signals on and waits for all.
echo "$*" > srun.line
echo $$ > srun.pid
while [[ $1 == --* ]]; do
    case $1 in
        --ntasks) tasks=$2; shift 2 ;;
        --output) exec >> "$2" 2>&1; shift 2 ;;
        --ntasks-per-node | --open-mode) shift 2 ;;
        --kill-on-bad-exit=0) shift ;;
        *) echo "srun: unrecognized option '$1'" >&2; exit 1 ;;
    esac
done
for ((rank = 0; rank < tasks; rank++)); do SLURM_NODEID=$rank "$@" & done
trap 'kill -TERM $(jobs -p) 2> /dev/null' TERM
while [[ -n $(jobs -pr) ]]; do wait || true; done
"""
SCANCEL = """#!/bin/sh
# To the tasks of the job's first step.
[ "$1 $2 $3" = "--signal TERM $SLURM_JOB_ID.0" ] && kill -TERM "$(cat srun.pid)"
"""
RAY = """#!/bin/bash
# Writes its arguments and environment to a file; a node stays until it is ended.
trap 'kill $(jobs -p) 2> /dev/null' EXIT
trap 'echo "$SLURM_NODEID ended" >> nodes.lines; exit 0' TERM
echo "$RAY_AUTH_MODE $(stat -c %a:%s "$RAY_AUTH_TOKEN_PATH") $*" >> nodes.lines
if [[ " $* " == *" --head "* ]]; then
    coproc LISTEN { exec python -c "
import socket, sys, time
held = socket.create_server(('127.0.0.1', int(sys.argv[1])))
print('there', flush=True)
time.sleep(600)" "$4"; }
    read -r _ <&"${LISTEN[0]}"
fi
[[ -e broken && $SLURM_NODEID == 1 ]] && rm broken && exit 1
sleep 600 & wait $!
"""
# In the place of the look for nodes that have joined: the first one is there.
PYTHON = f"""#!/bin/sh
[ "$1" = - ] || exec {sys.executable} "$@"
until [ -s nodes.lines ]; do sleep 0.1; done
"""
# The command: an exit code, and how often Ray has to be started until it has done its work.
PROCAP = """#!/bin/bash
trap 'echo saved; exit 143' TERM
echo "$RAY_ADDRESS $*"
touch at-work
until [[ $(grep -c -e --block nodes.lines) == "$2" ]]; do sleep 0.1 & wait $!; done
exit "$1"
"""
FOR_EVER = 99

NODES = """
import os, ray
ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False)
there = [node["Resources"] for node in ray.nodes() if node["Alive"]]
print([(resources["CPU"], resources["object_store_memory"]) for resources in there])
print(ray.get(ray.remote(lambda: "answered").remote()))
"""

Submit = Callable[..., "subprocess.Popen[str]"]


def free_job() -> int:
    """A job's number whose three ports are free here."""
    for number in ((os.getpid() + offset) % 4000 for offset in range(4000)):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(20000 + number * 3, 20003 + number * 3):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return number
    raise AssertionError("no three free ports")


@pytest.fixture
def submit(tmp_path) -> Submit:
    """Begin the script as Slurm would on the first node of several, with stand-ins in front of PATH."""

    def begin(*words: object, nodes: int, **stand_ins: str) -> subprocess.Popen[str]:
        bin = tmp_path / "bin"
        bin.mkdir()
        for name, text in {"scontrol": SCONTROL, "srun": SRUN, "scancel": SCANCEL, **stand_ins}.items():
            (bin / name).write_text(text)
            (bin / name).chmod(0o755)
        # Slurm runs a copy that lies elsewhere.
        copy = Path(shutil.copy(SCRIPT, tmp_path / "slurm_script"))
        slurm = {
            "SLURM_JOB_ID": str(free_job()),
            "SLURM_JOB_NODELIST": ",".join(["localhost", *(f"node{n}" for n in range(1, nodes))]),
            "SLURM_NNODES": str(nodes),
            "SLURM_CPUS_PER_TASK": "1",
            "SLURM_GPUS_ON_NODE": "2",
            "PATH": f"{bin}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        line = ["bash", str(copy), *map(str, words)]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            line, cwd=tmp_path, env={**os.environ, **slurm}, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    return begin


def ended(job: subprocess.Popen[str], seconds: float = 300) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a job, of which nothing may be left."""
    try:
        out, err = job.communicate(timeout=seconds)
        patience = time.monotonic() + 60
        while left := members(job.pid):
            assert time.monotonic() < patience, left
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    return job.returncode, out, err


def members(group: int) -> list[str]:
    """The command lines of a process group's living processes."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.info["cmdline"] or []))
    return found


def test_ray_starts_on_all_nodes_and_ends_with_the_command(submit, tmp_path):
    """The second node's Ray does not come up at first. The command's exit code is the job's."""
    (tmp_path / "broken").touch()
    job = submit(5, 4, "--methods", "maple,procap", nodes=3, ray=RAY, python=PYTHON, procap=PROCAP)
    code, out, err = ended(job)
    assert code == 5, err
    address, *words = out.split()
    assert address.startswith(("localhost:2", "localhost:3")) and words == ["5", "4", "--methods", "maple,procap"]
    port = int(address.partition(":")[2])
    assert (tmp_path / "srun.line").read_text().startswith("--ntasks 3 --ntasks-per-node 1 --kill-on-bad-exit=0 ")
    lines = (tmp_path / "nodes.lines").read_text().splitlines()
    started = [line for line in lines if line.endswith("--block")]
    sizes = "--num-cpus 1 --num-gpus 2 --object-store-memory 1000000000 --block"
    assert started[0] == (
        f"token 600:64 start --head --port {port} --ray-client-server-port {port + 2} "
        f"--dashboard-host 127.0.0.1 --dashboard-port {port + 1} {sizes}"
    )
    assert started[1:] == [f"token 600:64 start --address {address} {sizes}"] * 3
    assert sorted(line for line in lines if line.endswith("ended")) == ["0 ended", "1 ended", "2 ended"]
    assert not list(tmp_path.glob(".ray-token*"))


def test_the_warning_before_the_end_reaches_the_command_alone(submit, tmp_path):
    """As `--signal B:TERM@120` sends it; Ray goes on until the command has saved."""
    job = submit(0, FOR_EVER, nodes=1, ray=RAY, python=PYTHON, procap=PROCAP)
    assert job.stdout.readline().startswith("localhost:")
    before = (tmp_path / "nodes.lines").read_text()
    os.kill(job.pid, signal.SIGTERM)
    assert job.stdout.readline() == "saved\n" and "ended" not in before
    assert ended(job)[0] == 143
    assert (tmp_path / "nodes.lines").read_text().endswith("0 ended\n")


def test_a_job_whose_ray_is_gone_does_not_wait_for_ever(submit, tmp_path):
    until_then = "until [[ -e at-work ]]; do sleep 0.1; done &"
    job = submit(0, FOR_EVER, nodes=1, ray=RAY.replace("sleep 600 &", until_then), python=PYTHON, procap=PROCAP)
    code, out, _ = ended(job)
    assert code == 143 and out.endswith("saved\n")


@pytest.mark.parametrize("name", ["ray.sbatch", "train.sbatch"])
def test_the_files_are_bash_and_say_how_to_use_them(name):
    path = SCRIPT.with_name(name)
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).stderr == b""
    said = subprocess.run(["bash", str(path)], capture_output=True, text=True)
    assert said.returncode == 2 and f"cluster/slurm/{name}" in said.stderr and said.stderr.count("\n") == 3
    options = [line for line in path.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+( \S+)?", line) for line in options) and "#SBATCH --requeue" in options


@pytest.mark.slow
def test_two_real_nodes_of_ray_answer_to_the_command_and_leave_nothing(submit, tmp_path):
    """Real Ray, with a token; the nodes share this machine."""
    (tmp_path / "nodes.py").write_text(NODES)
    job = submit("bench", nodes=2, procap=f"#!/bin/sh\nexec python {tmp_path / 'nodes.py'}\n")
    code, out, err = ended(job)
    assert code == 0, err
    assert out.splitlines() == ["[(1.0, 1000000000.0), (1.0, 1000000000.0)]", "answered"]
    assert not list(tmp_path.glob(".ray-token*"))
