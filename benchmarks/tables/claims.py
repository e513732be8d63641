"""List the checkable sentences of the paper with their tests, and make the table of their verdicts.

Sentences about how a number is computed are not listed: tests of this program hold those.
"""

from __future__ import annotations

import csv
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from benchmarks.console.output import plural
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.claim_verdicts import (
    HALVES,
    Claim,
    ClaimTest,
    Contrasts,
    Estimate,
    UntestedError,
    Verdict,
    column_of,
    judge,
    read_scores,
    title_of,
)
from benchmarks.tables.grid import paper_weights
from benchmarks.tables.notes import note_sources
from benchmarks.tables.table import Column, Row, Table

if TYPE_CHECKING:
    import pandas as pd

MARGIN = 1.0
"""Percentage points within which accuracies count as competitive, stable or preserved; a reading of ours."""
TIE = -0.005
"""The least difference, in points, of numbers that tables print as equal and mark as the best alike."""
FEW = 4
"""The most shots of the low-shot regime ("1–4 shots")."""
FULL, SENSITIVE = "procap Full ProCAP", ("dtd", "eurosat", "fgvc-aircraft")
FINE_GRAINED = ("oxford-pets", "stanford-cars", "oxford-flowers", "food101", "fgvc-aircraft")
STAND_INS: Mapping[str, str] = {
    "dtd": "textures",
    "eurosat": "tiles",
    "oxford-pets": "petals",
    "oxford-flowers": "petals",
    "caltech101": "shapes",
    "ucf101": "glyphs",
}
"""Generated data sets in the place of the paper's, as in the lists of the suites."""

Differences = Mapping[str, "pd.Series"]
Make = Callable[["pd.DataFrame"], Differences]


def difference(scores: pd.DataFrame, own: str, other: str, metric: str = "hm") -> pd.Series:
    """Subtract the values of one variant from those of another, where both have some."""
    return (column_of(scores, own, metric) - column_of(scores, other, metric)).dropna()


def versus(*others: str, metric: str = "hm", own: str = "procap") -> Make:
    """Subtract the values of other variants from those of one, by default ProCAP; of all others if none is named."""

    def make(scores: pd.DataFrame) -> Differences:
        every = others or [label for label, kind in scores if kind == metric and label != own]
        if not every:
            raise UntestedError("no other method was run, or not to the end")
        return {title_of(other): difference(scores, own, other, metric) for other in every}

    return make


def split(values: pd.Series, names: Sequence[str], *, compared: bool = True) -> tuple[pd.Series, pd.Series]:
    """Split values into those of the named data sets, or of those in their place, and the others.

    Raises UntestedError if there are none of the named data sets, or none of the others with which they are compared.
    """
    wanted = [*names, *(STAND_INS[name] for name in names if name in STAND_INS)]
    mask = values.index.get_level_values("task").isin(wanted)
    if not mask.any():
        named = (f"{name} ({STAND_INS[name]})" if name in STAND_INS else name for name in names)
        raise UntestedError(f"none of {', '.join(named)} was run", needs_data=True)
    if compared and mask.all():
        raise UntestedError("no other data set was run to compare these with", needs_data=True)
    return values[mask], values[~mask]


def only_on(make: Make, *names: str) -> Make:
    """Restrict differences to the named data sets."""
    return lambda scores: {title: split(own, names, compared=False)[0] for title, own in make(scores).items()}


def more_on(make: Make, *names: str) -> Make:
    """Subtract from differences on the named data sets their mean over all others, seed by seed."""

    def compared(scores: pd.DataFrame) -> Differences:
        parts = {title: split(own, names) for title, own in make(scores).items()}
        return {title: own - others.groupby("seed").mean() for title, (own, others) in parts.items()}

    return compared


def by_task(make: Make) -> Make:
    """Make a contrast of each data set, to be tested over its seeds."""

    def divided(scores: pd.DataFrame) -> Differences:
        found = make(scores)
        return {
            f"{title} on {task}" if len(found) > 1 else str(task): part
            for title, own in found.items()
            for task, part in own.groupby("task", sort=False)
        }

    return divided


def list_keys(scores: pd.DataFrame) -> list[int]:
    """List ProCAP's numbers of shots, tokens or epochs."""
    keys = sorted({int(label.split()[1]) for label, _ in scores if label.startswith("procap ")})
    if len(keys) < 2:
        raise UntestedError("ProCAP was run with one value only")
    return keys


def gains(pairs: Callable[[list[int]], Iterable[tuple[int, int]]], *metrics: str) -> Make:
    """Subtract ProCAP's values with the first key of each pair (shots, tokens or epochs) from those with the second."""
    return lambda scores: {
        f"{before} to {after}" + f" {half_title(metric)}" * (len(metrics) > 1): difference(
            scores, f"procap {after}", f"procap {before}", metric
        )
        for before, after in pairs(list_keys(scores))
        for metric in metrics
    }


