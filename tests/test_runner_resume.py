"""Killed anywhere and started again, by hand, by torchrun or on another machine, a run ends with the same bits."""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import sessions
from child_process import start_process
from rank_processes import Processes, run_ranks
from small_runs import make_runtime, only_run
from tiny_geometry import SHORT_OPTIONS, STEPPED, needed_options

from benchmarks.cli import main
from procap.errors import Unreachable
from runner import checkpoint, remote_results, run_folders
from runner.config import RunConfig, RuntimeConfig, Target
from runner.earlier_runs import preliminary_run
from runner.planning import plan_run
from runner.results import Progress
from runner.resumable_training import ResumableTraining
from runner.session import Session

STEPS = 12
SMALL_PROCAP = {"n_ctx": 2, "depth": 3, "heads": 1, "head_width": 8, "nce_width": 8, "logvar_lr_scale": 9.0}


def train_and_stop(config: dict, data: str, results: str, every: float, stop: int | None, seconds: float) -> None:
    """Train, saving the state `every` so many seconds; stop this process `seconds` after a step was counted.

    stop: the step, 0 for the start, None to train to the end. A process that stops itself cannot be done before a slow
    test sends its signal.
    """
    count, stopped = checkpoint.TrainState.count, []

    def stop_here(*_: object) -> None:
        stopped.append(True)
        os.kill(os.getpid(), signal.SIGSTOP)

    def count_and_stop(state: checkpoint.TrainState, *step: Any) -> None:
        count(state, *step)
        if state.step == stop:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        while stop and state.step > stop and not stopped:
            time.sleep(0.001)

    checkpoint.TrainState.count = count_and_stop  # type: ignore[method-assign]
    signal.signal(signal.SIGALRM, stop_here)
    if stop == 0:
        signal.setitimer(signal.ITIMER_REAL, seconds)
    runtime = make_runtime(data, results, state_seconds=every)
    sessions.train(RunConfig.model_validate(config), runtime)


def train_until(config, data, results, number, stop, seconds=1e-6, every=0.0):
    """Train in a process that stops at a step, and let it continue with the signal `number`."""
    arguments = config.model_dump(mode="json"), str(data), str(results), every, stop, seconds
    with Processes(1, train_and_stop, *arguments) as processes:
        training, deadline = psutil.Process(processes.pid(0)), time.monotonic() + 900
        while (status := training.status()) != psutil.STATUS_STOPPED:
            assert status != psutil.STATUS_ZOMBIE and time.monotonic() < deadline, processes.output(0, "err")
            time.sleep(0.002)
        training.send_signal(number)
        with suppress(psutil.NoSuchProcess):
            training.send_signal(signal.SIGCONT)
        return processes.wait()[0]


def train_to_the_end(config: RunConfig, data: Path, results: Path) -> None:
    arguments = config.model_dump(mode="json"), str(data), str(results), 0.0, None, 0.0
    [end] = run_ranks(1, train_and_stop, *arguments)
    assert end.code == 0, end.err


@pytest.fixture(scope="module")
def planned(short_checkpoint) -> Callable[[str], RunConfig]:
    """Plan a run of a method: 12 steps in 3 epochs. ProCAP has AdamW and sampled tokens, MaPLe SGD with momentum."""

    def plan(method: str) -> RunConfig:
        options = SHORT_OPTIONS.get(method, {}) | needed_options(method, short_checkpoint)
        length = {"iterations": STEPS} if method == "2sfs" else {"epochs": 3, "batches": "random"}
        return plan_run(
            method=method, dataset="digits", shots=4, options=SMALL_PROCAP if method == "procap" else options,
            backbone=str(short_checkpoint), overrides={"batch_size": 5, **length},
        )  # fmt: skip

    return plan


