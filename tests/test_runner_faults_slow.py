"""torchrun starts a run again whose worker was killed, with one agent or two, and it ends with the same counts."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.cli import main
from benchmarks.studies.chaos.ports import free_port
from runner.checkpoint import read_checkpoint
from runner.run_folders import RunFolder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def words(command: str, data: Path, results: Path) -> list[str]:
    """MaPLe on digits with the embedded weights: 100 steps, a state a second."""
    flags = f"--methods maple --datasets digits --shots 4 --epochs 20 --batch-size 4 --lr 0.002 --data {data}"
    return [command, *flags.split(), "--results", str(results), "--tracking", "off", "--device", "cpu"]


@pytest.fixture(scope="module")
def straight(few_digits, tmp_path_factory) -> RunFolder:
    """The run of one process that nobody kills."""
    results = tmp_path_factory.mktemp("straight")
    for command in ("train", "eval"):
        assert main(words(command, few_digits, results)) == 0
    return only_run(results)


def only_run(results: Path) -> RunFolder:
    (config,) = results.rglob("config.json")
    return RunFolder(config.parent)


class Agents:
    """torchruns that were started, and the workers they started."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, launcher: list[str], work: list[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "benchmarks.cli", *work]
        with self.log.open("ab") as log:
            agent = subprocess.Popen(command, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=log, stderr=log)
        self.started.append(agent)
        return agent

    def workers(self, agent: int = 0) -> list[psutil.Process]:
        return psutil.Process(self.started[agent].pid).children()

    def wait_for_state(self, folder: Path, seconds: float = 120.0) -> None:
        """Until a state of a run below `folder` is on disk, which is in the middle of the training."""
        deadline = time.monotonic() + seconds
        while not list(folder.rglob("state/step-*.safetensors")):
            assert time.monotonic() < deadline and self.started[0].poll() is None, self.log.read_text()
            time.sleep(0.05)

    def wait(self, agent: int = 0, seconds: float = 180.0) -> int:
        try:
            return self.started[agent].wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.log.read_text()) from None

    def end(self) -> None:
        for agent in self.started:
            if agent.poll() is None:
                for process in [*psutil.Process(agent.pid).children(recursive=True), psutil.Process(agent.pid)]:
                    process.kill()
                agent.wait()


@pytest.fixture
def agents(tmp_path) -> Iterator[Agents]:
    agents = Agents(tmp_path / "log.txt")
    yield agents
    agents.end()


def meeting(nodes: str, *more: str) -> list[list[str]]:
    """The flags of two agents that meet at the first one."""
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "faults"]
    shared = ["--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "3", *place]
    return [[*shared, "--rdzv-conf", ",".join((f"is_host={first}", *more))] for first in (1, 0)]


def assert_same(wanted: RunFolder, results: Path, ranks: int = 2) -> None:
    """A finished run is the other one up to the order of sums, and `ranks` processes finished it."""
    folder = only_run(results)
    one, other = wanted.train(), folder.train()
    assert one is not None and other is not None
    assert (other.steps, other.images, other.fewshot) == (one.steps, one.images, one.fewshot)
    assert other.resumed >= 1 and (len(other.ranks) or 1) == ranks
    weights = read_checkpoint(folder.checkpoint_file, other.checkpoint_sha256)[0]
    for name, weight in read_checkpoint(wanted.checkpoint_file)[0].items():
        assert (weight - weights[name]).abs().max() <= 1e-3 * weight.abs().max(), name
    assert not folder.state.exists() and not folder.progress_file.exists()
    counts = [[result.per_class for result in run.evaluations()] for run in (wanted, folder)]
    assert counts[0] and counts[0] == counts[1]


def test_one_agent_starts_again_when_a_worker_is_killed(agents, straight, few_digits, tmp_path):
    results = tmp_path / "results"
    launcher = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    agents.start(launcher, words("train", few_digits, results))
    agents.wait_for_state(results)
    random.Random(1).choice(agents.workers()).send_signal(signal.SIGKILL)
    assert agents.wait() == 0, agents.log.read_text()
    agents.started.clear()
    agents.start(launcher, words("eval", few_digits, results))
    assert agents.wait() == 0, agents.log.read_text()
    assert_same(straight, results)


def test_one_agent_goes_on_alone_when_the_other_machine_is_lost(agents, straight, few_digits, tmp_path):
    results = tmp_path / "results"
    for launcher in meeting("1:2", "last_call_timeout=20"):
        agents.start(launcher, words("train", few_digits, results))
    agents.wait_for_state(results)
    workers = agents.workers(1)
    agents.started[1].kill()
    for worker in workers:
        worker.kill()
    assert agents.wait(0) == 0, agents.log.read_text()
    assert main(words("eval", few_digits, results)) == 0
    assert_same(straight, results, ranks=1)
