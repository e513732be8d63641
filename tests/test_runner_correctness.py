"""Which images were right is kept with every count, is the same for any number of processes, and adds up."""

from __future__ import annotations

import base64
import json
import shutil
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from made_results import put_run, put_score
from rank_processes import run_ranks
from small_runs import make_runtime

from runner.calibration import Calibration, measure_calibration
from runner.config import EvalSettings, RunConfig, RuntimeConfig, Target, plan_run
from runner.distributed.collectives import ProcessGroup
from runner.distributed.process_group import init_process_group
from runner.distributed.ranks import ranks_from_environment
from runner.evaluate import evaluate, load_trained
from runner.image_answers import pack_labels, unpack_bits, unpack_labels
from runner.predictions import Predictions
from runner.results import EvalResult
from runner.run_folders import RunFolder
from runner.train import train
from shards.fewshot import evaluation_split
from shards.reader import open_dataset
from shards.transforms import eval_transform

TARGETS = [Target("digits", "base"), Target("digits", "novel"), Target("digits", "all")]


def bomb() -> str:
    return "zlib:" + base64.b64encode(zlib.compress(bytes(10**7), 9)).decode()


@pytest.mark.parametrize(
    "text",
    ["", "bits:", "/w==", "bits:/w", "bits:!w==", "bits:/w==AA", "bits://///w==", "bits:é", "zlib:/w==", bomb()],
)
def test_a_broken_text_is_refused(text):
    with pytest.raises(ValueError):
        unpack_bits(text, 8)


@pytest.mark.parametrize("classes", [2, 256, 257, 70_000])
def test_labels_of_wrong_images_are_stored_whatever_the_number_of_classes(classes):
    draws = np.random.default_rng(classes)
    labels, predicted = draws.integers(0, classes, 50), draws.integers(0, classes, 50)
    wrong = np.flatnonzero(labels != predicted)
    text = pack_labels(labels, predicted, classes)
    assert unpack_labels(text, len(wrong), classes).tolist() == [labels[wrong].tolist(), predicted[wrong].tolist()]
    with pytest.raises(ValueError):
        unpack_labels(text, len(wrong) + 1, classes)


@pytest.mark.parametrize(
    ("labels", "predicted", "why"),
    [
        ([0, 0, 0, 1, 1], [1, 1, 1, 0, 0], "by class"),
        ([0, 0, 1, 1, 1], [2, 1, 0, 0, 0], "no class"),
        ([0, 0, 1, 1], [1, 1, 0, 0], "bytes"),
    ],
)
def test_labels_of_wrong_images_that_do_not_fit_the_counts_are_refused(tmp_path, labels, predicted, why):
    file = put_score(tmp_path, put_run(tmp_path, "maple", "digits"), "digits:base", 3, 8)
    counts = {"per_class": {"correct": [2, 1], "total": [4, 4]}, "num_classes": 2}
    document = json.loads(file.read_text()) | counts
    sound = pack_labels(np.array([0, 0, 1, 1, 1]), np.array([1, 1, 0, 0, 0]), 2)
    EvalResult.model_validate(document | {"wrong_labels": sound})
    wrong = pack_labels(np.array(labels), np.array(predicted), 2)
    with pytest.raises(ValueError, match=why):
        EvalResult.model_validate(document | {"wrong_labels": wrong})


def plan(checkpoint: str) -> RunConfig:
    quick = {"epochs": 1, "batch_size": 4}
    options = {"depth": 3}
    return plan_run(method="maple", dataset="digits", shots=1, backbone=checkpoint, overrides=quick, options=options)


SAMPLED = EvalSettings(samples=2)


def plan_sampled(checkpoint: str) -> RunConfig:
    """ProCAP with tokens that vary widely, so that its samples differ."""
    options, quick = {"depth": 3, "logvar_init": -2.0}, {"epochs": 1, "batch_size": 4}
    return plan_run(method="procap", dataset="digits", shots=1, backbone=checkpoint, options=options, overrides=quick)


@pytest.fixture(scope="module")
def trained(few_digits, short_checkpoint, tmp_path_factory) -> RuntimeConfig:
    """Where a run is finished and counted by one process."""
    runtime, config = make_runtime(few_digits, tmp_path_factory.mktemp("one")), plan(str(short_checkpoint))
    train(config, runtime)
    loaded = load_trained(config, runtime)
    for target in TARGETS:
        evaluate(config, target, runtime, trained=loaded)
    train(plan_sampled(str(short_checkpoint)), runtime)
    evaluate(plan_sampled(str(short_checkpoint)), TARGETS[1], replace(runtime, evaluation=SAMPLED))
    return runtime


