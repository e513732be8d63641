"""Trainings in stages, with a budget of steps, and with batches of one class: lengths, rates, resuming."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import make_runtime

from procap.errors import UsageError
from procap.methods.twosfs import TwoSFS
from procap.recipe import step_rate
from runner.checkpoint import read_checkpoint
from runner.config import RunConfig, RuntimeConfig, Target, plan_run
from runner.evaluate import evaluate, load_trained
from runner.results import Progress, TrainResult
from runner.run_folders import RunFolder
from runner.train import train

STEPS = 7
TARGETS = [Target("digits", "base"), Target("digits", "novel"), Target("digits", "all")]


def planned(checkpoint: Path, **changes) -> RunConfig:
    """Plan 2SFS on ten images: batches of 4, 4 and 2; four steps tune LayerNorms and three the classifier."""
    overrides = {"iterations": STEPS, "epochs": STEPS, "batch_size": 4, "lr": 1e-2, **changes}
    return plan_run(method="2sfs", dataset="digits", shots=2, backbone=str(checkpoint), overrides=overrides)


@pytest.fixture(scope="module")
def runtime(few_digits, tmp_path_factory) -> RuntimeConfig:
    results = tmp_path_factory.mktemp("results")
    return make_runtime(few_digits, results)


@pytest.fixture(scope="module")
def finished(short_checkpoint, runtime) -> tuple[RunConfig, TrainResult]:
    config = planned(short_checkpoint)
    return config, train(config, runtime)


def test_a_budget_of_steps_passes_over_the_images_as_often_as_it_takes(finished):
    config, result = finished
    assert (result.steps, result.images) == (STEPS, 4 + 4 + 2 + 4 + 4 + 2 + 4)
    expected = [step_rate(config.recipe, step, 4) for step in range(4)]
    expected += [step_rate(config.recipe, step, 3) for step in range(3)]
    assert [log.lr for log in result.epochs] == expected


def test_each_stage_trains_its_own_part_and_new_classes_keep_the_first_stage(finished, runtime):
    config, _ = finished
    trained = load_trained(config, runtime)
    assert isinstance(trained.method, TwoSFS)
    tensors, card = read_checkpoint(RunFolder(runtime.results / config.path).checkpoint_file)
    assert torch.equal(trained.method.rows, tensors["rows"])
    moved = [(value - 1).abs().max() > 1e-3 for name, value in tensors.items() if name.endswith("weight")]
    assert len(moved) == 12 and all(moved)
    assert not torch.allclose(trained.method.class_features(card.space), tensors["rows"], atol=1e-3)
    assert all(evaluate(config, target, runtime, trained=trained).total for target in TARGETS)


def test_a_run_that_stops_after_every_step_ends_with_the_same_bits(finished, runtime, tmp_path):
    """Every step is an epoch here, so the run resumes from a state after each, also where the stage changes."""
    config, result = finished
    other = replace(runtime, results=tmp_path)
    for epochs in range(1, STEPS + 1):
        train(config, other, until=epochs)
    again = train(config, other)
    assert isinstance(again, TrainResult)
    assert (again.resumed, again.images) == (STEPS - 1, result.images)
    assert again.checkpoint_sha256 == result.checkpoint_sha256
    assert [log.terms for log in again.epochs] == [log.terms for log in result.epochs]


def test_a_stage_that_changes_inside_an_epoch_gives_the_same_weights(finished, runtime, short_checkpoint):
    config = planned(short_checkpoint, epochs=2)
    result = train(config, runtime)
    assert isinstance(result, TrainResult) and len(result.epochs) == 2
    one, other = (
        read_checkpoint(RunFolder(runtime.results / run.path).checkpoint_file)[0] for run in (config, finished[0])
    )
    assert all(torch.equal(one[name], value) for name, value in other.items())


def test_a_number_of_epochs_replaces_the_budget_of_steps(short_checkpoint, runtime):
    config = plan_run(
        method="2sfs",
        dataset="digits",
        shots=2,
        backbone=str(short_checkpoint),
        overrides={"epochs": 1, "batch_size": 4},
    )
    assert config.recipe.iterations is None
    result = train(config, runtime)
    assert isinstance(result, TrainResult)
    assert (result.steps, result.images) == (3, 10)


def test_batches_of_one_class_leave_out_what_remains_of_a_class(short_checkpoint, runtime):
    """Six shots of five classes make one batch of four per class."""
    fields = {"dataset": "digits", "shots": 6, "backbone": str(short_checkpoint)}
    config = plan_run(
        method="skipt", options={"first_block": 1}, overrides={"epochs": 2, "lr": 0.01, "vision_lr": 0.002}, **fields
    )
    assert isinstance(train(config, runtime, until=1), Progress)
    result = train(config, runtime)
    assert isinstance(result, TrainResult)
    assert (result.steps, result.images, result.resumed) == (10, 40, 1)
    assert all(evaluate(config, target, runtime).total for target in TARGETS)


def test_shots_too_few_for_batches_of_one_class_are_refused(short_checkpoint, runtime):
    fields = {"dataset": "digits", "shots": 3, "backbone": str(short_checkpoint)}
    assert plan_run(method="skipt", **fields).recipe.batches == "random", "as the public code does below 4 shots"
    with pytest.raises(UsageError, match=r"class '.*' has 3 training images, but a batch has 4 of one class"):
        train(plan_run(method="skipt", overrides={"batches": "class"}, **fields), runtime)
