"""Readings of the paper: every passage that can be read in several ways, one changed at a time around the default.

    procap bench readings --profile mini
    procap bench readings-training --profile mini
    procap bench readings --data DATA --datasets dtd --option n_ctx=2

A reading is an option of ProCAP (`readings`), or a field of its recipe or a precision (`readings-training`). It is
judged by base validation images and by classes held out from the base half, which needs a second training; test
accuracies are reported beside them. An option chosen with --option moves the default that the others are compared with.
"procap bench all" leaves these suites out.

Cost: three data sets, 21 and 13 variants, two seeds, each trained on the base classes and on half of them: 252 and 156
runs. With --profile mini, two data sets, 19 and 11 variants: less than 15 minutes each on two cores.

Published: nothing. The documentation lists the passages and what this suite measured (docs/paper.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ValidationError

from benchmarks.results.profiles import PAPER
from benchmarks.results.variant import SuiteOptions, Variant
from benchmarks.suites.suite import Suite, halves
from benchmarks.tables.readings import DEFAULT, readings_tables
from procap.methods.options import ProCAPOptions
from procap.recipe import format_value
from runner.config import Target

OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "class_prompt": ("phrase", "maple", "template"),
    "template_init_combine": ("mean", "first", "features"),
    "learn_logit_scale": (False, True),
    "depth": (9, 12),
    "deep_tokens": ("refined", "independent"),
    "inject": ("levels", "final", "final-all"),
    "norm": ("pre", "post", "none"),
    "zero_output": (True, False),
    "shared_attention": (False, True),
    "heads": (8, 4),
    "nce_hidden_width": (None, 256),
    "nce_activation": ("gelu", "relu"),
    "logvar_init": (-9.0, -6.0, -4.0),
    "logvar_lr_scale": (1.0, 1000.0),
    "vision_init_std": (0.02, 0.1),
}
"""The values of ProCAP's options that are compared; the one that is the default is compared with the others."""
RECIPE: Mapping[str, tuple[Any, ...]] = {
    "schedule": ("epoch", "warmup-step"),
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
PRECISIONS = ("fp32", "bf16", "fp16")
PAPER_ONLY = ("drop_last=false", "precision=fp16", "logvar_init=-6.0", "logvar_init=-4.0")
"""Left out on generated data, where every batch is full, fp16 takes minutes for a run on a CPU, and initial variances
are compared in a sweep of their own (docs/paper.md)."""


def option_readings(options: SuiteOptions, method: str) -> list[Variant]:
    """Return the default, and one variant for every other value of every option; any other method as it is."""
    if method != "procap":
        return [Variant(method)]
    own = ProCAPOptions(**options.options.get(method, {}))
    found = []
    for title, change in other_values(OPTIONS, own):
        # Leave out what a chosen option excludes, as deep_tokens=independent does with inject=final.
        with suppress(ValidationError):
            ProCAPOptions(**own.model_dump() | change)
            found.append(Variant(method, title, {"reading": title}, options=change))
    return with_default(options, method, found)


def training_readings(options: SuiteOptions, method: str) -> list[Variant]:
    """Return the default, and one variant for every other value of a recipe's field and every other precision."""
    if method != "procap":
        return [Variant(method)]
    # This imports torch.
    from procap.methods.procap import PROCAP_RECIPE

    recipe = PROCAP_RECIPE.model_copy(update=dict(options.overrides))
    found = [
        Variant(method, title, {"reading": title}, overrides=change) for title, change in other_values(RECIPE, recipe)
    ]
    for precision in PRECISIONS:
        if precision != (options.precision or options.profile.precision):
            title = f"precision={precision}"
            found.append(Variant(method, title, {"reading": title}, precision=precision))
    return with_default(options, method, found)


def with_default(options: SuiteOptions, method: str, others: list[Variant]) -> list[Variant]:
    """Put the default before the variants that the profile compares with it."""
    kept = [one for one in others if options.profile.name == PAPER.name or one.title not in PAPER_ONLY]
    return [Variant(method, DEFAULT, {"reading": DEFAULT}), *kept]


def other_values(listed: Mapping[str, tuple[Any, ...]], default: BaseModel) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield title and change for each listed value that is not the default."""
    for name, values in listed.items():
        for value in values:
            if value != getattr(default, name):
                yield f"{name}={format_value(value)}", {name: value}


def validated(options: SuiteOptions, dataset: str) -> tuple[Target, ...]:
    """Return the validation images of the base classes, then base and novel test images."""
    return Target(dataset, "base", "val"), *halves(options, dataset)


SUITE = Suite(
    name="readings",
    title="readings of the paper",
    methods=("procap",),
    datasets={"paper": ("ucf101", "eurosat", "dtd"), "mini": ("digits", "tiles")},
    held_out=True,
    variants=option_readings,
    targets=validated,
    tables=readings_tables,
    seeds=(1, 2),
    quick_seeds=(1,),
)
TRAINING = replace(SUITE, name="readings-training", title="readings of the paper: training", variants=training_readings)
