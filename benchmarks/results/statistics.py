"""Compare the results of two variants pairwise: tests over data sets and seeds, and an interval over test images.

A task is a target after training on one data set; for harmonic means it is a data set with its base and novel classes.
Shapes: n differences, N test images, K kinds of images, R draws, S seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.results.frame import dataset_order, is_half
from procap.errors import unknown_name
from runner.packed_predictions import unpack_bits
from runner.results import harmonic_mean
from shards.rng import stream_seed

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Measure = Literal["hm", "accuracy"]

EXACT = 16
"""For up to this many differences all 2^n choices of signs are enumerated; for more, 2^16 choices are drawn."""
DRAWS = 10_000
"""Number of bootstrap draws of test images for an interval."""
TASK = ["dataset", "task"]
PAIR = [*TASK, "seed"]


class PValues(NamedTuple):
    """Two-sided and uncorrected p values: two over pairs, one over tasks averaged over seeds; None without tasks."""

    wilcoxon: float | None
    permutation: float | None
    permutation_of_tasks: float | None


@dataclass(frozen=True)
class Comparison:
    """Compare variant A with variant B (whose title is `b`), in percentage points.

    tasks: `a` and `b` of each task averaged over seeds, with its `seeds`, number of test `images`, and `limited`.
    pairs: number of tasks and seeds. means: of A and B over tasks, None without a common task. seeds: of every task,
    empty if they differ; then there is no `std`. record: wins, ties and losses of A over pairs. interval: 95 %, under
    other test images; None if a result does not record single images. left_out: sentences on what was not compared.
    """

    b: str
    measure: Measure
    tasks: pd.DataFrame
    pairs: int
    means: tuple[float, float] | None
    seeds: tuple[int, ...]
    std: float | None
    record: tuple[int, int, int]
    p_values: PValues
    interval: tuple[float, float] | None
    left_out: tuple[str, ...]

    @property
    def difference(self) -> float | None:
        return self.means[0] - self.means[1] if self.means else None

    @property
    def limited(self) -> bool:
        return bool(self.tasks.limited.any())


def compare(variants: Mapping[str, pd.DataFrame], a: str, b: str, *, draws: int = DRAWS) -> Comparison:
    """Compare two variants, each a part of the frame by title. Raises UsageError for an unknown title."""
    for title in (a, b):
        if title not in variants:
            raise unknown_name("row", title, variants)
    # The harmonic mean if any variant has results on base or novel classes.
    measure: Measure = "hm" if any(is_half(frame).any() for frame in variants.values()) else "accuracy"
    paired, left_out = pair_results(variants, a, b, measure)
    pairs = _average(paired, PAIR)
    by_task = paired.drop_duplicates([*TASK, "part"]).groupby(TASK, sort=False)
    tasks = _average(paired, TASK).assign(
        seeds=pairs.reset_index().groupby(TASK, sort=False).seed.agg(lambda seeds: tuple(map(int, seeds))),
        images=by_task.total_a.sum(),
        limited=by_task.limited.any(),
    )
    over_pairs, over_tasks = pairs.a - pairs.b, tasks.a - tasks.b
    signs = np.sign(round_differences(over_pairs))
    means, p_values = None, PValues(None, None, None)
    if len(tasks):
        means = float(tasks.a.mean()), float(tasks.b.mean())
        generator = np.random.default_rng(stream_seed(0, "comparison", "signs"))
        p_values = PValues(
            wilcoxon_p(over_pairs, generator), sign_flip_p(over_pairs, generator), sign_flip_p(over_tasks, generator)
        )
    seeds = tasks.seeds.iloc[0] if len(set(tasks.seeds)) == 1 else ()
    interval = None
    if len(paired) and not paired[["correct_bits_a", "correct_bits_b"]].isna().any(axis=None):
        drawn = np.mean([_resample_task(own, draws) for _, own in paired.groupby(TASK, sort=False)], axis=0)
        low, high = np.quantile(drawn[:, 0] - drawn[:, 1], [0.025, 0.975])
        interval = float(low), float(high)
    return Comparison(
        b=b,
        measure=measure,
        tasks=tasks,
        pairs=len(pairs),
        means=means,
        seeds=seeds,
        std=float(over_pairs.groupby("seed").mean().std(ddof=1)) if len(seeds) > 1 else None,
        record=(int((signs > 0).sum()), int((signs == 0).sum()), int((signs < 0).sum())),
        p_values=p_values,
        interval=interval,
        left_out=tuple(dict.fromkeys(left_out)),
    )


def _average(paired: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Average accuracies of A and B by some columns; of base and novel accuracy take the harmonic mean."""
    means = paired.groupby([*by, "part"], sort=False)[["accuracy_a", "accuracy_b"]].mean()
    found = means.groupby(by, sort=False).agg(lambda own: harmonic_mean(*own) if len(own) == 2 else own.iloc[0])
    return found.rename(columns={"accuracy_a": "a", "accuracy_b": "b"})


