"""Recompute every printed number of the paper that follows from other printed numbers, in exact fractions.

    python -m benchmarks.studies.audit

A number with two decimals is known to half a hundredth. A value computed from such numbers lies in an interval, and a
printed result disagrees only if it is not a rounding of any value in that interval.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from benchmarks.results.metrics import Metric
from benchmarks.results.published import tables
from benchmarks.tables.render import render
from benchmarks.tables.table import Cell, Column, Row, Table
from shards.catalogue import CATALOGUE

Kind = Literal["HM", "average", "average HM", "target mean", "other table", "data set"]
Reading = Literal["HM of averages", "mean of HMs"]

HALF_UNIT = Fraction(1, 200)


@dataclass(frozen=True)
class Interval:
    """The range of a true percentage, ends included."""

    low: Fraction
    high: Fraction

    def gives(self, printed: float) -> bool:
        """Whether a value in the interval can round to `printed`, whichever way a tie is rounded."""
        rounded = known(printed)
        return rounded.low <= self.high and self.low <= rounded.high


@dataclass(frozen=True)
class Check:
    """A printed number and the value `recomputed`, in [low, high], from its own or another table.

    where: method and data set as printed. remark: what would explain a disagreement.
    readings: for an average harmonic mean, the readings that agree with the printed number.
    """

    table: str
    where: str
    kind: Kind
    printed: float
    recomputed: float
    low: float
    high: float
    agrees: bool
    remark: str = ""
    readings: tuple[Reading, ...] = ()


def known(printed: float) -> Interval:
    """Return the interval of a percentage printed with two decimals, within 0 and 100."""
    return Interval(max(_exact(printed) - HALF_UNIT, Fraction(0)), min(_exact(printed) + HALF_UNIT, Fraction(100)))


def harmonic(base: Interval, novel: Interval) -> Interval:
    """Compute the harmonic mean of two percentages, which increases with both."""
    return Interval(_hm(base.low, novel.low), _hm(base.high, novel.high))


def mean(parts: Sequence[Interval]) -> Interval:
    """Average several percentages."""
    return Interval(_mean([part.low for part in parts]), _mean([part.high for part in parts]))


def check_hm(table: str, where: str, base: float, novel: float, hm: float) -> Check:
    """Check the harmonic mean of one data set against its base and novel accuracy."""
    centre = _hm(_exact(base), _exact(novel))
    return _check(table, where, "HM", hm, centre, harmonic(known(base), known(novel)), _hm_remark(base, novel, hm))


def check_mean(table: str, where: str, kind: Kind, parts: Sequence[float], printed: float) -> Check:
    """Check a mean against the numbers it averages."""
    centre = _mean([_exact(part) for part in parts])
    return _check(table, where, kind, printed, centre, mean([known(part) for part in parts]))


def check_average_hm(table: str, where: str, base: float, novel: float, hm: float, hms: Sequence[float] = ()) -> Check:
    """Check an average row's HM, as the HM of the averages and, with `hms`, as the mean of the data sets' HMs.

    It agrees if one of the readings gives it; the nearest reading is compared.
    """
    ways: dict[Reading, tuple[Fraction, Interval]] = {
        "HM of averages": (_hm(_exact(base), _exact(novel)), harmonic(known(base), known(novel)))
    }
    if hms:
        ways["mean of HMs"] = (_mean([_exact(part) for part in hms]), mean([known(part) for part in hms]))
    readings = tuple(reading for reading, (_, interval) in ways.items() if interval.gives(hm))
    nearest = min(readings or ways, key=lambda reading: abs(ways[reading][0] - _exact(hm)))
    return _check(table, where, "average HM", hm, *ways[nearest], f"nearest reading: {nearest}", readings)


def check_same(table: str, where: str, printed: float, elsewhere: float, remark: str) -> Check:
    """Check a number that two tables print; it must be equal to the last digit."""
    same = printed == elsewhere
    return Check(table, where, "other table", printed, elsewhere, elsewhere, elsewhere, same, remark)


def check_count(table: str, where: str, printed: int, count: int, within: int) -> Check:
    """Check a printed count against the number of things; `within` is half of its last printed place."""
    agrees = abs(printed - count) <= within
    low, high = count - within, count + within
    return Check(table, where, "data set", printed, count, low, high, agrees, "counted in our lists")


def _check(
    table: str, where: str, kind: Kind, printed: float, centre: Fraction, interval: Interval, remark: str = "",
    readings: tuple[Reading, ...] = (),
) -> Check:  # fmt: skip
    low, high, agrees = float(interval.low), float(interval.high), interval.gives(printed)
    return Check(table, where, kind, printed, float(centre), low, high, agrees, remark, readings)


def _exact(printed: float) -> Fraction:
    # str() gives the printed decimal; the float itself differs slightly from it.
    return Fraction(str(printed))


def _mean(numbers: Sequence[Fraction]) -> Fraction:
    return sum(numbers, Fraction()) / len(numbers)


def _hm(base: Fraction, novel: Fraction) -> Fraction:
    return 2 * base * novel / (base + novel) if base + novel else Fraction(0)


def _hm_remark(base: float, novel: float, hm: float) -> str:
    """Describe which base or novel accuracy would give the printed harmonic mean with the other one as printed."""
    values = {"base": _partner(novel, hm), "novel": _partner(base, hm)}
    fits = [f"{name} {value:.2f}" for name, value in values.items() if value is not None]
    return f"fits {' or '.join(fits)}" if fits else "fits no base or novel accuracy"


def _partner(half: float, hm: float) -> float | None:
    """Compute the other accuracy of a harmonic mean, None if it would not be a percentage."""
    rest = 2 * _exact(half) - _exact(hm)
    value = _exact(hm) * _exact(half) / rest if rest > 0 else Fraction(101)
    return float(value) if value <= 100 else None


MAIN = "base-to-novel"
IN_MAIN = f"see {MAIN}"
NAMES: Mapping[Kind, str] = {
    "HM": "harmonic means", "average": "averages", "average HM": "harmonic means of averages",
    "target mean": "means over targets", "other table": "figures that stand in two tables",
    "data set": "sizes of data sets",
}  # fmt: skip


@dataclass(frozen=True)
class Audit:
    """All checks of the published tables."""

    checks: tuple[Check, ...]

    @property
    def findings(self) -> list[Check]:
        """The disagreements, in the order of the tables."""
        return [check for check in self.checks if not check.agrees]

    @property
    def readings(self) -> Mapping[tuple[str, str], tuple[Reading, ...]]:
        """The readings of each average harmonic mean that agree, by table and place; may be empty."""
        return {(check.table, check.where): check.readings for check in self.checks if check.kind == "average HM"}


def audit(folder: Path = tables.PUBLISHED) -> Audit:
    """Check every harmonic mean, average, target mean, repeated figure and data set size of the tables in `folder`."""
    parts = (_base_to_novel, _stability, _duration, _transfer, _ablation, _sizes)
    return Audit(tuple(check for part in parts for check in part(folder)))


def audit_table(folder: Path = tables.PUBLISHED) -> Table:
    """Make a table of disagreements, the largest difference first; notes explain the rule and what was not checked."""
    done = audit(folder)
    found = sorted(done.findings, key=lambda finding: -abs(finding.printed - finding.recomputed))
    return Table(
        name="audit",
        title="Printed figures of the paper that disagree with the figures they follow from",
        labels=("Table", "Figure"),
        columns=(
            Column("Printed", ""), Column("Recomputed", "", digits=3), Column("Lowest", "", digits=3),
            Column("Highest", "", digits=3), Column("Difference", "", digits=3), Column("Remark", ""),
        ),
        rows=tuple(Row((finding.table, _figure(finding)), _items(finding), "published") for finding in found),
        notes=_notes(done),
        wide=True,
    )  # fmt: skip


def by_method(rows: Iterable[Any]) -> Mapping[str, list[Any]]:
    """Group the rows of the main table by method as printed, in the order of first appearance."""
    found: dict[str, list[Any]] = {}
    for row in rows:
        found.setdefault(row.method, []).append(row)
    return found


def _base_to_novel(folder: Path) -> Iterator[Check]:
    for method, lines in by_method(tables.base_to_novel(folder)).items():
        yield from _halves(MAIN, method, lines)


def _stability(folder: Path) -> Iterator[Check]:
    table, main = "stability", _main(folder)
    yield from _halves(table, "ProCAP", tables.stability(folder))
    for line in tables.stability(folder):
        where, other, remark = f"ProCAP, {tables.display_name(line.dataset)}", main[line.dataset], IN_MAIN
        if line.dataset == tables.AVERAGE:
            [average] = [check for check in _halves(MAIN, "ProCAP", main.values()) if check.kind == "average HM"]
            remark = f"{MAIN}: {' or '.join(average.readings) or 'no reading'}"
        yield from _same_halves(table, where, line, other, remark)


def _duration(folder: Path) -> Iterator[Check]:
    table, lines, main = "duration", tables.duration(folder), _main(folder)[tables.AVERAGE]
    for line in lines:
        where = f"{line.method}, {line.epochs} epochs"
        yield check_average_hm(table, where, line.base, line.novel, line.hm)
        if line.epochs == max(each.epochs for each in lines):
            yield from _same_halves(table, where, line, main, IN_MAIN)


def _transfer(folder: Path) -> Iterator[Check]:
    yield from _target_means("cross-dataset", tables.cross_dataset(folder))
    yield from _target_means("domain-generalization", tables.domain_generalization(folder))
    sources = {line.method: line.source for line in tables.cross_dataset(folder)}
    for line in tables.domain_generalization(folder):
        plain = line.method.rstrip("*")
        if plain in sources:
            remark = "see cross-dataset" if plain == line.method else f"cross-dataset: {plain}, no star"
            where = f"{line.method}, ImageNet"
            yield check_same("domain-generalization", where, line.source, sources[plain], remark)


def _ablation(folder: Path) -> Iterator[Check]:
    table, main = "ablation", _main(folder)
    for line in tables.ablation(folder):
        yield check_mean(table, f"{line.variant}, Average", "average", [*line.hm.values()], line.average)
        if all(getattr(line, part) for part in tables.COMPONENTS):
            for dataset, hm in line.hm.items():
                where = f"{line.variant}, {tables.display_name(dataset)}"
                yield check_same(table, where, hm, main[dataset].hm, IN_MAIN)


def _sizes(folder: Path) -> Iterator[Check]:
    names = {printed: name for name, printed in tables.DATASETS.items()}
    with (folder / "datasets.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            ours, where = CATALOGUE[names[row["dataset"]]], row["dataset"]
            yield check_count("data sets", f"{where}, classes", int(row["classes"]), ours.classes, 0)
            for split in ("train", "val", "test"):
                if row[split]:
                    printed, within = _count(row[split])
                    count = ours.counts.get(split, 0)
                    yield check_count("data sets", f"{where}, {split}", printed, count, within)


def _count(text: str) -> tuple[int, int]:
    """Parse a count and half of its last printed place: "1.28M" is 1,280,000 within 5,000."""
    if not text.endswith("M"):
        return int(text), 0
    unit = 10 ** (6 - len(text[:-1].partition(".")[2]))
    return round(float(text[:-1]) * 1e6), unit // 2


def _halves(table: str, method: str, lines: Iterable[Any]) -> Iterator[Check]:
    """Check the rows of one method: each data set's harmonic mean, then the averages over them."""
    every = list(lines)
    sets = [line for line in every if line.dataset != tables.AVERAGE]
    for line in sets:
        yield check_hm(table, f"{method}, {tables.display_name(line.dataset)}", line.base, line.novel, line.hm)
    where = f"{method}, {tables.display_name(tables.AVERAGE)}"
    for line in every:
        if line.dataset == tables.AVERAGE and sets:
            yield check_mean(table, f"{where}, base", "average", [each.base for each in sets], line.base)
            yield check_mean(table, f"{where}, novel", "average", [each.novel for each in sets], line.novel)
        if line.dataset == tables.AVERAGE:
            yield check_average_hm(table, where, line.base, line.novel, line.hm, [each.hm for each in sets])


