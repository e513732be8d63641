"""Evaluations of a method that adapts to test images: order, several processes, repetition, and a user's own images."""

import json
import shutil
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from rank_processes import run_ranks
from sessions import evaluate, load_trained, make_run, train
from small_runs import make_runtime
from test_runner_counts import MEASURED

from benchmarks import results
from benchmarks.experiment.profiles import MINI
from benchmarks.suites import load_suite
from benchmarks.tables.runs import title_runs
from procap.errors import UsageError, UserError
from procap.methods.tda import public_order
from runner.config import RunConfig, RuntimeConfig, Target
from runner.distributed.connect import init_process_group
from runner.distributed.ranks import ranks_from_environment
from runner.evaluate import score_images
from runner.planning import plan_run
from runner.predict import ImageClassifier
from shards.image_selection import select_target_images
from shards.reader import open_dataset
from shards.rng import generator
from shards.transforms import EvalTransform

TARGETS = [Target("digits", "base"), Target("digits", "all")]


def plan(checkpoint: str, seed: int = 1, method: str = "tda", **options: object) -> RunConfig:
    # Of 60 test images there are four batches, of 30 two.
    options |= {"tda": {"negative_alpha": 1.0}, "tpt": {"views": 8}}.get(method, {})
    fields = {"backbone": checkpoint, "shots": 1, "overrides": {"test_batch_size": 16}, "options": options}
    return plan_run(method=method, dataset="digits", seed=seed, **fields)


@pytest.fixture(scope="module")
def evaluated(few_digits, short_checkpoint, tmp_path_factory) -> RuntimeConfig:
    runtime = make_runtime(few_digits, tmp_path_factory.mktemp("one"))
    for config in (
        plan(str(short_checkpoint)),
        plan(str(short_checkpoint), 2),
        plan(str(short_checkpoint), 1, "zeroshot"),
        plan(str(short_checkpoint), 1, "tpt"),
    ):
        train(config, runtime)
        for target in TARGETS:
            evaluate(config, target, runtime)
    return runtime


@pytest.mark.parametrize("order_by", ["seed", "public"])
def test_the_stream_has_the_order_of_the_named_stream_of_the_seed_or_the_public_one(
    few_digits, short_checkpoint, tmp_path, order_by
):
    config, runtime = plan(str(short_checkpoint), order=order_by), make_runtime(few_digits, tmp_path)
    train(config, runtime)
    loaded = load_trained(config, runtime)
    transform = EvalTransform(32, loaded.clip.preparation.mean, loaded.clip.preparation.std)
    selection = select_target_images(open_dataset(runtime.data, "digits"), "base")
    images = torch.stack([transform(selection.images.image(i)) for i in range(len(selection.images))])
    drawn = torch.randperm(len(images), generator=generator(1, "test order"))
    order = public_order(len(images), 1) if order_by == "public" else drawn
    # A call of the classifier is one stream.
    probabilities = torch.empty(len(images), 5)
    probabilities[order] = loaded.method.classifier()(images[order]).softmax(dim=1)
    result = evaluate(config, TARGETS[0], runtime)
    assert result.predicted == probabilities.argmax(dim=1).tolist()
    assert result.confidence == pytest.approx(probabilities.amax(dim=1).tolist(), abs=2e-5)
    assert result.phases["adaptation"] > 0
    in_list_order = loaded.method.classifier()(images).softmax(dim=1)
    assert result.confidence != pytest.approx(in_list_order.amax(dim=1).tolist(), abs=1e-3)


def repeat(data: str, folder: str, checkpoint: str) -> None:
    ranks = ranks_from_environment()
    runtime = make_runtime(data, folder if ranks.is_first else f"{folder}-of-{ranks.rank}")
    with init_process_group(ranks, torch.device("cpu")) as group:
        for config in (plan(checkpoint), plan(checkpoint, 1, "tpt")):
            for target in TARGETS:
                evaluate(config, target, runtime, force=True, group=group)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_repetition_on_any_number_of_processes_writes_an_equal_file(
    size, evaluated, few_digits, short_checkpoint, tmp_path
):
    shutil.copytree(evaluated.results, tmp_path, dirs_exist_ok=True)
    ends = run_ranks(size, repeat, str(few_digits), str(tmp_path), str(short_checkpoint))
    assert [end.code for end in ends] == [0] * size, "".join(end.err for end in ends)
    folders = [tmp_path / plan(str(short_checkpoint), 1, method).path for method in ("tda", "tpt")]
    written = [file.relative_to(tmp_path) for folder in folders for file in folder.glob("eval/*.json")]
    assert len(written) == 4
    for file in written:
        one, other = (json.loads((at / file).read_text()) for at in (evaluated.results, tmp_path))
        assert one["seconds"] != other["seconds"], "it was evaluated again"
        assert {name for name, value in one.items() if value != other[name]} <= MEASURED


