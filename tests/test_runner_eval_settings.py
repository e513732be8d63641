"""Evaluation under other settings than the default: precision, resizing, and samples of Gaussian tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rank_processes import run_ranks

from benchmarks.results.frame import load
from procap.errors import UsageError
from runner.config import EvalSettings, RunConfig, RuntimeConfig, Target, plan_run
from runner.distributed.process_group import init_process_group
from runner.distributed.ranks import ranks_from_environment
from runner.evaluate import evaluate, load_trained
from runner.results import EvalResult, RunFolder
from runner.setup import label_space
from runner.train import train
from shards.fewshot import evaluation_split
from shards.reader import open_dataset
from shards.rng import generator
from shards.transforms import eval_transform

TARGET = Target("digits", "novel")
SAMPLED = EvalSettings(samples=3)


def plan(checkpoint: str, **options: object) -> RunConfig:
    """ProCAP with tokens that vary widely, so that its samples differ."""
    options = {"depth": 3, "logvar_init": -2.0, **options}
    quick = {"epochs": 1, "batch_size": 5}
    return plan_run(method="procap", dataset="digits", shots=1, backbone=checkpoint, options=options, overrides=quick)


def make_runtime(data: Path | str, results: Path | str, settings: EvalSettings) -> RuntimeConfig:
    return RuntimeConfig(Path(data), Path(results), device="cpu", tracking_uri="off", quiet=True, evaluation=settings)


@pytest.fixture(scope="module")
def runtime(few_digits, short_checkpoint, tmp_path_factory) -> RuntimeConfig:
    """Where a run is finished, and counted under the default settings and with samples."""
    default = make_runtime(few_digits, tmp_path_factory.mktemp("results"), EvalSettings())
    train(plan(str(short_checkpoint)), default)
    for settings in (EvalSettings(), SAMPLED):
        evaluate(plan(str(short_checkpoint)), TARGET, replace(default, evaluation=settings))
    return default


@pytest.fixture
def config(short_checkpoint) -> RunConfig:
    return plan(str(short_checkpoint))


def test_other_settings_have_their_own_files_and_rows(config, runtime):
    settings = EvalSettings(precision="bf16", resize="squash", samples=1)
    folder, default = RunFolder(runtime.results / config.path), runtime
    before = folder.eval_file(TARGET).read_bytes()
    result = evaluate(config, TARGET, replace(default, evaluation=settings))
    file = folder.path / "eval" / "digits-novel-test.bf16-squash-1-sample.json"
    assert EvalResult.model_validate_json(file.read_bytes()) == result
    assert (result.precision, result.settings) == ("bf16", settings)
    assert folder.eval_file(TARGET).read_bytes() == before
    assert list(load(default.results).evaluation) == [""]
    assert sorted(load(default.results, evaluation=None).evaluation) == ["", "3 samples", "bf16, squash, 1 sample"]
    [row] = load(default.results, evaluation="bf16, squash, 1 sample").itertuples()
    assert row.correct == result.correct


def test_the_precision_of_the_training_is_the_default(config, runtime):
    assert EvalSettings(precision="fp32").of(config) == EvalSettings()
    settings = EvalSettings(precision="fp32").of(config.model_copy(update={"precision": "fp16"}))
    assert (settings.label, settings.flags) == ("fp32", ["--eval-precision", "fp32"])
    written = RunFolder(runtime.results / config.path).eval_file(TARGET).stat().st_mtime_ns
    evaluate(config, TARGET, replace(runtime, evaluation=EvalSettings(precision="fp32")))
    assert RunFolder(runtime.results / config.path).eval_file(TARGET).stat().st_mtime_ns == written


def test_a_file_without_settings_is_of_the_default_ones(config, runtime):
    file = RunFolder(runtime.results / config.path).eval_file(TARGET)
    plain = json.loads(file.read_bytes())
    assert plain.pop("settings") == {"precision": None, "resize": "crop", "samples": 0}
    assert EvalResult.model_validate(plain).settings == EvalSettings()


def test_squashing_resizes_the_whole_image_and_cropping_its_centre():
    """Stripes of equal width, black, grey, white, six by two pixels."""
    pixels = np.repeat(np.array([[0, 0, 128, 128, 255, 255]], np.uint8), 2, axis=0)
    image = Image.fromarray(pixels).convert("RGB")
    crop, squash = (eval_transform(2, (0.0,) * 3, (1.0,) * 3, resize) for resize in ("crop", "squash"))
    assert np.asarray(crop.crop(image))[:, :, 0].tolist() == [[128, 128]] * 2
    left, right = np.asarray(squash.crop(image))[0, :, 0].tolist()
    assert left < 64 and right > 191
    assert squash(image).shape == (3, 2, 2)


def probabilities(config: RunConfig, runtime: RuntimeConfig, samples: int) -> torch.Tensor:
    """Average probabilities [N, C] of an image at a time, with the noise of the seed's stream."""
    trained, shards = load_trained(config, runtime), open_dataset(runtime.data, "digits")
    selection = evaluation_split(shards, TARGET.classes)
    transform = eval_transform(32, trained.clip.image_mean, trained.clip.image_std)
    prompts = trained.method.prompts_of(label_space(shards.manifest, selection.classnames))
    found = []
    for number in range(samples):
        noise = trained.method.draw(generator(config.seed, "samples", number))
        with torch.no_grad():
            image_plan, text_plan = trained.method.plans(prompts, noise)
            text = trained.clip.encode_text(prompts.tokenized, text_plan)
            images = torch.stack([transform(selection.images.image(i)) for i in range(len(selection.images))])
            image = trained.clip.encode_image(images, image_plan)
            cosines = torch.cosine_similarity(image[:, None].double(), text[None].double(), dim=-1)
            found.append((trained.clip.logit_scale.double().exp() * cosines).softmax(dim=1))
    assert not torch.allclose(found[0], found[-1], rtol=0.01) or samples == 1
    return torch.stack(found).mean(dim=0)


