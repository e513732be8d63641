"""Open world: train on the base classes of a data set, test base and novel images among the names of all classes.

    procap bench open-world --data DATA
    procap bench open-world --data DATA --methods dept,2sfs,procap

The runs are those of base-to-novel. No method is told which half an image comes from; docs/methods.md says what those
do that treat base and novel classes differently.

Cost: 143 evaluations after base-to-novel; alone 143 runs and 429 evaluations.
"""

from __future__ import annotations

from benchmarks.experiment.suite import Suite, SuiteOptions, all_classes, halves
from benchmarks.plots.halves import open_world_plots
from benchmarks.tables.base_novel import open_world_tables
from runner.config import Target


def all_and_halves(options: SuiteOptions, dataset: str) -> tuple[Target, ...]:
    """Return all test images, and base and novel ones by themselves."""
    return *halves(options, dataset), *all_classes(options, dataset)


SUITE = Suite(
    name="open-world",
    title="base and novel classes among all names",
    methods=("zeroshot", "coop", "cocoop", "maple", "procap"),
    targets=all_and_halves,
    tables=open_world_tables,
    plots=open_world_plots,
    quick_datasets={"mini": ("tiles", "petals", "digits")},
)
