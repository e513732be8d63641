"""Domain generalization: the runs of cross-dataset again, tested on shifted versions of the data set.

    procap bench domain-generalization --data DATA

Cost: nothing to train after cross-dataset, else 13 runs; 65 evaluations.

Published (eleven methods): ProCAP 72.14 on ImageNet, 60.58 on average over V2,
Sketch, A and R; MaPLe 70.72 and 60.28.
"""

from __future__ import annotations

from functools import partial

from benchmarks.experiment.profiles import PROFILES
from benchmarks.experiment.suite import Suite
from benchmarks.tables.transfer import transfer_tables

SUITE = Suite(
    name="domain-generalization",
    title="domain generalization",
    methods=("zeroshot", "coop", "cocoop", "maple", "procap"),
    datasets={profile.name: (profile.general,) for profile in PROFILES.values()},
    classes="all",
    task="cross-dataset",
    tested=("all",),
    other_sets=lambda options: options.profile.shifts,
    tables=partial(transfer_tables, published="domain_generalization"),
)
