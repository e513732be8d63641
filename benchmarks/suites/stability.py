"""Mean and standard deviation over seeds of ProCAP's base, novel and harmonic mean: runs of base-to-novel again.

    procap bench stability --data DATA
    procap bench stability --data DATA --methods maple,procap --seeds 1,2,3,4,5

Cost: nothing after base-to-novel; alone 33 runs and 66 evaluations.

Published: 85.43 ± 0.18 base, 77.61 ± 0.31 novel, 81.12 ± 0.24 harmonic mean. The last is
the mean of the eleven harmonic means, 81.33 in Table 1 is the harmonic mean of the two averages; both are printed.
"""

from __future__ import annotations

from benchmarks.experiment.suite import Suite
from benchmarks.tables.base_novel import stability_tables

SUITE = Suite(
    name="stability",
    title="stability over seeds",
    methods=("procap",),
    tables=stability_tables,
    quick_datasets={"mini": ("tiles",)},
    quick_seeds=(1, 2, 3),
)
