"""Predictions side by side, EigenCAM maps, and learned prompts as heat maps with their nearest words.

    procap bench qualitative --data DATA

Pictures are of the first of the data sets (Flowers102), prompts of the second (EuroSAT), both trained on all classes
with 16 shots and seed 1: runs of few-shot again.

Cost: nothing after few-shot, else four runs; one pass over a test split and some seconds for the pictures.

Published: figures only.
"""

from __future__ import annotations

from benchmarks.results.suite import SuiteResults
from benchmarks.suites.suite import Suite, everything
from benchmarks.tables.qualitative import qualitative_tables
from runner.config import RuntimeConfig


def draw_pictures(results: SuiteResults, runtime: RuntimeConfig, force: bool) -> None:
    """Draw the pictures of a finished suite, with or without `force`: they take seconds."""
    from benchmarks.qualitative.pictures import make_pictures

    make_pictures(results, runtime)


SUITE = Suite(
    name="qualitative",
    title="predictions, attention and prompts",
    methods=("maple", "procap"),
    seeds=(1,),
    datasets={"paper": ("oxford-flowers", "eurosat"), "mini": ("petals", "tiles")},
    classes="all",
    targets=everything,
    tables=qualitative_tables,
    finish=draw_pictures,
)
