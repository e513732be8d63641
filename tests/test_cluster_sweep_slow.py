"""`procap sweep` on two real Ray nodes of this machine: the same results as locally, whatever is killed."""

import json
import os
import subprocess
import sys
import time

import pytest
from child_process import start_process
from nodes import REPOSITORY, Nodes
from object_server import object_server

from benchmarks.cli import main
from cluster.sweep_record import SweepFolder, key_of
from runner.config import Target
from runner.run_folders import RunFolder, find_runs

pytestmark = pytest.mark.slow
ASKED = ["--methods", "coop", "--datasets", "digits", "--seeds", "1,2", "--shots", "2", "--batch-size", "4"]
TPE = ["--name", "tpe", "--param", "lr=loguniform(1e-4,1)", "--search", "tpe", "--epochs", "12"]
PROGRAM = [sys.executable, "-m", "benchmarks.cli"]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """A head and another node with a processor each."""
    with Nodes(tmp_path_factory.mktemp("nodes")) as found:
        found.start_head(cpus=1)
        found.add(cpus=1)
        yield found


@pytest.fixture(scope="module")
def data(few_digits, tiny_checkpoint) -> list[str]:
    return ["--backbone", str(tiny_checkpoint), "--data", str(few_digits), "--tracking", "off"]


@pytest.fixture
def cluster(nodes: Nodes, data: list[str]) -> list[str]:
    return [*data, "--launcher", "ray", "--address", nodes.address]


def sweeping(words):
    settings = {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return start_process([*PROGRAM, "sweep", *words], env={**os.environ, **settings}, **pipes)


def finish(words: list[str], code: int = 0) -> tuple[dict, str]:
    with sweeping([*words, "--json"]) as process:
        out, err = process.communicate(timeout=900)
    assert process.returncode == code, err
    return json.loads(out.splitlines()[-1]) if code == 0 else {}, err


def printed(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def wait_until(condition, seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def checkpoints(results):
    done = [(run.path.relative_to(results).as_posix(), run.read_training()) for run in find_runs(results)]
    return {path: training.checkpoint_sha256 for path, training in done if training}


def test_after_a_killed_driver_the_sweep_resumes_and_keeps_its_budget(cluster, tmp_path):
    words = [*ASKED, *TPE, *cluster, "--results", str(tmp_path), "--trials", "4"]

    def known():
        record = SweepFolder(tmp_path / "sweeps" / "tpe").load()
        return record.configurations if record else []

    with sweeping(words) as driver:
        wait_until(lambda: any(one.state == "finished" for one in known()))
        driver.kill()
        driver.communicate()
    before, begun = checkpoints(tmp_path), {key_of(configuration.values) for configuration in known()}
    times = {run: (tmp_path / run / "train.json").stat().st_mtime_ns for run in before}
    found, _ = finish(words)
    assert found["counts"] == {"finished": 4, "stopped": 0, "unfinished": 0, "failed": 0}
    assert begun <= {key_of(configuration.values) for configuration in known()}
    assert len(find_runs(tmp_path)) == len(checkpoints(tmp_path)) == 8
    assert times == {run: (tmp_path / run / "train.json").stat().st_mtime_ns for run in before}


def test_results_behind_a_url_are_resumed_on_another_machine(data, tmp_path, monkeypatch):
    words = [*ASKED, *TPE[:-1], "1", *data, "--max-concurrent", "1", "--results", "s3://results/sweeps-here"]
    with object_server(tmp_path) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PROCAP_HOME", str(tmp_path / "first"))
        first, _ = finish([*words, "--trials", "1"])
        monkeypatch.setenv("PROCAP_HOME", str(tmp_path / "second"))
        second, err = finish([*words, "--trials", "2"])
    assert "1 with a score already" in err
    assert first["counts"]["finished"] == 1 and second["counts"]["finished"] == 2
    assert first["configurations"][0] in second["configurations"]
    trained = [json.loads(file.read_text()) for file in (tmp_path / "second").rglob("train.json")]
    assert len(trained) == 4 and len(list((tmp_path / "first").rglob("train.json"))) == 2


def test_a_time_limit_leaves_states_that_are_resumed(local_ray, where, tmp_path, capsys):
    words = [*ASKED, "--epochs", "4000", "--name", "h", "--param", "lr=loguniform(1e-4,1)", *where]
    assert main(["sweep", *words, "--hours", str(90 / 3600), "--results", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    counts = json.loads(captured.out.splitlines()[-1])["counts"]
    assert counts["unfinished"] > 0 == counts["finished"] + counts["stopped"] + counts["failed"]
    assert "unfinished, with their states kept" in captured.err


def test_held_out_selection_scores_classes_that_were_not_trained_on(local_ray, where, tmp_path, capsys):
    words = [*ASKED, "--epochs", "3", "--name", "h", "--param", "lr=0.002", "--metric", "held-out", *where]
    assert main(["sweep", *words, "--results", str(tmp_path), "--json"]) == 0
    document = printed(capsys)
    [row] = document["configurations"]
    for run, score in row["scores"].items():
        halves = [Target("digits", half, "val") for half in ("dev-base", "dev-novel")]
        base, novel = (RunFolder(tmp_path / run).read_evaluation(half) for half in halves)
        assert score == pytest.approx(2 * base.accuracy * novel.accuracy / (base.accuracy + novel.accuracy))
        assert run.startswith("dev-base/")
    assert all("dev-" not in command and "--metric" not in command for command in document["commands"])
