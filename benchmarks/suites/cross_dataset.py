"""Cross-dataset transfer: train on all classes of one data set (in the paper ImageNet), test on the others.

    procap bench cross-dataset --data DATA
    procap bench cross-dataset --data DATA --datasets sun397          another source

Cost: 16 shots, four trained methods, three seeds, and zero-shot CLIP: 13 runs and 143 evaluations. Nothing is
trained for domain-generalization after it.

Published (ten methods): ProCAP 72.14 on ImageNet, 70.02 on average over the ten others;
MaPLe 70.72 and 66.30.
"""

from __future__ import annotations

from functools import partial

from benchmarks.experiment.profiles import PROFILES
from benchmarks.experiment.suite import Suite, SuiteOptions
from benchmarks.tables.transfer import transfer_tables

QUICK_TARGETS = {"mini": ("tiles", "petals", "digits")}
"""Data sets tested on under `--quick`, by profile: those that other suites pack."""


def of_profile(options: SuiteOptions) -> tuple[str, ...]:
    """Return every data set of the profile, or a few under --quick."""
    profile = options.profile
    return QUICK_TARGETS.get(profile.name, profile.datasets) if options.quick else profile.datasets


SUITE = Suite(
    name="cross-dataset",
    title="cross-dataset transfer",
    methods=("zeroshot", "coop", "cocoop", "maple", "procap"),
    datasets={profile.name: (profile.general,) for profile in PROFILES.values()},
    classes="all",
    task="cross-dataset",
    tested=("all",),
    other_sets=of_profile,
    tables=partial(transfer_tables, published="cross_dataset"),
)
