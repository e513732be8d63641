"""Which results of two lines of a table may be compared: the same data sets, seeds and images, and what is left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from statistics import fmean
from typing import Literal

from benchmarks.results.scores import Score, dataset_order, describe_variant, is_half, labels, method_order
from runner.results import EvalResult, harmonic_mean

Figure = Literal["hm", "accuracy"]

Problem = tuple[str, str]
"""The data set trained on, and what it was tested on: a target, or its own name for the two halves of its classes."""

Results = tuple[EvalResult, ...]
"""What one figure is made of: the results of base and novel classes, or the one of a target."""


WITHOUT_ANSWERS = (
    "No interval, as {} has counts without the answers to single images "
    "(`procap eval --force` counts again and keeps them)"
)


class Missing:
    """What was left out of a comparison: reasons, and where each holds."""

    def __init__(self) -> None:
        self._places: dict[str, dict[str, set[int]]] = {}

    def add(self, reason: str, place: str, seed: int | None = None) -> None:
        seeds = self._places.setdefault(reason, {}).setdefault(place, set())
        if seed is not None:
            seeds.add(seed)

    def sentences(self) -> tuple[str, ...]:
        """One for each reason: `reason: place, place (seeds 1, 2); place (seed 3).`"""
        return tuple(f"{reason}: {_places(places)}." for reason, places in self._places.items())


def _places(places: Mapping[str, set[int]]) -> str:
    names: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(places, key=dataset_order):
        names.setdefault(tuple(sorted(places[name])), []).append(name)
    return "; ".join(", ".join(own) + (f" ({said_seeds(seeds)})" if seeds else "") for seeds, own in names.items())


def said_seeds(seeds: Sequence[int]) -> str:
    """`seed 1`, `seeds 1, 2`."""
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


@dataclass(frozen=True)
class Pair:
    """Results of A and B with one seed, of the same images in the same order."""

    seed: int
    a: Results
    b: Results

    @property
    def figures(self) -> tuple[float, float]:
        """In percent, of A and of B."""
        return figure([result.accuracy for result in self.a]), figure([result.accuracy for result in self.b])


@dataclass(frozen=True)
class Task:
    """A data set or a target, with one pair for each seed; every pair is of the same images."""

    problem: Problem
    name: str
    pairs: tuple[Pair, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(pair.seed for pair in self.pairs)

    @property
    def limited(self) -> bool:
        return any(result.limited for result in self.pairs[0].a)

    @property
    def has_answers(self) -> bool:
        """Whether every result says which images were right."""
        return all(result.correct_bits is not None for pair in self.pairs for result in (*pair.a, *pair.b))

    @property
    def images(self) -> int:
        return sum(result.total for result in self.pairs[0].a)

    @property
    def parts(self) -> list[tuple[Results, Results]]:
        """The results of A and of B over seeds, of each part of the figure."""
        sides = ((pair.a, pair.b) for pair in self.pairs)
        by_side = zip(*sides, strict=True)
        a, b = (list(zip(*side, strict=True)) for side in by_side)
        return list(zip(a, b, strict=True))

    @property
    def figures(self) -> tuple[float, float]:
        """Of A and of B: for two halves the harmonic mean of mean base and mean novel accuracy over seeds."""
        means = [[fmean(result.accuracy for result in side) for side in part] for part in self.parts]
        a, b = zip(*means, strict=True)
        return figure(a), figure(b)

    @property
    def differences(self) -> list[float]:
        """A minus B, by seed."""
        return [a - b for a, b in (pair.figures for pair in self.pairs)]


def figure(accuracies: Sequence[float]) -> float:
    """The harmonic mean of two accuracies, one as it is."""
    return harmonic_mean(*accuracies) if len(accuracies) == 2 else accuracies[0]


def lines_of(scores: Iterable[Score]) -> dict[str, list[Score]]:
    """Scores by the title of the line that a table of all of them gives them."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], list[Score]] = {}
    for score in scores:
        found.setdefault((score.config.method, tuple(describe_variant(score.config).items())), []).append(score)
    keys = sorted(found, key=lambda key: (method_order(key[0]), key[1]))
    titles = labels([(method, dict(facts)) for method, facts in keys])
    return {title: found[key] for title, key in zip(titles, keys, strict=True)}


def figure_of(lines: Mapping[str, Sequence[Score]]) -> Figure:
    """HM where any run was trained on base classes and tested on a half, else accuracy."""
    return "hm" if any(is_half(score) for scores in lines.values() for score in scores) else "accuracy"


