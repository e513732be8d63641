"""`procap sweep` on two real Ray nodes of this machine: the same results as locally, whatever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from child_process import start_process
from object_server import object_server
from ray_nodes import REPOSITORY, Nodes, without_settings

from benchmarks.cli import main
from cluster.configuration import SweepFolder
from runner.results import find_runs

pytestmark = pytest.mark.slow

ASKED = ["--methods", "coop", "--datasets", "digits", "--seeds", "1,2", "--shots", "2", "--batch-size", "4"]
TPE = ["--name", "tpe", "--param", "lr=loguniform(1e-4,1)", "--search", "tpe", "--epochs", "12"]
PROGRAM = [sys.executable, "-m", "benchmarks.cli"]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[Nodes]:
    """A head and another node with a processor each."""
    with Nodes(tmp_path_factory.mktemp("nodes")) as found:
        found.head(cpus=1)
        found.add(cpus=1)
        yield found


@pytest.fixture(scope="module")
def data(few_digits, tiny_checkpoint) -> list[str]:
    return ["--backbone", str(tiny_checkpoint), "--data", str(few_digits), "--tracking", "off"]


@pytest.fixture
def cluster(nodes: Nodes, data: list[str]) -> list[str]:
    return [*data, "--launcher", "ray", "--address", nodes.address]


def sweeping(words: list[str]) -> AbstractContextManager[subprocess.Popen[str]]:
    """`procap sweep` as a process of its own."""
    settings = {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return start_process(
        [*PROGRAM, "sweep", *words],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(words: list[str], code: int = 0) -> tuple[dict, str]:
    """The JSON that the sweep printed, and its messages."""
    with sweeping([*words, "--json"]) as process:
        out, err = process.communicate(timeout=900)
    assert process.returncode == code, err
    return json.loads(out.splitlines()[-1]) if code == 0 else {}, err


def wait_until(condition, seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def checkpoints(results: Path) -> dict[str, str]:
    return {
        run.path.relative_to(results).as_posix(): done.checkpoint_sha256
        for run in find_runs(results)
        if (done := run.train())
    }


def test_a_grid_on_two_nodes_has_the_bits_and_counts_of_a_local_one(cluster, data, tmp_path) -> None:
    grid = [*ASKED, "--name", "grid", "--param", "lr=0.002,0.1", "--param", "class_position=end,front", "--epochs", "2"]
    there, here = tmp_path / "there", tmp_path / "here"
    found, err = finish([*grid, *cluster, "--results", str(there)])
    assert "2 at once on the cluster" in err
    local, _ = finish([*grid, *data, "--max-concurrent", "1", "--results", str(here)])
    assert checkpoints(there) == checkpoints(here) and len(checkpoints(here)) == 8
    assert found["configurations"] == local["configurations"]


@pytest.mark.parametrize(
    "words",
    [
        "sweep --seeds 1,2 --name a --param lr=0.002,0.1 --scheduler asha --epochs 2 --max-concurrent 2",
        "sweep --seeds 1 --name h --param lr=loguniform(1e-4,1) --hours 0.02 --epochs 1 --max-concurrent 1",
        "sweep --seeds 1 --name t --param lr=loguniform(1e-4,1) --search tpe --trials 1 --epochs 1",
        "bench base-to-novel --seeds 1,2 --epochs 1 --max-concurrent 2",
    ],
)
def test_a_local_ray_starts_without_any_setting_of_ray(words, data, tmp_path) -> None:
    results = tmp_path / "results"
    asked = [*words.split(), "--methods", "coop", "--datasets", "digits", *data, "--results", str(results)]
    process = subprocess.run(
        [*PROGRAM, *asked],
        env={**without_settings(home=tmp_path), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0 and "on this machine" in process.stderr, process.stderr
    assert checkpoints(results) and "InvalidAuthToken" not in process.stderr


def test_after_a_killed_driver_the_sweep_resumes_and_keeps_its_budget(cluster, tmp_path) -> None:
    words = [*ASKED, *TPE, *cluster, "--results", str(tmp_path), "--trials", "4"]
    folder = SweepFolder(tmp_path / "sweeps" / "tpe")
    with sweeping(words) as driver:
        wait_until(lambda: any(one.state == "finished" for one in folder.load().values()))
        driver.kill()
        driver.communicate()
    before, begun = checkpoints(tmp_path), folder.load()
    times = {run: (tmp_path / run / "train.json").stat().st_mtime_ns for run in before}
    found, _ = finish(words)
    assert found["counts"] == {"finished": 4, "stopped": 0, "running": 0, "failed": 0}
    assert set(begun) <= set(folder.load())
    assert len(find_runs(tmp_path)) == len(checkpoints(tmp_path)) == 8
    assert times == {run: (tmp_path / run / "train.json").stat().st_mtime_ns for run in before}


def test_early_stopping_keeps_states_and_goes_on_with_the_same_bits(cluster, data, tmp_path) -> None:
    results, whole = tmp_path / "halved", tmp_path / "whole"
    words = [*ASKED, "--param", "lr=0.002,1e3,1e4,2e3,3e3,0.02", "--epochs", "5", "--recipe-field", "warmup=none"]
    halved = [*words, "--name", "asha", *cluster, "--results", str(results)]
    found, _ = finish([*halved, "--scheduler", "asha", "--grace-period", "1", "--reduction-factor", "2"])
    stopped = [one for one in SweepFolder(results / "sweeps" / "asha").load().values() if one.state == "stopped"]
    assert found["counts"]["stopped"] == len(stopped) > 0 and found["counts"]["finished"] > 0
    again, _ = finish(halved)
    assert again["counts"]["finished"] == 6
    assert main(["sweep", *words, "--name", "whole", *data, "--max-concurrent", "1", "--results", str(whole)]) == 0
    assert checkpoints(results) == checkpoints(whole)


def test_a_signal_leaves_states_and_another_sweep_of_the_name_is_refused_meanwhile(cluster, tmp_path) -> None:
    words = [*ASKED, *TPE[:-1], "4000", *cluster, "--results", str(tmp_path), "--trials", "2"]
    with sweeping(words) as first:
        wait_until(lambda: any(run.progress() for run in find_runs(tmp_path)))
        _, err = finish(words, code=1)
        assert f"pid {first.pid} on" in err and "error: the sweep 'tpe' is being carried out" in err
        first.send_signal(signal.SIGTERM)
        _, err = first.communicate(timeout=600)
    assert first.returncode == 143, err
    steps = [progress.step for run in find_runs(tmp_path) if (progress := run.progress())]
    assert steps and max(steps) > 0
    found, err = finish([*words, "--hours", str(60 / 3600)])
    assert found["counts"] == {"finished": 0, "stopped": 0, "running": 2, "failed": 0}
    assert "2 configurations unfinished, with their states kept" in err


def test_results_behind_a_url_are_resumed_on_another_machine(data, tmp_path, monkeypatch) -> None:
    words = [*ASKED, *TPE[:-1], "1", *data, "--max-concurrent", "1", "--results", "s3://results/sweeps-here"]
    with object_server(tmp_path) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PROCAP_HOME", str(tmp_path / "first"))
        first, _ = finish([*words, "--trials", "1"])
        monkeypatch.setenv("PROCAP_HOME", str(tmp_path / "second"))
        second, err = finish([*words, "--trials", "2"])
    assert "1 done already" in err
    assert first["counts"]["finished"] == 1 and second["counts"]["finished"] == 2
    assert first["configurations"][0] in second["configurations"]
    trained = [json.loads(file.read_text()) for file in (tmp_path / "second").rglob("train.json")]
    assert len(trained) == 4 and len(list((tmp_path / "first").rglob("train.json"))) == 2
