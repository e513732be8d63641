"""Compare two variants on the same test images: difference, bootstrap interval over images, test over data sets.

A task is a target after training on one data set; for harmonic means it is a data set with its base and novel classes.
Shapes: n differences, N test images, K combinations of right and wrong seeds, R draws, S seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.results.frame import dataset_order, is_half
from runner.results import harmonic_mean
from shards.rng import stream_seed

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Measure = Literal["hm", "accuracy"]

DRAWS = 10_000
"""Number of bootstrap draws of test images for an interval."""
FLIPS = 2**16
"""With more choices of signs, as many are drawn."""
TASK = ["dataset", "task"]
PAIR = [*TASK, "seed"]


class Comparison(NamedTuple):
    """Compare variant A with variant B, in percentage points.

    tasks: `a` and `b` of each task averaged over seeds, and its `seeds`. seeds: of every task, empty if they differ;
    then there is no `std`. interval: 95 %, under other test images; None if both variants gave the same answers. p:
    two-sided, of a permutation test over tasks, uncorrected.
    """

    tasks: pd.DataFrame
    seeds: tuple[int, ...]
    std: float | None
    interval: tuple[float, float] | None
    p: float

    @property
    def difference(self) -> float:
        return float(self.tasks.a.mean() - self.tasks.b.mean())


def measure_of(variants: Mapping[str, pd.DataFrame]) -> Measure:
    """Return the harmonic mean if any variant has results on base or novel classes, else accuracy."""
    return "hm" if any(is_half(frame).any() for frame in variants.values()) else "accuracy"


def compare(variants: Mapping[str, pd.DataFrame], a: str, b: str, *, draws: int = DRAWS) -> Comparison:
    """Compare two variants, each a part of the frame by title."""
    paired = pair_results(variants, a, b)
    # One row for each task and seed with columns `a` and `b`; `tasks` has the seeds averaged before the HM is taken.
    pairs = _average(paired, PAIR)
    seeds_by_task = pairs.reset_index().groupby(TASK, sort=False).seed.agg(lambda seeds: tuple(map(int, seeds)))
    tasks = _average(paired, TASK).assign(seeds=seeds_by_task)
    seeds = tasks.seeds.iloc[0] if len(set(tasks.seeds)) == 1 else ()
    return Comparison(
        tasks=tasks,
        seeds=seeds,
        std=float((pairs.a - pairs.b).groupby("seed").mean().std(ddof=1)) if len(seeds) > 1 else None,
        interval=bootstrap_interval(paired, draws) if len(paired) else None,
        p=sign_flip_p(tasks.a - tasks.b),
    )


def bootstrap_interval(paired: pd.DataFrame, draws: int = DRAWS) -> tuple[float, float] | None:
    """Compute the 95 % interval of the difference under other test images; None if all draws give the same."""
    if paired[["correct_images_a", "correct_images_b"]].isna().any(axis=None):
        return None
    # [R, 2]: means over tasks of draw r, with independent draws of the images of each task.
    drawn = np.mean([_resample_task(task, draws) for _, task in paired.groupby(TASK, sort=False)], axis=0)
    low, high = np.quantile(drawn[:, 0] - drawn[:, 1], [0.025, 0.975])
    return (float(low), float(high)) if low < high else None


def _average(paired: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Average accuracies of A and B by some columns; of base and novel accuracy take the harmonic mean."""
    means = paired.groupby([*by, "part"], sort=False)[["accuracy_a", "accuracy_b"]].mean()
    # `parts` below is a column with base and novel accuracy of a group, or the only accuracy of a target.
    groups = means.groupby(by, sort=False)
    merged = groups.agg(lambda parts: harmonic_mean(*parts) if len(parts) == 2 else parts.iloc[0])
    return merged.rename(columns={"accuracy_a": "a", "accuracy_b": "b"})


def sign_flip_p(differences: Sequence[float] | pd.Series) -> float:
    """Compute the two-sided p of the mean of paired differences [n] by flipping signs: all choices, or FLIPS drawn."""
    from scipy.stats import permutation_test

    # Round, so that equal accuracies compare as equal in spite of floating-point noise.
    values = np.round(np.asarray(differences, float), 9)
    # Flipping a zero changes nothing: without zeros the test is exact for more data sets.
    values = values[values != 0]
    if len(values) < 2:
        return 1.0

    def total(flipped: Floats, axis: int) -> Floats:
        # Sums of the same numbers in another order differ in their last digits.
        return np.round(flipped.sum(axis), 6)

    # A seed makes p repeatable.
    drawn = np.random.default_rng(stream_seed(0, "comparison", "signs"))
    tested = permutation_test((values,), total, permutation_type="samples", n_resamples=FLIPS, rng=drawn)
    return float(tested.pvalue)


