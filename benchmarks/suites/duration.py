"""Training duration: a fifth, a half and all of the epochs (10, 25 and 50 of ProCAP's), each with its own schedule.

    procap bench duration --data DATA

Cost: 11 data sets, two shorter durations, three seeds: 66 runs in addition to those of base-to-novel; 132 evaluations.

Published: harmonic mean 80.04, 80.56 and 81.33 after 10, 25 and 50 epochs.
"""

from __future__ import annotations

from statistics import mode

from benchmarks.experiment.suite import Suite, SuiteOptions, Variant
from benchmarks.tables.base_novel import duration_tables

PARTS = (0.2, 0.5, 1.0)


def by_duration(options: SuiteOptions, method: str) -> list[Variant]:
    """Return one variant per part of the epochs; one alone where there are none.

    The variants are named by the epochs of most data sets, and say so where a method's own recipe has others elsewhere.
    """
    epochs = [options.plan_run(Variant(method), dataset, 1, "base").recipe.epochs for dataset in options.datasets]
    usual = mode(epochs)
    if not usual:
        return [Variant(method, key={"epochs": 0})]
    title = f"{Variant(method).name} (on most data sets)" if len({*epochs}) > 1 else ""
    # Short trainings round to equal numbers of epochs; reversed, so that the smallest part keeps the number.
    parts = {max(1, round(part * usual)): part for part in reversed(PARTS)}
    return [Variant(method, title, key={"epochs": count}, part=parts[count]) for count in sorted(parts)]


SUITE = Suite(
    name="duration",
    title="training duration",
    methods=("procap",),
    variants=by_duration,
    tables=duration_tables,
    quick_datasets={"mini": ("tiles", "petals")},
)