def outcome(config: RunConfig, runtime: RuntimeConfig) -> tuple[bytes, list, list]:
    """Everything of a run that must not depend on where it was interrupted."""
    folder = run_folders.RunFolder(runtime.results / config.path)
    result = folder.read_training()
    logs = [(log.epoch, log.lr, log.terms) for log in result.epochs]
    counts = [sessions.evaluate(config, Target("digits", half), runtime).per_class for half in ("base", "novel")]
    return folder.checkpoint_file.read_bytes(), logs, counts


@pytest.fixture(scope="module")
def straight(planned, few_digits, tmp_path_factory):
    """Where each configuration was trained without interruption, and what came out."""
    runtime = make_runtime(few_digits, tmp_path_factory.mktemp("straight"))
    return lambda method: (runtime, sessions.train(planned(method), runtime))


@pytest.mark.parametrize(("method", "kills"), [
    ("procap", (0, 2, 9)), *(pytest.param(name, (5,), marks=pytest.mark.slow) for name in STEPPED if name != "procap"),
])  # fmt: skip
def test_a_run_killed_at_any_moment_ends_with_the_same_bits(planned, straight, few_digits, tmp_path, method, kills):
    config = planned(method)
    undisturbed, expected = straight(method)
    assert expected.steps == STEPS
    folder = run_folders.RunFolder(tmp_path / config.path)
    if first := preliminary_run(config):
        sessions.train(first, replace(undisturbed, results=tmp_path))
    draw = random.Random(method)
    for step in kills:
        # When the next step is counted, the state of this one is on disk; its own may be while it is killed.
        seconds = draw.uniform(1e-6, 0.01)
        end = train_until(config, few_digits, tmp_path, signal.SIGKILL, step and step + 1, seconds)
        assert end.code == -signal.SIGKILL and folder.read_training() is None
    train_to_the_end(config, few_digits, tmp_path)
    assert outcome(config, replace(undisturbed, results=tmp_path)) == outcome(config, undisturbed)
    result = folder.read_training()
    assert result.resumed == sum(step > 0 for step in kills)
    assert (result.steps, result.images) == (expected.steps, expected.images)
    assert not folder.state_folder.exists() and not folder.progress_file.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_the_step_and_the_run_resumes_from_it(planned, straight, few_digits, tmp_path, number):
    config = planned("maple")
    folder = run_folders.RunFolder(tmp_path / config.path)
    # Nothing is saved at this pace, so the state that is found is the signal's.
    seconds = random.Random(number).uniform(1e-6, 0.02)
    end = train_until(config, few_digits, tmp_path, number, 1, seconds, every=3600)
    assert end.code == 128 + number
    progress = folder.read_progress()
    assert progress.status == "interrupted" and 1 <= progress.step < STEPS
    assert max(int(path.name[5:13]) for path in folder.state_folder.iterdir()) == progress.step
    assert f"stopped {config.path} at step {progress.step} of {STEPS}" in end.err
    train_to_the_end(config, few_digits, tmp_path)
    result = folder.read_training()
    assert (result.resumed, result.checkpoint_sha256) == (1, straight("maple")[1].checkpoint_sha256)


ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.mark.slow
def test_torchrun_starts_all_processes_again_when_one_is_killed(few_digits, tmp_path):
    flags = f"--methods maple --datasets digits --shots 4 --epochs 2 --batch-size 4 --lr 0.002 --data {few_digits}"
    words = ["train", *flags.split(), "--tracking", "off", "--device", "cpu", "--results"]
    assert main([*words, str(tmp_path / "straight")]) == 0
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3", __file__]
    command, results = [sys.executable, "-m", *launcher, *words], tmp_path / "results"
    with start_process([*command, str(results)], cwd=ROOT, env=os.environ | ENVIRONMENT) as agent:
        while not list(results.rglob("state/step-*")):
            assert agent.poll() is None
            time.sleep(0.05)
        random.Random(1).choice(psutil.Process(agent.pid).children()).kill()
        assert agent.wait(900) == 0
    wanted, folder = only_run(tmp_path / "straight"), only_run(results)
    result = folder.read_training()
    assert result.resumed >= 1 and result.processes == 2 and result.steps == wanted.read_training().steps
    weights = checkpoint.read_checkpoint(folder.checkpoint_file, result.checkpoint_sha256)[0]
    for name, weight in checkpoint.read_checkpoint(wanted.checkpoint_file)[0].items():
        assert (weight - weights[name]).abs().max() <= 1e-3 * weight.abs().max(), name
    assert not folder.state_folder.exists() and not folder.progress_file.exists()


