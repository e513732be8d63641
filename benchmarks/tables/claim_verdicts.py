"""Test a claim of the paper on results.

`Scores`: a row per task (tested data set) and seed, a column per variant and metric. A variant is called by its method
and the values of its key: "procap", "procap 4", "procap w/o KL".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from benchmarks.results.frame import title_method
from benchmarks.results.runtime import explain_broken_report
from benchmarks.results.statistics import sign_flip_p, student_test
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.runtime import newest_measurement, reference_rows
from benchmarks.tables.table import format_number
from benchmarks.tables.transfer import list_targets
from procap.methods import METHODS
from runner.config import Target
from shards.resolve import kind_of_name
from shards.rng import stream_seed

if TYPE_CHECKING:
    import pandas as pd

HALVES = ("base", "novel", "hm")
MEASURED = {"train_seconds": "step_seconds", "images_per_second": "end_to_end_fps"}
"""Metrics, by the measurement in a runtime report."""
SHOWN = 5
"""Number of contrasts that a result lists; of more it lists the lowest and the highest."""
Verdict = Literal["holds", "does not hold", "undecided", "not tested"]


class UntestedError(Exception):
    """Raise if results do not suffice to test a claim; the text is the reason.

    needs_data: they lack data sets. flags: further ones of the command that makes the missing runs.
    """

    def __init__(self, reason: str, *, needs_data: bool = False, flags: str = "") -> None:
        super().__init__(reason)
        self.needs_data, self.flags = needs_data, flags


class Estimate(NamedTuple):
    """A mean with its 95 % interval. p: two-sided, None without a test. test: its name, n and p."""

    mean: float
    low: float
    high: float
    p: float | None
    test: str


Contrasts = Mapping[str, "pd.Series | Estimate"]
"""Differences by task and seed that a claim says are positive, or an estimate of them, by name."""


@dataclass(frozen=True)
class ClaimTest:
    """How a claim is tested.

    contrasts: make differences, each of whose means must be above `above`; None: the claim concerns a picture. wins: on
    how many of n data sets all contrasts must be above it; then means over sets do not count. unit: of the differences.
    against_all: with every method of the suite, so that it cannot hold while results of one are missing.
    """

    contrasts: Callable[[pd.DataFrame], Contrasts] | None
    above: float = 0.0
    wins: Callable[[int], int] | None = None
    unit: str = "points"
    against_all: bool = False


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper: quoted, or paraphrased without quotation marks. suite: whose results test it."""

    name: str
    section: str
    suite: str
    text: str
    measure: str
    test: ClaimTest


class Outcome(NamedTuple):
    """The verdict on a claim, texts for a table, and the estimate that decided."""

    verdict: Verdict
    result: str
    interval: str | None = None
    test: str | None = None
    decisive: Estimate | None = None
    needs_data: bool = False
    flags: str = ""


def read_scores(suite: SuiteResults) -> pd.DataFrame:
    """Read a suite's results; a variant with a missing evaluation has no column. HM is computed for each seed.

    Such variants, and methods of the suite that were not run, are listed in `attrs["missing"]`.
    Own data sets and methods of plug-ins, which no claim mentions, are left out. Where other data sets are tested,
    "source" is the accuracy on the one trained on.
    """
    if suite.suite.published == "runtime":
        return _read_runtime(suite)
    cells: dict[tuple[str, str], dict[tuple[str, int], float]] = {}
    incomplete = set()
    several = len(suite.options.datasets) > 1
    variants = [variant for variant in suite.variants if variant.method in METHODS]
    for variant, dataset in product(variants, filter(lambda name: kind_of_name(name) != "own", suite.options.datasets)):
        label = " ".join(map(str, (variant.method, *variant.key.values())))
        if suite.suite.classes == "base":
            halves = suite.halves(variant, dataset)
            found = [(metric, dataset, cell) for metric, cell in zip(HALVES, halves, strict=True)]
        else:
            others = list_targets(suite, dataset)
            own = "source" if others else "accuracy"
            found = [(own, dataset, suite.metric(variant, dataset, Target(dataset)))]
            for name in others:
                task = f"{dataset} to {name}" if several else name
                found.append(("accuracy", task, suite.metric(variant, dataset, Target(name))))
        for metric, task, cell in found:
            values = zip(cell.seeds, cell.values, strict=True) if cell else ()
            cells.setdefault((label, metric), {}).update({(task, seed): value for seed, value in values})
            incomplete |= set() if cell else {(label, metric)}
    frame = _make_frame({column: own for column, own in cells.items() if column not in incomplete})
    absent = (method for method in suite.suite.methods if method not in suite.options.methods)
    titles = dict.fromkeys(map(title_of, (*(label for label, _ in cells if (label, _) in incomplete), *absent)))
    frame.attrs["missing"] = list(titles)
    return frame


@explain_broken_report()
def _read_runtime(suite: SuiteResults) -> pd.DataFrame:
    """Read median, lowest and highest (in place of seeds) of repeated measurements in reference mode.

    Of an accuracy they are the accuracy and the ends of its 95 % binomial interval over test images.
    """
    from scipy.stats import binomtest

    report = newest_measurement(suite)
    cells: dict[tuple[str, str], dict[tuple[str, int], float]] = {}
    for dataset in suite.options.datasets:
        for row in reference_rows(report, dataset):
            spreads = {
                name: row[key] and [row[key][end] for end in ("median", "lowest", "highest")]
                for name, key in MEASURED.items()
            }
            if row["accuracy"] is not None:
                interval = binomtest(row["correct"], row["test_images"]).proportion_ci()
                spreads["accuracy"] = [row["accuracy"], 100 * interval.low, 100 * interval.high]
            for metric, values in spreads.items():
                numbered = {(dataset, place): value for place, value in enumerate(values or ())}
                cells.setdefault((row["method"], metric), {}).update(numbered)
    return _make_frame({column: own for column, own in cells.items() if own})


