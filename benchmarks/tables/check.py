"""Compare every published number of a suite with ours and report whether they agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.console.output import plural
from benchmarks.results.metrics import Metric
from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import AVERAGE, PublishedTransfer, display_name
from benchmarks.results.published.tolerances import (
    ALARMS,
    LEAST,
    NO_SEED,
    OF_RATIO,
    OF_UNTRAINED,
    PUBLISHED_SEEDS,
    Tolerance,
    expected,
    of_means,
)
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import Variant
from benchmarks.tables.rows import covers_paper, in_paper, is_comparable, why_incomparable
from benchmarks.tables.runtime import (
    compute_ratios,
    is_extrapolated,
    list_warnings,
    newest_measurement,
    published_ratios,
    rows_by_mode,
    why_unlike,
)
from benchmarks.tables.table import Cell, Column, Row, Table
from benchmarks.tables.targets import TARGET_MEAN, find_transfer, list_targets, target_metrics
from benchmarks.tables.text import format_number
from procap.errors import UserError

FIGURES = ("base", "novel", "hm")
TITLES = {"base": "Base", "novel": "Novel", "hm": "HM"}
OK, OUTSIDE, MISSING = "ok", "OUTSIDE", "missing"
NAMED = 8
"""How many missing numbers a note names; it counts all of them."""


@dataclass(frozen=True)
class Check:
    """One published number and ours, None if it is missing.

    where: a data set, or the name of an average. std: of ours, over seeds. among: how many of the numbers that are
    checked together are random.
    """

    where: str
    method: str
    figure: str
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


def collect_checks(suite: SuiteResults) -> list[Check]:
    """Collect every published number that the suite with these options covers.

    Raises UserError in one line if nothing can be compared: no published numbers, other data, another
    backbone, other schedules, limited results, or no results at all.
    """
    if suite.suite.published not in CHECKS:
        raise UserError(f"{suite.name}: nothing to check, the paper prints no figures of it")
    if why := why_incomparable(suite):
        raise UserError(f"{suite.name}: nothing to check, these results do not compare with published ones: {why}")
    found = list(CHECKS[suite.suite.published](suite))
    if not found:
        raise UserError(f"{suite.name}: nothing to check, no published figure is of what was chosen")
    if all(check.ours is None for check in found) and bool(suite.frame.limited.all()):
        why = "all results are limited to the first images"
        why = why if len(suite.frame) else f"there is no result below {suite.results}"
        raise UserError(f"{suite.name}: nothing to check, {why}")
    among = sum(check.tolerance.error > 0 for check in found)
    return [replace(check, among=among) for check in found]


def all_agree(checks: Sequence[Check]) -> bool:
    """Whether every published number has a result that agrees."""
    return all(check.verdict == OK for check in checks)


def check_table(suite: SuiteResults, checks: Sequence[Check]) -> Table:
    """Make the table of checks: disagreements first, then missing results, then the rest."""
    order = (OUTSIDE, MISSING, OK)
    rows = tuple(_row(check) for check in sorted(checks, key=lambda check: order.index(check.verdict)))
    counts = {verdict: sum(check.verdict == verdict for check in checks) for verdict in order}
    missing = [f"{check.method} {check.figure} on {check.where}" for check in checks if check.verdict == MISSING]
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    agree = "agrees" if counts[OK] == 1 else "agree"
    outside = "falls outside its tolerance" if counts[OUTSIDE] == 1 else "fall outside their tolerance"
    are = "is" if counts[MISSING] == 1 else "are"
    remarks = [
        f"{counts[OK]} of {plural(len(checks), 'published figure')} {agree}, {counts[OUTSIDE]} {outside}, "
        f"{counts[MISSING]} {are} missing.",
        *([f"MISSING, not compared: {', '.join(missing[:NAMED])}{more}."] if missing else []),
        *_reasons(suite, checks),
        *_measured(suite),
    ]
    columns = (Column("Ours", ""), Column("Published", ""), Column("Difference", ""), Column("Allowed", ""))
    return Table(
        f"{suite.name}-check",
        f"{suite.heading}: ours against published",
        ("Where", "Method", "Figure"),
        (*columns, Column("Verdict", "")),
        rows,
        tuple(remarks),
    )


def _reasons(suite: SuiteResults, checks: Sequence[Check]) -> Iterator[str]:
    """Explain the tolerances of these checks."""
    chance = [check for check in checks if check.tolerance.error]
    if chance:
        seeds = len(suite.seeds)
        yield (
            f"Allowed: t times s times the square root of 1/n + 1/m, for means over n = {seeds} of our seeds and over "
            f"m = {chance[0].tolerance.theirs} of the paper's. t is Student's of {chance[0].among} figures together "
            f"(Bonferroni): chance takes a correct reproduction outside somewhere in {100 * ALARMS:.0f} % of cases at "
            "most."
        )
        yield f"Never less than {LEAST:.2f} points is allowed, for {NO_SEED}; a reading of ours."
    for reason in dict.fromkeys(check.tolerance.reason for check in checks):
        yield f"Allowed {reason}."


def _measured(suite: SuiteResults) -> Iterator[str]:
    """Repeat the warnings of the runtime benchmark, if the suite is that one."""
    report = newest_measurement(suite) if suite.suite.published == "runtime" else None
    if report is None:
        return
    yield from list_warnings(report)
    rows = [row for row in report["rows"] if row["mode"] == "reference" and row["dataset"] in suite.datasets]
    if is_extrapolated(rows):
        yield "No ratio of training s is compared where a training was not run to its end."


def _row(check: Check) -> Row:
    ours: Cell = None if check.ours is None else Metric(check.ours, check.std)
    difference: Cell = None if check.ours is None else format_number(check.ours - check.published, 2, "+")
    # Text, not a Metric, which would add columns for its published number and difference in CSV.
    known = format_number(check.published, 2)
    items = (ours, known, difference, check.tolerance.printed(check.among), check.verdict)
    return Row((check.where, check.method, check.figure), items, average=check.where in (AVERAGE, TARGET_MEAN))


def _check(
    suite: SuiteResults,
    variant: Variant,
    dataset: str,
    figure: str,
    cell: Metric | None,
    known: float | None,
    *,
    sets: tuple[str, ...] = (),
    printed: bool = True,
    theirs: int = PUBLISHED_SEEDS,
) -> Iterator[Check]:
    """Yield one check, or none if the paper lacks the number or our images or recipe differ.

    printed: whether a ProCAP variant is the one in the paper's main table. theirs: number of seeds of the published
    figure.
    """
    if known is None or not is_comparable(suite, variant, sets or (dataset,)):
        return
    whole = None if cell is None or cell.limited else cell
    where = TARGET_MEAN if dataset == TARGET_MEAN else display_name(dataset)
    std = whole.std if whole else None
    tolerance = _tolerance(suite, variant, dataset, figure, std, printed=printed, theirs=theirs)
    mean = whole.mean if whole else None
    yield Check(where, variant.name, TITLES.get(figure, figure), mean, known, tolerance, std=std)


def _tolerance(
    suite: SuiteResults, variant: Variant, dataset: str, figure: str, std: float | None, *, printed: bool, theirs: int
) -> Tolerance:
    """Choose the tolerance from the deviations that the paper prints, of unchanged ProCAP on base and novel classes."""
    if variant.method == "zeroshot":
        return OF_UNTRAINED
    exact = printed and variant.method == "procap" and figure in FIGURES
    summed = dataset in (AVERAGE, TARGET_MEAN)
    # The paper prints no deviation for accuracy on all classes; use that of novel classes, the wider one.
    like = figure if figure in FIGURES else "novel"
    spread = expected(AVERAGE if summed else dataset, like, published.stability())
    return of_means(spread, len(suite.seeds), std=std, printed=exact, theirs=theirs)


def _main(suite: SuiteResults) -> Iterator[Check]:
    for dataset in (*suite.datasets, *([AVERAGE] if covers_paper(suite.datasets) else [])):
        for variant in suite.variants:
            cells = suite.average_halves(variant) if dataset == AVERAGE else suite.halves(variant, dataset)
            known = None if variant.changed else published.halves(variant.method, dataset)
            sets = suite.datasets if dataset == AVERAGE else ()
            for figure, cell in zip(FIGURES, cells, strict=True):
                yield from _check(suite, variant, dataset, figure, cell, getattr(known, figure, None), sets=sets)


def _stability(suite: SuiteResults) -> Iterator[Check]:
    """Check the spread table: like the main table, except that the average's HM is the mean of HMs."""
    for line in published.stability():
        summed = line.dataset == AVERAGE
        if not (covers_paper(suite.datasets) if summed else line.dataset in suite.datasets):
            continue
        for variant in suite.variants:
            if variant.method != "procap" or variant.changed:
                continue
            cells = suite.average_halves(variant) if summed else suite.halves(variant, line.dataset)
            cells = (*cells[:2], suite.mean_of_hms(variant)) if summed else cells
            sets = suite.datasets if summed else ()
            for figure, cell in zip(FIGURES, cells, strict=True):
                yield from _check(suite, variant, line.dataset, figure, cell, getattr(line, figure), sets=sets)