@pytest.mark.parametrize("samples", [1, 3])
def test_samples_give_the_mean_of_their_probabilities(config, runtime, samples):
    selection = evaluation_split(open_dataset(runtime.data, "digits"), TARGET.classes)
    expected = probabilities(config, runtime, samples)
    result = evaluate(config, TARGET, replace(runtime, evaluation=EvalSettings(samples=samples)))
    right = (expected.argmax(dim=1) == torch.from_numpy(selection.images.labels)).tolist()
    assert result.correct_images().tolist() == right
    trained = load_trained(config, runtime)
    noises = [trained.method.draw(generator(config.seed, "samples", number)) for number in range(samples)]
    space = label_space(open_dataset(runtime.data, "digits").manifest, selection.classnames)
    classify = trained.method.sampled_classifier(noises, space)
    transform = eval_transform(32, trained.clip.image_mean, trained.clip.image_std)
    logits = classify(torch.stack([transform(selection.images.image(i)) for i in range(4)]))
    torch.testing.assert_close(logits.softmax(dim=1).double(), expected[:4], rtol=1e-3, atol=1e-5)


def count(data: str, results: str, checkpoint: str) -> None:
    """What every rank does; only the first one has the folder of the results."""
    ranks = ranks_from_environment()
    runtime = make_runtime(data, results if ranks.first else f"{results}-of-{ranks.rank}", SAMPLED)
    with init_process_group(ranks, torch.device("cpu")) as group:
        evaluate(plan(checkpoint), TARGET, runtime, force=True, group=group)


def test_two_processes_draw_the_samples_of_one(few_digits, short_checkpoint, config, runtime):
    folder = RunFolder(runtime.results / config.path)
    one = folder.evaluation(TARGET, SAMPLED)
    ends = run_ranks(2, count, str(few_digits), str(runtime.results), str(short_checkpoint))
    assert [end.code for end in ends] == [0, 0], ends[0].err + ends[1].err
    two = folder.evaluation(TARGET, SAMPLED)
    assert one.seconds != two.seconds, "it was counted again"
    assert (one.correct_bits, one.per_class) == (two.correct_bits, two.per_class)


@pytest.mark.parametrize(("method", "options"), [("maple", {}), ("procap", {"gaussian": False})])
def test_samples_of_a_method_without_gaussians_are_refused(method, options):
    config = plan_run(method=method, dataset="digits", options=options)
    with pytest.raises(UsageError, match=rf"--samples 3: {method}.* has no Gaussian tokens .* have: procap$"):
        SAMPLED.of(config)