@pytest.fixture
def machines(s3, few_digits, tmp_path):
    """Machines that share results at one URL; "alone" has a folder of its own."""
    url = f"s3://{s3.bucket}/{tmp_path.name}"

    def make(name: str) -> RuntimeConfig:
        runtime = make_runtime(few_digits, tmp_path / name)
        return runtime if name == "alone" else replace(runtime, results_url=url)

    return make


@pytest.fixture(scope="module")
def config(short_checkpoint):
    quick = {"epochs": 2, "batch_size": 5, "lr": 0.1, "warmup": "none"}
    return plan_run(method="coop", dataset="digits", shots=2, backbone=str(short_checkpoint), overrides=quick)


def test_training_continues_on_another_machine_with_the_same_bits(machines, config):
    alone = sessions.train(config, machines("alone"))
    assert isinstance(sessions.train(config, machines("first"), until=1), Progress)
    ended = sessions.train(config, machines("second"))
    assert ended.checkpoint_sha256 == alone.checkpoint_sha256 and ended.resumed == 1
    assert sessions.train(config, machines("first")) == ended, "found finished, not repeated"
    folder = run_folders.RunFolder(machines("first").results / config.path)
    assert not folder.state_folder.exists() and not folder.progress_file.exists()
    third = machines("third")
    result = sessions.evaluate(config, Target("digits", "base"), third)
    assert result.correct == sessions.evaluate(config, Target("digits", "base"), machines("alone")).correct
    Session(machines("fourth")).remote.pull()
    assert run_folders.RunFolder(machines("fourth").results / config.path).read_evaluations() == [result]


def test_force_deletes_a_run_at_the_url(s3, machines, config):
    sessions.train(config, machines("first"))
    sessions.evaluate(config, Target("digits", "base"), machines("first"))
    sent = s3.count_requests("PUT", "train.json")
    again = sessions.train(config, machines("second"), force=True)
    assert s3.count_requests("PUT", "train.json") == sent + 1, "it was trained again"
    runtime = machines("third")
    Session(runtime).remote.pull()
    assert run_folders.RunFolder(runtime.results / config.path).read_training() == again
    assert run_folders.RunFolder(runtime.results / config.path).read_evaluations() == []


def test_an_unreachable_url_costs_only_the_upload(machines, config, monkeypatch, caplog):
    runtime = replace(machines("first"), state_seconds=0.0)
    upload = remote_results.RemoteResults.push
    away = [True]

    def broken(self: remote_results.RemoteResults, folder: str) -> None:
        if away[0]:
            raise Unreachable("s3://results cannot be reached; try again later")
        upload(self, folder)

    monkeypatch.setattr(remote_results.RemoteResults, "push", broken)
    with pytest.raises(Unreachable, match="cannot be reached"):
        sessions.train(config, runtime)
    assert "what is new is only in" in caplog.text
    away[0] = False
    done = sessions.train(config, runtime)
    assert done.resumed == 0, "it was finished here"
    assert sessions.train(config, machines("second")) == done


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


def save_and_wait(training: ResumableTraining, *status: Any) -> None:
    SAVE(training, *status)
    time.sleep(3600)


if __name__ == "__main__":
    # A worker of torchrun: the command line, whose first attempt waits behind its first state to be killed.
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        SAVE, ResumableTraining.save = ResumableTraining.save, save_and_wait  # type: ignore[method-assign]
        ResumableTraining.is_due = lambda *_: True  # type: ignore[method-assign]
    sys.exit(main())