def holm(values: Sequence[float]) -> list[float]:
    """Apply Holm's correction to p values, in the same order."""
    corrected, highest = [0.0] * len(values), 0.0
    for passed, index in enumerate(np.argsort(values, kind="stable")):
        # A larger p value never gets a smaller corrected one.
        corrected[index] = highest = max(highest, min(1.0, (len(values) - passed) * values[index]))
    return corrected


def _resample_task(paired: pd.DataFrame, draws: int) -> Floats:
    """Compute metrics of A and of B [R, 2] on R draws of the test images of one task, from its own random stream."""
    dataset, task = paired[TASK].iloc[0]
    parts = []
    for number, (_, rows) in enumerate(paired.groupby("part")):
        a, b = (np.stack(list(rows[f"correct_images_{side}"])) for side in "ab")
        # Not a shared generator: an interval must not depend on the other tasks and rows of a table.
        generator = np.random.default_rng(stream_seed(0, "comparison", "images", dataset, task, number))
        parts.append(resample_accuracy(a, b, draws, generator))
    if len(parts) == 1:
        return parts[0]
    base, novel = parts
    total = base + novel
    return np.divide(2 * base * novel, total, out=np.zeros_like(total), where=total > 0)


def resample_accuracy(a: Bools, b: Bools, draws: int, generator: np.random.Generator) -> Floats:
    """Compute accuracies in percent of A and of B [R, 2] from which images each of S seeds had right [S, N].

    Images are grouped by how many seeds of A and of B were right: which image of a group is drawn makes no difference,
    and the number drawn of each group is multinomial. This is the distribution of drawing N images one by one at the
    cost of K numbers; `scipy.stats.bootstrap` would draw R x N indices.
    """
    seeds = len(a)
    # Both counts, each 0 to S, in one number; `divmod` separates them again into shares of A and of B [K, 2].
    groups, images = np.unique(a.sum(0) * (seeds + 1) + b.sum(0), return_counts=True)
    right = np.stack(np.divmod(groups, seeds + 1), axis=1) / seeds
    total = int(images.sum())
    counts = generator.multinomial(total, images / total, size=draws)
    return 100.0 * (counts @ right) / total


def pair_results(variants: Mapping[str, pd.DataFrame], a: str, b: str) -> pd.DataFrame:
    """Merge the results of `a` and `b` on the same test images.

    Returns one row per task, seed and part (base and novel classes, or the target's classes), sorted, with columns of
    the frame that end in `_a` and `_b`. If any variant has targets on different data sets than the one trained on,
    the latter is left out, as in the paper's averages. Limited results are left out.
    """
    measure = measure_of(variants)
    away = measure == "accuracy" and any(_is_away(rows).any() for rows in variants.values())
    first, second = (_select(variants[title], measure, away=away) for title in (a, b))
    paired = first.join(second, how="inner", lsuffix="_a", rsuffix="_b").reset_index()
    paired["order"] = [dataset_order(task) for task in paired.task]
    paired = paired.sort_values(["order", *PAIR, "part"], kind="stable", ignore_index=True)
    # A seed with only one half of the classes has no harmonic mean.
    return paired[paired.groupby(PAIR).part.transform("size") == 2] if measure == "hm" else paired


def _select(rows: pd.DataFrame, measure: Measure, *, away: bool) -> pd.DataFrame:
    """Select the results of one variant that count, indexed by task, seed, part and test images."""
    rows = rows[~rows.limited]
    task = rows.target_dataset.where(rows.target_classes == "all", rows.target_dataset + ":" + rows.target_classes)
    rows = rows.assign(task=task, part=rows.target_classes)
    if measure == "hm":
        rows = rows[is_half(rows)].assign(task=rows.dataset)
    else:
        rows = rows[_is_away(rows) if away else rows.split == "test"]
    # The manifest's digest is part of the index, so that only results on equal images in equal order are paired.
    return rows.set_index([*PAIR, "part", "manifest"])[["accuracy", "correct_images"]]


def _is_away(frame: pd.DataFrame) -> pd.Series:
    return (frame.target_dataset != frame.dataset) & (frame.split == "test")
