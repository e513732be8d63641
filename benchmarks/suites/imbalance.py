"""Imbalance: train on uneven samples of the base classes, test on base and on novel classes by macro accuracy.

    procap bench imbalance --data DATA --methods maple,dpc,procap

Sizes of classes fall exponentially from 16 images, to 0.25 or 0.06 of them, or follow the training split ("natural").

Cost: 11 data sets, three trained methods, four samplings, three seeds, and zero-shot CLIP: 407 runs and 814
evaluations; 110 runs, those of balanced samples, are runs of base-to-novel.
"""

from __future__ import annotations

from benchmarks.experiment.suite import Suite, SuiteOptions, Variant
from benchmarks.tables.grid import imbalance_tables
from procap.methods import method_class
from shards.uneven_samples import BALANCED, NATURAL


def by_sampling(options: SuiteOptions, method: str) -> list[Variant]:
    """Return one variant per sampling, one in all for a method that trains nothing."""
    samplings = (BALANCED, "decay:0.25", "decay:0.06", NATURAL) if method_class(method).recipe().epochs else ()
    return [Variant(method, key={"sampling": name}, sampling=name) for name in samplings] or [Variant(method)]


SUITE = Suite(
    name="imbalance",
    title="uneven samples",
    methods=("zeroshot", "coop", "maple", "procap"),
    variants=by_sampling,
    tables=imbalance_tables,
    quick_datasets={"mini": ("tiles",)},
)