def base_minus_novel(pairs: Callable[[list[int]], Iterable[tuple[int, int]]]) -> Make:
    """Subtract gains on novel classes from those on base classes."""
    base, novel = gains(pairs, "base"), gains(pairs, "novel")
    return lambda scores: {name: own - novel(scores)[name] for name, own in base(scores).items()}


def half_title(metric: str) -> str:
    return metric.replace("hm", "HM")


def best_at(key: int) -> Callable[[list[int]], list[tuple[int, int]]]:
    return lambda keys: [(other, key) for other in keys if other != key]


def first_to_last(keys: list[int]) -> list[tuple[int, int]]:
    return [(keys[0], keys[-1])]


def advantage(combine: Callable[[pd.DataFrame, pd.DataFrame], pd.Series]) -> Make:
    """Combine ProCAP's advantage over its best trained rival by shots, and the rival's accuracies, into one value."""

    def make(scores: pd.DataFrame) -> Differences:
        import pandas as pd

        shots = list_keys(scores)
        rivals = sorted({label.split()[0] for label, _ in scores} - {"procap", "zeroshot"})
        if not rivals:
            raise UntestedError("no other trained method was run, or not to the end")
        if not shots[0] <= FEW < shots[-1]:
            raise UntestedError(f"needs numbers of shots up to {FEW} and above")

        def of(method: str) -> pd.DataFrame:
            return pd.concat({count: column_of(scores, f"{method} {count}", "accuracy") for count in shots}, axis=1)

        best = max(rivals, key=lambda name: float(of(name).mean().mean()))
        return {f"over {title_of(best)}": combine(of("procap") - of(best), of(best))}

    return make


def low_shot_mean(values: pd.DataFrame) -> pd.Series:
    """Average over the numbers of shots up to FEW."""
    return values.loc[:, :FEW].mean(axis=1)


def top_two(scores: pd.DataFrame) -> Differences:
    """Subtract at each number of shots the second best other method there from ProCAP."""
    found = {}
    for count in list_keys(scores):
        keys = ("0", str(count))
        means = {label: float(own.mean()) for (label, _), own in scores.items() if label.split()[1] in keys}
        others = sorted(means.keys() - {f"procap {count}"}, key=lambda label: -means[label])
        if len(others) < 2:
            raise UntestedError("fewer than two other methods were run, or not to the end")
        found[plural(count, "shot")] = difference(scores, f"procap {count}", others[1], "accuracy")
    return found


def without(part: str, metric: str = "hm") -> Make:
    return versus(f"procap w/o {part}", metric=metric, own=FULL)


def order_of_drops(scores: pd.DataFrame) -> Differences:
    """Subtract HM without the first component of a pair from that without the second, whose loss is to be smaller."""
    pairs = (("Gaussian", "InfoNCE"), ("InfoNCE", "Cross-Attn"), ("Cross-Attn", "KL"), ("Cross-Attn", "L2"))
    return {
        f"{first} over {second}": difference(scores, f"procap w/o {second}", f"procap w/o {first}")
        for first, second in pairs
    }


def deviation(scores: pd.DataFrame, label: str, metric: str) -> pd.Series:
    """Return standard deviations over seeds by data set, with 0 as seed."""
    found = column_of(scores, label, metric).groupby("task", sort=False).std(ddof=1)
    if found.isna().any():
        raise UntestedError("one seed has no deviation", flags=" --seeds 1,2,3")
    if len(found) < 2:
        raise UntestedError("the deviation on one data set gives no interval", needs_data=True)
    return found.to_frame("sd").assign(seed=0).set_index("seed", append=True).sd


def varied(scores: pd.DataFrame) -> Differences:
    """Subtract the mean deviation of the other data sets from each of the sensitive ones."""
    parts = {metric: split(deviation(scores, "procap", metric), SENSITIVE) for metric in HALVES}
    return {half_title(metric): values - others.mean() for metric, (values, others) in parts.items()}


def grid(sign: int) -> Make:
    """Subtract from HM of every point of the grid that of the paper's values, or with sign -1 the reverse."""

    def make(scores: pd.DataFrame) -> Differences:
        (weight, beta), temperature = paper_weights()
        found = versus(own=f"procap {weight} {beta} {temperature}")(scores)
        return {name: -sign * own for name, own in found.items()}

    return make


