"""Measure how well scores tell base from novel images, and images of known classes from unknown ones.

Base against novel: of runs trained on base classes, evaluated among the names of all classes, by the highest
probability of a base class (`base_confidence`). Known against unknown: by the stored scores of both.
Shapes: N images of a test set, of which P show base or known classes, and Q = N - P others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runner.config import Target
from runner.results import MCM, ScoreResult
from shards.image_selection import select_labels

if TYPE_CHECKING:
    import pandas as pd

Bools = NDArray[np.bool_]
MEASURES = ("base_among_all", "novel_among_all", "auroc", "fpr95", "openworld_auc")


def measure_open_world(frame: pd.DataFrame) -> pd.DataFrame:
    """Compute MEASURES in percent for the rows with all classes of runs trained on base ones; NaN for other rows.

    OpenworldAUC needs the results on base and on novel classes of the same run, under the same settings.
    """
    import pandas as pd

    measures = pd.DataFrame(math.nan, frame.index, MEASURES)
    keys = zip(frame.path, frame.evaluation, frame.target, strict=True)
    right = dict(zip(keys, frame.correct_images, strict=True))
    joint = frame[frame.base_confidence.notna() & (frame.classes == "base") & (frame.target_classes == "all")]
    for row in joint.itertuples():
        is_base = row.labels < len(select_labels(range(len(row.per_class.total)), "base"))
        # The first images of a limited evaluation can all be of one half.
        if not 0 < is_base.mean() < 1:
            continue
        parts, score = (is_base, ~is_base), row.base_confidence
        halves = (f"{row.target_dataset}:{half}:{row.split}" for half in ("base", "novel"))
        closed = [right.get((row.path, row.evaluation, half)) for half in halves]
        # Limited halves have other images than the first of all classes.
        has_both = [half is not None and len(half) for half in closed] == [part.sum() for part in parts]
        openworld = openworld_auc(*(score[part] for part in parts), *closed) if has_both else math.nan
        accuracies = (100 * row.correct_images[part].mean() for part in parts)
        measures.loc[row.Index] = [*accuracies, *detect(is_base, score), openworld]
    return measures


def detect(is_positive: Bools, score: NDArray[np.float64]) -> tuple[float, float]:
    """Compute AUROC and FPR95 in percent of images [N] by their scores [N], which are higher for positive ones.

    Of two images with equal scores AUROC counts one half. FPR95: the share of negative images at or above the highest
    score that at least 95 % of the positive ones reach.
    """
    from sklearn.metrics import roc_auc_score, roc_curve

    false_positive, true_positive, _ = roc_curve(is_positive, score, drop_intermediate=False)
    return 100 * float(roc_auc_score(is_positive, score)), 100 * float(false_positive[np.argmax(true_positive >= 0.95)])


def openworld_auc(
    base: NDArray[np.float64], novel: NDArray[np.float64], base_right: Bools, novel_right: Bools
) -> float:
    """Compute OpenworldAUC in percent from the scores of base [P] and novel images [Q], and which are right.

    The share of pairs of a base and a novel image of which both are classified right among the names of their half, and
    the base image has the higher score; equal scores count one half. Source: Hua et al. 2025, "OpenworldAUC", and its
    public code.
    """
    # Scores are probabilities: a wrong base image comes below, and a wrong novel image above all others.
    scores = np.concatenate([np.where(base_right, base, -1.0), np.where(novel_right, novel, 2.0)])
    return detect(np.arange(len(scores)) < len(base), scores)[0]


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