def pair_up(lines: Mapping[str, Sequence[Score]], a: str, b: str, kind: Figure) -> tuple[list[Task], tuple[str, ...]]:
    """The tasks that lines `a` and `b` share, and sentences on everything of theirs that is left out.

    Test splits alone count. Where any line has targets of other data sets than it was trained on, the one trained on is
    left out, as in the paper's averages. Of limited results only those of the same images count, and only where there
    is no whole one.
    """
    missing = Missing()
    away = kind == "accuracy" and any(_is_away(score) for scores in lines.values() for score in scores)
    mine, theirs = (_found(lines[title], kind, away, title, missing) for title in (a, b))
    for (title, own), (rival, other) in permutations(((a, mine), (b, theirs))):
        for problem, by_seed in own.items():
            for seed in by_seed.keys() - other.get(problem, {}).keys():
                missing.add(f"{rival} lacks results that {title} has, left out", problem[1], seed)
    trained_on = {source for source, _ in mine.keys() & theirs.keys()}
    tasks = []
    for problem in sorted(mine.keys() & theirs.keys(), key=lambda problem: (dataset_order(problem[1]), problem)):
        # Few lines are trained on several data sets and tested on others; then a target alone says too little.
        several = kind == "accuracy" and away and len(trained_on) > 1
        name = f"{problem[1]} from {problem[0]}" if several else problem[1]
        seeds = sorted(mine[problem].keys() & theirs[problem].keys())
        pairs = [Pair(seed, mine[problem][seed], theirs[problem][seed]) for seed in seeds]
        if alike := _of_the_same_images(pairs, problem[1], f"{a} and {b}", missing):
            tasks.append(Task(problem, name, tuple(alike)))
    whole = [task for task in tasks if not task.limited]
    for task in tasks if whole else []:
        if task.limited:
            missing.add(f"{a} and {b}, limited to the first images and left out beside whole results", task.name)
    kept = whole or tasks
    for task in kept:
        for pair in task.pairs:
            for title, results in ((a, pair.a), (b, pair.b)):
                if any(result.correct_bits is None for result in results):
                    missing.add(WITHOUT_ANSWERS.format(title), task.name, pair.seed)
    return kept, missing.sentences()


def _is_away(score: Score) -> bool:
    return score.target.dataset != score.config.dataset and score.target.split == "test"


def _found(
    scores: Sequence[Score], kind: Figure, away: bool, title: str, missing: Missing
) -> dict[Problem, dict[int, Results]]:
    """What there is of one line, by problem and seed."""
    found: dict[Problem, dict[int, dict[str, EvalResult]]] = {}
    for score in scores:
        target, seed = score.target, score.config.seed
        name = target.dataset if target.classes == "all" else f"{target.dataset}:{target.classes}"
        if target.split != "test":
            missing.add(f"{title} on images that are no test images, left out", str(target), seed)
        elif kind == "hm" and not is_half(score):
            missing.add(f"{title} on targets that are no half of its own classes, left out", name, seed)
        elif away and not _is_away(score):
            missing.add("The data set trained on is no target here, left out", name, seed)
        else:
            problem = (score.config.dataset, score.config.dataset if kind == "hm" else name)
            parts = found.setdefault(problem, {}).setdefault(seed, {})
            if parts.setdefault(target.classes, score.result) is not score.result:
                missing.add(f"{title} has more than one run of a seed, and all but the first are left out", name, seed)
    wanted = ("base", "novel")
    complete: dict[Problem, dict[int, Results]] = {}
    for problem, by_seed in found.items():
        for seed, parts in by_seed.items():
            if kind == "hm" and len(parts) < len(wanted):
                missing.add(f"{title} with one half alone, left out", problem[1], seed)
                continue
            names = wanted if kind == "hm" else tuple(parts)
            complete.setdefault(problem, {})[seed] = tuple(parts[name] for name in names)
    return complete


def _images(results: Results) -> tuple[tuple[str, int, int], ...]:
    return tuple((result.manifest_digest, result.dataset_size, result.total) for result in results)


def _of_the_same_images(pairs: Sequence[Pair], place: str, who: str, missing: Missing) -> list[Pair]:
    """The pairs of the images that most seeds have; whole ones before limited ones."""
    alike = [pair for pair in pairs if _images(pair.a) == _images(pair.b)]
    groups: dict[object, list[Pair]] = {}
    for pair in alike:
        groups.setdefault(_images(pair.a), []).append(pair)
    kept = max(groups.values(), key=lambda group: (not _limited(group[0]), len(group)), default=[])
    for pair in pairs:
        if not any(pair is other for other in alike):
            missing.add(
                f"{who} were tested on different images (another packing, or a limit), left out", place, pair.seed
            )
        elif not any(pair is other for other in kept):
            missing.add(f"{who} were tested on other images than with most seeds, left out", place, pair.seed)
    return kept


def _limited(pair: Pair) -> bool:
    return any(result.limited for result in pair.a)
