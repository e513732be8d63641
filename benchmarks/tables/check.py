"""Are our results those of the paper: every figure of a suite that is published, ours, and whether they agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.console.output import plural
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
from benchmarks.results.scores import Cell
from benchmarks.tables.helpers import beside, hindrance, in_paper, whole_paper
from benchmarks.tables.runtime import blocks, guessed, newest_report, published_ratios, ratios, unlike, warnings
from benchmarks.tables.table import Column, Item, Line, Sheet, Value
from benchmarks.tables.targets import TARGET_MEAN, known_transfer, target_cells, targets_of
from benchmarks.tables.text import rounded
from procap.errors import UserError

if TYPE_CHECKING:
    from benchmarks.results.suite import SuiteResults
    from benchmarks.results.variant import Variant

FIGURES = ("base", "novel", "hm")
TITLES = {"base": "Base", "novel": "Novel", "hm": "HM"}
OK, OUTSIDE, MISSING = "ok", "OUTSIDE", "missing"
NAMED = 8
"""Missing figures that a note names; it counts them all."""


@dataclass(frozen=True)
class Check:
    """One published figure and ours, None where it is missing.

    where: a data set, or what it is averaged over. std: of ours, over seeds. among: how many figures that are checked
    with it depend on chance.
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


def checks_of(done: SuiteResults) -> list[Check]:
    """Every published figure that the suite as it was chosen has a place for.

    Raises UserError in one line where nothing can be compared: no figures are published of it, other data, another
    backbone, other schedules, limited results, or no results at all.
    """
    suite = done.suite
    if suite.published not in CHECKS:
        raise UserError(f"{suite.name}: nothing to check, the paper prints no figures of it")
    if why := hindrance(done):
        raise UserError(f"{suite.name}: nothing to check, these results do not compare with published ones: {why}")
    found = list(CHECKS[suite.published](done))
    if not found:
        raise UserError(f"{suite.name}: nothing to check, no published figure is of what was chosen")
    if all(check.ours is None for check in found) and all(score.result.limited for score in done.scores.values()):
        why = (
            "all results are limited to the first images" if done.scores else f"there is no result below {done.results}"
        )
        raise UserError(f"{suite.name}: nothing to check, {why}")
    among = sum(check.tolerance.error > 0 for check in found)
    return [replace(check, among=among) for check in found]


def agrees(checks: Sequence[Check]) -> bool:
    """Whether every published figure is there and inside."""
    return all(check.verdict == OK for check in checks)


def check_sheet(done: SuiteResults, checks: Sequence[Check]) -> Sheet:
    """What disagrees first, then what is missing, then the rest."""
    order = (OUTSIDE, MISSING, OK)
    lines = tuple(_line(check) for check in sorted(checks, key=lambda check: order.index(check.verdict)))
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
        *_reasons(done, checks),
        *_measured(done),
    ]
    columns = (Column("Ours", ""), Column("Published", ""), Column("Difference", ""), Column("Allowed", ""))
    return Sheet(
        f"{done.suite.name}-check",
        f"{done.suite.heading}: ours against published",
        ("Where", "Method", "Figure"),
        (*columns, Column("Verdict", "")),
        lines,
        tuple(remarks),
    )


def _reasons(done: SuiteResults, checks: Sequence[Check]) -> Iterator[str]:
    """Where what is allowed comes from, of the figures that are here."""
    chance = [check for check in checks if check.tolerance.error]
    if chance:
        seeds = len(done.options.seeds)
        yield (
            f"Allowed: t times s times the square root of 1/n + 1/m, for means over n = {seeds} of our seeds and over "
            f"m = {chance[0].tolerance.theirs} of the paper's. t is Student's of {chance[0].among} figures together "
            f"(Bonferroni): chance takes a correct reproduction outside somewhere in {100 * ALARMS:.0f} % of cases at "
            "most."
        )
        yield f"Never less than {LEAST:.2f} points is allowed, for {NO_SEED}; a reading of ours."
    for reason in dict.fromkeys(check.tolerance.reason for check in checks):
        yield f"Allowed {reason}."


def _measured(done: SuiteResults) -> Iterator[str]:
    """What a contest says of itself, where the suite is one."""
    report = newest_report(done) if done.suite.published == "runtime" else None
    if report is None:
        return
    yield from warnings(report)
    if guessed([row for row in report["rows"] if row["mode"] == "reference" and row["dataset"] in done.datasets]):
        yield "No ratio of training s is compared where a training was not run to its end."


def _line(check: Check) -> Line:
    ours: Item = None if check.ours is None else Value(check.ours, check.std)
    difference: Item = None if check.ours is None else rounded(check.ours - check.published, 2, "+")
    # A Value would have a published one and a difference of its own in CSV.
    known = rounded(check.published, 2)
    items = (ours, known, difference, check.tolerance.printed(check.among), check.verdict)
    return Line((check.where, check.method, check.figure), items, average=check.where in (AVERAGE, TARGET_MEAN))


def _check(
    done: SuiteResults,
    variant: Variant,
    dataset: str,
    figure: str,
    cell: Cell | None,
    known: float | None,
    *,
    sets: tuple[str, ...] = (),
    printed: bool = True,
    theirs: int = PUBLISHED_SEEDS,
) -> Iterator[Check]:
    """Nothing where the paper has no such figure, or where the images or the recipe of ours are others.

    printed: whether the variant is ProCAP in its main table wherever it is ProCAP. theirs: seeds of the published
    figure.
    """
    if known is None or beside(done, variant, sets or (dataset,), known) is None:
        return
    whole = None if cell is None or cell.limited else cell
    where = TARGET_MEAN if dataset == TARGET_MEAN else display_name(dataset)
    std = whole.std if whole else None
    tolerance = _tolerance(done, variant, dataset, figure, std, printed=printed, theirs=theirs)
    mean = whole.mean if whole else None
    yield Check(where, variant.name, TITLES.get(figure, figure), mean, known, tolerance, std=std)


