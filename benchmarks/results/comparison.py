"""Is it better, or is it luck: lines of results compared with one of them on the data, seeds and images that both have.

Counts give the tests over data sets and seeds; intervals need the single images' answers that results keep.

Shapes: R draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

from benchmarks.results.paired_tests import (
    EXACT,
    Floats,
    Kinds,
    holm,
    percentile_interval,
    rounded,
    sign_flip_p,
    wilcoxon_p,
)
from benchmarks.results.pairing import Figure, Task, figure_of, pair_up, said_seeds
from benchmarks.results.scores import Score
from benchmarks.tables.table import Column, Line, Sheet, Value
from procap.errors import UserError, unknown_name
from shards.rng import stream_seed

NAMES: Mapping[Figure, str] = {"hm": "HM", "accuracy": "accuracy"}
DRAWS = 10_000
"""How often test images are drawn for an interval."""


class PValues(NamedTuple):
    """Two-sided, not corrected: two of pairs, one of tasks with the mean over their seeds; None without any."""

    wilcoxon: float | None
    permutation: float | None
    permutation_of_tasks: float | None


@dataclass(frozen=True)
class Comparison:
    """A against B, in percentage points.

    tasks: data sets or targets that both have. interval: 95 %, of `difference` under other test images; None where a
    result keeps no single images' answers. missing: what was left out of it.
    """

    a: str
    b: str
    figure: Figure
    tasks: tuple[Task, ...]
    interval: tuple[float, float] | None
    missing: tuple[str, ...]

    @property
    def figures(self) -> tuple[float, float] | None:
        """Of A and of B: over seeds as `Task.figures`, then the mean over tasks; None where they share nothing."""
        if not self.tasks:
            return None
        a, b = zip(*(task.figures for task in self.tasks), strict=True)
        return fmean(a), fmean(b)

    @property
    def difference(self) -> float | None:
        """A minus B."""
        return self.figures[0] - self.figures[1] if self.figures else None

    @property
    def pairs(self) -> list[float]:
        """A minus B of each task and seed."""
        return [difference for task in self.tasks for difference in task.differences]

    @property
    def means(self) -> list[float]:
        """A minus B of each task."""
        return [a - b for a, b in (task.figures for task in self.tasks)]

    @property
    def seeds(self) -> tuple[int, ...]:
        """Those of every task, nothing where they are not the same."""
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
        """Sample standard deviation (ddof = 1) over seeds of the mean over tasks; None unless all have equal seeds."""
        if len(self.seeds) < 2:
            return None
        return stdev(fmean(column) for column in zip(*(task.differences for task in self.tasks), strict=True))

    @property
    def record(self) -> tuple[int, int, int]:
        """Of how many pairs A has the higher figure, the same, and the lower one."""
        signs = np.sign(rounded(self.pairs))
        return int((signs > 0).sum()), int((signs == 0).sum()), int((signs < 0).sum())

    @cached_property
    def p_values(self) -> PValues:
        if not self.tasks:
            return PValues(None, None, None)
        random = np.random.default_rng(stream_seed(0, "comparison", "signs"))
        return PValues(wilcoxon_p(self.pairs, random), sign_flip_p(self.pairs, random), sign_flip_p(self.means, random))


def compare(
    lines: Mapping[str, Sequence[Score]], a: str, b: str, *, figure: Figure | None = None, draws: int = DRAWS
) -> Comparison:
    """Line `a` against line `b` of a table; see `benchmarks.results.pairing.pair_up` for what of them counts.

    figure: None takes HM where any line was trained on base classes and tested on a half, else accuracy. The same
    results give the same interval and p values, to the last digit. Raises UsageError for a line that is not there.
    """
    for title in (a, b):
        if title not in lines:
            raise unknown_name("line", title, lines)
    kind = figure or figure_of(lines)
    tasks, missing = pair_up(lines, a, b, kind)
    interval = None
    if tasks and all(task.has_answers for task in tasks):
        drawn = np.mean([resampled(task, draws) for task in tasks], axis=0)
        interval = percentile_interval(drawn[:, 0] - drawn[:, 1])
    return Comparison(a, b, kind, tuple(tasks), interval, missing)


def resampled(task: Task, draws: int, seed: int = 0) -> Floats:
    """The figures in percent of A and of B [R, 2] on R draws, with replacement, of the images of each test split.

    Both methods and all seeds answer the same drawn images; those of base and novel classes are drawn apart. Every
    target has a stream of its own, so that another data set in the table changes nothing here.
    """
    parts = []
    for number, (a, b) in enumerate(task.parts):
        answers = [np.stack([_answers(result.correct_images()) for result in side]) for side in (a, b)]
        generator = np.random.default_rng(stream_seed(seed, "comparison", "images", *task.problem, number))
        parts.append(Kinds.of(*answers).resampled(draws, generator))
    if len(parts) == 1:
        return parts[0]
    base, novel = parts
    total = base + novel
    return np.divide(2 * base * novel, total, out=np.zeros_like(total), where=total > 0)


def _answers(right: np.ndarray | None) -> np.ndarray:
    assert right is not None
    return right


def reference_of(lines: Mapping[str, Sequence[Score]], figure: Figure) -> tuple[str, bool]:
    """The first line of ProCAP, else the one that is ahead of most others; and whether it was chosen so."""
    own = [title for title, scores in lines.items() if any(score.config.method == "procap" for score in scores)]
    if own:
        return own[0], False
    wins = dict.fromkeys(lines, 0)
    for a in lines:
        for b in lines:
            tasks, _ = pair_up(lines, a, b, figure) if a != b else ([], ())
            wins[a] += bool(tasks) and fmean(x - y for x, y in (task.figures for task in tasks)) > 0
    return max(wins, key=lambda title: wins[title]), True


def comparison_sheet(
    lines: Mapping[str, Sequence[Score]],
    *,
    reference: str | None = None,
    figure: Figure | None = None,
    name: str = "comparison",
    draws: int = DRAWS,
) -> Sheet:
    """One line for each other line of `lines`: how much better the reference is, and whether that may be luck.

    reference: None takes the first line of ProCAP, else the line that is ahead of most others.
    Raises UserError where there are no two lines, UsageError for a reference that is none of them.
    """
    if len(lines) < 2:
        raise UserError("a comparison needs results of two methods, or of two settings of one")
    kind = figure or figure_of(lines)
    chosen, best = (reference, False) if reference else reference_of(lines, kind)
    assert chosen is not None
    found = [compare(lines, chosen, title, figure=kind, draws=draws) for title in lines if title != chosen]
    corrected = [holm([getattr(each.p_values, test) for each in found]) for test in PValues._fields]
    said, each_of = NAMES[kind], "data sets" if kind == "hm" else "targets"
    titles = (f"{said} of {chosen}", said, "Difference", "95 % interval", "W / T / L")
    tests = ("Wilcoxon p", "Permutation p", f"p over {each_of}")
    return Sheet(
        name=name,
        title=f"Better, or luck: {chosen} compared with every other line, {said}",
        labels=("Against", f"Pairs ({each_of})"),
        columns=tuple(Column(column, "") for column in (*titles, *tests)),
        lines=tuple(_line(each, [p[row] for p in corrected]) for row, each in enumerate(found)),
        notes=tuple(_notes(chosen, best, kind, found, draws)),
        wide=True,
    )


def _line(each: Comparison, corrected: Sequence[float | None]) -> Line:
    labels = (each.b, f"{len(each.pairs)} ({len(each.tasks)})")
    if each.figures is None or each.difference is None:
        return Line(labels, (None,) * 8)
    a, b = (Value(mean, None, each.seeds, limited=each.limited) for mean in each.figures)
    difference = Value(each.difference, each.std, each.seeds, limited=each.limited)
    interval = "{:.2f} to {:.2f}".format(*each.interval) if each.interval else None
    tests = (
        f"{getattr(each.p_values, test):.2g} ({holms:.2g})"
        for test, holms in zip(PValues._fields, corrected, strict=True)
    )
    return Line(labels, (a, b, difference, interval, " / ".join(map(str, each.record)), *tests))


def _notes(reference: str, best: bool, kind: Figure, found: Sequence[Comparison], draws: int) -> list[str]:
    said, one = NAMES[kind], "data set" if kind == "hm" else "target"
    if kind == "hm":
        mean = "of each data set the harmonic mean of mean base and mean novel accuracy over seeds, then the mean over "
        mean += "data sets (the mean of HMs, not the HM of averages)"
    else:
        mean = "of each target the mean accuracy over seeds, then the mean over targets"
    there = [each for each in found if each.tasks]
    most = max((len(each.tasks) for each in there), default=1)
    notes = [
        f"Figures are of what both have: {mean}. Difference: {reference} minus the line's, in percentage points of "
        f"{said}; ± is the sample standard deviation over seeds (ddof = 1) of the mean difference.",
        f"95 % interval of the difference: percentile bootstrap, {draws:,} draws with replacement of the images of "
        "each test split, the same drawn images for both methods and all seeds. It is about other test images, with "
        "these trained weights and data sets; what other seeds or few-shot picks would give is not in it.",
        f"W / T / L: wins, ties and losses of {reference}. They and the first two tests are over n pairs of one {one} "
        f"and one seed, the third, a permutation test too, over n {one}s, their seeds averaged; both n are in the "
        "second column. All p are two-sided. Wilcoxon: signed ranks, zeros dropped. Permutation: the sign of each "
        f"difference flipped. Exact up to n = {EXACT}, Wilcoxon beyond where no two differences have one size; else "
        f"{2**EXACT:,} seeded draws.",
        f"Seeds of one {one} share its images and classes and are not independent: where the difference varies "
        f"between {one}s, a p over pairs is too small, and the one over {one}s is to be trusted. With {most} of them "
        f"it cannot be below {2.0 ** (1 - most):.2g}.",
        f"In brackets: p after Holm's correction over the {len(there)} comparisons of this table, each test by itself.",
    ]
    if best:
        notes.append(
            f"{reference} was chosen after the fact, as the line that is ahead of most others: that favours it."
        )
    seeds = dict.fromkeys(each.seeds for each in there)
    if len(seeds) == 1 and all(seeds):
        notes.append(f"{said_seeds(*seeds).capitalize()}.")
    else:
        notes += [f"Against {each.b}: {_seeds(each)}." for each in there]
    images = dict.fromkeys(each.images for each in there)
    if len(images) == 1:
        notes.append(f"Images are those of the test splits, {next(iter(images)):,} of them.")
    else:
        notes += [f"Against {each.b}: {each.images:,} images, those of the test splits." for each in there]
    if any(each.limited for each in found):
        notes.append("† limited: only the first images of a test set were evaluated.")
    notes += [f"{each.b} shares no {one}, seed and images with {reference}." for each in found if not each.tasks]
    return [*notes, *dict.fromkeys(sentence for each in found for sentence in each.missing)]


def _seeds(each: Comparison) -> str:
    """Which seeds are compared of which task."""
    names: dict[tuple[int, ...], list[str]] = {}
    for task in each.tasks:
        names.setdefault(task.seeds, []).append(task.name)
    return "; ".join(f"{said_seeds(seeds)} of {', '.join(own)}" for seeds, own in names.items())
