"""Killed anywhere and started again, a run ends with the same bits; asked to stop, it saves and says so."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from started import started

from procap.errors import UserError
from runner.config import RunConfig, RuntimeConfig, Target, plan_run
from runner.evaluate import evaluate
from runner.results import RunFolder, TrainResult, write_json
from runner.train import train

# Imports once and forks for every training, so that a kill costs milliseconds instead of an interpreter's start. The
# training stops itself where it was told to: it cannot be done before a test that is slow comes to send its signal.
FORGE = """
import json, os, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from procap.errors import UserError
from runner import checkpointer
from runner.checkpoint import TrainState
from runner.config import RunConfig, RuntimeConfig
from runner.train import train
checkpointer.EPOCH_SAVE_SECONDS = float("inf")
count = TrainState.count
def stop_at(stop, seconds):
    stopped = []
    def stop_here(*_):
        stopped.append(True)
        os.kill(os.getpid(), signal.SIGSTOP)
    def counted(state, *what):
        count(state, *what)
        if state.step == stop:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        while stop and state.step > stop and not stopped:
            time.sleep(0.001)
    TrainState.count = counted
    signal.signal(signal.SIGALRM, stop_here)
    if stop == 0:
        signal.setitimer(signal.ITIMER_REAL, seconds)
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if not child:
        code = 0
        try:
            runtime = RuntimeConfig(Path(order["data"]), Path(order["results"]), device="cpu", tracking_uri="off",
                                    quiet=True, checkpoint_seconds=order["every"])
            stop_at(order["stop"], order["seconds"])
            train(RunConfig.model_validate(order["config"]), runtime)
        except UserError as error:
            print(error, file=sys.stderr, flush=True)
            code = error.exit_code
        os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
STEPS, STEPS_PER_EPOCH = 12, 4
SMALL_PROCAP = {"n_ctx": 2, "depth": 3, "heads": 1, "head_width": 8, "nce_width": 8}


class Forge:
    """Trains in processes that may be killed, one at a time."""

    def __init__(self, process: subprocess.Popen[str], data: Path, errors: Path) -> None:
        self.process, self.data, self.errors = process, data, errors
        self.running: int | None = None

    def _line(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def start(
        self, config: RunConfig, results: Path, every: float = 0.0, stop: int | None = None, seconds: float = 1e-6
    ) -> int:
        """Begin a training that saves its state `every` so many seconds; gives its process.

        stop: let it stop itself so many `seconds` after this step was counted, 0 for after its start.
        """
        if self.running is not None:
            # A test that failed has left it.
            with suppress(ProcessLookupError):
                os.kill(self.running, signal.SIGKILL)
            self.end()
        order = {"config": config.model_dump(mode="json"), "data": str(self.data), "results": str(results)}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({**order, "every": every, "stop": stop, "seconds": seconds}) + "\n")
        self.process.stdin.flush()
        self.running = self._line()
        return self.running

    def wait(self) -> None:
        """Until the training has stopped itself."""
        deadline = time.monotonic() + 240
        while (status := psutil.Process(self.running).status()) != psutil.STATUS_STOPPED:
            assert status != psutil.STATUS_ZOMBIE and time.monotonic() < deadline, self.errors.read_text()
            time.sleep(0.002)

    def send(self, number: int) -> None:
        """Wait until the training has stopped itself, and let it go on with a signal."""
        self.wait()
        assert self.running is not None
        os.kill(self.running, number)
        with suppress(ProcessLookupError):
            os.kill(self.running, signal.SIGCONT)

    def end(self) -> int:
        """Wait for the training's exit code, the negative signal when one killed it."""
        code, self.running = self._line(), None
        return code


@pytest.fixture(scope="module")
def forge(few_digits, tmp_path_factory) -> Iterator[Forge]:
    errors = tmp_path_factory.mktemp("forge") / "errors.txt"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        errors.open("w") as said,
        started([sys.executable, "-c", FORGE], cwd=Path(__file__).parent.parent, stderr=said, **pipes) as process,
    ):
        yield Forge(process, few_digits, errors)


