"""Prompt length: 2, 4, 8 and 16 tokens; base, novel and harmonic mean.

    procap bench prompt-length --data DATA
    procap bench prompt-length --data DATA --methods maple,procap

Cost: four data sets, four lengths, seed 1: 16 runs and 32 evaluations; those of 4 tokens are runs of base-to-novel.

Published: a figure only, best at 4 tokens.
"""

from __future__ import annotations

from benchmarks.experiment.suite import Suite, SuiteOptions, Variant
from benchmarks.plots.curves import prompt_length_plots
from benchmarks.tables.base_novel import prompt_length_tables
from procap.methods import method_class

LENGTHS = (2, 4, 8, 16)


def by_length(options: SuiteOptions, method: str) -> list[Variant]:
    """Return one variant per number of tokens; a method without tokens has one variant."""
    variants = [(length, method_class(method).Options.of_length(length)) for length in LENGTHS]
    if not variants[0][1]:
        return [Variant(method)]
    return [Variant(method, key={"n_ctx": length}, options=options) for length, options in variants]


SUITE = Suite(
    name="prompt-length",
    title="number of prompt tokens",
    methods=("procap",),
    seeds=(1,),
    datasets={
        "paper": ("eurosat", "caltech101", "oxford-pets", "ucf101"),
        "mini": ("tiles", "shapes", "petals", "glyphs"),
    },
    variants=by_length,
    tables=prompt_length_tables,
    quick_datasets={"mini": ("tiles",)},
    plots=prompt_length_plots,
)
