"""Define what the runtime benchmark measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from procap.errors import UsageError
from runner.acceleration import Acceleration

if TYPE_CHECKING:
    from runner.config import RunConfig
    from runner.session import Session

# The paper measures at 16 shots and seed 1.
SHOTS, SEED = 16, 1
METHOD_OPTIONS: dict[str, dict[str, Any]] = {"maple": {"n_ctx": 4}, "coprompt": {"sentences": "templates"}}
"""Defaults of the comparison. MaPLe-style, which the paper does not define, has ProCAP's tokens and recipe."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is measured.

    accelerations: of fast mode. classes: trained and tested on. options: chosen ones by method, before METHOD_OPTIONS.
    repeats: rounds of evaluation.
    """

    backbone: str
    pretrained: str | None
    workers: int
    accelerations: Acceleration
    methods: tuple[str, ...] = ("zeroshot", "maple", "procap")
    datasets: tuple[str, ...] = ("digits",)
    precisions: tuple[str, ...] = ("fp32",)
    classes: str = "base"
    shots: int = SHOTS
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    epochs: int = 10
    batch: int = 32
    test_batch: int = 100
    repeats: int = 5


def make_settings(session: Session, *, backbone: str = "mini", pretrained: str | None = None, **more: Any) -> Settings:
    """Make the settings of a session, with `more` fields of `Settings`. Raises UsageError for TPT or ReBaPL."""
    from procap.methods import method_class
    from procap.methods.hooks import TrainingHooks, ViewedMethod
    from procap.weights.architectures import canonical_name

    for method in more.get("methods", ()):
        if issubclass(method_class(method), ViewedMethod):
            # The speed of one view would be taken for that of an image.
            raise UsageError(f"{method} sees several views of a test image: `procap eval` shows its images per second")
        if method_class(method).begin_epoch is not TrainingHooks.begin_epoch:
            # Its first epochs have neither the noise nor the samples that the later ones have.
            raise UsageError(f"{method} takes different steps from epoch to epoch: `procap train` shows its seconds")
    backbone, pretrained = canonical_name(backbone, pretrained or None)
    return Settings(backbone, pretrained, session.decoders, session.acceleration, **more)


def run_config(
    method: str, precision: str, settings: Settings, *, dataset: str = "shapes", data: Path | None = None
) -> RunConfig:
    """Configure a run with ProCAP's recipe, so that only the methods differ. data: of sets not in the catalogue."""
    from runner.planning import plan_run

    return plan_run(
        method=method,
        dataset=dataset,
        classes=settings.classes,
        shots=settings.shots,
        seed=SEED,
        backbone=settings.backbone,
        pretrained=settings.pretrained,
        precision=precision,
        recipe="procap",
        overrides={"epochs": settings.epochs, "batch_size": settings.batch, "test_batch_size": settings.test_batch},
        options={**METHOD_OPTIONS.get(method, {}), **settings.options.get(method, {})},
        data=data,
    )
