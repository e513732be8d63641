"""Base-to-novel tables: base, novel, harmonic mean and speed of every method on every data set, and other targets.

Accuracies are percentages from integer counts; several seeds give mean ± sample standard deviation. A data set's
harmonic mean is that of mean base and mean novel accuracy; the average's is that of average base and average novel
accuracy, as in the paper's main table. A missing cell is never averaged over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.scores import (
    TITLES,
    Cell,
    Score,
    average,
    cell_of,
    dataset_order,
    hm_of,
    images_per_second,
    labels,
    method_order,
    variant,
    variants_of,
)

AVERAGE = "Average"
RECIPE = ("optimizer", "lr", "epochs", "batch_size")
"""The fields of a changed recipe that a caption names."""


@dataclass(frozen=True)
class Row:
    """One method on one data set, or on the average of all."""

    dataset: str
    method: str
    title: str
    base: Cell | None
    novel: Cell | None
    hm: Cell | None
    images_per_second: float | None
    images_per_second_model: float | None
    train_seconds: float | None

    def cells(self) -> tuple[Cell | None, Cell | None, Cell | None]:
        return self.base, self.novel, self.hm


@dataclass(frozen=True)
class TargetRow:
    """One trained method on one target that is not a half of its own data set's test images."""

    trained_on: str
    method: str
    title: str
    target: str
    accuracy: Cell


@dataclass(frozen=True)
class Table:
    """Rows by data set, then method; `averages` has one row per method where there are several data sets.

    title_of: the title of the row that each run, named by its path, went into.
    variants: the data sets that are not as published, and how they differ.
    """

    rows: tuple[Row, ...]
    averages: tuple[Row, ...]
    others: tuple[TargetRow, ...]
    notes: tuple[str, ...]
    title_of: Mapping[str, str]
    variants: Mapping[str, str]

    @property
    def datasets(self) -> list[str]:
        return list(dict.fromkeys(row.dataset for row in self.rows))

    @property
    def titles(self) -> list[str]:
        return list(dict.fromkeys(row.title for row in self.rows))


def build_table(scores: Iterable[Score]) -> Table:
    """The table of all `scores`; runs that differ in more than data set and seed get rows of their own."""
    kept, doubts = _one_per_seed(scores)
    keys = sorted(
        {(score.config.method, tuple(variant(score.config).items())) for score in kept},
        key=lambda key: (method_order(key[0]), key[1]),
    )
    variants = [(method, dict(facts)) for method, facts in keys]
    titles = labels(variants)
    titled = dict(zip(keys, titles, strict=True))
    title_of = {s.config.path: titled[s.config.method, tuple(variant(s.config).items())] for s in kept}
    halves: dict[tuple[str, str, str], list[Score]] = {}
    others: dict[tuple[str, str, str, str], list[Score]] = {}
    for score in kept:
        config = score.config
        title = title_of[config.path]
        if _is_half(score):
            halves.setdefault((config.dataset, config.method, title), []).append(score)
        else:
            trained_on = f"{config.dataset}:{config.classes}"
            others.setdefault((trained_on, config.method, title, str(score.target)), []).append(score)
    order = {title: position for position, title in enumerate(titles)}
    rows = [_row(*key, found) for key, found in halves.items()]
    rows.sort(key=lambda row: (dataset_order(row.dataset), order[row.title]))
    averages = _averages(rows)
    target_rows = []
    for (trained_on, method, title, target), found in others.items():
        cell = cell_of(found)
        assert cell is not None
        target_rows.append(TargetRow(trained_on, method, title, target, cell))
    target_rows.sort(
        key=lambda row: (row.trained_on, dataset_order(row.target.partition(":")[0]), row.target, order[row.title])
    )
    changed = variants_of(kept)
    foot = [f"{name}: {words}; not comparable with published figures." for name, words in changed.items()]
    notes = (*_notes(rows, averages, target_rows, variants), *foot, *doubts, *_unrated(kept, title_of), *_unequal(kept))
    return Table(tuple(rows), tuple(averages), tuple(target_rows), notes, title_of, changed)


def _is_half(score: Score) -> bool:
    own = score.target.dataset == score.config.dataset and score.target.split == "test"
    return own and score.config.classes == "base" and score.target.classes in ("base", "novel")


def _one_per_seed(scores: Iterable[Score]) -> tuple[list[Score], list[str]]:
    """Drop all but the first of scores that would share a cell and a seed, and say so."""
    first: dict[object, Score] = {}
    doubts = []
    for score in scores:
        config = score.config
        key = (config.method, config.dataset, config.seed, tuple(variant(config).items()), score.target)
        if key in first:
            other = first[key].config.path
            doubts.append(f"{config.path} is left out: it differs from {other} in its recipe or picks alone.")
        first.setdefault(key, score)
    return list(first.values()), list(dict.fromkeys(doubts))


def _row(dataset: str, method: str, title: str, scores: Sequence[Score]) -> Row:
    base, novel = (cell_of(s for s in scores if s.target.classes == half) for half in ("base", "novel"))
    seconds = {score.config.seed: score.training.seconds for score in scores if score.config.recipe.epochs}
    return Row(
        dataset,
        method,
        title,
        base,
        novel,
        hm_of(base, novel),
        images_per_second(scores),
        images_per_second(scores, model_only=True),
        fmean(seconds.values()) if seconds else None,
    )


