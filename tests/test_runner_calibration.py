"""Every evaluation records how well its probabilities fit the answers, by definitions written out here."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from made_results import put_run, put_score
from sklearn.metrics import log_loss

from benchmarks import results
from runner.calibration import BINS, Calibration, ReliabilityBins, measure_calibration
from runner.distributed.collectives import ProcessGroup
from runner.predictions import Predictions
from runner.results import EvalResult, read_document


def measure(logits: torch.Tensor, labels: list[int], batch: int = 7) -> Calibration:
    """Measure logits [N, C] that arrive in batches, from the last image to the first, each batch with padding."""
    predictions = Predictions(np.array(labels))
    backwards = np.arange(len(labels))[::-1]
    for start in range(0, len(labels), batch):
        indices = np.append(backwards[start : start + batch], -1)
        predictions.add(logits[torch.from_numpy(indices)], indices)
    return measure_calibration(predictions.gather(ProcessGroup()))


def draw(count: int, classes: int, scale: float = 3.0) -> tuple[torch.Tensor, list[int]]:
    """Draw logits and labels of which the true class is often, but not always, the most probable one."""
    generator = torch.Generator().manual_seed(count)
    logits = scale * torch.randn(count, classes, generator=generator)
    labels = torch.distributions.Categorical(logits=logits / 2).sample()
    return logits, labels.tolist()


def test_four_images_computed_by_hand():
    """Probabilities of class 0: 0.5, 0.5, 0.8 and 0.9; the true classes are 0, 1, 0 and 1."""
    first = torch.tensor([0.5, 0.5, 0.8, 0.9])
    found = measure(torch.stack([first, 1 - first], dim=1).log(), [0, 1, 0, 1])
    assert found.nll == pytest.approx(-(math.log(0.5) + math.log(0.5) + math.log(0.8) + math.log(0.1)) / 4)
    assert found.brier == pytest.approx((0.5 + 0.5 + 2 * 0.2**2 + 2 * 0.9**2) / 4)
    # Confidences 0.5 (one of two is correct), 0.8 (correct) and 0.9 (wrong) are in the 8th, 12th and 14th bin.
    width = found.equal_width
    assert {place + 1: count for place, count in enumerate(width.count) if count} == {8: 2, 12: 1, 14: 1}
    assert (width.correct[7], width.correct[11], width.correct[13]) == (1, 1, 0)
    assert width.confidence[7] == pytest.approx(1.0) and width.ece == pytest.approx(100 * (0 + 0.2 + 0.9) / 4)
    assert sum(found.equal_mass.count) == 4 and found.equal_mass.ece == pytest.approx(width.ece)


@pytest.mark.parametrize(("count", "classes"), [(400, 10), (61, 3), (8, 2), (1, 5)])
def test_measures_are_those_of_plain_formulas(count, classes):
    logits, labels = draw(count, classes)
    found = measure(logits, labels)
    probabilities = logits.double().softmax(dim=1).numpy()
    confidence, correct = probabilities.max(1), probabilities.argmax(1) == labels
    assert found.nll == pytest.approx(log_loss(labels, probabilities, labels=range(classes)), rel=1e-5)
    one_hot = np.eye(classes)[labels]
    assert found.brier == pytest.approx(((probabilities - one_hot) ** 2).sum(1).mean(), rel=1e-5)
    for bins, groups in (
        (found.equal_width, [(low < confidence) & (confidence <= low + 1 / BINS) for low in np.arange(BINS) / BINS]),
        (found.equal_mass, [np.isin(np.arange(count), own) for own in split_evenly(np.argsort(confidence))]),
    ):
        gaps = [own.sum() * abs(confidence[own].mean() - correct[own].mean()) for own in groups if own.any()]
        assert bins.ece == pytest.approx(100 * sum(gaps) / count, abs=1e-3)
        assert bins.count == [own.sum() for own in groups]
        assert bins.correct == [correct[own].sum() for own in groups]
        assert bins.confidence == pytest.approx([confidence[own].sum() for own in groups], abs=1e-4)


def split_evenly(order: np.ndarray) -> list[np.ndarray]:
    """Split the images, from the lowest to the highest confidence, at ceil(k N / K)."""
    return np.split(order, [math.ceil(k * len(order) / BINS) for k in range(1, BINS)])


def test_images_of_equal_confidence_are_in_one_bin_whatever_their_order():
    """All images have the same confidence and every other one is correct."""
    for labels in ([0] * 20 + [1] * 20, [0, 1] * 20):
        found = measure(torch.zeros(40, 2), labels)
        assert found.equal_mass.count == [40] + [0] * (BINS - 1)
        assert found.equal_mass.ece == found.equal_width.ece == 0


def test_sums_depend_neither_on_batches_nor_on_their_order():
    logits, labels = draw(101, 6)
    assert measure(logits, labels, 1) == measure(logits, labels, 13) == measure(logits, labels, 101)


def test_a_single_class_gives_zeros_and_valid_json():
    found = measure(30 * torch.randn(9, 1), [0] * 9)
    assert (found.nll, found.brier, found.equal_width.ece, found.equal_mass.ece) == (0, 0, 0, 0)
    assert "NaN" not in (text := found.model_dump_json()) and "-0" not in text
    assert Calibration.model_validate_json(text) == found


def test_the_frame_has_the_measures_and_nan_for_files_of_older_versions(tmp_path):
    config = put_run(tmp_path, "maple", "digits")
    put_score(tmp_path, config, "digits:base", 3, 8)
    file = put_score(tmp_path, config, "digits:novel", 3, 8)
    document = json.loads(file.read_text())
    document["per_class"] = {"correct": [3, 0, 0], "total": [4, 4, 0], "names": ["one", "two", "three"]}
    bins = {"ece": 12.5, "count": [8] + [0] * 14, "confidence": [4.0] + [0.0] * 14, "correct": [3] + [0] * 14}
    document["num_classes"] = 3
    zeros = [0] * 13
    mass = {"ece": 37.5, "count": [4, 4, *zeros], "confidence": [2.0, 2.0, *zeros], "correct": [3, 0, *zeros]}
    document["calibration"] = {"nll": 1.5, "brier": 0.5, "equal_width": bins, "equal_mass": mass}
    file.write_text(json.dumps(document))
    frame = results.load(tmp_path).set_index("target_classes")
    new, old = frame.loc["novel"], frame.loc["base"]
    assert (new.nll, new.brier, new.ece, new.ece_mass) == (1.5, 0.5, 12.5, 37.5)
    assert new.macro_accuracy == pytest.approx(100 * (3 / 4 + 0) / 2) and new.per_class.names[0] == "one"
    assert new.calibration.equal_width == ReliabilityBins(**bins)
    assert old[["nll", "brier", "ece", "ece_mass"]].isna().all() and old.calibration is None
    assert old.macro_accuracy == 37.5
    assert read_document(file, EvalResult).macro_accuracy == new.macro_accuracy
