"""Jobs on real clusters where something is amiss: a token, a killed driver, a head that is gone, runs that fail."""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from ray_nodes import Nodes

from benchmarks.cli import main
from cluster.address import Dashboard
from cluster.follow import Follower
from cluster.ray_jobs import RayCluster, RayJob, Unreachable
from runner.environment import source_state
from runner.results import RunFolder, find_runs

pytestmark = pytest.mark.slow
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
ROOT = Path(__file__).parent.parent


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """A cluster of one head, known to the commands here."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with Nodes(tmp_path / "nodes", environment={"PATH": PATH}) as nodes:
        nodes.head(cpus=2, dashboard=True)
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", nodes.dashboard)
        yield nodes


def test_a_cluster_with_a_token_is_used_with_it_and_refuses_others_in_one_line(tmp_path: Path) -> None:
    token = secrets.token_hex(32)
    (tmp_path / "token").write_text(token)
    (tmp_path / "wrong").write_text("f" * 64)
    (tmp_path / "home").mkdir()
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    plain |= {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}

    def procap(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "benchmarks.cli", *words]
        return subprocess.run(command, env={**plain, **environment}, capture_output=True, text=True, timeout=600)

    settings = {"PATH": PATH, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    with Nodes(tmp_path / "nodes", environment=settings) as nodes:
        nodes.head(cpus=1, dashboard=True)
        address = ("--address", nodes.dashboard)
        for environment, why in (
            ({}, "it wants a token"),
            ({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "wrong")}, "is not"),
        ):
            refused = procap("jobs", *address, **environment)
            assert refused.returncode == 1 and refused.stderr.count("\n") == 1, refused.stderr
            assert why in refused.stderr and "RAY_AUTH_TOKEN_PATH" in refused.stderr
        known = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
        sent = procap("submit", *address, "--name", "j", "--", "ls", "methods", **known)
        assert sent.returncode == 0 and "CoOp" in sent.stdout, sent.stderr
        listed = procap("jobs", *address, "--json", **known)
        assert '"exit_code": 0' in listed.stdout
        assert token not in sent.stdout + sent.stderr + listed.stdout


def followed(cluster: RayCluster, name: str, patience: float = 60) -> tuple[RayJob | BaseException, str]:
    """How following a job ended, and the log."""
    written: list[str] = []
    try:
        return Follower(cluster, name, written.append, tell=print).to_the_end(patience), "".join(written)
    except Unreachable as error:
        return error, "".join(written)


def test_a_killed_command_and_a_killed_head_are_told_apart(nodes: Nodes) -> None:
    cluster = RayCluster(Dashboard(nodes.dashboard, "--address"))
    for name in ("first", "second"):
        program = f'import time; print("{name}"); time.sleep(900)'
        cluster.submit(entrypoint=f"exec {sys.executable} -uc {shlex.quote(program)}", submission_id=name)

    def kill() -> None:
        while not cluster.log("first").endswith("first\n") or not cluster.log("second").endswith("second\n"):
            time.sleep(0.2)
        for process in nodes.nodes[0].processes():
            with suppress(psutil.NoSuchProcess):
                if "first" in " ".join(process.cmdline()) and "python" in process.name():
                    process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    job, log = followed(cluster, "first")
    killer.join()
    assert isinstance(job, RayJob) and job.exit_code == 137 and log.endswith("first\n")
    killer = threading.Timer(3, nodes.nodes[0].kill)
    killer.start()
    error, log = followed(cluster, "second", patience=3)
    killer.join()
    assert "procap jobs follow second" in str(error) and log.endswith("second\n")


def test_runs_of_a_job_equal_those_of_this_machine_and_a_failed_one_is_exit_code_3(
    nodes: Nodes, few_digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--methods", "coop", "--datasets", "digits", "--shots", "2", "--epochs", "1", "--seeds", "1,2"]
    words += ["--data", str(few_digits), "--tracking", "off", "--device", "cpu"]
    assert main([*words, "--results", str(tmp_path / "here")]) == 0
    first, second = sorted(run.path for run in find_runs(tmp_path / "here"))
    there = tmp_path / "there"
    spoilt = there / second.relative_to(tmp_path / "here")
    spoilt.mkdir(parents=True)
    for name, text in (("config.json", (second / "config.json").read_text()), ("train.json", "{}")):
        (spoilt / name).write_text(text)
    capsys.readouterr()
    assert main(["submit", "--", *words, "--results", str(there)]) == 3
    assert "1 done, 1 failed" in capsys.readouterr().out
    results = [RunFolder(run).train() for run in (first, there / first.relative_to(tmp_path / "here"))]
    assert results[0] is not None and results[1] is not None
    assert results[0].checkpoint_sha256 == results[1].checkpoint_sha256
    assert results[1].environment["git"] == source_state()
