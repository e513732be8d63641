"""Ablation: cross-attention, Gaussian tokens, KL, L2 and InfoNCE removed in turn, all of them at once, and MaPLe.

    procap bench ablation --data DATA

Cost: four data sets, eleven variants, seed 1: 44 runs and 88 evaluations; full ProCAP and
MaPLe are runs of base-to-novel.

Published: numbers of DTD, EuroSAT, OxfordPets and StanfordCars, on average 84.86 for full ProCAP and 79.46 for
MaPLe-style, a row in which all five components are marked as absent. The caption has Top-1 accuracy, but the numbers of
full ProCAP are the harmonic means of Table 1.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.experiment.suite import ALL_OFF, INDEPENDENT, Suite, SuiteOptions, Variant
from benchmarks.tables.base_novel import ablation_tables

FULL = "Full ProCAP"
VARIANTS = {
    # Without attention nothing turns one level's tokens into those of the next: one set would enter every layer
    # unchanged, which takes away more than the attention. Both are shown.
    "All off": ALL_OFF,
    "All off, one token set": {**ALL_OFF, "deep_tokens": "refined"},
    "w/o Cross-Attn": {"cross_attention": False, **INDEPENDENT},
    "w/o Cross-Attn, one token set": {"cross_attention": False, "deep_tokens": "refined"},
    # Without Gaussian tokens KL and L2 are undefined; the paper drops them too.
    "w/o Gaussian": {"gaussian": False, "kl": False, "l2": False},
    "w/o KL": {"kl": False},
    "w/o L2": {"l2": False},
    "w/o InfoNCE": {"infonce": False},
    "Letter of section 3.2": {"reading": "letter"},
    FULL: {},
}
PRINTED_AS = {"All off": "MaPLe-style"}
"""The paper's name of a row, if it is another one; see the note of the table."""


def variants(options: SuiteOptions, method: str) -> list[Variant]:
    """Return ProCAP without its parts in its own recipe, MaPLe as published, and others in ProCAP's recipe."""
    if method == "procap":
        return [
            Variant(method, name, {"variant": PRINTED_AS.get(name, name)}, changed, recipe="procap")
            for name, changed in VARIANTS.items()
        ]
    plain = Variant(method, recipe="" if method == "maple" else "procap")
    return [replace(plain, title=plain.name, key={"variant": plain.name})]


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
    quick_datasets={"mini": ("tiles",)},
)
