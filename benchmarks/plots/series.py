"""What figures of base and novel accuracy are drawn from: every method's figures, of a suite or of a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import AVERAGE
from benchmarks.results.scores import Cell, Score, images_per_second, timed
from benchmarks.tables.helpers import titled
from benchmarks.tables.plain import Row, Table
from runner.config import Target

if TYPE_CHECKING:
    from benchmarks.results.suite import SuiteResults

Halves = tuple[Cell | None, Cell | None, Cell | None]
RADAR = ("coop", "cocoop", "maple", "procap")
"""The methods of the paper's figure 1b."""


@dataclass(frozen=True)
class Series:
    """One method of a comparison. Its mappings are by data set, `AVERAGE` among them where all data sets are there.

    halves: base, novel, harmonic mean, of every data set in one order. speeds: images per second, decoding included.
    losses: cross-entropy of each epoch, one list for each seed. published: the figures are the paper's.
    """

    title: str
    method: str
    halves: Mapping[str, Halves]
    speeds: Mapping[str, float] = field(default_factory=dict)
    losses: Mapping[str, list[list[float]]] = field(default_factory=dict)
    published: bool = False

    def hm(self, dataset: str) -> Cell | None:
        """None where it is missing."""
        return self.halves.get(dataset, (None, None, None))[2]


def of_table(table: Table, scores: Sequence[Score]) -> list[Series]:
    """The methods of a table; `scores` are those that it was made of."""
    rows: dict[str, list[Row]] = {title: [] for title in table.titles}
    nothing: dict[str, Halves] = dict.fromkeys(table.datasets, (None, None, None))
    for row in (*table.rows, *table.averages):
        rows[row.title].append(row)
    found = []
    for title, own in rows.items():
        trained = [score for score in scores if table.title_of.get(score.config.path) == title]
        speeds = {row.dataset: row.images_per_second for row in own if row.images_per_second}
        halves = nothing | {row.dataset: row.cells() for row in own}
        found.append(Series(title, own[0].method, halves, speeds, _losses(trained)))
    return found


def of_suite(done: SuiteResults) -> list[Series]:
    """The variants of a suite, called as in its tables."""
    found = []
    for title, variant in titled(done).items():
        halves: dict[str, Halves] = {name: done.halves(variant, name) for name in done.datasets}
        tested = {
            name: [score for half in ("base", "novel") for score in done.found(variant, name, Target(name, half))]
            for name in done.datasets
        }
        rates = {name: images_per_second(scores) for name, scores in tested.items() if timed(scores)}
        speeds = {name: rate for name, rate in rates.items() if rate}
        if len(done.datasets) > 1:
            halves[AVERAGE] = done.average_halves(variant)
            if len(speeds) == len(done.datasets):
                speeds[AVERAGE] = sum(speeds.values()) / len(speeds)
        losses = _losses(score for scores in tested.values() for score in scores)
        found.append(Series(title, variant.method, halves, speeds, losses))
    return found


def of_paper(datasets: Iterable[str], methods: Iterable[str]) -> list[Series]:
    """What the paper prints of our methods on these data sets."""
    found = []
    for method in methods:
        lines = {name: published.halves(method, name) for name in datasets}
        halves: dict[str, Halves] = {
            name: (_printed(line.base), _printed(line.novel), _printed(line.hm)) for name, line in lines.items() if line
        }
        if halves:
            title = next(line.method for line in lines.values() if line)
            found.append(Series(f"{title} (published)", method, halves, published=True))
    return found


def _printed(figure: float) -> Cell:
    return Cell(figure, (figure,), ())


def _losses(scores: Iterable[Score]) -> dict[str, list[list[float]]]:
    """By data set, once for each run."""
    runs = {score.config.path: score for score in scores}
    found: dict[str, list[list[float]]] = {}
    for score in runs.values():
        losses = [epoch.terms["ce"] for epoch in score.training.epochs if "ce" in epoch.terms]
        if losses:
            found.setdefault(score.config.dataset, []).append(losses)
    return found
