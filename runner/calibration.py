"""Measure how well predicted probabilities fit the answers: log-likelihood, Brier score, calibration error.

The probabilities of an image are the softmax of its logits; its confidence is the highest of them. Shapes: N images of
a target, K = BINS bins of images of similar confidence.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PlainSerializer

from runner.config import Amount, Count, FrozenModel

BINS = 15
DECIMALS = 6
"""A confidence is rounded to these decimals: its last bits depend on the number of threads, and its bin should not."""


def _decode_probabilities(value: object) -> object:
    if not isinstance(value, str):
        return value
    return np.frombuffer(base64.b64decode(value, validate=True), "<f4").astype(float).round(DECIMALS).tolist()


Probabilities = Annotated[
    list[Annotated[float, Field(ge=0, le=1)]],
    BeforeValidator(_decode_probabilities),
    PlainSerializer(lambda values: base64.b64encode(np.array(values, "<f4").tobytes()).decode()),
]
"""Probabilities of DECIMALS decimals; in files the base64 of little-endian float32 values."""


class ReliabilityBins(FrozenModel):
    """Images by confidence, K bins from the lowest to the highest; a bin may be empty."""

    ece: Amount = Field(description="percent; |mean confidence - accuracy| of the bins, weighted by their images")
    count: list[Count] = Field(min_length=BINS, max_length=BINS, description="images of each bin")
    confidence: list[Amount] = Field(min_length=BINS, max_length=BINS, description="sum over the images of each bin")
    correct: list[Count] = Field(min_length=BINS, max_length=BINS, description="correct images of each bin")


class Calibration(FrozenModel):
    """How well the probabilities of an evaluation fit; means over its images."""

    nll: Amount = Field(description="negative log of the true class's probability, in nats")
    # A little above 2 is possible, because scores are computed in float32.
    brier: float = Field(
        ge=0, le=2.000001, description="sum over the classes of (probability - 1 if it is the true one)^2: 0 to 2"
    )
    equal_width: ReliabilityBins = Field(description="bin k of K has confidences in ((k - 1) / K, k / K]")


@dataclass(frozen=True)
class ImagePredictions:
    """What was predicted for the images of a target [N], in its order; `nll` and `brier` as in Calibration.

    labels, predicted: the true and the predicted class, indices of the target's classes. base_confidence: the highest
    probability of a class that the run was trained on, where there are others as well.
    """

    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    confidence: NDArray[np.float64]
    nll: NDArray[np.float64]
    brier: NDArray[np.float64]
    base_confidence: NDArray[np.float64] | None = None

    @property
    def is_correct(self) -> NDArray[np.bool_]:
        return self.labels == self.predicted


def measure_calibration(images: ImagePredictions) -> Calibration:
    """Measure N >= 1 images, with float64 sums in their order: the processes that predicted them do not matter."""
    # By the K - 1 inner edges; by default a value equal to an edge is put to its left, the bin below it.
    bins = np.searchsorted(np.arange(1, BINS) / BINS, images.confidence)
    count, correct = np.bincount(bins, minlength=BINS), np.bincount(bins[images.is_correct], minlength=BINS)
    confidence = np.bincount(bins, images.confidence, BINS)
    ece = float(100 * np.abs(confidence - correct).sum() / len(bins))
    filled = {"count": count.tolist(), "confidence": confidence.tolist(), "correct": correct.tolist()}
    nll, brier = float(images.nll.mean()), float(images.brier.mean())
    return Calibration(nll=nll, brier=brier, equal_width=ReliabilityBins(ece=ece, **filled))
