"""Sensitivity: harmonic mean over lambda (weight of InfoNCE) x beta (weight of KL), and over the initial tau_p.

    procap bench sensitivity --data DATA

The paper names no grid. Ours has zero and a tenth to a hundred times its weights, and temperatures from 0.01 to 0.5.

Cost: five data sets, 25 pairs and five temperatures, seed 1: 145 runs and 290 evaluations; the paper's own values are
runs of base-to-novel.

Published: a figure only.
"""

from __future__ import annotations

from benchmarks.experiment.suite import Suite, SuiteOptions, Variant
from benchmarks.plots.curves import sensitivity_plots
from benchmarks.tables.grid import paper_weights, sensitivity_tables

LAMBDAS, BETAS = (0.0, 0.001, 0.01, 0.1, 1.0), (0.0, 1e-6, 1e-5, 1e-4, 1e-3)
TEMPERATURES = (0.01, 0.03, 0.07, 0.2, 0.5)
QUICK_LAMBDAS, QUICK_BETAS, QUICK_TEMPERATURES = (0.0, 0.01, 1.0), (0.0, 1e-5, 1e-3), (0.01, 0.07, 0.5)


def grid(options: SuiteOptions, method: str) -> list[Variant]:
    """Return every pair of weights at the paper's temperature, and every temperature at the paper's weights."""
    if method != "procap":
        return [Variant(method)]
    lambdas, betas = (QUICK_LAMBDAS, QUICK_BETAS) if options.quick else (LAMBDAS, BETAS)
    temperatures = QUICK_TEMPERATURES if options.quick else TEMPERATURES
    (paper_weight, paper_beta), paper_temperature = paper_weights()
    points = [(weight, beta, paper_temperature) for weight in lambdas for beta in betas]
    points += [(paper_weight, paper_beta, temperature) for temperature in temperatures]
    names = ("nce_weight", "kl_weight", "nce_temperature")
    # The paper's own point is in both lists, and is one variant.
    settings = [dict(zip(names, point, strict=True)) for point in dict.fromkeys(points)]
    return [Variant(method, key=setting, options=setting) for setting in settings]


SUITE = Suite(
    name="sensitivity",
    title="sensitivity to the weights of the loss and to the initial temperature",
    methods=("procap",),
    seeds=(1,),
    datasets={
        "paper": ("eurosat", "oxford-pets", "caltech101", "dtd", "oxford-flowers"),
        "mini": ("tiles", "petals", "shapes", "textures", "glyphs"),
    },
    variants=grid,
    tables=sensitivity_tables,
    plots=sensitivity_plots,
    quick_datasets={"mini": ("tiles",)},
)
