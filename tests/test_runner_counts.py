"""What an evaluation records: counts, correct images and calibration, without images that only fill a batch."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from made_results import put_run, put_score
from rank_processes import run_ranks
from sessions import evaluate, load_trained, train
from small_runs import make_runtime

from benchmarks import results
from runner.acceleration import Acceleration
from runner.backbones import Backbones
from runner.calibration import BINS, Calibration, ImagePredictions, ReliabilityBins, measure_calibration
from runner.config import EvalSettings, RunConfig, RuntimeConfig, Target
from runner.distributed.collectives import ProcessGroup
from runner.distributed.connect import init_process_group
from runner.distributed.ranks import ranks_from_environment
from runner.inference import PredictionCollector
from runner.planning import plan_run
from runner.results import EvalResult, read_document, write_json
from runner.run_folders import RunFolder
from shards import image_selection, reader, transforms

TARGETS = [Target("digits", "base"), Target("digits", "novel"), Target("digits", "all")]


def test_labels_that_do_not_fit_the_counts_are_refused(tmp_path):
    file = put_score(tmp_path, put_run(tmp_path, "maple", "digits"), "digits:base", 3, 8)
    counts = {"per_class": {"correct": [2, 1], "total": [4, 4]}, "num_classes": 2}
    document = json.loads(file.read_text()) | counts
    sound = {"labels": [0, 0, 0, 0, 1, 1, 1, 1], "predicted": [0, 0, 1, 1, 1, 0, 0, 0]}
    assert EvalResult.model_validate(document | sound).wrong_images().T.tolist() == [[0, 1]] * 2 + [[1, 0]] * 3
    with pytest.raises(ValueError, match="labels has 7 images"):
        EvalResult.model_validate(document | {name: labels[:7] for name, labels in sound.items()})


def test_a_file_has_the_probabilities_of_the_prediction_and_of_the_likeliest_base_class(trained, short_checkpoint):
    config = plan(str(short_checkpoint))
    loaded = load_trained(config, trained)
    transform = transforms.EvalTransform(32, loaded.clip.preparation.mean, loaded.clip.preparation.std)
    selection = image_selection.select_target_images(reader.open_dataset(trained.data, "digits"), "all")
    images = torch.stack([transform(selection.images.image(i)) for i in range(len(selection.images))])
    classifier = loaded.method.classifier(replace(loaded.method.space, classnames=selection.classnames))
    probabilities = classifier(images).softmax(dim=1).double()
    frame = results.load(trained.results).set_index(["method", "target_classes"])
    joint = frame.loc["maple", "all"]
    assert joint.predicted.tolist() == probabilities.argmax(dim=1).tolist()
    assert joint.confidence == pytest.approx(probabilities.amax(dim=1).numpy(), abs=2e-6)
    # Digits 0 to 4 are the base classes.
    assert joint.base_confidence == pytest.approx(probabilities[:, :5].amax(dim=1).numpy(), abs=2e-6)
    assert (joint.confidence.round(6) == joint.confidence).all()
    assert frame.loc["maple", "novel"].base_confidence is None


def test_a_result_on_all_images_of_imagenet_has_less_than_a_megabyte(tmp_path):
    file, draw = (
        put_score(tmp_path, put_run(tmp_path, "maple", "digits"), "digits:all", 0, 50_000),
        np.random.default_rng(0),
    )
    labels, confidence = np.repeat(range(1000), 50), draw.uniform(size=50_000).round(6)
    predicted = np.roll(labels, 50)
    counts = {"correct": [0] * 1000, "total": [50] * 1000, "names": [f"the name of class {n}" for n in range(1000)]}
    lists = {"labels": labels.tolist(), "predicted": predicted.tolist(), "confidence": confidence.tolist()}
    lists |= {"base_confidence": (confidence / 2).round(6).tolist(), "num_classes": 1000, "per_class": counts}
    result = EvalResult.model_validate(json.loads(file.read_text()) | lists)
    write_json(file, result)
    assert file.stat().st_size < 1_000_000 and read_document(file, EvalResult) == result


def test_a_confidence_on_an_edge_belongs_to_the_bin_below_it():
    edges, zeros = np.array([0.2, 0.4, 0.6, 0.8]), np.zeros(4)
    labels = zeros.astype(int)
    bins = measure_calibration(ImagePredictions(labels, labels, edges, zeros, zeros)).equal_width
    assert [number for number, count in enumerate(bins.count, 1) if count] == [3, 6, 9, 12]


@pytest.mark.parametrize("changed", ["checkpoint_sha256", "backbone_digest"])
def test_an_evaluation_of_other_weights_is_not_current(tmp_path, changed):
    config = put_run(tmp_path, "maple", "digits")
    put_score(tmp_path, config, "digits:base", 3, 8)
    folder = RunFolder(tmp_path / config.path)
    [result], training = folder.read_evaluations(), folder.read_training()
    assert result.is_current(training, None)
    assert not result.is_current(training.model_copy(update={changed: "0" * 16}), None)


def plan(checkpoint: str, method: str = "maple", **options: float) -> RunConfig:
    # Of 60 test images there are four batches, of 30 two.
    options, quick = {"depth": 3, **options}, {"epochs": 1, "batch_size": 4, "test_batch_size": 16}
    return plan_run(method=method, dataset="digits", shots=1, backbone=checkpoint, overrides=quick, options=options)


SAMPLED = EvalSettings(samples=2)


def plan_sampled(checkpoint: str) -> RunConfig:
    """ProCAP with tokens that vary widely, so that its samples differ."""
    return plan(checkpoint, "procap", logvar_init=-2.0)


@pytest.fixture(scope="module")
def trained(few_digits, short_checkpoint, tmp_path_factory) -> RuntimeConfig:
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
    transform = transforms.EvalTransform(32, loaded.clip.preparation.mean, loaded.clip.preparation.std)
    for target in TARGETS:
        selection = image_selection.select_target_images(reader.open_dataset(trained.data, "digits"), target.classes)
        classifier = loaded.method.classifier(replace(loaded.method.space, classnames=selection.classnames))
        labels = selection.images.labels
        answers = [int(classifier(transform(selection.images.image(i))[None]).argmax()) for i in range(len(labels))]
        result = evaluate(config, target, trained)
        right = result.correct_images()
        assert right.tolist() == [answer == label for answer, label in zip(answers, labels.tolist(), strict=True)]
        wrong = [(label, answer) for label, answer in zip(labels.tolist(), answers, strict=True) if label != answer]
        assert list(map(tuple, result.wrong_images().T.tolist())) == wrong
        assert np.bincount(labels[right], minlength=result.num_classes).tolist() == result.per_class.correct
        assert np.bincount(labels).tolist() == result.per_class.total
        assert 0 < result.correct < result.total


def count(data: str, results: str, checkpoint: str) -> None:
    ranks = ranks_from_environment()
    runtime = make_runtime(data, results if ranks.is_first else f"{results}-of-{ranks.rank}")
    with init_process_group(ranks, torch.device("cpu")) as group:
        for target in TARGETS:
            found = evaluate(plan(checkpoint), target, runtime, force=True, group=group)
            assert found.correct_images().sum() == found.correct
        evaluate(plan_sampled(checkpoint), TARGETS[1], replace(runtime, evaluation=SAMPLED), force=True, group=group)
        print(measure_drawn(group))


def load_other_weights(data: str, results: str, checkpoint: str) -> None:
    """Load the run where rank 1 has a backbone of the same name with different weights."""
    config, backbones = plan(checkpoint), Backbones()
    with init_process_group(ranks_from_environment(), torch.device("cpu")) as group:
        clip = backbones.load(config, torch.device("cpu"), Acceleration())
        clip._digest = "other" if group.rank else clip.digest()
        load_trained(config, make_runtime(data, results), group, backbones)


def test_hosts_with_different_weights_do_not_evaluate(few_digits, trained, short_checkpoint):
    ends = run_ranks(2, load_other_weights, str(few_digits), str(trained.results), str(short_checkpoint))
    assert [end.code for end in ends] == [1, 1] and "and other on rank 1" in ends[0].err


def measure_drawn(group: ProcessGroup) -> str:
    """Measure 51 drawn logits, each on one rank; an odd number, so that one of two ranks has padding."""
    logits, labels = torch.randn(51, 4, generator=torch.Generator().manual_seed(0)), np.arange(51) % 4
    collector, places = PredictionCollector(labels), np.arange(52)
    places[-1] = -1
    own = places[: 51 if group.size == 1 else None][group.rank :: group.size]
    collector.add(logits[torch.from_numpy(own)], own)
    return measure_calibration(collector.gather_predictions(group)).model_dump_json()


MEASURED = {"written", "seconds", "images_per_second", "images_per_second_model", "phases", "environment"}
"""Fields of a result that differ between two evaluations of one run."""


@pytest.mark.parametrize("size", [2, 4])
def test_several_processes_write_the_result_of_one(few_digits, trained, short_checkpoint, tmp_path, size):
    shutil.copytree(trained.results, tmp_path, dirs_exist_ok=True)
    ends = run_ranks(size, count, str(few_digits), str(tmp_path), str(short_checkpoint))
    assert [end.code for end in ends] == [0] * size, "".join(end.err for end in ends)
    assert {end.out for end in ends} == {measure_drawn(ProcessGroup()) + "\n"}
    written = sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("eval/*.json"))
    assert len(written) == 4
    for file in written:
        one, other = (json.loads((at / file).read_text()) for at in (trained.results, tmp_path))
        assert one["seconds"] != other["seconds"], "it was evaluated again"
        assert {name for name, value in one.items() if value != other[name]} <= MEASURED


def measure(logits: torch.Tensor, labels: list[int], batch: int = 7) -> Calibration:
    """Measure logits [N, C] that arrive in batches, from the last image to the first, each batch with padding."""
    collector = PredictionCollector(np.array(labels))
    backwards = np.arange(len(labels))[::-1]
    for start in range(0, len(labels), batch):
        indices = np.append(backwards[start : start + batch], -1)
        collector.add(logits[torch.from_numpy(indices)], indices)
    return measure_calibration(collector.gather_predictions(ProcessGroup()))


def draw(count: int, classes: int, scale: float = 3.0) -> tuple[torch.Tensor, list[int]]:
    """Draw logits and labels of which the true class is often, but not always, the most probable one."""
    generator = torch.Generator().manual_seed(count)
    logits = scale * torch.randn(count, classes, generator=generator)
    labels = torch.distributions.Categorical(logits=logits / 2).sample()
    return logits, labels.tolist()


@pytest.mark.parametrize(("count", "classes"), [(400, 10), (61, 3), (8, 2), (1, 5)])
def test_measures_are_those_of_plain_formulas(count, classes):
    from sklearn.metrics import log_loss

    logits, labels = draw(count, classes)
    found = measure(logits, labels)
    probabilities = logits.double().softmax(dim=1).numpy()
    confidence, correct = probabilities.max(1), probabilities.argmax(1) == labels
    assert found.nll == pytest.approx(log_loss(labels, probabilities, labels=range(classes)), rel=1e-5)
    one_hot = np.eye(classes)[labels]
    assert found.brier == pytest.approx(((probabilities - one_hot) ** 2).sum(1).mean(), rel=1e-5)
    bins = found.equal_width
    groups = [(low < confidence) & (confidence <= low + 1 / BINS) for low in np.arange(BINS) / BINS]
    gaps = [group.sum() * abs(confidence[group].mean() - correct[group].mean()) for group in groups if group.any()]
    assert bins.ece == pytest.approx(100 * sum(gaps) / count, abs=1e-3)
    assert bins.count == [group.sum() for group in groups]
    assert bins.correct == [correct[group].sum() for group in groups]
    assert bins.confidence == pytest.approx([confidence[group].sum() for group in groups], abs=1e-4)


def test_sums_depend_neither_on_batches_nor_on_their_order():
    logits, labels = draw(101, 6)
    assert measure(logits, labels, 1) == measure(logits, labels, 13) == measure(logits, labels, 101)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_logit_that_is_not_finite_leaves_no_predictions(value):
    logits = torch.zeros(3, 4)
    logits[1, 2] = value
    collector, places = PredictionCollector(np.arange(3)), np.arange(3)
    collector.add(logits, places)
    assert collector.gather_predictions(ProcessGroup()) is None


def test_a_single_class_gives_zeros_and_valid_json():
    found = measure(30 * torch.randn(9, 1), [0] * 9)
    assert (found.nll, found.brier, found.equal_width.ece) == (0, 0, 0)
    assert "NaN" not in (text := found.model_dump_json()) and "-0" not in text
    assert Calibration.model_validate_json(text) == found


def test_the_frame_has_the_measures_and_nan_where_they_were_not_recorded(tmp_path):
    config = put_run(tmp_path, "maple", "digits")
    put_score(tmp_path, config, "digits:base", 3, 8)
    file = put_score(tmp_path, config, "digits:novel", 3, 8)
    document = json.loads(file.read_text())
    document["per_class"] = {"correct": [3, 0, 0], "total": [4, 4, 0], "names": ["one", "two", "three"]}
    bins = {"ece": 12.5, "count": [8] + [0] * 14, "confidence": [4.0] + [0.0] * 14, "correct": [3] + [0] * 14}
    document["num_classes"] = 3
    document["calibration"] = {"nll": 1.5, "brier": 0.5, "equal_width": bins}
    file.write_text(json.dumps(document))
    frame = results.load(tmp_path).set_index("target_classes")
    new, old = frame.loc["novel"], frame.loc["base"]
    assert (new.nll, new.brier, new.ece) == (1.5, 0.5, 12.5)
    assert new.macro_accuracy == pytest.approx(100 * (3 / 4 + 0) / 2) and new.per_class.names[0] == "one"
    assert new.calibration.equal_width == ReliabilityBins(**bins)
    assert old[["nll", "brier", "ece"]].isna().all() and old.calibration is None
    assert old.macro_accuracy == 37.5 and read_document(file, EvalResult).macro_accuracy == new.macro_accuracy
