"""CoPrompt's training images: two random views of each, drawn like all else, and sentences from a file."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import torch
from PIL import Image
from small_runs import make_runtime, seeded

from benchmarks.suites.planning import is_done
from cluster.run import RunSpec
from procap.errors import UserError
from procap.methods import build_method, method_options
from procap.methods.coprompt import read_sentences
from procap.text import LabelSpace
from runner.config import RunConfig, RuntimeConfig, Target, plan_run
from runner.evaluate import evaluate
from runner.run_folders import RunFolder
from runner.train import train
from shards.device.images import augments_on_device
from shards.loader import TrainStream
from shards.reader import open_dataset
from shards.transforms import TABLE, TrainAugment, randaugment

AUGMENT = TrainAugment(32, (0.5,) * 3, (0.25,) * 3, augmentation="randaugment", views=2)


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    grey = Image.effect_mandelbrot((48, 40), (-2, -1.5, 1, 1.5), 50)
    return Image.merge("RGB", (grey, grey.rotate(90), grey.rotate(180)))


@pytest.mark.parametrize("index", range(len(TABLE)))
def test_every_operation_keeps_the_size_and_follows_its_generator(picture, index):
    operation, low, high = TABLE[index]
    one, again = (operation(picture, low + (high - low) / 3, seeded(3)) for _ in range(2))
    assert (one.size, one.mode) == (picture.size, "RGB")
    assert one.tobytes() == again.tobytes() != picture.tobytes()


def test_views_differ_and_depend_on_the_generator_alone(picture):
    views = AUGMENT(picture, seeded(1))
    assert views.shape == AUGMENT.shape == (2, 3, 32, 32)
    assert not torch.equal(*views) and torch.equal(views, AUGMENT(picture, seeded(1)))
    assert randaugment(picture, seeded(1)).tobytes() != randaugment(picture, seeded(2)).tobytes()
    assert not augments_on_device(AUGMENT), "crops and flips alone are done on a device"


def test_the_views_of_several_processes_and_of_a_resumed_epoch_are_those_of_one(few_digits):
    split = open_dataset(few_digits, "digits").split("train")

    def batches(start: int = 0, **ranks: int) -> list[torch.Tensor]:
        stream = TrainStream(split.subset(range(16)), 4, AUGMENT, seed=1, **ranks)
        return [images for images, _ in stream.epoch(1, start)]

    whole = batches()
    halves = [batches(rank=rank, world_size=2) for rank in range(2)]
    for batch, first, second in zip(whole, *halves, strict=True):
        assert batch.shape == (4, 2, 3, 32, 32)
        assert torch.equal(batch[0::2], first) and torch.equal(batch[1::2], second)
    assert all(torch.equal(one, other) for one, other in zip(whole[2:], batches(2), strict=True))


@pytest.fixture
def run(few_digits, tiny_checkpoint, tmp_path) -> tuple[RunConfig, RuntimeConfig]:
    overrides = {"epochs": 2, "warmup": "none", "batch_size": 4}
    options: dict[str, Any] = {"sentences": "templates", "depth": 2, "weight": 1.0}
    config = plan_run(
        method="coprompt",
        dataset="digits",
        shots=1,
        backbone=str(tiny_checkpoint),
        overrides=overrides,
        options=options,
    )
    return config, make_runtime(few_digits, tmp_path / "whole")


def test_a_run_that_pauses_ends_with_the_bits_of_one_that_does_not(run, tmp_path):
    config, runtime = run
    train(config, runtime)
    other = make_runtime(runtime.data, tmp_path / "paused")
    train(config, other, until=1)
    train(config, other)
    one, two = (RunFolder(results / config.path) for results in (runtime.results, other.results))
    assert one.checkpoint_file.read_bytes() == two.checkpoint_file.read_bytes()
    assert set(one.train().epochs[0].terms) == {"ce", "text", "image"}


def test_training_without_sentences_is_refused_before_anything_is_written(run):
    config, runtime = run
    bare = config.model_copy(update={"options": {**config.options, "sentences": ""}})
    with pytest.raises(UserError, match=r"sentences that a language model wrote.*--option sentences=FILE"):
        train(bare, runtime)
    assert not list(runtime.results.rglob("*.json"))


def test_a_run_keeps_to_the_sentences_it_began_with(run, tmp_path):
    """A changed file is refused when a run resumes and when it is finished; evaluation needs no file."""
    config, runtime = run
    classes = open_dataset(runtime.data, "digits").classnames
    file = tmp_path / "digits.json"
    config = config.model_copy(update={"options": {**config.options, "sentences": str(tmp_path / "{dataset}.json")}})

    def write(sentence: str) -> None:
        file.write_text(json.dumps({name.replace("_", " "): [sentence] for name in classes}))

    write("the first")
    train(config, runtime, until=1)
    write("another")
    with pytest.raises(UserError, match=r"cannot resume .* SHA-256 of sentences .*start over with --force"):
        train(config, runtime)
    write("the first")
    result = train(config, runtime)
    assert result.files == {"sentences": hashlib.sha256(file.read_bytes()).hexdigest()}
    spec = RunSpec(config=config, targets=())
    assert train(config, runtime) == result and is_done(spec, runtime)
    write("another")
    with pytest.raises(UserError, match=r"was trained on another content of sentences = .*\.json"):
        train(config, runtime)
    file.unlink()
    assert train(config, runtime) == result and evaluate(config, Target("digits", "base"), runtime).total


def test_wrong_files_of_sentences_are_one_line_each(tiny_clip, tiny_space, tmp_path):
    def fail(content: Any) -> str:
        file = tmp_path / "sentences.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        method = build_method("coprompt", tiny_clip, tiny_space, {"sentences": str(file)}, seeded())
        with pytest.raises(UserError) as raised:
            method.prepare_training()
        assert "\n" not in str(raised.value)
        return str(raised.value)

    good = {name: [f"a {name}", f"the {name}"] for name in tiny_space.names()}
    assert "has none for 'cat', 'annual crop land', 'red circle' and 2 more classes" in fail({"dog": ["a dog"]})
    assert "has none for 'cat'" in fail({**good, "cat": []})
    assert "1 sentences for one class and 2 for another" in fail({**good, "cat": ["a cat"]})
    assert "no JSON" in fail("{")
    assert "CLIP reads 77" in fail({**good, "cat": ["a " * 90, "a cat"]})
    method = build_method("coprompt", tiny_clip, tiny_space, {"sentences": "nowhere.json"}, seeded())
    with pytest.raises(UserError, match=r"nowhere\.json: No such file"):
        method.prepare_training()


def test_each_data_set_has_its_own_file_of_sentences(tmp_path):
    for dataset in ("dtd", "eurosat"):
        (tmp_path / f"{dataset}.json").write_text(json.dumps({"annual crop": [f"in {dataset}"]}))
    options: Any = method_options("coprompt", {"sentences": str(tmp_path / "{dataset}.json")})
    for dataset in ("dtd", "eurosat"):
        assert read_sentences(options, LabelSpace(("annual_crop",), dataset=dataset)) == [[f"in {dataset}"]]