def _same_halves(table: str, where: str, line: Any, main: Any, hm_remark: str) -> Iterator[Check]:
    """Check that base, novel and HM of a row are those of the main table."""
    yield check_same(table, f"{where}, base", line.base, main.base, IN_MAIN)
    yield check_same(table, f"{where}, novel", line.novel, main.novel, IN_MAIN)
    yield check_same(table, f"{where}, HM", line.hm, main.hm, hm_remark)


def _target_means(table: str, lines: Sequence[Any]) -> Iterator[Check]:
    for line in lines:
        where = f"{line.method}, {tables.display_name(tables.AVERAGE)}"
        yield check_mean(table, where, "target mean", [*line.targets.values()], line.target_mean)


def _main(folder: Path) -> dict[str, Any]:
    """Return ProCAP's rows of the main table, by data set."""
    return {line.dataset: line for line in tables.base_to_novel(folder) if line.key == "procap"}


def _figure(finding: Check) -> str:
    return f"{finding.where}, HM" if finding.kind in ("HM", "average HM") else finding.where


def _items(finding: Check) -> tuple[Cell, ...]:
    figures = (finding.printed, finding.recomputed, finding.low, finding.high, finding.printed - finding.recomputed)
    if finding.kind == "data set":
        return (*(f"{figure:,.0f}" for figure in figures), finding.remark)
    return (*(Metric(figure) for figure in figures), finding.remark)


