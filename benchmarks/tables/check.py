"""Compare every published number of a suite with ours and report whether they agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.console.output import plural
from benchmarks.results.metrics import Metric
from benchmarks.results.published import tables as published
from benchmarks.results.published import tolerances
from benchmarks.results.published.tables import AVERAGE, display_name
from benchmarks.results.published.tolerances import Tolerance
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import SHOTS, Variant
from benchmarks.tables import runtime
from benchmarks.tables.base_novel import pair_halves, printed_halves
from benchmarks.tables.qualitative import pictured_accuracy
from benchmarks.tables.table import Cell, Column, Row, Table, format_number
from benchmarks.tables.transfer import TARGET_MEAN, list_targets, pair_accuracies
from procap.errors import UserError
from runner.config import Target

HALVES = {"base": "Base", "novel": "Novel", "hm": "HM"}
OK, OUTSIDE, MISSING = "ok", "OUTSIDE", "missing"

Pair = tuple[Variant, str, str, Metric | None, float | None]
"""A variant, where it was tested (a data set or an average), the name of a metric, ours, and the paper's number."""


@dataclass(frozen=True)
class CheckedMetric:
    """One published number and ours, None if missing; `among` of the numbers that are checked together are random."""

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
    """Compare every published number that the suite covers. Raises UserError with the reason if nothing can be."""
    if why := suite.why_incomparable:
        raise UserError(f"{suite.name}: nothing to check, these results do not compare with published ones: {why}")
    found = list_published(suite)
    if not found:
        why = "" if suite.suite.published else "the paper prints no numbers of it, and "
        raise UserError(f"{suite.name}: nothing to check, {why}no published number matches these data sets and methods")
    if all(one.ours is None for one in found) and bool(suite.frame.limited.all()):
        why = "all results are limited to the first images"
        why = why if len(suite.frame) else f"there is no result below {suite.results}"
        raise UserError(f"{suite.name}: nothing to check, {why}")
    among = sum(one.tolerance.error > 0 for one in found)
    return [replace(one, among=among) for one in found]


def list_published(suite: SuiteResults) -> list[CheckedMetric]:
    """List the published numbers of what the suite covers, each beside ours, also if all of ours are missing."""
    table = suite.suite.published
    if table == "runtime":
        return [*_runtime(suite)]
    found = []
    transfer = {"cross_dataset": _transfer, "domain_generalization": _transfer}
    pairs = {**transfer, "prompt_picture": _pictured, "": _points_of_tables}.get(table, _halves)
    for variant, where, metric, cell, number in pairs(suite):
        sets = {AVERAGE: suite.options.datasets, TARGET_MEAN: list_targets(suite, "imagenet")}.get(where, [where])
        # The paper may lack the number, or our images or recipe differ.
        if number is None or not suite.is_comparable(variant, sets):
            continue
        ours, std = (None, None) if cell is None or cell.limited else (cell.mean, cell.std)
        tolerance = tolerances.OF_UNTRAINED
        if variant.method != "zeroshot":
            # The paper prints no deviation for accuracy on all classes; use that of novel classes, the wider one.
            like = metric if metric in HALVES else "novel"
            dataset = AVERAGE if where == TARGET_MEAN else where
            deviation = tolerances.estimate_deviation(dataset, like, published.stability())
            # The printed deviations belong to ProCAP as in the main table: unchanged, and trained to the end.
            exact = variant.method == "procap" and not variant.options and variant.part == 1.0 and metric in HALVES
            exact = exact and (where != AVERAGE or suite.covers_paper)
            # By the text the ablation has seed 1, but its row of full ProCAP repeats the means of the main table.
            alone = table == "prompt_picture" or (table == "ablation" and bool(variant.options))
            theirs = 1 if alone else tolerances.PUBLISHED_SEEDS
            seeds = len(suite.options.seeds)
            tolerance = tolerances.tolerance_of_means(deviation, seeds, std=std, printed=exact, theirs=theirs)
        title = HALVES.get(metric, metric)
        if table == "training_duration":
            title = f"{title} after {variant.key['epochs']} epochs"
        found.append(CheckedMetric(display_name(where), variant.name, title, ours, number, tolerance, std=std))
    return found


