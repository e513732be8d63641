"""Readings of the paper: every passage that can be read in several ways, one changed at a time around the default.

    procap bench examples/suites/readings.py --profile mini
    procap bench examples/suites/readings.py --data DATA --datasets dtd --option n_ctx=2

A reading is an option of ProCAP, a field of its recipe, or a precision. It is judged by base validation images and by
classes held out from the base half, which needs a second training; the tables report test accuracies next to them. An
option chosen with --option moves the default that the others are compared with.

Cost: three data sets, two seeds, each variant trained on the base classes and on half of them. With --profile mini, two
data sets: about an hour on two cores.

Published: nothing. The documentation lists the passages and what this suite measured (docs/paper.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ValidationError
from scipy.stats import ttest_1samp

from benchmarks.console.output import plural
from benchmarks.experiment.profiles import PAPER
from benchmarks.experiment.suite import Suite, SuiteOptions, Variant
from benchmarks.results.metrics import Metric, average, harmonic
from benchmarks.results.suite_results import SuiteResults
from benchmarks.tables.notes import suite_notes
from benchmarks.tables.table import Column, Row, Table, format_number
from procap.methods.procap import ProCAPOptions
from procap.recipe import format_value
from runner.config import Target

DEFAULT = "default"
"""The title of the variant that the others are compared with."""
MEASURES = ("base val", "held-out HM", "base test", "novel test", "HM test")
"""Accuracies and harmonic means of one variant, those without test images first."""
OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "class_prompt": ("phrase", "maple", "template"),
    "template_init_combine": ("mean", "first"),
    "learn_logit_scale": (False, True),
    "depth": (9, 12),
    "deep_tokens": ("refined", "independent"),
    "inject": ("levels", "final"),
    "norm": ("pre", "post", "none"),
    "zero_output": (True, False),
    "shared_attention": (False, True),
    "heads": (8, 4),
    "logvar_init": (-9.0, -6.0, -4.0),
    "logvar_lr_scale": (1.0, 1000.0),
}
"""The values of ProCAP's options that are compared; the one that is the default is compared with the others."""
RECIPE: Mapping[str, tuple[Any, ...]] = {
    "schedule": ("epoch", "step"),
    "warmup_epochs": (3, 0),
    "betas": ((0.9, 0.999), (0.9, 0.98)),
    "weight_decay": (0.03, 0.0),
    "grad_clip": (None, 1.0),
    "drop_last": (True, False),
    "crop_scale": ((0.8, 1.0), (0.08, 1.0)),
    "flip": (True, False),
    "colour_jitter": (0.0, 0.2),
    "rotation": (0.0, 10.0),
}
"""The same of its recipe."""
LONG = {"lr": 2.5e-4, "epochs": 36}
"""On generated data, whose usual trainings hardly move ProCAP's tokens: the learning rates of each training, also on
half of the base classes, then sum to at least 0.0133, as in the paper's shortest training, that of EuroSAT."""
PRECISIONS = ("fp32", "bf16", "fp16")
PAPER_ONLY = ("drop_last=false", "precision=fp16", "logvar_init=-6.0", "logvar_init=-4.0")
"""Left out on generated data, where every batch is full, fp16 takes minutes for a run on a CPU, and initial variances
are compared in a sweep of their own (docs/paper.md)."""


def readings(options: SuiteOptions, method: str) -> list[Variant]:
    """Return the default, and one variant for each value that is not the default; any other method as it is."""
    if method != "procap":
        return [Variant(method)]
    # These import torch.
    from procap.methods.procap import PROCAP_RECIPE

    chosen = ProCAPOptions(**options.options.get(method, {}))
    variants = [Variant(method, DEFAULT, {"reading": DEFAULT})]
    for title, change in further_values(OPTIONS, chosen):
        # Leave out what a chosen option excludes, as deep_tokens=independent does with inject=final.
        with suppress(ValidationError):
            ProCAPOptions(**chosen.model_dump() | change)
            variants.append(Variant(method, title, {"reading": title}, options=change))
    recipe = PROCAP_RECIPE.model_copy(update=dict(options.overrides))
    for title, change in further_values(RECIPE, recipe):
        variants.append(Variant(method, title, {"reading": title}, overrides=change))
    for precision in PRECISIONS:
        if precision != (options.precision or options.profile.precision):
            title = f"precision={precision}"
            variants.append(Variant(method, title, {"reading": title}, precision=precision))
    if options.profile.name == PAPER.name:
        return variants
    schedule = {} if options.quick else {name: LONG[name] for name in LONG.keys() - options.overrides.keys()}
    kept = [variant for variant in variants if variant.title not in PAPER_ONLY]
    return [replace(variant, overrides={**schedule, **variant.overrides}) for variant in kept]