def round_differences(differences: Sequence[float] | pd.Series) -> Floats:
    """Round differences [n], so that equal accuracies compare as equal in spite of floating-point noise."""
    return np.round(np.asarray(differences, float), 9) + 0.0


def student_test(values: Sequence[float] | pd.Series, mean: float = 0.0) -> tuple[float, float, float]:
    """Compute the 95 % interval of the mean of at least two values by Student's t, and the two-sided p of `mean`."""
    from scipy.stats import ttest_1samp

    values = round_differences(values)
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0]), float(np.isclose(values[0], mean))
    found = ttest_1samp(values, mean)
    interval = found.confidence_interval(0.95)
    return float(interval.low), float(interval.high), float(found.pvalue)


def sign_flip_p(differences: Sequence[float] | pd.Series, generator: np.random.Generator) -> float:
    """Compute the two-sided p of the mean of paired differences by flipping signs, exact up to EXACT that are not 0."""
    from scipy.stats import permutation_test

    values = round_differences(differences)
    values = values[values != 0]
    if len(values) < 2:
        return 1.0

    def statistic(x: Floats, axis: int = -1) -> Floats:
        # Round, as sums of the same numbers in another order differ in their last digits.
        return np.round(np.abs(x.sum(axis=axis)), 6)

    found = permutation_test(
        (values,),
        statistic,
        permutation_type="samples",
        vectorized=True,
        n_resamples=2**EXACT,
        alternative="greater",
        rng=generator,
    )
    return float(found.pvalue)


def wilcoxon_p(differences: Sequence[float] | pd.Series, generator: np.random.Generator) -> float:
    """Compute the exact two-sided p of Wilcoxon's test without zeros; with ties flip the signs of the ranks."""
    from scipy.stats import rankdata, wilcoxon

    values = round_differences(differences)
    values = values[values != 0]
    if not len(values):
        return 1.0
    sizes = np.abs(values)
    if len(np.unique(sizes)) < len(values):
        return sign_flip_p(np.sign(values) * rankdata(sizes), generator)
    return float(wilcoxon(values, method="exact").pvalue)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Apply Holm's correction to the p values that are not None, in the same order."""
    there = sorted((value, place) for place, value in enumerate(values) if value is not None)
    corrected: list[float | None] = [None] * len(values)
    highest = 0.0
    for passed, (value, place) in enumerate(there):
        corrected[place] = highest = max(highest, min(1.0, (len(there) - passed) * value))
    return corrected


def _resample_task(paired: pd.DataFrame, draws: int) -> Floats:
    """Compute metrics of A and of B [R, 2] on R draws of the test images of one task, from its own random stream."""
    dataset, task = paired[TASK].iloc[0]
    parts = []
    for number, (_, own) in enumerate(paired.groupby("part")):
        a, b = (np.stack(list(map(unpack_bits, own[f"correct_bits_{side}"], own.total_a))) for side in "ab")
        generator = np.random.default_rng(stream_seed(0, "comparison", "images", dataset, task, number))
        parts.append(resample_accuracy(a, b, draws, generator))
    if len(parts) == 1:
        return parts[0]
    base, novel = parts
    total = base + novel
    return np.divide(2 * base * novel, total, out=np.zeros_like(total), where=total > 0)


def resample_accuracy(a: Bools, b: Bools, draws: int, generator: np.random.Generator) -> Floats:
    """Compute accuracies in percent of A and of B [R, 2] from which images each of S seeds had right [S, N].

    Images are grouped by how many seeds of A and of B were right: which image of a kind is drawn makes no difference,
    and the number drawn of each kind is multinomial. This is the distribution of drawing N images one by one at the
    cost of K numbers; `scipy.stats.bootstrap` would draw R x N indices.
    """
    seeds = len(a)
    kind, images = np.unique(a.sum(0) * (seeds + 1) + b.sum(0), return_counts=True)
    right = np.stack(np.divmod(kind, seeds + 1), axis=1) / seeds
    total = int(images.sum())
    counts = generator.multinomial(total, images / total, size=draws)
    return 100.0 * (counts @ right) / total