def test_bits_are_those_of_looking_at_one_image_after_the_other(trained, short_checkpoint):
    config = plan(str(short_checkpoint))
    loaded = load_trained(config, trained)
    transform = eval_transform(32, loaded.clip.image_mean, loaded.clip.image_std)
    for target in TARGETS:
        selection = evaluation_split(open_dataset(trained.data, "digits"), target.classes)
        classifier = loaded.method.classifier(replace(loaded.method.space, classnames=selection.classnames))
        labels = selection.images.labels
        answers = [int(classifier(transform(selection.images.image(i))[None]).argmax()) for i in range(len(labels))]
        result = evaluate(config, target, trained)
        right = result.correct_images()
        assert right.tolist() == [answer == label for answer, label in zip(answers, labels.tolist(), strict=True)]
        wrong = [(label, answer) for label, answer in zip(labels.tolist(), answers, strict=True) if label != answer]
        assert list(map(tuple, result.wrong_images().T.tolist())) == wrong
        assert np.bincount(labels[right], minlength=result.num_classes).tolist() == result.per_class.correct
        assert 0 < result.correct < result.total


def count(data: str, results: str, checkpoint: str) -> None:
    """What every rank does; only the first one has the folder of the results."""
    ranks = ranks_from_environment()
    runtime = make_runtime(data, results if ranks.first else f"{results}-of-{ranks.rank}")
    with init_process_group(ranks, torch.device("cpu")) as group:
        for target in TARGETS:
            found = evaluate(plan(checkpoint), target, runtime, force=True, group=group)
            assert found.correct_images().sum() == found.correct
        evaluate(plan_sampled(checkpoint), TARGETS[1], replace(runtime, evaluation=SAMPLED), force=True, group=group)
        print(measure_drawn(group))


def measure_drawn(group: ProcessGroup) -> str:
    """Measure 51 drawn logits, each on one rank; an odd number, so that one of two ranks has padding."""
    logits, labels = torch.randn(51, 4, generator=torch.Generator().manual_seed(0)), np.arange(51) % 4
    predictions, places = Predictions(labels), np.arange(52)
    places[-1] = -1
    own = places[: 51 if group.size == 1 else None][group.rank :: group.size]
    predictions.add(logits[torch.from_numpy(own)], own)
    return measure_calibration(predictions.gather(group)).model_dump_json()


def assert_same_calibration(one: Calibration | None, other: Calibration | None) -> None:
    """Logits of an image in batches of two sizes may differ in their last bits."""
    assert one and other
    assert (other.nll, other.brier) == pytest.approx((one.nll, one.brier), rel=1e-5)
    for mine, theirs in ((one.equal_width, other.equal_width), (one.equal_mass, other.equal_mass)):
        assert (mine.count, mine.correct) == (theirs.count, theirs.correct)
        assert theirs.confidence == pytest.approx(mine.confidence, abs=1e-5)


def test_two_processes_keep_the_bits_of_one(few_digits, trained, short_checkpoint, tmp_path):
    config = plan(str(short_checkpoint))
    shutil.copytree(trained.results, tmp_path, dirs_exist_ok=True)
    files = [RunFolder(tmp_path / config.path).eval_file(target) for target in TARGETS]
    before = [file.stat().st_mtime_ns for file in files]
    ends = run_ranks(2, count, str(few_digits), str(tmp_path), str(short_checkpoint))
    assert [end.code for end in ends] == [0, 0], ends[0].err + ends[1].err
    assert ends[0].out == ends[1].out == measure_drawn(ProcessGroup()) + "\n"
    for target in TARGETS:
        one, two = (RunFolder(at / config.path).evaluation(target) for at in (trained.results, tmp_path))
        assert one.correct_images().tolist() == two.correct_images().tolist() and one.per_class == two.per_class
        assert one.wrong_labels == two.wrong_labels
        assert_same_calibration(one.calibration, two.calibration)
    after = [file.stat().st_mtime_ns for file in files]
    assert all(old != new for old, new in zip(before, after, strict=True)), "they were counted again"
    folders = [RunFolder(at / plan_sampled(str(short_checkpoint)).path) for at in (trained.results, tmp_path)]
    one, two = (folder.evaluation(TARGETS[1], SAMPLED) for folder in folders)
    assert (one.correct_bits, one.calibration.nll) == (two.correct_bits, pytest.approx(two.calibration.nll, rel=1e-5))
    assert one.seconds != two.seconds, "the samples were counted again"