def check_table(suite: SuiteResults, checked: Sequence[CheckedMetric]) -> Table:
    """Make the table of published numbers and ours: disagreements first, then missing results, then the rest."""
    order = (OUTSIDE, MISSING, OK)
    rows = []
    for one in sorted(checked, key=lambda one: order.index(one.verdict)):
        ours: Cell = None if one.ours is None else Metric(one.ours, one.std)
        difference: Cell = None if one.ours is None else format_number(one.ours - one.published, 2, "+")
        # Text, not a Metric, which would add columns for its published number and difference in CSV.
        number = format_number(one.published, 2)
        cells = (ours, number, difference, one.tolerance.describe(one.among), one.verdict)
        rows.append(Row((one.where, one.method, one.metric), cells, average=one.where in (AVERAGE, TARGET_MEAN)))
    counts = {verdict: sum(one.verdict == verdict for one in checked) for verdict in order}
    missing = [f"{one.method} {one.metric} on {one.where}" for one in checked if one.verdict == MISSING]
    total = plural(len(checked), "published metric")
    agree = f"{counts[OK]} of {total} {'agrees' if counts[OK] == 1 else 'agree'}"
    notes = [f"{agree} (outside the tolerance: {counts[OUTSIDE]}, missing: {counts[MISSING]})."]
    if missing:
        notes.append(f"MISSING, not compared: {', '.join(missing)}.")
    random = [one for one in checked if one.tolerance.error]
    if random:
        seeds = len(suite.options.seeds)
        theirs = " or ".join(map(str, sorted({one.tolerance.theirs for one in random})))
        notes += [
            f"Allowed: t times s times the square root of 1/n + 1/m, for means over n = {seeds} of our seeds and over "
            f"m = {theirs} of the paper's. t is Student's of {random[0].among} metrics together "
            f"(Bonferroni): chance takes a correct reproduction outside somewhere in {100 * tolerances.ALARMS:.0f} % "
            "of cases at most.",
            f"Never less than {tolerances.LEAST:.2f} points is allowed, for {tolerances.NO_SEED}; a reading of ours.",
        ]
        if suite.suite.classes == "all" or suite.suite.published == "training_duration":
            notes.append("The paper does not print how many seeds it has here; three are assumed, as in Table 1.")
    notes += [f"Allowed {reason}." for reason in dict.fromkeys(one.tolerance.reason for one in checked)]
    if not suite.suite.published:
        notes.append(
            "The paper draws curves of this suite without numbers. Compared are the points that are runs of its "
            "tables: methods with their defaults in Table 1, and on all classes of ImageNet in the transfer tables."
        )
    report = runtime.newest_measurement(suite) if suite.suite.published == "runtime" else None
    notes += runtime.list_runtime_notes(report) if report else []
    columns = [Column(title, "") for title in ("Ours", "Published", "Difference", "Allowed", "Verdict")]
    title, labels = f"{suite.suite.heading}: ours against published", ("Where", "Method", "Metric")
    return Table(f"{suite.name}-check", title, labels, columns, rows, notes)


def _halves(suite: SuiteResults) -> Iterator[Pair]:
    """List the halves and their harmonic mean: "base", "novel" and "hm"."""
    for dataset, variant in product((*suite.options.datasets, AVERAGE), suite.variants):
        pairs = pair_halves(suite, variant, dataset, suite.suite.published)
        for metric, (cell, number) in zip(HALVES, pairs, strict=True):
            yield variant, dataset, metric, cell, number


def _transfer(suite: SuiteResults) -> Iterator[Pair]:
    """List the accuracy on the source, on every target, and the mean of the targets."""
    for source in suite.options.datasets:
        targets = list_targets(suite, source)
        for variant in suite.variants:
            for name, metric, number in pair_accuracies(suite, variant, source, targets):
                yield variant, name, "Accuracy", metric, number


def _pictured(suite: SuiteResults) -> Iterator[Pair]:
    """List the accuracies in the caption of the figure of learned prompts."""
    for dataset, variant in product(suite.options.datasets, suite.variants):
        number = published.PROMPT_PICTURE.get(dataset, {}).get(variant.method)
        yield variant, dataset, "base", pictured_accuracy(suite, variant, dataset), number


def _points_of_tables(suite: SuiteResults) -> Iterator[Pair]:
    """List variants whose runs are those of an unchanged method in the paper's tables."""
    transfer = {row.key: row.source for row in (*published.domain_generalization(), *published.cross_dataset())}
    for dataset, variant in product(suite.options.datasets, suite.variants):
        plain, task = Variant(variant.method, shots=SHOTS), None if suite.suite.classes == "base" else "cross-dataset"
        runs = {run.path for run in suite.runs if run.dataset == dataset and run.variant == variant}
        seeds = suite.options.seeds
        if runs != {suite.options.run(plain, dataset, seed, suite.suite.classes, task).path for seed in seeds}:
            continue
        if suite.suite.classes == "base":
            cells, numbers = suite.halves(variant, dataset), printed_halves(suite, plain, dataset, "base_to_novel")
            for metric, cell, number in zip(HALVES, cells, numbers, strict=True):
                yield plain, dataset, metric, cell, number
        elif dataset == "imagenet":
            cell = suite.metric(variant, dataset, Target(dataset))
            yield plain, dataset, "Accuracy", cell, transfer.get(plain.method)


def _runtime(suite: SuiteResults) -> Iterator[CheckedMetric]:
    """Check reference mode, which works as public code does: ratios to MaPLe-style, and accuracies of one seed.

    The paper prints a deviation for 50 epochs only, and accuracies after the ten of the runtime comparison; with random
    weights, or weights that are not OpenAI's, ours are missing.
    """
    report = runtime.newest_measurement(suite)
    if report and (why := runtime.why_unlike(report)):
        raise UserError(f"runtime: nothing to check, what was measured does not compare with published ratios: {why}")
    for dataset in suite.options.datasets if suite.in_paper else ():
        where, rows = display_name(dataset), runtime.reference_rows(report, dataset)
        if printed := runtime.published_ratios(dataset):
            seconds, _, speed = runtime.compute_ratios(rows)
            ours = None if runtime.is_extrapolated(rows) else seconds, speed
            for metric, own, theirs in zip(("training s", "FPS"), ours, printed, strict=True):
                yield CheckedMetric(where, "ProCAP / MaPLe-style", metric, own, theirs, tolerances.OF_RATIO)
        known = runtime.printed_accuracies(suite, report, dataset) if report else {}
        whole = [row for row in rows if row["test_images"] == row["test_images_all"]]
        accuracies = {row["method"]: row["accuracy"] for row in whole if row["method"] in known}
        deviation = tolerances.estimate_deviation(dataset, "base", published.stability())
        tolerance = tolerances.tolerance_of_means(deviation, 1, std=None, printed=False, theirs=1)
        for one in published.runtime():
            if one.dataset == dataset and one.key in suite.options.methods:
                own = accuracies.get(one.key)
                yield CheckedMetric(where, one.method, "Accuracy", own, one.accuracy, tolerance)