def pair_results(
    variants: Mapping[str, pd.DataFrame], a: str, b: str, measure: Measure
) -> tuple[pd.DataFrame, list[str]]:
    """Merge the results of `a` and `b` on the same test images, and describe in sentences everything that is left out.

    Returns one row per task, seed and part (base and novel classes, or the target's classes), sorted, with columns of
    the frame that end in `_a` and `_b`. If any variant has targets of other data sets than it was trained on, the one
    trained on is left out, as in the paper's averages. Limited results count only if there is no unlimited result.
    """
    left_out: list[str] = []

    def keep(rows: pd.DataFrame, mask: pd.Series | Bools, reason: str) -> pd.DataFrame:
        if not mask.all():
            left_out.append(_describe(f"{reason}, left out", rows[~mask]))
        return rows[mask]

    def select(title: str) -> pd.DataFrame:
        rows = variants[title]
        task = rows.target_dataset.where(rows.target_classes == "all", rows.target_dataset + ":" + rows.target_classes)
        rows = rows.assign(task=task.where(rows.split == "test", rows.target), part=rows.target_classes)
        rows["tested"] = rows.manifest + "/" + rows.images.astype(str) + "/" + rows.total.astype(str)
        if measure == "hm":
            rows = keep(rows, is_half(rows), f"{title} on targets other than its own base and novel test images")
            rows = rows.assign(task=rows.dataset)
        else:
            rows = keep(rows, rows.split == "test", f"{title} on images that are no test images")
            rows = keep(rows, _is_away(rows), "The data set trained on is no target here") if away else rows
        return rows.set_index([*PAIR, "part", "tested"])[["accuracy", "total", "limited", "correct_bits"]]

    away = measure == "accuracy" and any(_is_away(rows).any() for rows in variants.values())
    first, second = select(a), select(b)
    for title, own, rival, other in ((a, first, b, second), (b, second, a, first)):
        reason = f"{rival} lacks results that {title} has, or has them of other images"
        keep(own.reset_index(), own.index.isin(other.index), reason)
    paired = first.join(second, how="inner", lsuffix="_a", rsuffix="_b").reset_index()
    paired["order"] = [dataset_order(task) for task in paired.task]
    paired = paired.sort_values(["order", *PAIR, "part"], kind="stable", ignore_index=True)
    if measure == "hm":
        both = paired.groupby(PAIR).part.transform("size") == 2
        paired = keep(paired, both, f"{a} and {b} with only one of base and novel classes")
    # Base and novel classes of one seed count together, and all seeds of a task have the same images.
    of_pair = paired.groupby(PAIR, sort=False)
    paired = paired.assign(limited=of_pair.limited_a.transform("any"), tested=of_pair.tested.transform("|".join))
    seeds = paired.groupby([*TASK, "tested"]).seed.transform("size") - len(paired) * paired.limited
    usual = seeds.groupby([paired.dataset, paired.task]).transform("idxmax")
    is_usual = paired.tested.to_numpy() == paired.tested.loc[usual].to_numpy()
    whole = ~paired.limited | paired.limited.all()
    reason = f"{a} and {b} on other images than with most seeds, or limited to the first images beside whole results"
    paired = keep(paired, is_usual & whole, reason)
    for title, side in ((a, "a"), (b, "b")):
        unknown = paired[paired[f"correct_bits_{side}"].isna()]
        if len(unknown):
            reason = f"No interval, as {title} has counts without the answers to single images "
            left_out.append(_describe(f"{reason}(`procap eval RUN --force` counts again and keeps them)", unknown))
    return paired, left_out


def _describe(reason: str, rows: pd.DataFrame) -> str:
    """Write one sentence: `reason: task, task (seeds 1, 2); task (seed 3).`"""
    by_seeds: dict[tuple[int, ...], list[str]] = {}
    for task, own in sorted(rows.groupby("task").seed, key=lambda item: dataset_order(str(item[0]))):
        by_seeds.setdefault(tuple(sorted({*map(int, own)})), []).append(str(task))
    named = (f"{', '.join(tasks)} ({format_seeds(seeds)})" for seeds, tasks in by_seeds.items())
    return f"{reason}: {'; '.join(named)}."


def format_seeds(seeds: Sequence[int]) -> str:
    """Format seeds: `seed 1`, `seeds 1, 2`."""
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _is_away(frame: pd.DataFrame) -> pd.Series:
    return (frame.target_dataset != frame.dataset) & (frame.split == "test")
