"""Define what the runtime benchmark measures, from the text of its flags or from the options of the suite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.console.parse import parse_integers, parse_methods, parse_options, split_names
from procap.errors import UsageError
from procap.methods import method_options
from runner.acceleration import Acceleration
from runner.environment import num_decoders

if TYPE_CHECKING:
    import torch

    from benchmarks.experiment.suite import SuiteOptions
    from runner.config import RunConfig, RuntimeConfig

SHOTS, SEED = 16, 1
METHODS = "zeroshot,maple,procap"
METHOD_OPTIONS: dict[str, dict[str, Any]] = {"maple": {"n_ctx": 4}, "coprompt": {"sentences": "templates"}}
"""Defaults of the comparison. MaPLe-style, which the paper does not define, has ProCAP's tokens and recipe."""
COMPONENTS_OFF: dict[str, dict[str, Any]] = {"procap-off": {}, "procap-off-one-set": {"deep_tokens": "refined"}}
"""Two ProCAP variants with all components off, by report name; the ablation allows either reading of MaPLe-style."""
CLASS_CHOICES = ("base", "all")
"""Classes to measure. The paper does not name them; its accuracies are near those of base classes."""
PRECISIONS = ("fp32", "bf16", "fp16")
SCALING = "10,50,200x4,32"
CHECK_SCALING = "102,10,500x32"
"""Sizes of the check on a GPU: the table's own number of classes, and one batch."""
QUICK_BUDGET, SMALL_BUDGET, FULL_BUDGET, CHECK_BUDGET = 30.0, 150.0, 900.0, 420.0
"""Seconds: of the suite with --quick, of mini and of another backbone on a CPU, and of the check on a GPU."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is measured.

    accelerations: of fast mode. budget: seconds after which training is extrapolated and evaluation limited, None
    without limit. scaling: numbers of classes and batches. classes: trained and tested on; `photographs-C` has all.
    options: chosen ones by method, before METHOD_OPTIONS. repeats: rounds of evaluation and of every size.
    """

    methods: tuple[str, ...]
    datasets: tuple[str, ...]
    precisions: tuple[str, ...]
    backbone: str
    pretrained: str | None
    workers: int
    accelerations: Acceleration
    budget: float | None
    scaling: tuple[tuple[int, ...], tuple[int, ...]]
    classes: str = "base"
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    epochs: int = 10
    batch: int = 32
    test_batch: int = 100
    repeats: int = 5


def make_settings(
    runtime: RuntimeConfig,
    device: torch.device,
    *,
    methods: str = METHODS,
    datasets: str = "",
    precision: str = "",
    backbone: str = "",
    pretrained: str = "",
    budget: float | None = None,
    scaling: str = "",
    classes: str = "",
    option: Sequence[str] | None = None,
    check: bool = False,
) -> Settings:
    """Make the settings for `device` from flags of `procap bench runtime`. Raises UsageError for impossible ones."""
    from procap.weights.architectures import canonical_name

    on_gpu = device.type == "cuda"
    full = check and on_gpu and not backbone
    if budget is not None and not 0 <= budget < math.inf:
        raise UsageError(f"--budget {budget:g}: a number of seconds is needed, 0 for no limit")
    if (classes := classes or "base") not in CLASS_CHOICES:
        raise UsageError(f"--classes {classes}: known are {', '.join(CLASS_CHOICES)}")
    precisions = split_names(precision or ("bf16" if full else "fp32"))
    for name in precisions:
        if name not in PRECISIONS:
            raise UsageError(f"--precision {name}: known are {', '.join(PRECISIONS)}")
    backbone, weights = canonical_name(
        backbone or ("ViT-B-16" if full else "mini"), pretrained or ("random" if full else None)
    )
    small = backbone == "mini"
    if budget is None and not on_gpu:
        budget = SMALL_BUDGET if small else FULL_BUDGET
    elif budget is None and check:
        budget = CHECK_BUDGET
    sizes = CHECK_SCALING if check and on_gpu else SCALING if on_gpu or small else "off"
    chosen = tuple(parse_methods(methods))
    return Settings(
        methods=chosen,
        datasets=tuple(split_names(datasets) or (["digits", "tiles"] if small else ["photographs-102"])),
        precisions=tuple(precisions),
        backbone=backbone,
        pretrained=weights,
        workers=num_decoders(runtime.workers, device),
        accelerations=Acceleration.parse(runtime.accelerate, device),
        budget=budget or None,
        scaling=_parse_scaling(scaling or sizes),
        classes=classes,
        options=_parse_options(option or (), chosen),
    )


def flags_of_options(options: SuiteOptions) -> dict[str, Any]:
    """Convert options of the suite `runtime` to flags; its table has no sizes."""
    profile = options.profile
    flags = {
        "methods": ",".join(options.methods),
        "datasets": ",".join(options.datasets),
        "precision": options.precision or profile.precision,
        "backbone": options.backbone or profile.backbone,
        "pretrained": options.pretrained if options.backbone else profile.pretrained,
        "budget": QUICK_BUDGET if options.quick else None,
        "scaling": "off",
        "classes": options.classes,
        "option": options.option_flags,
    }
    return {name: value for name, value in flags.items() if value}


def _parse_options(given: Sequence[str], methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse options by method. Raises UsageError for a wrong value."""
    found = {method: own for method, own in parse_options(given, methods).items() if own}
    for method, own in found.items():
        method_options(method, own)
    return found


def _parse_scaling(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if text == "off":
        return (), ()
    classes, _, batches = text.partition("x")
    sizes = tuple(tuple(parse_integers(part, "--scaling", SCALING)) for part in (classes, batches or "32"))
    if not all(part and min(part) for part in sizes):
        raise UsageError(f"--scaling {text}: classes and images of 1 or more are needed, as in {SCALING}, or off")
    return sizes[0], sizes[1]


def run_config(
    method: str, precision: str, settings: Settings, *, dataset: str = "shapes", data: Path | None = None,
    classes: str = "all", batch: int | None = None,
) -> RunConfig:  # fmt: skip
    """Configure a run with ProCAP's recipe, so that only the methods differ. data: of sets not in the catalogue."""
    from runner.planning import plan_run

    return plan_run(
        method=method,
        dataset=dataset,
        classes=classes,
        shots=SHOTS,
        seed=SEED,
        backbone=settings.backbone,
        pretrained=settings.pretrained,
        precision=precision,
        recipe="procap",
        overrides={
            "epochs": settings.epochs,
            "batch_size": batch or settings.batch,
            "test_batch_size": batch or settings.test_batch,
        },
        options={**METHOD_OPTIONS.get(method, {}), **settings.options.get(method, {})},
        data=data,
    )


def list_cases(precision: str, settings: Settings, **data: Any) -> list[tuple[str, RunConfig]]:
    """Configure every method by its name, and ProCAP without its components where it is compared with MaPLe.

    data: as `run_config` takes them.
    """
    from benchmarks.experiment.suite import ALL_OFF

    cases = [(method, run_config(method, precision, settings, **data)) for method in settings.methods]
    if {"maple", "procap"} <= set(settings.methods):
        full = dict(cases)["procap"]
        position = settings.methods.index("procap")
        cases[position:position] = [
            (name, full.model_copy(update={"options": {**full.options, **ALL_OFF, **more}}))
            for name, more in COMPONENTS_OFF.items()
        ]
    return cases
