"""What recipes demand of a training: stages, budgets of steps, averaged weights, two views of each image."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from public_code import FIGURES
from safetensors.torch import load_file
from sessions import evaluate, load_trained, state_of, train
from small_runs import make_runtime, seeded

from procap import errors, methods, recipe, text
from procap.methods.coprompt import read_sentences
from runner.checkpoint import read_checkpoint
from runner.config import RunConfig, RuntimeConfig, Target
from runner.epoch_average import gaussian_weights
from runner.planning import plan_run
from runner.results import Progress, TrainResult
from runner.run_folders import RunFolder
from runner.run_state import RunSpec
from runner.setup import select_images_of_run
from shards import reader, transforms

STEPS = 7
TARGETS = [Target("digits", "base"), Target("digits", "novel"), Target("digits", "all")]


def planned(checkpoint, **changes):
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
    expected = [recipe.step_rate(config.recipe, step, 4) for step in range(4)]
    expected += [recipe.step_rate(config.recipe, step, 3) for step in range(3)]
    assert [log.lr for log in result.epochs] == expected


def test_batches_of_one_class_are_full_whatever_remains_of_the_images(short_checkpoint, few_digits):
    overrides = {"batches": "class", "batch_size": 2}
    config = plan_run(method="2sfs", dataset="digits", shots=3, backbone=str(short_checkpoint), overrides=overrides)
    selection = select_images_of_run(config, reader.open_dataset(few_digits, "digits"), 2)
    assert not config.recipe.drop_last and len(selection.train) == 15


def test_each_stage_trains_its_own_part_and_new_classes_keep_the_first_stage(finished, runtime):
    config, _ = finished
    trained = load_trained(config, runtime)
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
    assert (again.resumed, again.images) == (STEPS - 1, result.images)
    assert again.checkpoint_sha256 == result.checkpoint_sha256
    assert [log.terms for log in again.epochs] == [log.terms for log in result.epochs]


def test_a_stage_that_changes_inside_an_epoch_gives_the_same_weights(finished, runtime, short_checkpoint):
    config = planned(short_checkpoint, epochs=2)
    result = train(config, runtime)
    assert isinstance(result, TrainResult) and len(result.epochs) == 2
    files = (RunFolder(runtime.results / run.path).checkpoint_file for run in (config, finished[0]))
    one, other = (read_checkpoint(file)[0] for file in files)
    assert all(torch.equal(one[name], value) for name, value in other.items())


def test_a_number_of_epochs_replaces_the_budget_of_steps(short_checkpoint, runtime):
    few = {"epochs": 1, "batch_size": 4}
    config = plan_run(method="2sfs", dataset="digits", shots=2, backbone=str(short_checkpoint), overrides=few)
    assert config.recipe.iterations is None
    result = train(config, runtime)
    assert (result.steps, result.images) == (3, 10)


def test_batches_of_one_class_leave_out_what_remains_of_a_class(short_checkpoint, runtime):
    """Six shots of five classes make one batch of four per class."""
    fields = {"dataset": "digits", "shots": 6, "backbone": str(short_checkpoint)}
    fields["overrides"] = {"epochs": 2, "lr": 0.01, "vision_lr": 0.002}
    config = plan_run(method="skipt", options={"first_block": 1}, **fields)
    assert isinstance(train(config, runtime, until=1), Progress)
    result = train(config, runtime)
    assert (result.steps, result.images, result.resumed) == (10, 40, 1)
    assert all(evaluate(config, target, runtime).total for target in TARGETS)


def test_shots_too_few_for_batches_of_one_class_are_refused(short_checkpoint, runtime):
    fields = {"dataset": "digits", "shots": 3, "backbone": str(short_checkpoint)}
    assert plan_run(method="skipt", **fields).recipe.batches == "random", "as the public code does below 4 shots"
    with pytest.raises(errors.UsageError, match=r"class '.*' has 3 training images, but a batch has 4 of one class"):
        train(plan_run(method="skipt", overrides={"batches": "class"}, **fields), runtime)


@pytest.mark.parametrize(
    "name, epochs, mean, std",
    [("e20_mean15_std1", 20, 15, 1), ("e20_mean6_std10", 20, 6, 10), ("e50_mean45_std5", 50, 45, 5)],
)
def test_weights_of_the_epochs_are_those_of_the_public_code(name, epochs, mean, std):
    figures = np.load(FIGURES / "promptsrc.npz")
    assert gaussian_weights(epochs, mean, std) == pytest.approx(figures[f"gauss/{name}"].tolist(), rel=1e-9)


@pytest.fixture(scope="module")
def config(short_checkpoint) -> RunConfig:
    overrides = {"epochs": 3, "average": (2.0, 1.0), "warmup": "none", "batch_size": 20}
    return plan_run(
        method="ivlp", dataset="digits", shots=4, backbone=str(short_checkpoint), overrides=overrides,
        options={"depth": 2, "vision_depth": 2},
    )  # fmt: skip


def trained(config, data, results, until=None):
    runtime = make_runtime(data, results)
    train(config, runtime, until=until)
    return {} if until else load_file(RunFolder(results / config.path).checkpoint_file)


def test_a_paused_run_ends_with_the_average_of_an_uninterrupted_one(config, few_digits, tmp_path):
    straight = trained(config, few_digits, tmp_path / "straight")
    for epoch in (1, 2):
        trained(config, few_digits, tmp_path / "paused", until=epoch)
    paused = trained(config, few_digits, tmp_path / "paused")
    assert straight.keys() == paused.keys() and all(torch.equal(straight[name], paused[name]) for name in straight)


def test_the_result_is_the_weighted_sum_of_the_epochs(config, few_digits, tmp_path):
    """Without the average the run passes through the same weights, which its saved states hold."""
    plain = config.model_copy(update={"recipe": config.recipe.model_copy(update={"average": None})})
    total: dict[str, torch.Tensor] = {}
    for epoch, weight in enumerate(gaussian_weights(3, 2.0, 1.0), start=1):
        tensors = trained(plain, few_digits, tmp_path / "plain", until=epoch if epoch < 3 else None)
        if not tensors:
            tensors = torch.load(max((tmp_path / "plain").rglob("step-*")), weights_only=True)["method"]
        for name, tensor in tensors.items():
            total[name] = total.get(name, 0) + weight * tensor
    averaged = trained(config, few_digits, tmp_path / "averaged")
    assert averaged.keys() == total.keys()
    for name in averaged:
        torch.testing.assert_close(averaged[name], total[name], atol=1e-7, rtol=1e-5)


AUGMENT = transforms.TrainAugment(32, (0.5,) * 3, (0.25,) * 3, augmentation="randaugment", views=2)


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    grey = Image.effect_mandelbrot((48, 40), (-2, -1.5, 1, 1.5), 50)
    return Image.merge("RGB", (grey, grey.rotate(90), grey.rotate(180)))


def test_views_differ_and_depend_on_the_generator_alone(picture):
    views = AUGMENT(picture, seeded(1))
    assert views.shape == AUGMENT.shape == (2, 3, 32, 32)
    assert not torch.equal(*views) and torch.equal(views, AUGMENT(picture, seeded(1)))
    assert transforms.randaugment(picture, seeded(1)).tobytes() != transforms.randaugment(picture, seeded(2)).tobytes()


@pytest.fixture
def run(few_digits, tiny_checkpoint, tmp_path) -> tuple[RunConfig, RuntimeConfig]:
    overrides = {"epochs": 2, "warmup": "none", "batch_size": 4}
    options: dict[str, Any] = {"sentences": "templates", "depth": 2, "weight": 1.0}
    config = plan_run(
        method="coprompt", dataset="digits", shots=1, backbone=str(tiny_checkpoint), overrides=overrides,
        options=options,
    )  # fmt: skip
    return config, make_runtime(few_digits, tmp_path / "whole")


def test_training_without_sentences_is_refused_before_anything_is_written(run):
    config, runtime = run
    bare = config.model_copy(update={"options": {**config.options, "sentences": ""}})
    with pytest.raises(errors.UserError, match=r"CoPrompt needs --option sentences=.*JSON file"):
        train(bare, runtime)
    assert not list(runtime.results.rglob("*.json"))


def test_a_run_keeps_to_the_sentences_it_began_with(run, tmp_path):
    """A changed file is refused when a run resumes and when it is finished; evaluation needs no file."""
    config, runtime = run
    classes = reader.open_dataset(runtime.data, "digits").classnames
    file = tmp_path / "digits.json"
    config = config.model_copy(update={"options": {**config.options, "sentences": str(tmp_path / "{dataset}.json")}})

    def write(sentence: str) -> None:
        file.write_text(json.dumps({name.replace("_", " "): [sentence] for name in classes}))

    write("the first")
    train(config, runtime, until=1)
    write("another")
    with pytest.raises(errors.UserError, match=r"cannot resume .* SHA-256 of sentences .*start over with --force"):
        train(config, runtime)
    write("the first")
    result = train(config, runtime)
    assert set(result.epochs[0].terms) == {"ce", "text", "image"}
    assert result.files == {"sentences": hashlib.sha256(file.read_bytes()).hexdigest()}
    spec = RunSpec(config=config, targets=())
    assert train(config, runtime) == result and state_of(spec, runtime).is_finished
    write("another")
    with pytest.raises(errors.UserError, match=r"was trained on another content of sentences = .*\.json"):
        train(config, runtime)
    file.unlink()
    assert train(config, runtime) == result and evaluate(config, Target("digits", "base"), runtime).total


def test_each_data_set_has_its_own_file_of_sentences(tmp_path):
    for dataset in ("dtd", "eurosat"):
        (tmp_path / f"{dataset}.json").write_text(json.dumps({"annual crop": [f"in {dataset}"]}))
    options: Any = methods.method_options("coprompt", {"sentences": str(tmp_path / "{dataset}.json")})
    for dataset in ("dtd", "eurosat"):
        file = methods.method_class("coprompt").option_file(options, dataset)
        assert read_sentences(file, text.LabelSpace(("annual_crop",), dataset=dataset)) == [[f"in {dataset}"]]


@pytest.mark.parametrize(("method", "option"), [("coprompt", "sentences"), ("ipo", "proposals")])
def test_a_file_called_as_the_hand_written_templates_is_named_by_its_path(method, option):
    cls = methods.method_class(method)
    files = {name: cls.option_file(cls.Options(**{option: name}), "dtd") for name in ("templates", "./templates")}
    assert files == {"templates": None, "./templates": Path("templates")}
