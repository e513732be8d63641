"""Predictions side by side, EigenCAM maps, and learned prompts as heat maps with their nearest words.

    procap bench qualitative --data DATA

Pictures show the first of the data sets (Flowers102), prompts of the second (EuroSAT), both trained on base classes
with 16 shots and seed 1, and shown on them. MaPLe-style is MaPLe with as many tokens as ProCAP, and its recipe.

Cost: two runs of MaPLe; ProCAP's are runs of base-to-novel. One pass over a test split and some seconds for the
pictures.

Published: figures, and in the caption of that of prompts the base accuracies on EuroSAT: 96.86 of "the trained
baseline" and 98.43 of ProCAP. The classes of the figures of Flowers102 are not named.
"""

from __future__ import annotations

from benchmarks.experiment.suite import Suite, SuiteOptions, Variant
from benchmarks.results.suite_results import SuiteResults
from benchmarks.tables.qualitative import qualitative_tables
from runner.session import Session


def baseline_and_procap(options: SuiteOptions, method: str) -> list[Variant]:
    """Return MaPLe in ProCAP's recipe, with as many tokens by default, and any other method as it is."""
    if method == "maple":
        return [Variant(method, "MaPLe-style", recipe="procap")]
    return [Variant(method)]


def draw_pictures(results: SuiteResults, session: Session, force: bool) -> None:
    """Draw the pictures of a finished suite, with or without `force`: they take seconds."""
    from benchmarks.qualitative.pictures import make_pictures

    make_pictures(results, session)


SUITE = Suite(
    name="qualitative",
    title="predictions, attention and prompts",
    methods=("maple", "procap"),
    seeds=(1,),
    datasets={"paper": ("oxford-flowers", "eurosat"), "mini": ("petals", "tiles")},
    variants=baseline_and_procap,
    tested=("base",),
    tables=qualitative_tables,
    finish=draw_pictures,
)