def measured(metric: str, sign: int = 1, *, percent: bool = True) -> Callable[[pd.DataFrame], Contrasts]:
    """Compare ProCAP's measurements with MaPLe-style's; the interval is from one's lowest to the other's highest."""

    def make(scores: pd.DataFrame) -> Contrasts:
        own, other = column_of(scores, "procap", metric), column_of(scores, "maple", metric)
        found = {}
        for task, values in own.groupby("task", sort=False):
            theirs = other[task]
            pairs = ((values.median(), theirs.median()), (values.min(), theirs.max()), (values.max(), theirs.min()))
            middle, low, high = (sign * (100 * (a / b - 1) if percent else a - b) for a, b in pairs)
            test = "ranges of repeated measurements" if percent else "binomial intervals over test images"
            found[str(task)] = Estimate(middle, min(low, high), max(low, high), None, test)
        return found

    return make


def share_of(share: float) -> Callable[[int], int]:
    return lambda n: math.ceil(n * share)


BEST: Mapping[str, float] = {"base": 4 / 11, "novel": 2 / 11, "hm": 3 / 11}
"""Shares of the data sets on which the paper's main table has ProCAP as the best method, or one of them."""
MAPLE_HM, ACCURACY = versus("maple"), versus(metric="accuracy")
TESTS: Mapping[str, ClaimTest] = {
    "average": ClaimTest(versus(), against_all=True),
    "maple": ClaimTest(MAPLE_HM),
    "nearly-all": ClaimTest(MAPLE_HM, wins=lambda n: max(1, n - 1)),
    "texture-shift": ClaimTest(by_task(more_on(MAPLE_HM, "eurosat", "dtd"))),
    "fine-grained": ClaimTest(by_task(only_on(MAPLE_HM, "oxford-pets", "caltech101"))),
    "base-kept": ClaimTest(versus(metric="base"), -MARGIN, against_all=True),
    "novel": ClaimTest(versus("maple", metric="novel")),
    "balance": ClaimTest(versus("coop", "cocoop", "maple"), wins=lambda n: min(3, n)),
    **{
        f"best-{metric}": ClaimTest(versus(metric=metric), TIE, wins=share_of(BEST[metric]), against_all=True)
        for metric in BEST
    },
    "eurosat-base": ClaimTest(by_task(only_on(versus("maple", metric="base"), "eurosat"))),
    "stable": ClaimTest(
        lambda scores: {half_title(half): MARGIN - deviation(scores, "procap", half) for half in HALVES}
    ),
    "most-varied": ClaimTest(varied),
    "transfer-average": ClaimTest(ACCURACY, against_all=True),
    "transfer-strong": ClaimTest(
        only_on(ACCURACY, "dtd", "eurosat", "sun397", "ucf101"), wins=lambda n: n, against_all=True
    ),
    "shifts-competitive": ClaimTest(ACCURACY, -MARGIN, against_all=True),
    "shifts-maple": ClaimTest(versus("maple", metric="accuracy")),
    "source": ClaimTest(versus(metric="source"), against_all=True),
    "monotonic": ClaimTest(gains(pairwise, "accuracy")),
    "low-shot": ClaimTest(
        advantage(lambda gaps, _: low_shot_mean(gaps) - gaps.loc[:, FEW + 1 :].mean(axis=1)), against_all=True
    ),
    "narrows": ClaimTest(advantage(lambda gaps, _: gaps.iloc[:, 0] - gaps.iloc[:, -1]), against_all=True),
    "top": ClaimTest(top_two, against_all=True),
    "challenging": ClaimTest(
        more_on(advantage(lambda gaps, theirs: low_shot_mean(100 * gaps / theirs)), *FINE_GRAINED, "dtd", "eurosat"),
        unit="%",
    ),
    "flowers": ClaimTest(only_on(versus("maple 16", metric="accuracy", own="procap 16"), "oxford-flowers")),
    "cross-attention": ClaimTest(without("Cross-Attn")),
    "gaussian": ClaimTest(without("Gaussian")),
    "kl": ClaimTest(without("KL")),
    "l2": ClaimTest(without("L2")),
    "infonce": ClaimTest(without("InfoNCE")),
    "largest-drop": ClaimTest(order_of_drops),
    "maple-style": ClaimTest(versus("procap MaPLe-style", own=FULL)),
    "overfitting": ClaimTest(without("Gaussian", "novel")),
    "steadier": ClaimTest(
        lambda scores: {"HM": deviation(scores, "procap w/o Gaussian", "hm") - deviation(scores, FULL, "hm")}
    ),
    "four-tokens": ClaimTest(gains(best_at(4), "hm")),
    "two-to-four": ClaimTest(gains(lambda keys: [(2, 4)], *HALVES)),
    "longer-lower": ClaimTest(gains(lambda keys: [(8, 4), (16, 4)], "hm")),
    "longer-overfit": ClaimTest(base_minus_novel(lambda keys: [(4, 8), (4, 16)])),
    "broad": ClaimTest(grid(1), -MARGIN, against_all=True),
    "chosen": ClaimTest(grid(-1), against_all=True),
    "longer-base": ClaimTest(gains(first_to_last, "base")),
    "primarily-base": ClaimTest(base_minus_novel(first_to_last)),
    "novel-kept": ClaimTest(gains(first_to_last, "novel"), -MARGIN),
    "longest-best": ClaimTest(lambda scores: gains(best_at(list_keys(scores)[-1]), "hm")(scores)),
    "slower-training": ClaimTest(measured("train_seconds"), unit="%"),
    "slower-inference": ClaimTest(measured("images_per_second", -1), unit="%"),
    "accuracy-gain": ClaimTest(measured("accuracy", percent=False)),
    "attention": ClaimTest(None),
}
"""How each claim of claims.csv is tested; `versus` and the others make the differences that must be positive."""


