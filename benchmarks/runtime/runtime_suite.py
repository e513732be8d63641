"""Runtime: seconds of training, images per second and accuracy of methods measured on one machine.

    procap bench runtime --profile mini
    procap bench runtime --data DATA --device cuda --precision fp32

Nothing else should run on the machine; the methods alternate in one process, epoch by epoch.

Ten epochs of 16 shots of the base classes, or --epochs of them.

Cost: about three minutes in the generated profile on two CPU cores.

Published: on Flowers102 169.1 s, 278.8 images/s and 97.39 % for ProCAP, 112.6 s, 415.9 and
95.25 % for MaPLe-style. The paper does not name the classes; its accuracies are near its base accuracies after 50
epochs (98.39 % on Flowers102).
"""

from __future__ import annotations

from benchmarks.experiment.suite import Suite
from benchmarks.runtime.benchmark import measure_suite
from benchmarks.tables.speed import runtime_tables

UNREAD = ("seeds", "recipe", "reference", "limit", "eval-precision", "eval-resize", "samples", "temperature",
          "launcher", "address", "processes", "cpus", "gpus", "max-concurrent", "autoscale", "no-cache",
          "deterministic", "timeout", "engine", "zero-stage")  # fmt: skip
"""One process measures all test images, with ProCAP's recipe and seed 1."""

SUITE = Suite(
    name="runtime",
    title="training seconds and images per second",
    methods=("zeroshot", "maple", "procap"),
    seeds=(1,),
    datasets={"paper": ("oxford-flowers", "ucf101"), "mini": ("digits", "tiles")},
    quick_datasets={"mini": ("digits",)},
    trains=False,
    tables=runtime_tables,
    finish=measure_suite,
    unread=UNREAD,
)
