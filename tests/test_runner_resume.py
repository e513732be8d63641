"""Killed anywhere and started again, a run ends with the same bits; asked to stop, it saves and says so."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rank_processes import Ended, Processes, run_ranks
from small_runs import make_runtime

from procap.errors import UserError
from procap.methods import METHODS
from runner import checkpointer
from runner.checkpoint import TrainState
from runner.config import RunConfig, RuntimeConfig, Target, plan_run
from runner.evaluate import evaluate
from runner.results import TrainResult, write_json
from runner.run_folders import RunFolder
from runner.train import train

STEPS, STEPS_PER_EPOCH = 12, 4
QUICK: dict[str, Any] = {
    "dataset": "digits",
    "shots": 4,
    "overrides": {"epochs": 3, "batch_size": 5, "batches": "random"},
}
CHANGES: dict[str, dict[str, Any]] = {
    "coprompt": {"options": {"sentences": "templates"}},
    "2sfs": {"overrides": {"iterations": 12, "batch_size": 5}},
}
SMALL_PROCAP = {"n_ctx": 2, "depth": 3, "heads": 1, "head_width": 8, "nce_width": 8, "logvar_lr_scale": 9.0}


def train_and_stop(config: dict, data: str, results: str, every: float, stop: int | None, seconds: float) -> None:
    """Train, saving the state `every` so many seconds; stop this process `seconds` after a step was counted.

    stop: the step, 0 for the start, None to train to the end. A process that stops itself cannot be done before a slow
    test sends its signal.
    """
    checkpointer.EPOCH_SAVE_SECONDS = float("inf")
    count, stopped = TrainState.count, []

    def stop_here(*_: object) -> None:
        stopped.append(True)
        os.kill(os.getpid(), signal.SIGSTOP)

    def count_and_stop(state: TrainState, *step: Any) -> None:
        count(state, *step)
        if state.step == stop:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        while stop and state.step > stop and not stopped:
            time.sleep(0.001)

    TrainState.count = count_and_stop  # type: ignore[method-assign]
    signal.signal(signal.SIGALRM, stop_here)
    if stop == 0:
        signal.setitimer(signal.ITIMER_REAL, seconds)
    runtime = make_runtime(data, results, checkpoint_seconds=every)
    train(RunConfig.model_validate(config), runtime)


def train_until(
    config: RunConfig, data: Path, results: Path, number: int, stop: int, seconds: float = 1e-6, every: float = 0.0
) -> Ended:
    """Train in a process that stops at a step, and let it continue with the signal `number`."""
    arguments = config.model_dump(mode="json"), str(data), str(results), every, stop, seconds
    with Processes(1, train_and_stop, *arguments) as processes:
        training, deadline = psutil.Process(processes.pid(0)), time.monotonic() + 240
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
def configs(short_checkpoint) -> dict[str, RunConfig]:
    """AdamW with sampled tokens, and SGD with momentum; 12 steps in 3 epochs."""
    backbone = str(short_checkpoint)
    return {
        "adamw": plan_run(method="procap", options=SMALL_PROCAP, backbone=backbone, **QUICK),
        "sgd": plan_run(method="maple", options={"depth": 3}, backbone=backbone, **QUICK),
    }


def outcome(config: RunConfig, runtime: RuntimeConfig) -> tuple[bytes, list, list]:
    """Everything of a run that must not depend on where it was interrupted."""
    folder = RunFolder(runtime.results / config.path)
    result = folder.train()
    assert result is not None
    logs = [(log.epoch, log.lr, log.terms) for log in result.epochs]
    counts = [evaluate(config, Target("digits", half), runtime).per_class for half in ("base", "novel")]
    return folder.checkpoint_file.read_bytes(), logs, counts


@pytest.fixture(scope="module")
def straight(configs, few_digits, tmp_path_factory) -> Callable[[str], tuple[RuntimeConfig, TrainResult]]:
    """Where each configuration was trained without interruption, and what came out."""
    runtime = make_runtime(few_digits, tmp_path_factory.mktemp("straight"))
    return lambda name: (runtime, train(configs[name], runtime))


@pytest.mark.parametrize(("name", "kills"), [("adamw", (0, 2, 9)), pytest.param("sgd", (5,), marks=pytest.mark.slow)])
def test_a_run_killed_at_any_moment_ends_with_the_same_bits(configs, straight, few_digits, tmp_path, name, kills):
    config = configs[name]
    undisturbed, wanted = straight(name)
    assert wanted.steps == STEPS
    folder = RunFolder(tmp_path / config.path)
    draw = random.Random(name)
    for step in kills:
        # When the next step is counted, the state of this one is on disk; its own may be while it is killed.
        seconds = draw.uniform(1e-6, 0.01)
        end = train_until(config, few_digits, tmp_path, signal.SIGKILL, step and step + 1, seconds)
        assert end.code == -signal.SIGKILL
        assert folder.train() is None
    train_to_the_end(config, few_digits, tmp_path)
    assert outcome(config, replace(undisturbed, results=tmp_path)) == outcome(config, undisturbed)
    result = folder.train()
    assert result is not None
    assert result.resumed == sum(step > 0 for step in kills)
    assert (result.steps, result.images) == (wanted.steps, wanted.images)
    assert not folder.state.exists()
    assert not folder.progress_file.exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("zeroshot", "maple", "procap")])
def test_every_method_killed_in_the_second_epoch_ends_with_the_same_bits(tiny_checkpoint, few_digits, tmp_path, method):
    config = plan_run(method=method, backbone=str(tiny_checkpoint), **QUICK | CHANGES.get(method, {}))
    undisturbed = make_runtime(few_digits, tmp_path / "straight")
    assert train(config, undisturbed).steps == STEPS
    killed = tmp_path / "killed"
    end = train_until(config, few_digits, killed, signal.SIGKILL, 6)
    assert end.code == -signal.SIGKILL and RunFolder(killed / config.path).train() is None
    train_to_the_end(config, few_digits, killed)
    assert outcome(config, replace(undisturbed, results=killed)) == outcome(config, undisturbed)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_the_step_and_the_run_resumes_from_it(configs, straight, few_digits, tmp_path, number):
    config = configs["sgd"]
    folder = RunFolder(tmp_path / config.path)
    # Nothing is saved at this pace, so the state that is found is the signal's.
    seconds = random.Random(number).uniform(1e-6, 0.02)
    end = train_until(config, few_digits, tmp_path, number, 1, seconds, every=3600)
    assert end.code == 128 + number
    progress = folder.progress()
    assert progress is not None
    assert progress.status == "interrupted"
    assert 1 <= progress.step < STEPS
    assert max(int(path.name[5:13]) for path in folder.state.iterdir()) == progress.step
    assert f"stopped {config.path} at step {progress.step} of {STEPS}" in end.err
    train_to_the_end(config, few_digits, tmp_path)
    result = folder.train()
    assert result is not None
    assert (result.resumed, result.checkpoint_sha256) == (1, straight("sgd")[1].checkpoint_sha256)


@pytest.fixture
def stopped(configs, few_digits, tmp_path) -> tuple[RunConfig, RunFolder]:
    """A run that was killed inside its second epoch."""
    config = configs["sgd"]
    folder = RunFolder(tmp_path / config.path)
    assert train_until(config, few_digits, tmp_path, signal.SIGKILL, STEPS_PER_EPOCH + 2).code == -signal.SIGKILL
    return config, folder


def test_other_data_than_at_the_start_is_refused(stopped, few_digits, tmp_path):
    config, folder = stopped
    from shards.manifest import read_manifest

    data = tmp_path / "data"
    shutil.copytree(few_digits / "digits", data / "digits")
    manifest = read_manifest(few_digits / "digits")
    other = manifest.model_copy(update={"template": "another {}."})
    (data / "digits" / "manifest.json").write_text(other.to_json())
    states = sorted(folder.state.iterdir())
    with pytest.raises(UserError, match=r"cannot resume from .* manifest digest is .*--force"):
        train(config, make_runtime(data, tmp_path))
    assert sorted(folder.state.iterdir()) == states


def test_a_result_of_another_run_is_not_taken_for_this_one(configs, straight, few_digits, tmp_path):
    runtime = make_runtime(few_digits, tmp_path)
    write_json(RunFolder(tmp_path / configs["adamw"].path).train_file, straight("sgd")[1])
    with pytest.raises(UserError, match=r"--force"):
        train(configs["adamw"], runtime)
