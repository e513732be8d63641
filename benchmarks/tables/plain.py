"""Base-to-novel tables: base, novel, harmonic mean and speed of every method on every data set, and other targets.

They are printed as the sheets of `benchmarks.tables.runs`.

Accuracies are percentages from integer counts; several seeds give mean ± sample standard deviation. A data set's
harmonic mean is that of mean base and mean novel accuracy; the average's is that of average base and average novel
accuracy, as in the paper's main table. A missing cell is never averaged over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.results.published.tables import AVERAGE
from benchmarks.results.scores import (
    Cell,
    Score,
    average,
    cell_of,
    dataset_order,
    describe_variant,
    hm_of,
    images_per_second,
    is_half,
    labels,
    method_order,
)
from runner.config import RunConfig


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
    """Rows by data set, then method; `averages` has a row per method that is on all of several data sets.

    scores: what it was made of, method by method; left_out: which were not counted, and why.
    title_of: the title of the row of halves that each run, named by its path, went into.
    """

    rows: tuple[Row, ...]
    averages: tuple[Row, ...]
    others: tuple[TargetRow, ...]
    scores: tuple[Score, ...]
    left_out: tuple[str, ...]
    title_of: Mapping[str, str]

    @property
    def datasets(self) -> list[str]:
        return list(dict.fromkeys(row.dataset for row in self.rows))

    @property
    def titles(self) -> list[str]:
        return list(dict.fromkeys(row.title for row in self.rows))


def build_table(scores: Iterable[Score]) -> Table:
    """The table of all `scores`; runs that differ in more than data set and seed get rows of their own."""
    kept, left_out = _one_per_seed(scores)
    kept.sort(key=lambda score: _key(score.config))
    title_of = _titles(score.config for score in kept if is_half(score))
    other_titles = _titles(score.config for score in kept if not is_half(score))
    halves: dict[tuple[str, str, str], list[Score]] = {}
    others: dict[tuple[str, str, str, str], list[Score]] = {}
    for score in kept:
        config = score.config
        if is_half(score):
            halves.setdefault((config.dataset, config.method, title_of[config.path]), []).append(score)
        else:
            trained_on, title = f"{config.dataset}:{config.classes}", other_titles[config.path]
            others.setdefault((trained_on, config.method, title, str(score.target)), []).append(score)
    order = list(dict.fromkeys(title_of.values()))
    rows = [_row(*key, found) for key, found in halves.items()]
    rows.sort(key=lambda row: (dataset_order(row.dataset), order.index(row.title)))
    averages = _averages(rows)
    target_rows = []
    for (trained_on, method, title, target), found in others.items():
        cell = cell_of(found)
        assert cell is not None
        target_rows.append(TargetRow(trained_on, method, title, target, cell))
    order = list(dict.fromkeys(other_titles.values()))
    target_rows.sort(
        key=lambda row: (
            row.trained_on,
            dataset_order(row.target.partition(":")[0]),
            row.target,
            order.index(row.title),
        )
    )
    return Table(tuple(rows), tuple(averages), tuple(target_rows), tuple(kept), tuple(left_out), title_of)


def _key(config: RunConfig) -> tuple[tuple[int, str], str, tuple[tuple[str, str], ...]]:
    """What has rows of its own, in their order. The classes trained on stand beside a title."""
    facts = ((name, value) for name, value in describe_variant(config).items() if name != "classes")
    return method_order(config.method), config.method, tuple(facts)


def _titles(configs: Iterable[RunConfig]) -> dict[str, str]:
    """The title of every run by its path, in the order of rows; it tells apart what is among these runs alone."""
    key_of = {config.path: _key(config) for config in configs}
    keys = sorted(set(key_of.values()))
    titled = dict(zip(keys, labels([(method, dict(facts)) for _, method, facts in keys]), strict=True))
    return {path: titled[key] for path, key in sorted(key_of.items(), key=lambda item: item[1])}


def _one_per_seed(scores: Iterable[Score]) -> tuple[list[Score], list[str]]:
    """Drop all but the first of scores that would share a cell and a seed, and say so."""
    first: dict[object, Score] = {}
    doubts = []
    for score in scores:
        config = score.config
        key = (config.method, config.dataset, config.seed, tuple(describe_variant(config).items()), score.target)
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
    """Each method's average over every data set of the table; no row where there is nothing to say."""
    datasets = {row.dataset for row in rows}
    if len(datasets) < 2:
        return []
    found = []
    for title in dict.fromkeys(row.title for row in rows):
        own = [row for row in rows if row.title == title]
        if len(own) < len(datasets):
            continue
        base, novel = average([row.base for row in own]), average([row.novel for row in own])
        speeds = (
            _mean([row.images_per_second for row in own]),
            _mean([row.images_per_second_model for row in own]),
            _mean([row.train_seconds for row in own]),
        )
        if any(figure is not None for figure in (base, novel, *speeds)):
            found.append(Row(AVERAGE, own[0].method, title, base, novel, hm_of(base, novel), *speeds))
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return fmean(there) if len(there) == len(values) else None


def mean_of_hms(rows: Sequence[Row], title: str) -> Cell | None:
    """The mean of the data sets' harmonic means: the other reading of an average HM, as the paper's stability table."""
    return average([row.hm for row in rows if row.title == title])