def _ablation(suite: SuiteResults) -> Iterator[Check]:
    table = {line.variant: line for line in published.ablation()}
    for variant in suite.variants:
        line = table.get(variant.key.get("variant", ""))
        if line is None:
            continue
        full = variant.method == "procap" and not variant.options
        for dataset in suite.datasets:
            cell = suite.halves(variant, dataset)[2]
            yield from _check(suite, variant, dataset, "hm", cell, line.hm.get(dataset), printed=full, theirs=1)
        if set(suite.datasets) == set(line.hm):
            cell = suite.mean_of_hms(variant)
            yield from _check(
                suite, variant, AVERAGE, "hm", cell, line.average, sets=suite.datasets, printed=False, theirs=1
            )


def _duration(suite: SuiteResults) -> Iterator[Check]:
    table = {(line.key, str(line.epochs)): line for line in published.duration()}
    for variant in suite.variants if covers_paper(suite.datasets) else ():
        line = table.get((variant.method, str(variant.key.get("epochs"))))
        for figure, cell in zip(FIGURES, suite.average_halves(variant), strict=True):
            titled = f"{TITLES[figure]} after {variant.key.get('epochs')} epochs"
            # The paper prints no deviation for fewer epochs.
            known, whole = getattr(line, figure, None), variant.part == 1.0
            for check in _check(suite, variant, AVERAGE, figure, cell, known, sets=suite.datasets, printed=whole):
                yield replace(check, figure=titled)


