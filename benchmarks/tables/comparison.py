"""The paired tests of a suite's lines, where several were evaluated on the same images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.tables.helpers import name_of, titled
from benchmarks.tables.table import Sheet

if TYPE_CHECKING:
    from benchmarks.results.scores import Score
    from benchmarks.results.suite import SuiteResults
    from benchmarks.results.variant import Variant


def comparison_sheets(
    done: SuiteResults, reference: str | None = None, variants: Mapping[str, Variant] | None = None, source: str = ""
) -> list[Sheet]:
    """One sheet, called <suite>-comparison; none where fewer than two lines have results.

    reference: the title of what the others are compared with; None: ProCAP. variants: by title; None: all. source: of
    runs on this data set alone, where several were trained on and tested on the same targets.
    """
    from benchmarks.results.comparison import comparison_sheet

    there = {
        title: scores
        for title, variant in (variants or titled(done)).items()
        if (scores := scores_of(done, variant, source))
    }
    if len(there) < 2:
        return []
    chosen = reference if reference in there else None
    name = f"{done.suite.name}-comparison"
    sheet = comparison_sheet(there, reference=chosen, name=f"{name}-from-{source}" if source else name)
    sheet = replace(sheet, compares=True)
    if source:
        sheet = replace(sheet, title=f"{sheet.title}, trained on {name_of(source)}")
    if done.paper_rounding:
        sheet = replace(sheet, notes=(*sheet.notes, "Nothing is rounded here before it is averaged."))
    return [sheet]


def scores_of(done: SuiteResults, variant: Variant, source: str = "") -> list[Score]:
    """Those of an variant that are there, of its runs on one data set or on all."""
    entries = [entry for entry in done.runs if entry.variant == variant and source in ("", entry.dataset)]
    places = dict.fromkeys((entry.path, target) for entry in entries for target in entry.spec.targets)
    return done.for_all_seeds(variant, [done.scores[place] for place in places if place in done.scores])
