"""Domain generalization: the runs of cross-dataset again, tested on shifted versions of the data set.

    procap bench domain-generalization --data DATA

Cost: nothing to train after cross-dataset, else 13 runs; 65 evaluations.

Published (eleven methods): ProCAP 72.14 on ImageNet, 60.58 on average over V2,
Sketch, A and R; MaPLe 70.72 and 60.28.
"""

from __future__ import annotations

from benchmarks.experiment.profiles import PROFILES
from benchmarks.experiment.suite import Suite, SuiteOptions
from benchmarks.tables.transfer import transfer_tables
from runner.config import Target


def shifts(options: SuiteOptions, dataset: str) -> tuple[Target, ...]:
    """The source itself and its shifted test sets."""
    return tuple(Target(name) for name in (dataset, *options.profile.shifts))


SUITE = Suite(
    name="domain-generalization",
    title="domain generalization",
    methods=("zeroshot", "coop", "cocoop", "maple", "procap"),
    datasets={profile.name: (profile.general,) for profile in PROFILES.values()},
    classes="all",
    task="cross-dataset",
    targets=shifts,
    tables=transfer_tables,
    published="domain_generalization",
)
