"""Train, evaluate and list results behind a URL from several machines."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from child_process import start_process
from small_runs import make_runtime

from benchmarks.cli import main
from runner import evaluate, remote_results, run_folders, train
from runner.config import RuntimeConfig, Target, plan_run
from runner.results import Progress
from shards.errors import Unreachable
from shards.remote import RemoteFolder


@pytest.fixture
def machines(s3, few_digits, tmp_path):
    """Machines that share results at one URL; "alone" has a folder of its own."""
    url = f"s3://{s3.bucket}/{tmp_path.name}"

    def make(name: str) -> RuntimeConfig:
        runtime = make_runtime(few_digits, tmp_path / name)
        return runtime if name == "alone" else replace(runtime, store=url)

    return make


@pytest.fixture(scope="module")
def config(short_checkpoint):
    quick = {"epochs": 2, "batch_size": 5, "lr": 0.1, "warmup": "none"}
    return plan_run(method="coop", dataset="digits", shots=2, backbone=str(short_checkpoint), overrides=quick)


def test_training_continues_on_another_machine_with_the_same_bits(machines, config):
    alone = train.train(config, machines("alone"))
    assert isinstance(train.train(config, machines("first"), until=1), Progress)
    ended = train.train(config, machines("second"))
    assert ended.checkpoint_sha256 == alone.checkpoint_sha256 and ended.resumed == 1
    assert train.train(config, machines("first")) == ended, "found finished, not repeated"
    folder = run_folders.RunFolder(machines("first").results / config.path)
    assert not folder.state.exists() and not folder.progress_file.exists()
    third = machines("third")
    result = evaluate.evaluate(config, Target("digits", "base"), third)
    assert result.correct == evaluate.evaluate(config, Target("digits", "base"), machines("alone")).correct
    remote_results.RemoteResults.from_runtime(machines("fourth")).pull_all()
    assert run_folders.RunFolder(machines("fourth").results / config.path).evaluations() == [result]


def test_force_deletes_a_run_at_the_url(s3, machines, config):
    train.train(config, machines("first"))
    evaluate.evaluate(config, Target("digits", "base"), machines("first"))
    sent = s3.count_requests("PUT", "train.json")
    again = train.train(config, machines("second"), force=True)
    assert s3.count_requests("PUT", "train.json") == sent + 1, "it was trained again"
    runtime = machines("third")
    remote_results.RemoteResults.from_runtime(runtime).pull_all()
    assert run_folders.RunFolder(runtime.results / config.path).train() == again
    assert run_folders.RunFolder(runtime.results / config.path).evaluations() == []


def test_an_unreachable_url_costs_only_the_upload(machines, config, monkeypatch, caplog):
    runtime = replace(machines("first"), checkpoint_seconds=0.0)
    upload = remote_results.RemoteResults.push_run
    away = [True]

    def broken(self: remote_results.RemoteResults, folder: str) -> None:
        if away[0]:
            raise Unreachable("s3://results cannot be reached; try again later")
        upload(self, folder)

    monkeypatch.setattr(remote_results.RemoteResults, "push_run", broken)
    with pytest.raises(Unreachable, match="cannot be reached"):
        train.train(config, runtime)
    assert "is uploaded later" in caplog.text
    away[0] = False
    done = train.train(config, runtime)
    assert done.resumed == 0, "it was finished here"
    assert train.train(config, machines("second")) == done


def answer(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_command_line_takes_a_url_for_results(s3, few_digits, tmp_path, monkeypatch, capsys):
    url = f"s3://{s3.bucket}/{tmp_path.name}"
    at = ("--data", str(few_digits), "--results", url, "--tracking", "off", "--device", "cpu")
    wanted = ("--methods", "zeroshot", "--datasets", "digits")
    monkeypatch.setenv("PROCAP_HOME", str(tmp_path / "one"))
    trained = answer(capsys, "train", *wanted, *at)
    run = trained["trained"][0]["run"]
    monkeypatch.setenv("PROCAP_HOME", str(tmp_path / "two"))
    planned = answer(capsys, "train", *wanted, *at, "--dry-run")
    assert planned["runs"][0]["state"] == "finished"
    evaluated = answer(capsys, "eval", run, *at)["evaluated"]
    assert len(evaluated) == 2
    monkeypatch.setenv("PROCAP_HOME", str(tmp_path / "three"))
    listed = answer(capsys, "ls", "runs", "--results", url)
    assert [(row["run"], row["state"], len(row["evaluated"])) for row in listed] == [(run, "finished", 2)]
    [line] = answer(capsys, "table", "--results", url)["tables"][0]["rows"]
    assert line["labels"] == ["digits", "CLIP (zero-shot)"]
    assert not list((tmp_path / "three").rglob("*.safetensors")), "a table needs no weights"


COMMAND = "from benchmarks.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
# Is stopped when its first state is sent, so that it cannot be done before it is killed.
STOPPED = """
import os, signal
from runner.remote_results import CheckpointUploader

def stop(uploader):
    uploader.upload()
    os.kill(os.getpid(), signal.SIGSTOP)

CheckpointUploader.start = stop
"""


@pytest.mark.slow
def test_a_lost_machine_costs_the_work_since_its_last_state(s3, few_digits, short_checkpoint, tmp_path):
    url = f"s3://{s3.bucket}/{tmp_path.name}"
    words = ["train", "--methods", "coop", "--datasets", "digits", "--shots", "4", "--epochs", "60", "--json"]
    words += ["--backbone", str(short_checkpoint), "--data", str(few_digits), "--tracking", "off", "--device", "cpu"]

    def begun(home, results, before=""):
        command = [sys.executable, "-c", f"{before}{COMMAND}", *words, "--results", results]
        environment = {**os.environ, "PROCAP_HOME": str(tmp_path / home), "OMP_NUM_THREADS": "1"}
        return start_process(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def result(home, results):
        with begun(home, results) as process:
            output, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        return json.loads(output.splitlines()[-1])["trained"][0]

    alone = result("alone", str(tmp_path / "alone"))
    with begun("lost", url, STOPPED) as lost:
        deadline = time.monotonic() + 200
        while not any("/state/step-" in name for name in RemoteFolder(url).list()):
            assert lost.poll() is None and time.monotonic() < deadline, "no state was sent"
            time.sleep(0.05)
        lost.kill()
    assert not any(name.endswith("train.json") for name in RemoteFolder(url).list()), "it was killed on the way"
    assert result("next", url)["checkpoint_sha256"] == alone["checkpoint_sha256"]
    names = RemoteFolder(url).list()
    assert any(name.endswith("train.json") for name in names) and not any("/state/" in name for name in names)
    runtime = tmp_path / "third"
    remote_results.RemoteResults(url, runtime).pull_all()
    [file] = runtime.rglob("train.json")
    assert json.loads(file.read_text())["resumed"] == 1