def _averages(rows: Sequence[Row]) -> list[Row]:
    """Each method's average over every data set of the table; nothing where one is missing."""
    datasets = {row.dataset for row in rows}
    if len(datasets) < 2:
        return []
    found = []
    for title in dict.fromkeys(row.title for row in rows):
        own = [row for row in rows if row.title == title]
        complete = len(own) == len(datasets)
        base = average([row.base for row in own]) if complete else None
        novel = average([row.novel for row in own]) if complete else None
        found.append(
            Row(
                AVERAGE,
                own[0].method,
                title,
                base,
                novel,
                hm_of(base, novel),
                _mean([row.images_per_second for row in own]) if complete else None,
                _mean([row.images_per_second_model for row in own]) if complete else None,
                _mean([row.train_seconds for row in own]) if complete else None,
            )
        )
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return fmean(there) if len(there) == len(values) else None


def mean_of_hms(rows: Sequence[Row], title: str) -> Cell | None:
    """The mean of the data sets' harmonic means: the other reading of an average HM, as the paper's stability table."""
    return average([row.hm for row in rows if row.title == title])


def _notes(
    rows: Sequence[Row],
    averages: Sequence[Row],
    others: Sequence[TargetRow],
    variants: Sequence[tuple[str, Mapping[str, str]]],
) -> list[str]:
    cells = [cell for row in rows for cell in row.cells() if cell] + [row.accuracy for row in others]
    notes = ["Accuracy in %, computed from integer counts; HM is the harmonic mean of base and novel accuracy."]
    if averages:
        means = [(row.title, mean_of_hms(rows, row.title)) for row in averages if row.hm]
        listed = "; ".join(f"{title} {cell.mean:.2f}" for title, cell in means if cell)
        also = f" The mean of the data sets' HMs is: {listed}." if listed else ""
        notes.append(f"Average's HM is the harmonic mean of average base and average novel accuracy.{also}")
    seeds = sorted({cell.seeds for cell in cells})
    if any(cell.std is not None for cell in cells):
        notes.append("± is the sample standard deviation over seeds (ddof = 1).")
    if len(seeds) == 1:
        notes.append(f"n = {len(seeds[0])}: seed{'s' * (len(seeds[0]) > 1)} {', '.join(map(str, seeds[0]))}.")
    elif seeds:
        notes.append("Seeds differ between cells: n is written beside each; there is no HM or average across them.")
    if rows:
        notes.append(
            "FPS: images per second in the evaluation of both halves, decoding included, warm-up left out; "
            "training s: training alone. Both are of the machine that ran it."
        )
    notes += _setting(variants)
    if any(cell.limited for cell in cells):
        notes.append(
            "† limited: only the first images of a test set were evaluated; never averaged with whole results."
        )
    return notes


def _setting(variants: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """What the runs of the table have in common, and the fields of a changed recipe in which the methods differ."""
    values: dict[str, dict[str, list[str]]] = {}
    for method, facts in variants:
        for name, value in facts.items():
            values.setdefault(name, {}).setdefault(value, []).append(TITLES.get(method, method))
    shared = {name: next(iter(found)) for name, found in values.items() if len(found) == 1}
    parts = [f"backbone {shared['backbone']}"] if "backbone" in shared else []
    if shared.get("pretrained", "default") != "default":
        parts.append(f"weights {shared['pretrained']}")
    if "shots" in shared:
        parts.append(f"{shared['shots']} shots")
    if shared.get("picks") == "imported":
        parts.append("imported few-shot picks")
    if "precision" in shared:
        parts.append(shared["precision"])
    if shared.get("recipe") == "custom":
        fields = ", ".join(
            _recipe_field(name, values[f"recipe.{name}"]) for name in RECIPE if f"recipe.{name}" in values
        )
        parts.append(f"not the published recipes but a changed one: {fields}")
    elif "recipe" in shared:
        parts.append({"own": "each method's own published recipe", "procap": "ProCAP's recipe"}[shared["recipe"]])
    return [f"Setting: {'; '.join(parts)}."] if parts else []


def _recipe_field(name: str, found: Mapping[str, Sequence[str]]) -> str:
    if len(found) == 1:
        return f"{name} {next(iter(found))}"
    return f"{name} " + " / ".join(f"{value} ({', '.join(dict.fromkeys(methods))})" for value, methods in found.items())


def _unrated(scores: Iterable[Score], title_of: Mapping[str, str]) -> list[str]:
    """Methods of which a speed is missing because the image tower did not run."""
    cached = [title_of[s.config.path] for s in scores if _is_half(s) and s.result.features != "computed"]
    if not cached:
        return []
    named = ", ".join(dict.fromkeys(cached))
    return [f"FPS leaves out evaluations with image features from the cache ({named}): procap eval --force times them."]


def _unequal(scores: Sequence[Score]) -> list[str]:
    """Targets whose images are not the same for all runs: their accuracies do not compare."""
    digests: dict[str, set[tuple[int, str]]] = {}
    for score in scores:
        key = (score.result.dataset_size, score.result.manifest_digest)
        digests.setdefault(str(score.target), set()).add(key)
    return [
        f"{target} was evaluated on {len(found)} different packings of its data set: these numbers do not compare."
        for target, found in digests.items()
        if len(found) > 1
    ]
