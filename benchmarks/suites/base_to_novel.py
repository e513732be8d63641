"""Table 1 and figure 1b: train on the base classes of a data set, test on its base and on its novel classes.

    procap bench base-to-novel --data DATA
    procap bench base-to-novel --data DATA --methods maple,procap --recipe procap    one recipe and 4 tokens for both

Cost: 11 data sets, 16 shots, four trained methods, three seeds, and zero-shot CLIP: 143 runs and 286 evaluations.

Published (eighteen methods, one of them on average only): ProCAP 85.43 base, 77.61 novel,
81.33 harmonic mean on average; MaPLe 82.28, 75.14, 78.55.
"""

from __future__ import annotations

from benchmarks.experiment.suite import Suite
from benchmarks.plots.halves import halves_plots
from benchmarks.tables.base_novel import base_to_novel_tables

SUITE = Suite(
    name="base-to-novel",
    title="base-to-novel generalisation",
    methods=("zeroshot", "coop", "cocoop", "maple", "procap"),
    tables=base_to_novel_tables,
    plots=halves_plots,
    quick_datasets={"mini": ("tiles", "petals", "digits")},
)