@functools.cache
def load_claims() -> list[Claim]:
    """Load the claims in the order of claims.csv."""
    with Path(__file__).with_name("claims.csv").open(encoding="utf-8", newline="") as file:
        return [Claim(**row, test=TESTS[row["name"]]) for row in csv.DictReader(file)]


def claims_table(
    suites: Mapping[str, SuiteResults], commands: Mapping[str, str], wider: Mapping[str, str] | None = None
) -> Table:
    """Make a row for each claim of some suites.

    commands: those that make the results of each suite, if missing; wider: with the data sets that claims compare.
    """
    scores = {name: read_scores(suite) for name, suite in suites.items()}
    rows, verdicts = [], {}
    for claim in load_claims():
        if claim.suite not in suites:
            continue
        outcome = judge(claim, scores[claim.suite])
        verdicts[claim.name] = outcome.verdict
        own = outcome.decisive
        if outcome.verdict == "not tested":
            command = (wider if wider and outcome.needs_data else commands)[claim.suite]
            outcome = outcome._replace(result=f"{outcome.result}: {command}{outcome.flags}")
        numbers = [None] * 4 if own is None else [own.mean, own.low, own.high, own.p]
        details = [None if number is None else f"{number:.6g}" for number in numbers]
        cells = outcome.verdict, claim.text, outcome.result, outcome.interval, outcome.test, claim.section
        rows.append(Row((claim.suite, claim.name), (*cells, *details)))
    titles = ("Verdict", "The paper", "Our results", "95 % interval", "Test", "Section")
    columns = [Column(title, "") for title in titles]
    columns += [Column(title, "", detail=True) for title in ("estimate", "low", "high", "p")]
    tested = {claim.suite for claim in load_claims() if verdicts.get(claim.name, "not tested") != "not tested"}
    why = dict.fromkeys(suites[name].why_incomparable for name in suites if name in tested)
    changed = sorted({dataset for name in tested for dataset in suites[name].changed_sets})
    reasons = [*filter(None, why), *([f"changed data sets are among them ({', '.join(changed)})"] if changed else [])]
    title = "Claims of the paper, tested on our results"
    title += f", which do not apply to the paper's data: {'; '.join(reasons)}" if reasons else ""
    counts = Counter(verdicts.values())
    counted = ", ".join(f"{counts[one]} {one}" for one in get_args(Verdict) if counts[one])
    notes = [f"{len(verdicts)} claims: {counted}.", *NOTES]
    frames = [suites[name].frame for name in suites if name in tested]
    if any(frame.limited.any() for frame in frames):
        notes.append("LIMITED: some results cover the first images of a test set only.")
    notes += dict.fromkeys(sentence for frame in frames for sentence in note_sources(frame))
    return Table("claims", title, ("Suite", "Claim"), columns, rows, notes, wide=True)


NOTES = (
    f"In the place of the paper's data sets: {', '.join(f'{new} ({old})' for old, new in STAND_INS.items())}.",
    "Result: every difference that the claim says is positive. A claim holds if all 95 % intervals are above 0 (or "
    "above the limit in its text), does not hold if one is wholly below, and is undecided otherwise. Interval and test "
    "are those of the difference that decides; they are not corrected for the number of claims.",
    "t: Student's t over data sets, each the mean over its seeds, or over the seeds of one data set. Signs flipped: "
    "permutation test of the same differences. Binomial: so many data sets won by chance among equally good methods. "
    "All p but the binomial are two-sided. Runtime: from the lowest to the highest of repeated measurements.",
    "A claim of a number of data sets holds if that number is reached, with a binomial p of 0.05 at most, and does not "
    "hold if the interval, in whole data sets, is wholly below it.",
    "HM is of each seed and data set, its average the mean of HMs; comparison tables have the HM of mean accuracies "
    "over seeds, and intervals over test images, so that their differences are others. The advantage in few-shot "
    "learning is that over the trained method that is the best over all shots.",
)