def _make_frame(cells: Mapping[tuple[str, str], Mapping[tuple[str, int], float]]) -> pd.DataFrame:
    import pandas as pd

    frame = pd.DataFrame({column: dict(own) for column, own in cells.items()})
    return frame.rename_axis(index=["task", "seed"]) if len(frame) else frame


def column_of(scores: pd.DataFrame, label: str, metric: str) -> pd.Series:
    """Return the values of one variant. Raises UntestedError if there are none."""
    if (label, metric) not in scores:
        raise UntestedError(f"{title_of(label)} was not run, or not to the end")
    return scores[label, metric].dropna()


def title_of(label: str) -> str:
    """Return a variant as a table prints it: its key if that is a text, else its method and key."""
    method, _, key = label.partition(" ")
    return key if key and not key[0].isdigit() else f"{title_method(method)} {key}".strip()


def judge(claim: Claim, scores: pd.DataFrame) -> Outcome:
    """Decide whether a claim holds; undecided if an interval contains `above` or a rival is missing."""
    if claim.test.contrasts is None:
        return Outcome("not tested", "a picture, for readers to judge")
    if scores.empty:
        return Outcome("not tested", "no results")
    try:
        found = claim.test.contrasts(scores)
        if claim.test.wins:
            outcome = _judge_wins(claim, found, claim.test.wins)
        else:
            outcome = _judge_means(claim, {name: _estimate(one, claim.test.above) for name, one in found.items()})
    except UntestedError as error:
        return Outcome("not tested", str(error), needs_data=error.needs_data, flags=error.flags)
    if claim.test.against_all and (missing := scores.attrs.get("missing")):
        outcome = outcome._replace(result=f"{outcome.result}; missing: {', '.join(missing)}")
        return outcome._replace(verdict="undecided") if outcome.verdict == "holds" else outcome
    return outcome


def _judge_means(claim: Claim, estimates: Mapping[str, Estimate]) -> Outcome:
    """Decide whether all means are above the limit."""
    decisive = min(estimates, key=lambda name: estimates[name].low)
    refuted = min(estimates, key=lambda name: estimates[name].high)
    verdict: Verdict = "holds" if estimates[decisive].low > claim.test.above else "undecided"
    if estimates[refuted].high <= claim.test.above:
        verdict, decisive = "does not hold", refuted
    own = estimates[decisive]
    names = sorted(estimates, key=lambda name: estimates[name].mean) if len(estimates) > SHOWN else [*estimates]
    shown = [names[0], names[-1]] if len(estimates) > SHOWN else names
    listed = "; ".join(f"{name} {format_number(estimates[name].mean, 2, '+')}" for name in shown)
    more = f" (lowest and highest of {len(estimates)})" if len(estimates) > SHOWN else ""
    result = f"{claim.measure}: {listed} {claim.test.unit}{more}"
    interval = f"{format_number(own.low, 2, '+')} to {format_number(own.high, 2, '+')}"
    return Outcome(verdict, result, interval + f" ({decisive})" * (len(estimates) > 1), own.test, own)


def _estimate(values: pd.Series | Estimate, above: float) -> Estimate:
    """Estimate a mean over tasks, each averaged over its seeds; of a single task over its seeds."""
    if isinstance(values, Estimate):
        return values
    # Rounded, as equal accuracies may differ in the last digit of their harmonic means.
    values = values.round(9)
    tasks = values.groupby("task").mean()
    sample, unit = (tasks, "data sets") if len(tasks) > 1 else (values, "seeds")
    n = len(sample)
    if n < 2:
        raise UntestedError("one data set with one seed gives no interval", flags=" --seeds 1,2,3")
    low, high, p = student_test(sample, above)
    flipped = sign_flip_p(sample - above, np.random.default_rng(stream_seed(0, "claims", "signs")))
    test = f"t, n = {n} {unit}: p = {p:.2g}; signs flipped: p = {flipped:.2g}"
    if len(values) > n:
        test += f"; {(values > above).sum()} of {len(values)} pairs of data set and seed above {above:g}"
    return Estimate(float(sample.mean()), low, high, p, test)


def _judge_wins(claim: Claim, contrasts: Contrasts, needed: Callable[[int], int]) -> Outcome:
    """Decide whether enough data sets are won, and more than is likely among variants that are equally good."""
    import pandas as pd
    from scipy.stats import binomtest

    series = {name: one for name, one in contrasts.items() if isinstance(one, pd.Series)}
    means = pd.DataFrame({name: one.groupby("task", sort=False).mean() for name, one in series.items()})
    won, variants = (means > claim.test.above).all(axis=1), len(contrasts) + 1
    wins, n = int(won.sum()), len(won)
    p = float(binomtest(wins, n, 1 / variants, alternative="greater").pvalue)
    share = binomtest(wins, n).proportion_ci()
    lost = f"; not on {', '.join(won.index[~won])}" if 0 < wins < n else ""
    result = f"{claim.measure}: on {wins} of {n} data sets, to be {needed(n)}{lost}"
    result += f"; against {', '.join(series)}" if claim.test.against_all and len(series) <= SHOWN else ""
    test = f"binomial against 1 in {variants}, n = {n} data sets: p = {p:.2g}"
    own = Estimate(wins / n, float(share.low), float(share.high), p, test)
    verdict: Verdict = "holds" if wins >= needed(n) and p <= 0.05 else "undecided"
    low, high = round(n * own.low), round(n * own.high)
    interval = f"{low} to {high} of {n} data sets"
    return Outcome("does not hold" if high < needed(n) else verdict, result, interval, test, own)
