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
from procap.errors import UsageError
from procap.methods import method_class, method_options

LENGTHS = (2, 4, 8, 16)


def by_length(options: SuiteOptions, method: str) -> list[Variant]:
    """Return one variant per number of tokens; a method without tokens has one variant."""
    if "n_ctx" not in method_class(method).Options.model_fields:
        return [Variant(method)]
    return [Variant(method, key={"n_ctx": length}, options=tokens(method, length)) for length in LENGTHS]


def tokens(method: str, length: int) -> dict[str, object]:
    """Return options for `length` tokens, random at first where the number of the method's initial words differs."""
    options: dict[str, object] = {"n_ctx": length}
    try:
        method_options(method, options)
    except UsageError:
        options["ctx_init"] = ""
    return options


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
