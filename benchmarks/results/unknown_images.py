"""Measure how well runs tell images of their classes from images of unknown ones, from the stored scores of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from benchmarks.results.open_world import detect
from runner.config import Target
from runner.results import MCM, ScoreResult

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Detection:
    """Known against unknown images by `runner.evaluate`; `auroc` and `fpr95` in percent, see `detect`.

    known [P], unknown [Q]: their scores. manifest: digest of the unknown images. limited: the first images alone.
    score: the rule of the scores.
    """

    auroc: float
    fpr95: float
    known: NDArray[np.float64]
    unknown: NDArray[np.float64]
    manifest: str
    limited: bool
    score: str = MCM


def score_rule(frame: pd.DataFrame) -> str:
    """Return the rule of the scores in the rows of a method."""
    return next(detection.score for unknown in frame.unknown for detection in unknown.values())


def detect_unknown(known: Target, results: Iterable[ScoreResult]) -> Mapping[str, Mapping[str, Detection]]:
    """Compare the scores of `known`, the images of a run's classes, with those of each other target.

    Returns the detections by settings of the evaluation, as `EvalSettings.label` names them, and target.
    """
    by_settings: dict[str, dict[str, ScoreResult]] = {}
    for result in results:
        by_settings.setdefault(result.settings.label, {})[result.target] = result
    detections: dict[str, dict[str, Detection]] = {}
    for label, by_target in by_settings.items():
        if positive := by_target.pop(str(known), None):
            detections[label] = {target: _compare(positive, result) for target, result in by_target.items()}
    return detections


def _compare(known: ScoreResult, unknown: ScoreResult) -> Detection:
    scores = np.array([*known.scores, *unknown.scores])
    is_known = np.arange(len(scores)) < known.total
    limited = known.limited or unknown.limited
    parts, digest = (scores[is_known], scores[~is_known]), unknown.manifest_digest
    return Detection(*detect(is_known, scores), *parts, digest, limited, unknown.score)
