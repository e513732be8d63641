"""Open world: train on the base classes of a data set, test base and novel images among the names of all classes.

    procap bench open-world --data DATA --methods dept,2sfs,procap

The runs are those of base-to-novel. No method is told which half an image comes from; docs/methods.md says what those
do that treat base and novel classes differently.

Cost: 143 evaluations after base-to-novel; alone 143 runs and 429 evaluations.
"""

from __future__ import annotations

from benchmarks.experiment.suite import Suite
from benchmarks.plots.halves import open_world_plots
from benchmarks.tables.base_novel import open_world_tables

SUITE = Suite(
    name="open-world",
    title="base and novel classes among all names",
    methods=("zeroshot", "coop", "cocoop", "maple", "procap"),
    tested=("base", "novel", "all"),
    tables=open_world_tables,
    plots=open_world_plots,
    quick_datasets={"mini": ("tiles", "petals", "digits")},
)
