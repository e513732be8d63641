"""Whether a printed figure follows from other printed ones, in exact fractions.

A figure with two decimals is known to half a hundredth. What follows from such figures is known to an interval, and a
printed result disagrees only if no true values that round to what is printed could give it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Kind = Literal["HM", "average", "average HM", "target mean", "other table", "data set"]
Reading = Literal["HM of averages", "mean of HMs"]

HALF_UNIT = Fraction(1, 200)


@dataclass(frozen=True)
class Interval:
    """Where a true percentage lies, ends included."""

    low: Fraction
    high: Fraction

    def gives(self, printed: float) -> bool:
        """Whether a true value in here can be printed so, whichever way a tie is rounded."""
        rounded = known(printed)
        return rounded.low <= self.high and self.low <= rounded.high


@dataclass(frozen=True)
class Finding:
    """A printed figure that disagrees with what its own or another table gives: `recomputed`, in [low, high].

    where: method and data set as printed. remark: what would explain it.
    """

    table: str
    where: str
    printed: float
    recomputed: float
    low: float
    high: float
    kind: Kind
    remark: str = ""


@dataclass(frozen=True)
class Check:
    """A printed figure that was held against others. finding: None where it agrees.

    readings: of an average harmonic mean, those that give what is printed.
    """

    table: str
    where: str
    kind: Kind
    finding: Finding | None = None
    readings: tuple[Reading, ...] = ()


def known(printed: float) -> Interval:
    """What a percentage printed with two decimals says; none is below 0 or above 100."""
    return Interval(max(_exact(printed) - HALF_UNIT, Fraction(0)), min(_exact(printed) + HALF_UNIT, Fraction(100)))


def harmonic(base: Interval, novel: Interval) -> Interval:
    """The harmonic mean of two percentages: it grows with both."""
    return Interval(_hm(base.low, novel.low), _hm(base.high, novel.high))


def mean(parts: Sequence[Interval]) -> Interval:
    """The mean of several percentages."""
    return Interval(_mean([part.low for part in parts]), _mean([part.high for part in parts]))


def check_hm(table: str, where: str, base: float, novel: float, hm: float) -> Check:
    """The harmonic mean of one data set against its base and novel accuracy."""
    centre = _hm(_exact(base), _exact(novel))
    return _check(table, where, "HM", hm, centre, harmonic(known(base), known(novel)), _hm_remark(base, novel, hm))


def check_mean(table: str, where: str, kind: Kind, parts: Sequence[float], printed: float) -> Check:
    """A mean against the figures that it is the mean of."""
    centre = _mean([_exact(part) for part in parts])
    return _check(table, where, kind, printed, centre, mean([known(part) for part in parts]))


def check_average_hm(table: str, where: str, base: float, novel: float, hm: float, hms: Sequence[float] = ()) -> Check:
    """An average line's harmonic mean, read as that of the averages and, with `hms`, as the mean of the data sets' own.

    It agrees if one of the readings gives it; a finding is told by the reading that comes nearest.
    """
    ways: dict[Reading, tuple[Fraction, Interval]] = {
        "HM of averages": (_hm(_exact(base), _exact(novel)), harmonic(known(base), known(novel)))
    }
    if hms:
        ways["mean of HMs"] = (_mean([_exact(part) for part in hms]), mean([known(part) for part in hms]))
    readings = tuple(reading for reading, (_, interval) in ways.items() if interval.gives(hm))
    if readings:
        return Check(table, where, "average HM", readings=readings)
    nearest = min(ways, key=lambda reading: abs(ways[reading][0] - _exact(hm)))
    return _check(table, where, "average HM", hm, *ways[nearest], f"nearest reading: {nearest}")


def check_same(table: str, where: str, printed: float, elsewhere: float, remark: str) -> Check:
    """A figure that two tables print: nothing was computed between them, so it has to be the same to the last digit."""
    finding = Finding(table, where, printed, elsewhere, elsewhere, elsewhere, "other table", remark)
    return Check(table, where, "other table", None if printed == elsewhere else finding)


def check_count(table: str, where: str, printed: int, count: int, within: int, remark: str) -> Check:
    """A printed number of things against their count; `within` is half of its last printed place."""
    finding = Finding(table, where, printed, count, count - within, count + within, "data set", remark)
    return Check(table, where, "data set", None if abs(printed - count) <= within else finding)


def _check(
    table: str, where: str, kind: Kind, printed: float, centre: Fraction, interval: Interval, remark: str = ""
) -> Check:
    if interval.gives(printed):
        return Check(table, where, kind)
    low, high = float(interval.low), float(interval.high)
    return Check(table, where, kind, Finding(table, where, printed, float(centre), low, high, kind, remark))


def _exact(printed: float) -> Fraction:
    # The shortest decimal of a float is what was printed; the float itself is a hair beside it.
    return Fraction(str(printed))


def _mean(numbers: Sequence[Fraction]) -> Fraction:
    return sum(numbers, Fraction()) / len(numbers)


def _hm(base: Fraction, novel: Fraction) -> Fraction:
    return 2 * base * novel / (base + novel) if base + novel else Fraction(0)


def _hm_remark(base: float, novel: float, hm: float) -> str:
    """Which base or novel accuracy would give the printed harmonic mean with the other half as printed."""
    values = {"base": _partner(novel, hm), "novel": _partner(base, hm)}
    fits = [f"{name} {value:.2f}" for name, value in values.items() if value is not None]
    return f"fits {' or '.join(fits)}" if fits else "fits no base or novel accuracy"


def _partner(half: float, hm: float) -> float | None:
    """The other half of a harmonic mean, None where it would be no percentage."""
    rest = 2 * _exact(half) - _exact(hm)
    value = _exact(hm) * _exact(half) / rest if rest > 0 else Fraction(101)
    return float(value) if value <= 100 else None