def test_unknown_images_are_scored_only_if_an_image_does_not_change_the_score_of_others(evaluated, short_checkpoint):
    run = make_run(plan(str(short_checkpoint)), evaluated)
    with pytest.raises(UserError, match="tda adapts to a set of test images as a whole, so that scores"):
        score_images(run, Target("digits", "novel"))
    assert not (run.folder.path / "scores").exists()
    scored = score_images(make_run(plan(str(short_checkpoint), 1, "tpt"), evaluated), Target("digits", "novel"))
    assert scored.total == len(scored.scores)


def test_each_seed_is_a_row_of_its_own_and_zero_shot_clip_counts_for_all(evaluated):
    frame = results.load(evaluated.results)
    assert sorted(frame[frame.method == "tda"].seed) == [1, 1, 2, 2]
    rows = title_runs(frame).set_index(["method", "target", "seed"]).sort_index()
    for method, differ in (("tda", True), ("zeroshot", False)):
        first, second = (rows.loc[method, "digits:all:test", seed].confidence for seed in (1, 2))
        assert (np.abs(np.subtract(first, second)).max() > 1e-3) == differ
    suite = load_suite("base-to-novel")
    options = suite.options(MINI, methods=("tda", "zeroshot"), datasets=("digits",), seeds=(1, 2))
    assert [(run.variant.method, run.seed) for run in suite.plan(options)] == [("tda", 1), ("tda", 2), ("zeroshot", 1)]


def test_images_of_a_folder_are_one_stream_in_their_order_whatever_the_batches(evaluated, short_checkpoint):
    classify = ImageClassifier.load(evaluated.results / plan(str(short_checkpoint)).path, device="cpu")
    encoded = open_dataset(evaluated.data, "digits").open_images("test")
    files = [(str(i), data) for i, data in enumerate(encoded.stream(list(range(20))))]
    whole = classify([Image.open(BytesIO(data)) for _, data in files])
    probabilities = torch.stack([row for _, row in classify.predict(iter(files))])
    torch.testing.assert_close(probabilities, whole, rtol=1e-4, atol=1e-5)


def test_an_image_is_classified_by_views_of_its_pixels_in_every_target_and_batch_and_as_a_file(
    evaluated, short_checkpoint
):
    config = plan(str(short_checkpoint), 1, "tpt")
    base, everything = (evaluate(config, target, evaluated) for target in TARGETS)
    assert base.total == 30 and everything.total == 60 and base.images_per_second > 0
    dataset = open_dataset(evaluated.data, "digits")
    selection = select_target_images(dataset, "base").images
    classify = ImageClassifier.load(evaluated.results / config.path, device="cpu")
    # One at a time, where the evaluation has two in a batch; the classes of the run are the base classes.
    probabilities = torch.cat([classify([selection.image(i)]) for i in range(4)])
    assert base.predicted[:4] == probabilities.argmax(dim=1).tolist()
    assert base.confidence[:4] == pytest.approx(probabilities.amax(dim=1).tolist(), abs=1e-3)
    plain = classify(torch.stack([classify.transform.plain(selection.image(i)) for i in range(4)]))
    assert base.confidence[:4] != pytest.approx(plain.amax(dim=1).tolist(), abs=1e-3), "other views count"


def test_a_method_that_adapts_to_test_images_is_no_teacher(evaluated, short_checkpoint, tmp_path):
    teacher = evaluated.results / plan(str(short_checkpoint)).path
    config = plan_run(
        method="kdpl", dataset="digits", backbone=str(short_checkpoint), options={"teacher": str(teacher)}
    )
    with pytest.raises(UsageError, match="adapts to test images: name a run of a different method"):
        train(config, make_runtime(evaluated.data, tmp_path))
