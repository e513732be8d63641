"""Make the table of paired tests: how much better one row is than every other, and whether that may be chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.console.output import plural
from benchmarks.results.metrics import Metric
from benchmarks.results.statistics import DRAWS, EXACT, Comparison, Measure, PValues, compare, format_seeds, holm
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import Variant
from benchmarks.tables.calibration import choose_reference
from benchmarks.tables.table import Column, Row, Table
from procap.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

NAMES: Mapping[Measure, str] = {"hm": "mean of HMs", "accuracy": "accuracy"}


def comparison_tables(suite: SuiteResults, variants: Mapping[str, Variant] | None = None) -> list[Table]:
    """Make one table called <suite>-comparison; none if fewer than two rows have results.

    The others are compared with the title that `find_default` finds. variants: by title; None: all.
    """
    titled = variants or suite.by_title
    results = {title: rows for title, variant in titled.items() if len(rows := suite.rows(variant))}
    if len(results) < 2:
        return []
    reference = find_default(suite, titled)
    return [comparison_table(results, reference=reference, name=f"{suite.name}-comparison")]


def find_default(suite: SuiteResults, titled: Mapping[str, Variant]) -> str | None:
    """Find the title of ProCAP, else of the last method with results, without what variants change, or None."""
    titled = {title: variant for title, variant in titled.items() if len(suite.rows(variant))}
    if not titled:
        return None
    method = titled[choose_reference({title: variant.method for title, variant in titled.items()})].method
    for title, variant in titled.items():
        if variant.method == method:
            run = next(run for run in suite.runs if run.variant == variant)
            plain, config = Variant(method, recipe=variant.recipe, shots=variant.shots), run.spec.config
            if suite.options.run(plain, run.dataset, run.seed, config.classes, suite.suite.task).path == run.path:
                return title
    return None


def comparison_table(
    variants: Mapping[str, pd.DataFrame], *, reference: str | None = None, name: str = "comparison", draws: int = DRAWS
) -> Table:
    """Make one row for each variant, a part of the frame by title, but the reference (None: ProCAP, or the last)."""
    if len(variants) < 2:
        raise UserError("a comparison needs results of two methods, or of two settings of one")
    methods = {title: str(frame.method.iloc[0]) for title, frame in variants.items() if len(frame)}
    is_chosen = reference is None
    reference = reference or choose_reference(methods)
    others = [title for title in variants if title != reference]
    found = [compare(variants, reference, title, draws=draws) for title in others]
    measure = found[0].measure
    corrected = [holm([getattr(each.p_values, test) for each in found]) for test in PValues._fields]
    printed, tasks = NAMES[measure], "data sets" if measure == "hm" else "targets"
    titles = (f"{printed} of {reference}", printed, "Difference", "95 % interval", "W / T / L")
    tests = ("Wilcoxon p (Holm)", "Permutation p (Holm)", f"p over {tasks} (Holm)")
    notes = _notes(reference, measure, found, draws)
    if is_chosen and methods.get(reference) != "procap":
        notes.insert(0, f"Reference: {reference}, the last row, as no row has ProCAP.")
    return Table(
        name=name,
        title=f"{reference} compared with every other row, {printed}",
        labels=("Against", f"Pairs ({tasks})"),
        columns=tuple(Column(column, "") for column in (*titles, *tests)),
        rows=tuple(_row(each, [p[number] for p in corrected]) for number, each in enumerate(found)),
        notes=notes,
        wide=True,
        compares=True,
    )


def _row(each: Comparison, corrected: Sequence[float | None]) -> Row:
    labels = (each.b, f"{each.pairs} ({len(each.tasks)})")
    if each.means is None or each.difference is None:
        return Row(labels, (None,) * 8)
    a, b = (Metric(mean, None, each.seeds, limited=each.limited) for mean in each.means)
    difference = Metric(each.difference, each.std, each.seeds, limited=each.limited)
    interval = "{:.2f} to {:.2f}".format(*each.interval) if each.interval else None
    tests = (
        f"{getattr(each.p_values, test):.2g} ({holms:.2g})"
        for test, holms in zip(PValues._fields, corrected, strict=True)
    )
    return Row(labels, (a, b, difference, interval, " / ".join(map(str, each.record)), *tests))


def _notes(reference: str, measure: Measure, found: Sequence[Comparison], draws: int) -> list[str]:
    one = "data set" if measure == "hm" else "target"
    mean = "of each target the mean accuracy over seeds, then the mean over targets"
    if measure == "hm":
        mean = "of each data set the harmonic mean of mean base and mean novel accuracy over seeds, then the mean over "
        mean += "data sets (the mean of HMs, not the HM of averages)"
    shared = [each for each in found if len(each.tasks)]
    most = max((len(each.tasks) for each in shared), default=1)
    notes = [
        f"Metrics cover what both have: {mean}. Difference: {reference} minus the row's, in percentage "
        "points; ± is the sample standard deviation over seeds (ddof = 1) of the mean difference.",
        f"95 % interval of the difference: percentile bootstrap, {draws:,} draws with replacement of the images of "
        "each test split, the same drawn images for both methods and all seeds. It covers other test images, not other "
        "seeds, few-shot samples or data sets.",
        f"W / T / L: wins, ties and losses of {reference}, over n pairs of one {one} and one seed, as the first two "
        f"tests; the third, a permutation test, is over n {one}s, their seeds averaged; both n are in the second "
        "column. All p are two-sided. Wilcoxon: signed ranks, zeros dropped. Permutation: the sign of each difference "
        f"flipped. Exact up to n = {EXACT}, Wilcoxon without ties for any n; else {2**EXACT:,} seeded draws.",
        f"Seeds of one {one} share its images and classes and are not independent: where the difference varies "
        f"between {one}s, a p over pairs is too small, and the one over {one}s is to be trusted. With {most} of them "
        f"it cannot be below {2.0 ** (1 - most):.2g}.",
        f"In brackets: p after Holm's correction over the {plural(len(shared), 'comparison')} of this table for each "
        "test.",
    ]
    if len({each.seeds for each in shared}) == 1 and all(each.seeds for each in shared):
        notes.append(f"{format_seeds(shared[0].seeds).capitalize()}.")
    else:
        for each in shared:
            named = each.tasks.reset_index().groupby("seeds", sort=False).task.agg(", ".join)
            listed = "; ".join(f"{format_seeds(seeds)} of {names}" for seeds, names in named.items())
            notes.append(f"Against {each.b}: {listed}.")
    images = " / ".join(f"{count:,}" for count in dict.fromkeys(int(each.tasks.images.sum()) for each in shared))
    notes += [f"Images are those of the test splits, {images} of them."] if images else []
    if any(each.limited for each in found):
        notes.append("† limited: only the first images of a test set were evaluated.")
    notes += [f"{each.b} shares no {one}, seed and images with {reference}." for each in found if each.tasks.empty]
    return [*notes, *dict.fromkeys(sentence for each in found for sentence in each.left_out)]