@pytest.fixture(scope="module")
def configs(tiny_checkpoint) -> dict[str, RunConfig]:
    """AdamW with sampled tokens, and SGD with momentum; 12 steps in 3 epochs."""
    quick = {"epochs": 3, "batch_size": 5}
    fields: dict[str, Any] = {"dataset": "digits", "shots": 4, "backbone": str(tiny_checkpoint), "overrides": quick}
    return {
        "adamw": plan_run(method="procap", options=SMALL_PROCAP, **fields),
        "sgd": plan_run(method="maple", options={"depth": 3}, **fields),
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
    runtime = RuntimeConfig(
        few_digits, tmp_path_factory.mktemp("straight"), device="cpu", tracking_uri="off", quiet=True
    )
    return lambda name: (runtime, train(configs[name], runtime))


@pytest.mark.parametrize(("name", "kills"), [("adamw", (0, 2, 9)), pytest.param("sgd", (5,), marks=pytest.mark.slow)])
def test_a_run_killed_at_any_moment_ends_with_the_same_bits(
    forge, configs, straight, few_digits, tmp_path, name, kills
):
    config = configs[name]
    undisturbed, wanted = straight(name)
    assert wanted.steps == STEPS
    folder = RunFolder(tmp_path / config.path)
    draw = random.Random(name)
    for step in kills:
        # When the next step is counted, the state of this one is on disk; its own may be while it is killed.
        forge.start(config, tmp_path, stop=step and step + 1, seconds=draw.uniform(1e-6, 0.01))
        forge.send(signal.SIGKILL)
        assert forge.end() == -signal.SIGKILL
        assert folder.train() is None
    forge.start(config, tmp_path)
    assert forge.end() == 0, forge.errors.read_text()
    assert outcome(config, replace(undisturbed, results=tmp_path)) == outcome(config, undisturbed)
    result = folder.train()
    assert result is not None
    assert result.resumed == sum(step > 0 for step in kills)
    assert (result.steps, result.images) == (wanted.steps, wanted.images)
    assert not folder.state.exists()
    assert not folder.progress_file.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_the_step_and_the_run_resumes_from_it(forge, configs, straight, tmp_path, number):
    config = configs["sgd"]
    folder = RunFolder(tmp_path / config.path)
    # Nothing is saved at this pace, so the state that is found is the signal's.
    forge.start(config, tmp_path, every=3600, stop=1, seconds=random.Random(number).uniform(1e-6, 0.02))
    forge.send(number)
    assert forge.end() == 128 + number
    progress = folder.progress()
    assert progress is not None
    assert progress.status == "interrupted"
    assert 1 <= progress.step < STEPS
    assert max(int(path.name[5:13]) for path in folder.state.iterdir()) == progress.step
    assert f"stopped {config.path} at step {progress.step} of {STEPS}" in forge.errors.read_text()
    forge.start(config, tmp_path)
    assert forge.end() == 0
    result = folder.train()
    assert result is not None
    assert (result.resumed, result.checkpoint_sha256) == (1, straight("sgd")[1].checkpoint_sha256)


@pytest.fixture
def stopped(forge, configs, tmp_path) -> tuple[RunConfig, RunFolder]:
    """A run that was killed inside its second epoch."""
    config = configs["sgd"]
    folder = RunFolder(tmp_path / config.path)
    forge.start(config, tmp_path, stop=STEPS_PER_EPOCH + 2)
    forge.send(signal.SIGKILL)
    assert forge.end() == -signal.SIGKILL
    return config, folder


def test_other_data_than_at_the_start_is_refused(stopped, few_digits, tmp_path):
    config, folder = stopped
    from shards.manifest import read_manifest

    data = tmp_path / "data"
    (data / "digits").mkdir(parents=True)
    for path in (few_digits / "digits").iterdir():
        (data / "digits" / path.name).symlink_to(path)
    manifest = read_manifest(few_digits / "digits")
    (data / "digits" / "manifest.json").unlink()
    other = manifest.model_copy(update={"template": "another {}."})
    (data / "digits" / "manifest.json").write_text(other.to_json())
    states = sorted(folder.state.iterdir())
    with pytest.raises(UserError, match=r"cannot resume from .* manifest digest is .*--force"):
        train(config, RuntimeConfig(data, tmp_path, device="cpu", tracking_uri="off", quiet=True))
    assert sorted(folder.state.iterdir()) == states


def test_a_broken_newest_state_costs_a_step_and_changes_no_bit(stopped, straight, few_digits, tmp_path, caplog):
    config, folder = stopped
    newest = max(folder.state.glob("step-*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:100])
    runtime = RuntimeConfig(few_digits, tmp_path, device="cpu", tracking_uri="off", quiet=True)
    result = train(config, runtime)
    assert str(newest) in caplog.text
    assert result.resumed == 1
    assert result.checkpoint_sha256 == straight("sgd")[1].checkpoint_sha256


def test_a_result_of_another_run_is_not_taken_for_this_one(configs, straight, few_digits, tmp_path):
    runtime = RuntimeConfig(few_digits, tmp_path, device="cpu", tracking_uri="off", quiet=True)
    write_json(RunFolder(tmp_path / configs["adamw"].path).train_file, straight("sgd")[1])
    with pytest.raises(UserError, match=r"--force"):
        train(configs["adamw"], runtime)
