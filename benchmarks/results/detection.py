"""Measure how well scores tell base from novel images, and images of known classes from unknown ones.

Base against novel: by the highest probability of a base class (`base_confidence`) among the names of all classes, of
runs trained on base classes. Known against unknown: by the stored scores of both. Shapes: N images of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runner.config import EvalSettings, Target
from runner.results import ScoreResult
from shards.image_selection import select_labels

if TYPE_CHECKING:
    import pandas as pd

MEASURES = ("base_among_all", "novel_among_all", "auroc", "fpr95", "openworld_auc")


def measure_open_world(frame: pd.DataFrame) -> pd.DataFrame:
    """Compute MEASURES in percent for the rows with all classes of runs trained on base ones; NaN for other rows.

    OpenworldAUC needs the results on base and on novel classes of the same run, under the same settings.
    """
    import pandas as pd

    measures = pd.DataFrame(math.nan, frame.index, MEASURES)
    right = frame.set_index(["path", "evaluation", "target"]).correct_images.to_dict()
    joint = frame[frame.base_confidence.notna() & (frame.classes == "base") & (frame.target_classes == "all")]
    for row in joint.itertuples():
        is_base, openworld = row.labels < len(select_labels(range(len(row.per_class.total)), "base")), math.nan
        # The first images of a limited evaluation can all be of one half.
        if not 0 < is_base.mean() < 1:
            continue
        halves = (f"{row.target_dataset}:{half}:{row.split}" for half in ("base", "novel"))
        closed = [right.get((row.path, row.evaluation, half)) for half in halves]
        # Limited halves have other images than the first of all classes.
        if [half is not None and len(half) for half in closed] == [is_base.sum(), (~is_base).sum()]:
            is_right = np.empty_like(is_base)
            is_right[is_base], is_right[~is_base] = closed
            openworld = openworld_auc(is_base, row.base_confidence, is_right)
        accuracies = (100 * row.correct_images[part].mean() for part in (is_base, ~is_base))
        measures.loc[row.Index] = [*accuracies, *detect(is_base, row.base_confidence), openworld]
    return measures


def detect(is_positive: NDArray[np.bool_], score: NDArray[np.float64]) -> tuple[float, float]:
    """Compute AUROC and FPR95 in percent of images [N] by their scores [N], which are higher for positive ones.

    Of two images with equal scores AUROC counts one half. FPR95: the share of negative images at or above the highest
    score that at least 95 % of the positive ones reach.
    """
    from sklearn.metrics import auc, roc_curve

    false, true, _ = roc_curve(is_positive, score, drop_intermediate=False)
    return 100 * float(auc(false, true)), 100 * float(false[np.argmax(true >= 0.95)])


def openworld_auc(is_base: NDArray[np.bool_], score: NDArray[np.float64], is_right: NDArray[np.bool_]) -> float:
    """Compute OpenworldAUC in percent from the scores [N], and which images are right among their half's names.

    The share of pairs of a base and a novel image of which both are right, and the base image has the higher score;
    equal scores count one half. Source: Hua et al. 2025, "OpenworldAUC", and its public code.
    """
    # Scores are probabilities: a wrong base image comes below, and a wrong novel image above all others.
    return detect(is_base, np.where(is_right, score, np.where(is_base, -1.0, 2.0)))[0]


@dataclass(frozen=True)
class Detection:
    """The images of a run's classes against unknown ones by the scores of both; see `detect`."""

    known: ScoreResult
    unknown: ScoreResult
    limited: bool
    auroc: float
    fpr95: float


def detect_unknown(known: Target, results: Iterable[ScoreResult], settings: EvalSettings) -> dict[str, Detection]:
    """Compare the scores of `known`, the images of a run's classes, with those of each other target, by its name."""
    by_target = {result.target: result for result in results if result.settings == settings}
    if not (positive := by_target.pop(str(known), None)):
        return {}
    detections = {}
    for target, result in by_target.items():
        scores, limited = np.array([*positive.scores, *result.scores]), positive.limited or result.limited
        measures = detect(np.arange(len(scores)) < positive.total, scores)
        detections[target] = Detection(positive, result, limited, *measures)
    return detections


def score_rule(frame: pd.DataFrame) -> str:
    """Return the rule of the scores in the rows of a method."""
    return next(detection.unknown.score for unknown in frame.unknown for detection in unknown.values())