def _transfer(table: Callable[[], tuple[PublishedTransfer, ...]]) -> Callable[[SuiteResults], Iterator[Check]]:
    def checks(suite: SuiteResults) -> Iterator[Check]:
        for source in suite.datasets:
            for variant in suite.variants:
                known = find_transfer(table(), variant, source)
                if known is None:
                    continue
                own, cells, mean = target_metrics(suite, variant, source)
                yield from _check(suite, variant, source, "Accuracy", own, known.source)
                for name, cell in cells.items():
                    yield from _check(suite, variant, name, "Accuracy", cell, known.targets.get(name))
                targets = tuple(list_targets(suite, source))
                if set(targets) == set(known.targets):
                    yield from _check(suite, variant, TARGET_MEAN, "Accuracy", mean, known.target_mean, sets=targets)

    return checks


def _runtime(suite: SuiteResults) -> Iterator[Check]:
    """Check ratios of ProCAP to MaPLe-style in reference mode, which works as the paper's code does.

    Raises UserError if the newest measurement is not of the paper's work.
    """
    report = newest_measurement(suite)
    if report and (why := why_unlike(report)):
        raise UserError(f"runtime: nothing to check, what was measured does not compare with published ratios: {why}")
    for dataset in suite.datasets if in_paper(suite) else ():
        known = published_ratios(dataset)
        if known is None:
            continue
        rows = rows_by_mode(report, dataset) if report else {}
        modes = [rows[mode] for mode in rows if mode.startswith("reference")]
        seconds, _, speed = compute_ratios(modes[0]) if modes else (None, None, None)
        seconds = None if modes and is_extrapolated(modes[0]) else seconds
        for figure, ours, theirs in (("training s", seconds, known[0]), ("FPS", speed, known[1])):
            yield Check(display_name(dataset), "ProCAP / MaPLe-style", figure, ours, theirs, OF_RATIO)


CHECKS: dict[str, Callable[[SuiteResults], Iterator[Check]]] = {
    "base_to_novel": _main,
    "seed_stability": _stability,
    "cross_dataset": _transfer(published.cross_dataset),
    "domain_generalization": _transfer(published.domain_generalization),
    "ablation": _ablation,
    "training_duration": _duration,
    "runtime": _runtime,
}
"""The checks by the file of published/ with a suite's numbers."""
