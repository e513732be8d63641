"""Ablation: cross-attention, Gaussian tokens, KL, L2 and InfoNCE removed in turn, and MaPLe-style prompting.

    procap bench ablation --data DATA

Cost: four data sets, seven variants, seed 1: 28 runs and 56 evaluations; full ProCAP is a run of base-to-novel.

Published (published/ablation.csv): harmonic means of DTD, EuroSAT, OxfordPets and StanfordCars, on average 84.86 for
full ProCAP and 79.46 for MaPLe-style, which is MaPLe with as many tokens as ProCAP and its recipe.
"""

from __future__ import annotations

from benchmarks.results.variant import SuiteOptions, Variant
from benchmarks.suites.suite import Suite
from benchmarks.tables.base_novel import ablation_tables

FULL, MAPLE_STYLE = "Full ProCAP", "MaPLe-style"
VARIANTS = {
    "w/o Cross-Attn": {"cross_attention": False},
    # Deterministic tokens have no distribution to pull anywhere: both priors go with the Gaussian, as in the paper.
    "w/o Gaussian": {"gaussian": False, "kl": False, "l2": False},
    "w/o KL": {"kl": False},
    "w/o L2": {"l2": False},
    "w/o InfoNCE": {"infonce": False},
    FULL: {},
}


def variants(options: SuiteOptions, method: str) -> list[Variant]:
    """ProCAP without its parts, MaPLe in ProCAP's recipe, and any other method as it is in that recipe."""
    if method == "procap":
        named = VARIANTS.items()
        return [Variant(method, name, {"variant": name}, options, recipe="procap") for name, options in named]
    if method == "maple":
        return [Variant(method, MAPLE_STYLE, {"variant": MAPLE_STYLE}, {"n_ctx": 4}, recipe="procap")]
    plain = Variant(method, recipe="procap")
    return [Variant(method, plain.name, {"variant": plain.name}, recipe="procap")]


SUITE = Suite(
    name="ablation",
    title="ablation of ProCAP's parts",
    methods=("maple", "procap"),
    seeds=(1,),
    datasets={
        "paper": ("dtd", "eurosat", "oxford-pets", "stanford-cars"),
        "mini": ("textures", "tiles", "petals", "shapes"),
    },
    variants=variants,
    tables=ablation_tables,
    published="ablation",
)