def _tolerance(
    done: SuiteResults, variant: Variant, dataset: str, figure: str, std: float | None, *, printed: bool, theirs: int
) -> Tolerance:
    """From the deviations that the paper prints, which are of ProCAP as it is, on base and novel classes."""
    if variant.method == "zeroshot":
        return OF_UNTRAINED
    exact = printed and variant.method == "procap" and figure in FIGURES
    summed = dataset in (AVERAGE, TARGET_MEAN)
    # Of accuracy on all classes no deviation is printed; that on novel classes is the wider one.
    like = figure if figure in FIGURES else "novel"
    spread = expected(AVERAGE if summed else dataset, like, published.stability())
    return of_means(spread, len(done.options.seeds), std=std, printed=exact, theirs=theirs)


def _main(done: SuiteResults) -> Iterator[Check]:
    for dataset in (*done.datasets, *([AVERAGE] if whole_paper(done.datasets) else [])):
        for variant in done.variants:
            cells = done.average_halves(variant) if dataset == AVERAGE else done.halves(variant, dataset)
            known = None if variant.changed else published.halves(variant.method, dataset)
            sets = done.datasets if dataset == AVERAGE else ()
            for figure, cell in zip(FIGURES, cells, strict=True):
                yield from _check(done, variant, dataset, figure, cell, getattr(known, figure, None), sets=sets)


def _stability(done: SuiteResults) -> Iterator[Check]:
    """Like the main table, but for the average's HM, which is the mean of HMs here."""
    for line in published.stability():
        summed = line.dataset == AVERAGE
        if not (whole_paper(done.datasets) if summed else line.dataset in done.datasets):
            continue
        for variant in done.variants:
            if variant.method != "procap" or variant.changed:
                continue
            cells = done.average_halves(variant) if summed else done.halves(variant, line.dataset)
            cells = (*cells[:2], done.mean_of_hms(variant)) if summed else cells
            sets = done.datasets if summed else ()
            for figure, cell in zip(FIGURES, cells, strict=True):
                yield from _check(done, variant, line.dataset, figure, cell, getattr(line, figure), sets=sets)


def _ablation(done: SuiteResults) -> Iterator[Check]:
    table = {line.variant: line for line in published.ablation()}
    for variant in done.variants:
        line = table.get(variant.key.get("variant", ""))
        if line is None:
            continue
        full = variant.method == "procap" and not variant.options
        for dataset in done.datasets:
            cell = done.halves(variant, dataset)[2]
            yield from _check(done, variant, dataset, "hm", cell, line.hm.get(dataset), printed=full, theirs=1)
        if set(done.datasets) == set(line.hm):
            cell = done.mean_of_hms(variant)
            yield from _check(
                done, variant, AVERAGE, "hm", cell, line.average, sets=done.datasets, printed=False, theirs=1
            )


def _duration(done: SuiteResults) -> Iterator[Check]:
    table = {(line.key, str(line.epochs)): line for line in published.duration()}
    for variant in done.variants if whole_paper(done.datasets) else ():
        line = table.get((variant.method, str(variant.key.get("epochs"))))
        for figure, cell in zip(FIGURES, done.average_halves(variant), strict=True):
            titled = f"{TITLES[figure]} after {variant.key.get('epochs')} epochs"
            # Of fewer epochs no deviation is printed.
            known, whole = getattr(line, figure, None), variant.part == 1.0
            for check in _check(done, variant, AVERAGE, figure, cell, known, sets=done.datasets, printed=whole):
                yield replace(check, figure=titled)


def _transfer(table: Callable[[], tuple[PublishedTransfer, ...]]) -> Callable[[SuiteResults], Iterator[Check]]:
    def checks(done: SuiteResults) -> Iterator[Check]:
        for source in done.datasets:
            for variant in done.variants:
                known = known_transfer(table(), variant, source)
                if known is None:
                    continue
                own, cells, mean = target_cells(done, variant, source)
                yield from _check(done, variant, source, "Accuracy", own, known.source)
                for name, cell in cells.items():
                    yield from _check(done, variant, name, "Accuracy", cell, known.targets.get(name))
                targets = tuple(targets_of(done, source))
                if set(targets) == set(known.targets):
                    yield from _check(done, variant, TARGET_MEAN, "Accuracy", mean, known.target_mean, sets=targets)

    return checks


def _runtime(done: SuiteResults) -> Iterator[Check]:
    """How ProCAP relates to MaPLe-style in reference mode, which works as the paper's code does.

    Raises UserError where what was measured last is other work than the paper's.
    """
    report = newest_report(done)
    if report and (why := unlike(report)):
        raise UserError(f"runtime: nothing to check, what was measured does not compare with published ratios: {why}")
    for dataset in done.datasets if in_paper(done) else ():
        known = published_ratios(dataset)
        if known is None:
            continue
        rows = blocks(report, dataset) if report else {}
        modes = [rows[mode] for mode in rows if mode.startswith("reference")]
        seconds, _, speed = ratios(modes[0]) if modes else (None, None, None)
        seconds = None if modes and guessed(modes[0]) else seconds
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
"""By the file of published/ that has a suite's figures."""
