"""Few-shot curves: train on several numbers of images of every class, test on all classes.

    procap bench few-shot --data DATA
    procap bench few-shot --data DATA --shots 1,4

Cost: 11 data sets, five trained methods, 1, 2, 4, 8 and 16 shots, three seeds, and zero-shot CLIP: 836 runs and as
many evaluations; CoOp trains up to 200 epochs.

Published: curves only, no figures.
"""

from __future__ import annotations

from benchmarks.experiment.suite import Suite, SuiteOptions, Variant
from benchmarks.plots.curves import shots_plots
from benchmarks.tables.grid import few_shot_tables
from procap.errors import UsageError
from procap.methods import method_class

CURVE = (1, 2, 4, 8, 16)
QUICK_CURVE = (1, 4, 16)


def by_shots(options: SuiteOptions, method: str) -> list[Variant]:
    """Return one variant per number of shots, one in all for a method that trains nothing."""
    curve = options.shots or (QUICK_CURVE if options.quick else CURVE)
    if 0 in curve:
        raise UsageError("--shots: a curve is over numbers of shots; for example --shots 1,2,4")
    if not method_class(method).recipe().epochs:
        # A fitted temperature reads shots.
        return [Variant(method, key={"shots": 0}, shots=max(curve))]
    return [Variant(method, key={"shots": shots}, shots=shots) for shots in sorted(curve)]


SUITE = Suite(
    name="few-shot",
    title="few-shot learning on all classes",
    methods=("zeroshot", "tipadapterf", "coop", "maple", "cliplora", "procap"),
    classes="all",
    variants=by_shots,
    tested=("all",),
    tables=few_shot_tables,
    plots=shots_plots,
    quick_datasets={"mini": ("tiles",)},
)
