"""MMLoP's parts added one after the other, from IVLP: the test of an implementation that has no public code to equal.

    procap bench examples/suites/mmlop_ladder.py --data DATA

IVLP has MMLoP's tokens, depth and recipe here.

Cost: 11 data sets, five variants, three seeds: 165 runs, of which 33 are those of base-to-novel, and 330 evaluations.

Published (in the paper of MMLoP): base, novel and HM, averaged over the data sets:

    IVLP                  84.21  71.79  77.51
    + low rank            83.70  71.39  77.06
    + consistency         83.60  74.48  78.78
    + drift correction    83.78  75.12  79.20
    + shared factor       83.79  75.98  79.70
"""

from __future__ import annotations

from typing import Any

from benchmarks.experiment.suite import Suite, SuiteOptions, Variant
from benchmarks.tables.base_novel import base_to_novel_tables

NONE = {"text_weight": 0.0, "image_weight": 0.0, "logit_weight": 0.0}
PARTS: dict[str, dict[str, Any]] = {
    "+ low rank": {**NONE, "drift_correction": False, "shared_factor": False},
    "+ consistency": {"drift_correction": False, "shared_factor": False},
    "+ drift correction": {"shared_factor": False},
    "+ shared factor": {},
}
"""Options of MMLoP without the parts that later rows add."""


def ladder(options: SuiteOptions, method: str) -> list[Variant]:
    """Return IVLP with MMLoP's tokens, depth and recipe, then MMLoP with ever more parts; other methods unchanged."""
    if method != "mmlop":
        return [Variant(method, key={"variant": method})]
    run = options.plan_run(Variant(method), options.datasets[0], 1, "base")
    tokens, depth = run.options["n_ctx"], run.options["depth"]
    tokens_and_depth = {"n_ctx": tokens, "vision_tokens": tokens, "depth": depth, "vision_depth": depth}
    recipe = {name: getattr(run.recipe, name) for name in ("lr", "epochs", "batch_size")}
    first = Variant("ivlp", "IVLP", {"variant": "IVLP"}, tokens_and_depth, recipe)
    return [first, *(Variant(method, title, {"variant": title}, changed) for title, changed in PARTS.items())]


SUITE = Suite(
    name="mmlop-ladder",
    title="MMLoP's parts, one after the other",
    methods=("mmlop",),
    datasets={"mini": ("textures", "tiles", "petals", "shapes")},
    variants=ladder,
    tables=base_to_novel_tables,
)
