"""Compare two rows of results pairwise: tests over data sets and seeds, and an interval over test images.

Shapes: n differences, N test images, K kinds of images, R draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.results.frame import dataset_order, is_half
from procap.errors import unknown_name
from runner.correctness import unpack_bits
from runner.results import harmonic_mean
from shards.rng import stream_seed

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
Measure = Literal["hm", "accuracy"]
Results = tuple[Any, ...]
"""Rows of the frame for one metric: base and novel classes for a harmonic mean, else one row."""

EXACT = 16
"""For up to this many differences all 2^n choices of signs are enumerated; for more, 2^16 choices are drawn."""
DRAWS = 10_000
"""Number of bootstrap draws of test images for an interval."""


class Pair(NamedTuple):
    """Results of A and B with one seed, on the same images in the same order."""

    seed: int
    a: Results
    b: Results

    @property
    def values(self) -> tuple[float, float]:
        """Accuracies or harmonic means of A and of B, in percent."""
        return _value([row.accuracy for row in self.a]), _value([row.accuracy for row in self.b])


@dataclass(frozen=True)
class Task:
    """A data set or a target, with one pair for each seed; all pairs are of the same images.

    problem: the data set trained on, and the one evaluated or target.
    """

    problem: tuple[str, str]
    name: str
    pairs: tuple[Pair, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(pair.seed for pair in self.pairs)

    @property
    def limited(self) -> bool:
        return any(row.limited for row in self.pairs[0].a)

    @property
    def images(self) -> int:
        return sum(row.total for row in self.pairs[0].a)

    @property
    def has_bits(self) -> bool:
        """Whether every result records which images were classified correctly."""
        return all(isinstance(row.correct_bits, str) for pair in self.pairs for row in (*pair.a, *pair.b))

    @property
    def parts(self) -> list[tuple[Results, Results]]:
        """Results of A and of B over seeds, for each part of the metric: base and novel classes, or the target."""
        a, b = (list(zip(*side, strict=True)) for side in zip(*((pair.a, pair.b) for pair in self.pairs), strict=True))
        return list(zip(a, b, strict=True))

    @property
    def values(self) -> tuple[float, float]:
        """Metrics of A and B: accuracy averaged over seeds, or the harmonic mean of both averages."""
        means = [[fmean(row.accuracy for row in side) for side in part] for part in self.parts]
        a, b = zip(*means, strict=True)
        return _value(a), _value(b)

    @property
    def differences(self) -> list[float]:
        """A minus B for each seed."""
        return [a - b for a, b in (pair.values for pair in self.pairs)]


class PValues(NamedTuple):
    """Two-sided and uncorrected p values: two over pairs, one over tasks averaged over seeds; None without tasks."""

    wilcoxon: float | None
    permutation: float | None
    permutation_of_tasks: float | None


@dataclass(frozen=True)
class Comparison:
    """Compare A with B, in percentage points.

    interval: 95 %, of `difference` under other test images; None if a result does not record single images.
    left_out: sentences on what was not compared.
    """

    a: str
    b: str
    measure: Measure
    tasks: tuple[Task, ...]
    interval: tuple[float, float] | None
    left_out: tuple[str, ...]

    @property
    def means(self) -> tuple[float, float] | None:
        """Means of A and B over tasks; None if they share no task."""
        if not self.tasks:
            return None
        a, b = zip(*(task.values for task in self.tasks), strict=True)
        return fmean(a), fmean(b)

    @property
    def difference(self) -> float | None:
        return self.means[0] - self.means[1] if self.means else None

    @property
    def pairs(self) -> list[float]:
        """A minus B for each task and seed."""
        return [difference for task in self.tasks for difference in task.differences]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of every task, empty if they differ."""
        found = {task.seeds for task in self.tasks}
        return next(iter(found)) if len(found) == 1 else ()

    @property
    def images(self) -> int:
        return sum(task.images for task in self.tasks)

    @property
    def limited(self) -> bool:
        return any(task.limited for task in self.tasks)

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds of the mean over tasks; None unless all have the same seeds."""
        if len(self.seeds) < 2:
            return None
        return stdev(fmean(column) for column in zip(*(task.differences for task in self.tasks), strict=True))

    @property
    def record(self) -> tuple[int, int, int]:
        """Wins, ties and losses of A over pairs."""
        signs = np.sign(round_differences(self.pairs))
        return int((signs > 0).sum()), int((signs == 0).sum()), int((signs < 0).sum())

    @cached_property
    def p_values(self) -> PValues:
        if not self.tasks:
            return PValues(None, None, None)
        generator = np.random.default_rng(stream_seed(0, "comparison", "signs"))
        of_tasks = [a - b for a, b in (task.values for task in self.tasks)]
        return PValues(
            wilcoxon_p(self.pairs, generator), sign_flip_p(self.pairs, generator), sign_flip_p(of_tasks, generator)
        )


def compare(
    lines: Mapping[str, pd.DataFrame], a: str, b: str, *, measure: Measure | None = None, draws: int = DRAWS
) -> Comparison:
    """Compare two rows of a table, each a part of the frame; see `pair_up` for which results count.

    measure: None takes the harmonic mean if any row was trained on base classes and evaluated on a half, else
    accuracy. Equal results give equal intervals and p values, to the last digit. Raises UsageError for an unknown row.
    """
    for title in (a, b):
        if title not in lines:
            raise unknown_name("line", title, lines)
    measure = measure or find_measure(lines)
    tasks, left_out = pair_up(lines, a, b, measure)
    interval = None
    if tasks and all(task.has_bits for task in tasks):
        drawn = np.mean([resample(task, draws) for task in tasks], axis=0)
        low, high = np.quantile(drawn[:, 0] - drawn[:, 1], [0.025, 0.975])
        interval = float(low), float(high)
    return Comparison(a, b, measure, tuple(tasks), interval, left_out)


def find_measure(lines: Mapping[str, pd.DataFrame]) -> Measure:
    return "hm" if any(is_half(frame).any() for frame in lines.values()) else "accuracy"


def find_reference(lines: Mapping[str, pd.DataFrame], measure: Measure) -> tuple[str, bool]:
    """Return the first ProCAP row, else the row that wins most comparisons; and whether it was chosen by its wins."""
    own = [title for title, frame in lines.items() if (frame.method == "procap").any()]
    if own:
        return own[0], False
    wins = dict.fromkeys(lines, 0)
    for a, b in permutations(lines, 2):
        tasks, _ = pair_up(lines, a, b, measure)
        wins[a] += bool(tasks) and fmean(x - y for x, y in (task.values for task in tasks)) > 0
    return max(wins, key=lambda title: wins[title]), True


def round_differences(differences: Sequence[float]) -> Floats:
    """Round differences [n] to remove floating-point noise, so that equal accuracies compare as equal."""
    return np.round(np.asarray(differences, float), 9) + 0.0


def sign_flip_p(differences: Sequence[float], generator: np.random.Generator) -> float:
    """Compute the two-sided p of the mean of n paired differences by flipping signs (Fisher's randomization test).

    Exact up to `EXACT` differences that are not 0, else from 2^16 draws. 1 without a difference.
    """
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


def wilcoxon_p(differences: Sequence[float], generator: np.random.Generator) -> float:
    """Compute the two-sided p of Wilcoxon's signed-rank test without zeros; 1 if nothing is left.

    Exact; if differences of equal size share a rank, `sign_flip_p` of the signed ranks.
    """
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
        highest = max(highest, min(1.0, (len(there) - passed) * value))
        corrected[place] = highest
    return corrected


def resample(task: Task, draws: int, seed: int = 0) -> Floats:
    """Compute percentages of A and of B [R, 2] on R bootstrap draws of the images of each test split.

    Both methods and all seeds are evaluated on the same drawn images; base and novel classes are drawn independently.
    Every target has a separate random stream, so that further data sets in a table change nothing here.
    """
    parts = []
    for number, part in enumerate(task.parts):
        a, b = (np.stack([unpack_bits(row.correct_bits, row.total) for row in side]) for side in part)
        generator = np.random.default_rng(stream_seed(seed, "comparison", "images", *task.problem, number))
        parts.append(resample_accuracy(a, b, draws, generator))
    if len(parts) == 1:
        return parts[0]
    base, novel = parts
    total = base + novel
    return np.divide(2 * base * novel, total, out=np.zeros_like(total), where=total > 0)


def resample_accuracy(a: NDArray[np.bool_], b: NDArray[np.bool_], draws: int, generator: np.random.Generator) -> Floats:
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


def pair_up(lines: Mapping[str, pd.DataFrame], a: str, b: str, measure: Measure) -> tuple[list[Task], tuple[str, ...]]:
    """Find the tasks that rows `a` and `b` share, and describe in sentences everything that is left out.

    Only test splits count. If any row has targets of other data sets than it was trained on, the one trained on is
    left out, as in the paper's averages. Limited results count only with the same images, and if there is no unlimited
    result.
    """
    left_out = LeftOut()
    away = measure == "accuracy" and any(_is_away(frame).any() for frame in lines.values())
    mine, theirs = (_by_problem(lines[title], measure, away, title, left_out) for title in (a, b))
    for (title, own), (rival, other) in permutations(((a, mine), (b, theirs))):
        for problem, by_seed in own.items():
            for seed in by_seed.keys() - other.get(problem, {}).keys():
                left_out.add(f"{rival} lacks results that {title} has, left out", problem[1], seed)
    shared = sorted(mine.keys() & theirs.keys(), key=lambda problem: (dataset_order(problem[1]), problem))
    # With several training data sets a target alone does not identify a task.
    several = away and len({source for source, _ in shared}) > 1
    tasks = []
    for problem in shared:
        seeds = sorted(mine[problem].keys() & theirs[problem].keys())
        pairs = [Pair(seed, mine[problem][seed], theirs[problem][seed]) for seed in seeds]
        if alike := _with_same_images(pairs, problem[1], f"{a} and {b}", left_out):
            name = f"{problem[1]} from {problem[0]}" if several else problem[1]
            tasks.append(Task(problem, name, tuple(alike)))
    whole = [task for task in tasks if not task.limited]
    for task in tasks if whole else []:
        if task.limited:
            left_out.add(f"{a} and {b}, limited to the first images and left out beside whole results", task.name)
    for task in whole or tasks:
        for pair in task.pairs:
            for title, rows in ((a, pair.a), (b, pair.b)):
                if not all(isinstance(row.correct_bits, str) for row in rows):
                    reason = f"No interval, as {title} has counts without the answers to single images "
                    reason += "(`procap eval --force` counts again and keeps them)"
                    left_out.add(reason, task.name, pair.seed)
    return whole or tasks, left_out.sentences()


class LeftOut:
    """Collect what a comparison leaves out: reasons, and the data sets and seeds they apply to."""

    def __init__(self) -> None:
        self._places: dict[str, dict[str, set[int]]] = {}

    def add(self, reason: str, place: str, seed: int | None = None) -> None:
        seeds = self._places.setdefault(reason, {}).setdefault(place, set())
        if seed is not None:
            seeds.add(seed)

    def sentences(self) -> tuple[str, ...]:
        """Format one sentence per reason: `reason: place, place (seeds 1, 2); place (seed 3).`"""
        found = []
        for reason, places in self._places.items():
            names: dict[tuple[int, ...], list[str]] = {}
            for name in sorted(places, key=dataset_order):
                names.setdefault(tuple(sorted(places[name])), []).append(name)
            words = (", ".join(own) + (f" ({format_seeds(seeds)})" if seeds else "") for seeds, own in names.items())
            found.append(f"{reason}: {'; '.join(words)}.")
        return tuple(found)


def format_seeds(seeds: Sequence[int]) -> str:
    """Format seeds: `seed 1`, `seeds 1, 2`."""
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _value(accuracies: Sequence[float]) -> float:
    return harmonic_mean(*accuracies) if len(accuracies) == 2 else accuracies[0]


def _is_away(frame: pd.DataFrame) -> pd.Series:
    return (frame.target_dataset != frame.dataset) & (frame.split == "test")


def _by_problem(
    frame: pd.DataFrame, measure: Measure, away: bool, title: str, left_out: LeftOut
) -> dict[tuple[str, str], dict[int, Results]]:
    """Group the results of one row by problem and seed; for a harmonic mean base before novel."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    marked = frame.assign(half=is_half(frame), away=_is_away(frame))
    for row in marked.itertuples():
        seed, source = int(row.seed), str(row.dataset)
        name = f"{row.target_dataset}" if row.target_classes == "all" else f"{row.target_dataset}:{row.target_classes}"
        if row.split != "test":
            left_out.add(f"{title} on images that are no test images, left out", str(row.target), seed)
        elif measure == "hm" and not row.half:
            left_out.add(f"{title} on targets that are no half of its own classes, left out", name, seed)
        elif away and not row.away:
            left_out.add("The data set trained on is no target here, left out", name, seed)
        else:
            problem = source, source if measure == "hm" else name
            parts = found.setdefault(problem, {}).setdefault(seed, {})
            if parts.setdefault(str(row.target_classes), row) is not row:
                left_out.add(f"{title} has more than one run of a seed, and all but the first are left out", name, seed)
    complete: dict[tuple[str, str], dict[int, Results]] = {}
    for problem, by_seed in found.items():
        for seed, parts in by_seed.items():
            if measure == "hm" and len(parts) < 2:
                left_out.add(f"{title} with one half alone, left out", problem[1], seed)
                continue
            names = ("base", "novel") if measure == "hm" else tuple(parts)
            complete.setdefault(problem, {})[seed] = tuple(parts[name] for name in names)
    return complete


def _with_same_images(pairs: Sequence[Pair], place: str, who: str, left_out: LeftOut) -> list[Pair]:
    """Keep the pairs with the images that most seeds have; unlimited results before limited ones."""

    def images(rows: Results) -> tuple[Any, ...]:
        return tuple((row.manifest, row.images, row.total) for row in rows)

    groups: dict[Any, list[Pair]] = {}
    for pair in pairs:
        if images(pair.a) == images(pair.b):
            groups.setdefault(images(pair.a), []).append(pair)
        else:
            reason = f"{who} were tested on different images (another packing, or a limit), left out"
            left_out.add(reason, place, pair.seed)
    kept = max(groups.values(), key=lambda own: (not any(row.limited for row in own[0].a), len(own)), default=[])
    for own in groups.values():
        for pair in own if own is not kept else []:
            left_out.add(f"{who} were tested on other images than with most seeds, left out", place, pair.seed)
    return kept