def _notes(done: Audit) -> tuple[str, ...]:
    kinds = Counter(check.kind for check in done.checks)
    counts = ", ".join(f"{count} of {NAMES[kind]}" for kind, count in kinds.items())
    return (
        f"{len(done.checks)} checks of printed figures ({counts}); {len(done.findings)} find one that disagrees.",
        "Rule: a printed percentage is known to ±0.005. Lowest and Highest are the ends of what such figures can give; "
        "a printed result disagrees only if it cannot be a rounding of anything between them. A figure that stands in "
        "two tables has to be the same in both. Difference: printed minus recomputed.",
        *_reading_notes(done),
        "The mean over seeds of a harmonic mean is never above the harmonic mean of the means: it can explain only an "
        "HM with a difference below zero.",
        "Not checked, since nothing else that is printed gives them: base and novel accuracies of single data sets, "
        "accuracies on single targets, standard deviations, base and novel averages of the shorter durations, single "
        "HMs of the reduced variants, figures of runtime.",
    )


def _reading_notes(done: Audit) -> Iterator[str]:
    """Describe for each table which reading of an average harmonic mean agrees, and how often."""
    by_table: dict[str, Counter[str]] = {}
    for (table, _), readings in done.readings.items():
        by_table.setdefault(table, Counter())[" or ".join(readings) or "neither reading"] += 1
    for table, counter in by_table.items():
        counts = "; ".join(f"{reading} in {count} of {counter.total()}" for reading, count in counter.items())
        yield f"Average HM of {table}: {counts}."


if __name__ == "__main__":
    print(render(audit_table(), "md"))
