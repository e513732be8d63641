"""Define what the runtime benchmark measures, from the text of its flags or from the options of the suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.console.parse import parse_methods, parse_options, split_names
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
CLASS_CHOICES = ("base", "all")
"""Classes to measure. The paper does not name them; its accuracies are near those of base classes."""
PRECISIONS = ("fp32", "bf16", "fp16")
QUICK_EPOCHS, EPOCHS = 2, 10


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is measured.

    accelerations: of fast mode. classes: trained and tested on; `photographs-C` has all. options: chosen ones by
    method, before METHOD_OPTIONS. repeats: rounds of evaluation.
    """

    methods: tuple[str, ...]
    datasets: tuple[str, ...]
    precisions: tuple[str, ...]
    backbone: str
    pretrained: str | None
    workers: int
    accelerations: Acceleration
    classes: str = "base"
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    epochs: int = EPOCHS
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
    epochs: int = EPOCHS,
    classes: str = "",
    option: Sequence[str] | None = None,
) -> Settings:
    """Make the settings for `device` from flags of `procap bench runtime`. Raises UsageError for impossible ones."""
    from procap.weights.architectures import canonical_name

    if (classes := classes or "base") not in CLASS_CHOICES:
        raise UsageError(f"--classes {classes}: known are {', '.join(CLASS_CHOICES)}")
    precisions = split_names(precision or "fp32")
    for name in precisions:
        if name not in PRECISIONS:
            raise UsageError(f"--precision {name}: known are {', '.join(PRECISIONS)}")
    backbone, weights = canonical_name(backbone or "mini", pretrained or None)
    chosen = tuple(parse_methods(methods))
    return Settings(
        methods=chosen,
        datasets=tuple(split_names(datasets) or (["digits", "tiles"] if backbone == "mini" else ["photographs-102"])),
        precisions=tuple(precisions),
        backbone=backbone,
        pretrained=weights,
        workers=num_decoders(runtime.workers, device),
        accelerations=Acceleration.parse(runtime.accelerate, device),
        classes=classes,
        options=_parse_options(option or (), chosen),
        epochs=epochs,
    )


def flags_of_options(options: SuiteOptions) -> dict[str, Any]:
    """Convert options of the suite `runtime` to flags of `procap bench runtime`."""
    profile = options.profile
    flags = {
        "methods": ",".join(options.methods),
        "datasets": ",".join(options.datasets),
        "precision": options.precision or profile.precision,
        "backbone": options.backbone or profile.backbone,
        "pretrained": options.pretrained if options.backbone else profile.pretrained,
        "epochs": QUICK_EPOCHS if options.quick else None,
        "classes": options.classes,
        "option": options.option_flags,
    }
    return {name: value for name, value in flags.items() if value}


def _parse_options(option_flags: Sequence[str], methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse options by method. Raises UsageError for a wrong value."""
    chosen = {method: values for method, values in parse_options(option_flags, methods).items() if values}
    for method, values in chosen.items():
        method_options(method, values)
    return chosen


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
