"""Runtime: training seconds of ten epochs, images per second, accuracy; MaPLe-style and ProCAP, all classes, 16 shots.

    procap bench runtime                        every flag of the measurement: `procap bench runtime --help`
    procap bench runtime --datasets oxford-flowers,ucf101 --backbone ViT-B/16 --pretrained openai --data DATA

Nothing else should run on the machine, so its cases are no runs of Ray: they take turns in one process.

Cost: about three minutes in the generated profile on two CPU cores; `--budget` limits it.

Published (published/runtime.csv): on Flowers102 169.1 s and 278.8 images/s for ProCAP, 112.6 s and 415.9 for
MaPLe-style.
"""

from __future__ import annotations

from benchmarks.results.variant import SuiteOptions
from benchmarks.runtime.benchmark import measure_suite
from benchmarks.runtime.settings import flags_of_options
from benchmarks.suites.suite import Suite
from benchmarks.tables.runtime import runtime_tables


def runtime_flags(options: SuiteOptions) -> list[str]:
    """Return the flags of `procap bench runtime`, which has no runs and flags of its own."""
    return [word for name, value in flags_of_options(options).items() for word in (f"--{name}", str(value))]


SUITE = Suite(
    name="runtime",
    title="training seconds and images per second",
    methods=("zeroshot", "maple", "procap"),
    seeds=(1,),
    datasets={"paper": ("oxford-flowers", "ucf101"), "mini": ("digits", "tiles")},
    classes="all",
    # No runs: the benchmark trains and evaluates by itself.
    variants=lambda options, method: [],
    tables=runtime_tables,
    finish=measure_suite,
    published="runtime",
    flags=runtime_flags,
)
