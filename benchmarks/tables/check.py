"""Compare every published number of a suite with ours and report whether they agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.console.output import plural
from benchmarks.results.metrics import Metric
from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import AVERAGE, display_name
from benchmarks.results.published.tolerances import (
    ALARMS,
    LEAST,
    NO_SEED,
    OF_RATIO,
    OF_UNTRAINED,
    PUBLISHED_SEEDS,
    Tolerance,
    estimate_deviation,
    tolerance_of_means,
)
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import Variant
from benchmarks.tables.base_novel import printed_halves, read_halves
from benchmarks.tables.rows import covers_paper, in_paper, is_comparable, why_incomparable
from benchmarks.tables.runtime import (
    compute_ratios,
    is_extrapolated,
    newest_measurement,
    published_ratios,
    rows_by_mode,
    why_unlike,
)
from benchmarks.tables.runtime_notes import list_warnings
from benchmarks.tables.table import Cell, Column, Row, Table
from benchmarks.tables.targets import TARGET_MEAN, find_transfer, list_targets, printed_transfer, target_metrics
from benchmarks.tables.text import format_number
from procap.errors import UserError

HALVES = {"base": "Base", "novel": "Novel", "hm": "HM"}
OK, OUTSIDE, MISSING = "ok", "OUTSIDE", "missing"
NAMED = 8
"""How many missing numbers a note names; it counts all of them."""


@dataclass(frozen=True)
class CheckedMetric:
    """One published number and ours, None if it is missing.

    where: a data set as printed, or the name of an average. std: of ours, over seeds. among: how many of the numbers
    that are checked together are random.
    """

    where: str
    method: str
    metric: str
    ours: float | None
    published: float
    tolerance: Tolerance
    among: int = 1
    std: float | None = None

    @property
    def verdict(self) -> str:
        if self.ours is None:
            return MISSING
        return OK if self.tolerance.allows(self.ours, self.published, self.among) else OUTSIDE


def check_metrics(suite: SuiteResults) -> list[CheckedMetric]:
    """Compare every published number that the suite with these options covers.

    Raises UserError in one line if nothing can be compared: no published numbers, other data, another
    backbone, other schedules, limited results, or no results at all.
    """
    if not suite.suite.published:
        raise UserError(f"{suite.name}: nothing to check, the paper prints no numbers of it")
    if why := why_incomparable(suite):
        raise UserError(f"{suite.name}: nothing to check, these results do not compare with published ones: {why}")
    found = list_published(suite)
    if not found:
        raise UserError(f"{suite.name}: nothing to check, no published number is of what was chosen")
    if all(one.ours is None for one in found) and bool(suite.frame.limited.all()):
        why = "all results are limited to the first images"
        why = why if len(suite.frame) else f"there is no result below {suite.results}"
        raise UserError(f"{suite.name}: nothing to check, {why}")
    among = sum(one.tolerance.error > 0 for one in found)
    return [replace(one, among=among) for one in found]


def list_published(suite: SuiteResults) -> list[CheckedMetric]:
    """List the published numbers of what the suite covers, each beside ours, also if all of ours are missing."""
    match suite.suite.published:
        case "runtime":
            return list(_ratios(suite))
        case "cross_dataset":
            return list(_transfer(suite, published.cross_dataset()))
        case "domain_generalization":
            return list(_transfer(suite, published.domain_generalization()))
        case _:
            return list(_halves(suite))


def all_agree(checked: Sequence[CheckedMetric]) -> bool:
    """Whether every published number has a result that agrees."""
    return all(one.verdict == OK for one in checked)


def check_table(suite: SuiteResults, checked: Sequence[CheckedMetric]) -> Table:
    """Make the table of published numbers and ours: disagreements first, then missing results, then the rest."""
    order = (OUTSIDE, MISSING, OK)
    rows = tuple(_row(one) for one in sorted(checked, key=lambda one: order.index(one.verdict)))
    counts = {verdict: sum(one.verdict == verdict for one in checked) for verdict in order}
    missing = [f"{one.method} {one.metric} on {one.where}" for one in checked if one.verdict == MISSING]
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    total = plural(len(checked), "published metric")
    notes = [f"{counts[OK]} of {total} agree (outside the tolerance: {counts[OUTSIDE]}, missing: {counts[MISSING]})."]
    if missing:
        notes.append(f"MISSING, not compared: {', '.join(missing[:NAMED])}{more}.")
    random = [one for one in checked if one.tolerance.error]
    if random:
        seeds = len(suite.seeds)
        notes += [
            f"Allowed: t times s times the square root of 1/n + 1/m, for means over n = {seeds} of our seeds and over "
            f"m = {random[0].tolerance.theirs} of the paper's. t is Student's of {random[0].among} metrics together "
            f"(Bonferroni): chance takes a correct reproduction outside somewhere in {100 * ALARMS:.0f} % of cases at "
            "most.",
            f"Never less than {LEAST:.2f} points is allowed, for {NO_SEED}; a reading of ours.",
        ]
    notes += [f"Allowed {reason}." for reason in dict.fromkeys(one.tolerance.reason for one in checked)]
    report = newest_measurement(suite) if suite.suite.published == "runtime" else None
    if report:
        notes += list_warnings(report)
        measured = [row for row in report["rows"] if row["mode"] == "reference" and row["dataset"] in suite.datasets]
        if is_extrapolated(measured):
            notes.append("No ratio of training s is compared where a training was not run to its end.")
    columns = tuple(Column(title, "") for title in ("Ours", "Published", "Difference", "Allowed", "Verdict"))
    title, labels = f"{suite.heading}: ours against published", ("Where", "Method", "Metric")
    return Table(f"{suite.name}-check", title, labels, columns, rows, tuple(notes))


def _row(one: CheckedMetric) -> Row:
    ours: Cell = None if one.ours is None else Metric(one.ours, one.std)
    difference: Cell = None if one.ours is None else format_number(one.ours - one.published, 2, "+")
    # Text, not a Metric, which would add columns for its published number and difference in CSV.
    number = format_number(one.published, 2)
    cells = (ours, number, difference, one.tolerance.describe(one.among), one.verdict)
    return Row((one.where, one.method, one.metric), cells, average=one.where in (AVERAGE, TARGET_MEAN))


def _check(
    suite: SuiteResults, variant: Variant, where: str, metric: str, cell: Metric | None, number: float | None
) -> Iterator[CheckedMetric]:
    """Yield one comparison, or none if the paper lacks the number or our images or recipe differ.

    where: a data set, AVERAGE or TARGET_MEAN. metric: "base", "novel", "hm" or "Accuracy".
    """
    table, sets = suite.suite.published, [where]
    if where in (AVERAGE, TARGET_MEAN):
        sets = list(suite.datasets) if where == AVERAGE else list_targets(suite, "imagenet")
    if number is None or not is_comparable(suite, variant, sets):
        return
    whole = None if cell is None or cell.limited else cell
    ours, std = (whole.mean, whole.std) if whole else (None, None)
    tolerance = OF_UNTRAINED
    if variant.method != "zeroshot":
        # The paper prints no deviation for accuracy on all classes; use that of novel classes, the wider one.
        like = metric if metric in HALVES else "novel"
        dataset = AVERAGE if where == TARGET_MEAN else where
        deviation = estimate_deviation(dataset, like, published.stability())
        # The printed deviations are of ProCAP as in the main table: unchanged, and trained to the end.
        exact = variant.method == "procap" and not variant.options and variant.part == 1.0 and metric in HALVES
        exact = exact and (where != AVERAGE or covers_paper(suite.datasets))
        theirs = 1 if table == "ablation" else PUBLISHED_SEEDS
        tolerance = tolerance_of_means(deviation, len(suite.seeds), std=std, printed=exact, theirs=theirs)
    title = HALVES.get(metric, metric)
    if table == "training_duration":
        title = f"{title} after {variant.key['epochs']} epochs"
    yield CheckedMetric(display_name(where), variant.name, title, ours, number, tolerance, std=std)


def _halves(suite: SuiteResults) -> Iterator[CheckedMetric]:
    """Check base, novel and HM of every data set and on average."""
    table = suite.suite.published
    for dataset in (*suite.datasets, AVERAGE):
        for variant in suite.variants:
            cells = read_halves(suite, variant, dataset, table)
            numbers = printed_halves(suite, variant, dataset, table)
            for metric, cell, number in zip(HALVES, cells, numbers, strict=True):
                yield from _check(suite, variant, dataset, metric, cell, number)


def _transfer(suite: SuiteResults, paper: Sequence[object]) -> Iterator[CheckedMetric]:
    """Check the accuracy on the source, on every target, and the mean of the targets."""
    for source in suite.datasets:
        names = [source, *list_targets(suite, source), TARGET_MEAN]
        for variant in suite.variants:
            own, metrics, mean = target_metrics(suite, variant, source)
            numbers = printed_transfer(find_transfer(paper, variant, source), list(metrics))
            for name, cell, number in zip(names, [own, *metrics.values(), mean], numbers, strict=False):
                yield from _check(suite, variant, name, "Accuracy", cell, number)


def _ratios(suite: SuiteResults) -> Iterator[CheckedMetric]:
    """Check ratios of ProCAP to MaPLe-style in reference mode, which works as the paper's code does.

    Raises UserError if the newest measurement is not of the paper's work.
    """
    report = newest_measurement(suite)
    if report and (why := why_unlike(report)):
        raise UserError(f"runtime: nothing to check, what was measured does not compare with published ratios: {why}")
    for dataset in suite.datasets if in_paper(suite) else ():
        printed = published_ratios(dataset)
        if printed is None:
            continue
        rows = rows_by_mode(report, dataset) if report else {}
        modes = [rows[mode] for mode in rows if mode.startswith("reference")]
        seconds, _, speed = compute_ratios(modes[0]) if modes else (None, None, None)
        seconds = None if modes and is_extrapolated(modes[0]) else seconds
        for metric, ours, theirs in (("training s", seconds, printed[0]), ("FPS", speed, printed[1])):
            yield CheckedMetric(display_name(dataset), "ProCAP / MaPLe-style", metric, ours, theirs, OF_RATIO)