def further_values(listed: Mapping[str, tuple[Any, ...]], default: BaseModel) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield title and change for each listed value that is not the default."""
    for name, values in listed.items():
        for value in values:
            if value != getattr(default, name):
                yield f"{name}={format_value(value)}", {name: value}


def readings_tables(results: SuiteResults) -> list[Table]:
    """Make the differences to the default with their intervals, then the numbers themselves."""
    default = results.by_title.get(DEFAULT, results.variants[0])
    reference = {name: measures(results, default, name) for name in results.options.datasets}
    differences, numbers = [], []
    for title, variant in results.by_title.items():
        measured = {name: measures(results, variant, name) for name in results.options.datasets}
        means = tuple(average(column) for column in zip(*measured.values(), strict=True))
        numbers.append(Row((title,), means))
        pairs = zip(zip(*measured.values(), strict=True), zip(*reference.values(), strict=True), strict=True)
        cells = [_format_difference(*pair) for pair in pairs]
        differences.append(Row((title,), means if variant is default else tuple(cells), group=title))
    rule = (
        "Base val: validation images of the base classes trained on. Held-out HM: trained on half of the base classes, "
        "harmonic mean over the validation images of both halves. Choose by these two; the test columns only report."
    )
    over = plural(len(results.options.datasets), "data set")
    interval = (
        f"Other rows: mean difference to `{DEFAULT}` over pairs of data set and seed, in percentage points (of HMs of "
        "single seeds), with its 95 % interval by Student's t. Seeds of one data set are not independent; of twenty "
        "rows without effect one interval leaves out zero by chance."
    )
    columns, title = tuple(Column(name, "") for name in MEASURES), results.suite.heading
    return [
        Table(results.name, title, ("Reading",), columns, differences, suite_notes(results, rule, interval).lines),
        Table(
            f"{results.name}-accuracy",
            f"{title}: means over {over}",
            ("Reading",),
            tuple(map(Column, MEASURES)),
            numbers,
            suite_notes(results, rule, "HM: mean of the data sets' HMs.").lines,
        ),
    ]


def measures(results: SuiteResults, variant: Variant, dataset: str) -> tuple[Metric | None, ...]:
    """Return MEASURES of a variant on one data set; None where results are missing."""
    base_val, dev_base, dev_novel = (
        results.metric(variant, dataset, Target(dataset, half, "val")) for half in ("base", "dev-base", "dev-novel")
    )
    return base_val, harmonic(dev_base, dev_novel), *results.halves(variant, dataset)


def _format_difference(measured: Sequence[Metric | None], reference: Sequence[Metric | None]) -> str | None:
    """Format the mean difference over data sets and seeds with its interval; None if a result is missing."""
    differences: list[float] = []
    for ours, other in zip(measured, reference, strict=True):
        if ours is None or other is None or ours.limited != other.limited:
            return None
        differences += (a - b for a, b in zip(ours.values, other.values, strict=True))
    text = format_number(fmean(differences), 2, "+")
    if len(differences) < 2:
        return text
    low, high = ttest_1samp(differences, 0.0).confidence_interval(0.95)
    return f"{text} ({format_number(low, 2)} to {format_number(high, 2)})"


SUITE = Suite(
    name="readings",
    title="readings of the paper",
    methods=("procap",),
    datasets={"paper": ("ucf101", "eurosat", "dtd"), "mini": ("digits", "tiles")},
    dev_runs=True,
    variants=readings,
    tested=("base:val", "base", "novel"),
    tables=readings_tables,
    seeds=(1, 2),
)
