"""Runs that are paused and watched: what is counted while they train, and that the training itself does not change."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from sessions import evaluate, train
from small_runs import make_runtime

import runner.inference
import runner.resumable_training
import runner.train
import runner.validate
from procap.errors import UsageError
from runner.config import RunConfig, RuntimeConfig, Target
from runner.distributed.connect import init_process_group
from runner.distributed.ranks import ranks_from_environment
from runner.planning import plan_run
from runner.results import EpochLog, Progress, TrainResult
from runner.run_folders import RunFolder
from runner.stop_signals import Interrupted
from runner.validate import Callbacks

EPOCHS, STEPS_PER_EPOCH = 4, 3
BASE, NOVEL = Target("digits", "dev-base", "val"), Target("digits", "dev-novel", "val")
HALVES = (BASE, NOVEL)
SMALL: dict[str, dict[str, Any]] = {
    "coop": {},
    "cocoop": {},
    "maple": {"depth": 3},
    "procap": {"n_ctx": 2, "depth": 3, "heads": 1, "head_width": 8, "nce_width": 8},
}


def planned(checkpoint: str, method: str = "coop", **more: Any) -> RunConfig:
    """12 steps of 4 images in 4 epochs, on three of the five base classes."""
    quick = {"epochs": EPOCHS, "batch_size": 4, "warmup": "none", **more.pop("overrides", {})}
    fields: dict[str, Any] = {"dataset": "digits", "classes": "dev-base", "shots": 4, "backbone": checkpoint, **more}
    return plan_run(method=method, options=SMALL[method], overrides=quick, **fields)


@pytest.fixture
def runtime(few_digits, tmp_path) -> RuntimeConfig:
    return make_runtime(few_digits, tmp_path)


@pytest.fixture(scope="module")
def config(short_checkpoint) -> RunConfig:
    return planned(str(short_checkpoint), overrides={"lr": 0.5})


@pytest.fixture(scope="module")
def straight(config, few_digits, tmp_path_factory) -> RunFolder:
    """The run trained at once, while both halves of the base classes are counted."""
    runtime = make_runtime(few_digits, tmp_path_factory.mktemp("straight"))
    train(config, runtime, callbacks=Callbacks(HALVES))
    return RunFolder(runtime.results / config.path)


def folder_of(config: RunConfig, runtime: RuntimeConfig) -> RunFolder:
    return RunFolder(runtime.results / config.path)


def weights(folder: RunFolder) -> bytes:
    return folder.checkpoint_file.read_bytes()


def logs(folder: RunFolder) -> list[tuple[int, float, dict[str, float]]]:
    result = folder.read_training()
    return [(log.epoch, log.lr, log.terms) for log in result.epochs]


def test_a_run_that_is_paused_after_every_epoch_ends_with_the_same_bits(config, straight, runtime):
    folder = folder_of(config, runtime)
    for until in range(1, EPOCHS):
        paused = train(config, runtime, until=until, callbacks=Callbacks(HALVES))
        assert isinstance(paused, Progress) and (paused.status, len(paused.epochs)) == ("paused", until)
        assert (paused.step, paused.steps) == (until * STEPS_PER_EPOCH, EPOCHS * STEPS_PER_EPOCH)
        assert paused == folder.read_progress() and folder.read_training() is None
        with folder.locked():
            pass
    # One who asks for more epochs than there are gets the finished run.
    result = train(config, runtime, until=EPOCHS + 1, callbacks=Callbacks(HALVES))
    assert isinstance(result, TrainResult) and result.resumed == EPOCHS - 1
    assert (weights(folder), logs(folder)) == (weights(straight), logs(straight))
    assert folder.read_validation() == straight.read_validation()
    assert not folder.state_folder.exists() and not folder.progress_file.exists()
    assert train(config, runtime, until=1) == result


@pytest.mark.parametrize("method", SMALL)
def test_callbacks_change_no_bit_of_any_method(method, short_checkpoint, runtime, tmp_path):
    config = planned(str(short_checkpoint), method, overrides={"epochs": 2})
    alone = replace(runtime, results=tmp_path / "alone")
    train(config, alone)
    seen: list[EpochLog] = []
    watched = train(config, runtime, callbacks=Callbacks(HALVES, seen.append))
    folders = folder_of(config, runtime), folder_of(config, alone)
    assert weights(folders[0]) == weights(folders[1]) and logs(folders[0]) == logs(folders[1])
    assert seen == watched.epochs
    assert not folders[1].validation_file.exists() and folders[1].read_validation() == []


def test_every_image_of_a_target_is_counted_as_an_evaluation_counts_it(config, straight, runtime):
    counts = straight.read_validation()
    assert [(count.epoch, count.target) for count in counts] == [
        (epoch, str(target)) for epoch in range(EPOCHS) for target in (BASE, NOVEL)
    ]
    where = replace(runtime, results=straight.path.parents[5])
    for count, target in zip(counts[-2:], (BASE, NOVEL), strict=True):
        result = evaluate(config, target, where)
        assert (count.correct, count.total, count.accuracy) == (result.correct, result.total, result.accuracy)
    # Learning shows, so that counts of the wrong epoch would be found.
    assert len({count.correct for count in counts if count.target == str(BASE)}) > 1


def test_validation_on_a_test_split_is_refused():
    for split in ("test", "all"):
        with pytest.raises(UsageError, match=rf"digits:novel:{split} cannot be used for model selection"):
            Callbacks((BASE, Target("digits", "novel", split)))


def test_validation_does_not_count_in_seconds_and_rates_of_a_training(config, runtime, monkeypatch):
    plain = runner.validate.Validator.validate
    spent: list[float] = []

    def slow(watcher: runner.validate.Validator) -> None:
        plain(watcher)
        with watcher.training.meter.phase("validation", in_step=False):
            time.sleep(0.02)
        spent.append(0.02)

    monkeypatch.setattr(runner.validate.Validator, "validate", slow)
    result = train(config, runtime, callbacks=Callbacks(HALVES))
    assert result.phases["validation"] > sum(spent)
    rest = [seconds for name, seconds in result.phases.items() if name not in runner.train.UNTIMED_PHASES]
    assert sum(rest) == pytest.approx(result.seconds)
    steps = sum(result.phases[name] for name in ("data", "forward", "backward", "optimizer"))
    assert sum(log.seconds for log in result.epochs) == pytest.approx(steps)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_callback_that_raises_leaves_the_state_of_that_epoch_and_no_lock(config, straight, runtime, error):
    folder = folder_of(config, runtime)

    def end(log: EpochLog) -> None:
        if log.epoch == 1:
            raise error("enough")

    with pytest.raises(error):
        train(config, runtime, callbacks=Callbacks(HALVES, end))
    progress = folder.read_progress()
    assert (progress.status, progress.step, len(progress.epochs)) == ("interrupted", 2 * STEPS_PER_EPOCH, 2)
    assert [int(path.name[5:13]) for path in folder.state_folder.iterdir()] == [progress.step]
    seen: list[EpochLog] = []
    result = train(config, runtime, callbacks=Callbacks(HALVES, seen.append))
    assert result.resumed == 1 and [log.epoch for log in seen] == [2, 3]
    assert weights(folder) == weights(straight) and folder.read_validation() == straight.read_validation()


def test_the_callback_gets_every_epoch_once_over_pauses(config, runtime, monkeypatch):
    # The state of the last step of an epoch does not know yet that the epoch has ended.
    monkeypatch.setattr(runner.resumable_training.ResumableTraining, "is_due", lambda training, seconds: True)
    epochs: list[int] = []
    for until in (1, 3, 4):
        train(config, runtime, until=until, callbacks=Callbacks(HALVES, lambda log: epochs.append(log.epoch)))
    assert epochs == [0, 1, 2, 3]


def test_a_signal_during_validation_saves_and_validates_later(config, straight, runtime, monkeypatch):
    folder, plain = folder_of(config, runtime), runner.inference.evaluation_batches

    def signalled(*arguments: Any, **more: Any) -> Any:
        for batch in plain(*arguments, **more):
            os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="at step 3 of 12; repeat the"):
        patch.setattr(runner.inference, "evaluation_batches", signalled)
        train(config, runtime, callbacks=Callbacks(HALVES))
    progress = folder.read_progress()
    assert progress is not None and progress.status == "interrupted" and not folder.read_validation()
    train(config, runtime, callbacks=Callbacks(HALVES))
    assert weights(folder) == weights(straight) and folder.read_validation() == straight.read_validation()


def train_in_parts(data: str, results: str, checkpoint: str, engine: str) -> None:
    ranks = ranks_from_environment()
    config = planned(checkpoint, overrides={"lr": 0.5, "optimizer": "sgd"})
    with init_process_group(ranks, torch.device("cpu")) as group:
        seen: list[EpochLog] = []
        callbacks = Callbacks(HALVES, seen.append if ranks.is_first else None)
        for part, untils in (("whole", (None,)), ("parts", (1, 3, 2, None))):
            own = Path(results) / (part if ranks.is_first else f"{part}-of-{ranks.rank}")
            runtime = make_runtime(data, own, engine=engine)
            for until in untils:
                result = train(config, runtime, group=group, until=until, callbacks=callbacks)
                print(result.status, len(result.epochs), flush=True)
        if ranks.is_first:
            assert [log.epoch for log in seen] == [0, 1, 2, 3] * 2


@pytest.mark.parametrize("engine", ["ddp", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_several_processes_pause_count_and_go_on_as_one(few_digits, short_checkpoint, tmp_path, engine):
    ends = run_ranks(2, train_in_parts, str(few_digits), str(tmp_path), str(short_checkpoint), engine)
    assert [end.code for end in ends] == [0, 0], ends[0].err + ends[1].err
    assert ends[0].out == ends[1].out == "finished 4\npaused 1\npaused 3\npaused 3\nfinished 4\n"
    assert not list(tmp_path.glob("*-of-*"))
    config = planned(str(short_checkpoint), overrides={"lr": 0.5, "optimizer": "sgd"})
    whole, parts = (RunFolder(tmp_path / part / config.path) for part in ("whole", "parts"))
    assert weights(whole) == weights(parts) and whole.read_validation() == parts.read_validation()
    one = make_runtime(few_digits, tmp_path / "one")
    train(config, one, callbacks=Callbacks(HALVES))
    assert folder_of(config, one).read_validation() == whole.read_validation()
