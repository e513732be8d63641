"""Runtime: training seconds of ten epochs, images per second, accuracy; MaPLe-style and ProCAP, all classes, 16 shots.

    procap bench runtime                        every flag of the measurement: `procap bench runtime --help`
    procap bench runtime --datasets oxford-flowers,ucf101 --backbone ViT-B/16 --pretrained openai --data DATA

Nothing else should run on the machine, so its cases are no runs of Ray: they take turns in one process.

Cost: about three minutes in the generated profile on two CPU cores; `--budget` limits it.

Published (published/runtime.csv): on Flowers102 169.1 s and 278.8 images/s for ProCAP, 112.6 s and 415.9 for
MaPLe-style.
"""

from __future__ import annotations

from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import SuiteOptions, Variant
from benchmarks.runtime.settings import QUICK_BUDGET, Flags, flags_of_options
from benchmarks.suites.suite import Suite
from benchmarks.tables.runtime import runtime_tables
from runner.config import RuntimeConfig


def no_runs(options: SuiteOptions, method: str) -> list[Variant]:
    """Return no variants: the benchmark trains and evaluates by itself."""
    return []


def measure(suite: SuiteResults, runtime: RuntimeConfig, force: bool) -> None:
    """Run the benchmark, unless it was measured with these settings on such a machine."""
    from benchmarks.runtime.benchmark import measure_suite

    measure_suite(suite, runtime, budget=QUICK_BUDGET if suite.options.quick else None, force=force)


def changed_flags(options: SuiteOptions) -> list[str]:
    """Return the flags of `procap bench runtime`, which has no runs and flags of its own."""
    words: list[str] = []
    for name, value in vars(flags_of_options(options, QUICK_BUDGET if options.quick else None)).items():
        text = f"{value:g}" if isinstance(value, float) else str(value)
        words += [f"--{name}", text] if value != getattr(Flags(), name) else []
    return words


SUITE = Suite(
    name="runtime",
    title="training seconds and images per second",
    methods=("zeroshot", "maple", "procap"),
    seeds=(1,),
    datasets={"paper": ("oxford-flowers", "ucf101"), "mini": ("digits", "tiles")},
    classes="all",
    variants=no_runs,
    tables=runtime_tables,
    finish=measure,
    published="runtime",
    flags=changed_flags,
)
