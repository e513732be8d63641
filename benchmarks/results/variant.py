"""Define what a suite compares: variants of methods, the options of a suite, and its planned runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pydantic import ConfigDict, TypeAdapter, ValidationError

from benchmarks.results.frame import title_method
from benchmarks.results.profiles import Profile, find_profile
from benchmarks.results.published.tables import COMPONENTS
from cluster.run import RunSpec
from procap.errors import UserError, describe_invalid
from procap.methods import METHODS
from procap.recipe import format_value
from runner.config import EvalSettings, RunConfig, Target
from runner.planning import control_options, plan_run

SHOTS = 16
"""Training images per class unless a variant or the user says otherwise, as in all published numbers."""
INDEPENDENT: Mapping[str, Any] = {"deep_tokens": "independent", "inject": "levels"}
"""Options of ProCAP with a token set for each layer, which enters that layer."""
ALL_OFF: Mapping[str, Any] = {**dict.fromkeys(COMPONENTS, False), **INDEPENDENT}
"""Options of ProCAP without any of its components: deep prompts of both towers, a token set for each layer."""
UNTRAINED_SEED = 1
"""The seed of runs without training."""


def is_trained(method: str) -> bool:
    """Whether the method is trained at all; zero-shot CLIP is not."""
    from procap.methods import method_class

    return method_class(method).recipe().epochs > 0


@dataclass(frozen=True)
class Variant:
    """A method with changed options or recipe, as a suite compares it.

    key: what varies within the suite, by name: {"n_ctx": 8}. options are the method's, overrides the recipe's. recipe:
    "published" or "procap" if the suite prescribes one. part: share of the epochs to train. shots, precision: as
    prescribed.
    """

    method: str
    title: str = ""
    key: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    recipe: str = ""
    part: float = 1.0
    shots: int | None = None
    precision: str = ""

    @property
    def name(self) -> str:
        return self.title or title_method(self.method)

    @property
    def changed(self) -> bool:
        """Whether the variant differs from the method whose numbers the paper's main tables print."""
        control = self.recipe == "procap" and self.method not in ("procap", "zeroshot")
        other = bool(self.options or self.overrides or self.precision) or self.part != 1.0
        return control or other or self.shots not in (None, SHOTS)


@dataclass(frozen=True)
class SuiteOptions:
    """Options that a user may choose for any suite; empty ones take the suite's or the profile's.

    shots: 0 is all. classes: those trained on, in suites that offer a choice. evaluation: the fields of `EvalSettings`
    that differ from the default.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    profile: Profile
    datasets: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    shots: tuple[int, ...] = ()
    recipe: str = ""
    quick: bool = False
    backbone: str = ""
    pretrained: str | None = None
    precision: str = ""
    classes: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    data: Path | None = None

    @property
    def eval_settings(self) -> EvalSettings:
        """How the suite's runs are evaluated."""
        return EvalSettings.model_validate(self.evaluation)

    def recipe_of(self, variant: Variant) -> str:
        """Return whose recipe a variant is trained in, "published" or "procap".

        The profile's is for the built-in methods, for which rates were chosen; a plug-in has its own.
        """
        return variant.recipe or self.recipe or (self.profile.recipe if variant.method in METHODS else "published")

    def run(self, variant: Variant, dataset: str, seed: int, classes: str, task: str | None = None) -> RunConfig:
        """Configure the run of a variant on a data set; the profile's changes apply to the profile's recipe only."""
        profile, method = self.profile, variant.method
        recipe = self.recipe_of(variant)
        changes: dict[str, Any] = {}
        if recipe == profile.recipe:
            changes = {**profile.changes, **({"lr": profile.rates[method]} if method in profile.rates else {})}
        changes |= profile.quick if self.quick else {}
        prescribed = {**self.overrides, **variant.overrides}
        changes |= prescribed
        planned = partial(
            plan_run,
            method=method,
            dataset=dataset,
            classes=classes,
            backbone=self.backbone or profile.backbone,
            pretrained=self.pretrained or (None if self.backbone else profile.pretrained),
            precision=variant.precision or self.precision or profile.precision,
            recipe=recipe,
            task=task,
            options={
                **profile.options.get(method, {}),
                **control_options(method, variant.recipe or self.recipe),
                **self.options.get(method, {}),
                **variant.options,
            },
            data=self.data,
        )
        if not is_trained(method):
            # Without training neither seed nor shots change anything: the run is the same for all of them.
            return planned(overrides=changes, seed=UNTRAINED_SEED, shots=SHOTS)
        shots = (*self.shots, SHOTS)[0] if variant.shots is None else variant.shots
        config = planned(overrides=changes, seed=seed, shots=shots)
        epochs = config.recipe.epochs
        if variant.part != 1.0 and config.recipe.iterations:
            changes["iterations"] = max(1, round(variant.part * config.recipe.iterations))
        elif variant.part != 1.0:
            changes["epochs"] = epochs = max(1, round(variant.part * epochs))
        if "epochs" in changes and "warmup_epochs" not in prescribed and epochs <= config.recipe.warmup_epochs:
            # With epochs of warm-up only, the learning rate would never reach its full value.
            changes["warmup_epochs"] = epochs - 1
        return planned(overrides=changes, seed=seed, shots=shots)

    @property
    def option_flags(self) -> list[str]:
        """The options of methods as `--option` takes them: `procap.n_ctx=8`."""
        return [
            f"{method}.{name}={format_value(value)}"
            for method, own in self.options.items()
            for name, value in own.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON, for `settings` of a collection."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("profile", "data")}
        return json.loads(json.dumps({"profile": self.profile.name, **values}))

    @classmethod
    def from_json(cls, values: Mapping[str, Any], data: Path | None = None) -> SuiteOptions:
        """Convert back from `to_json`. Raises UserError for anything else."""
        try:
            profile = find_profile(str(values["profile"]))
            options = TypeAdapter(cls).validate_python({**values, "profile": profile, "data": data})
            EvalSettings.model_validate(options.evaluation)
        except (KeyError, ValidationError) as error:
            reason = describe_invalid(error) if isinstance(error, ValidationError) else f"{error} is missing"
            raise UserError(
                f"a collection whose settings are no options of a suite ({reason}); run the suite again"
            ) from error
        return options


@dataclass(frozen=True)
class SuiteRun:
    """One run of a suite: its variant, and the run that is sent to a machine."""

    variant: Variant
    dataset: str
    seed: int
    spec: RunSpec

    @property
    def path(self) -> str:
        """The run's folder below the results."""
        return self.spec.config.path


class SuiteDefinition(Protocol):
    """The part of `benchmarks.suites.suite.Suite` that results, tables and plots use."""

    @property
    def name(self) -> str: ...
    @property
    def heading(self) -> str: ...
    @property
    def classes(self) -> str: ...
    @property
    def methods(self) -> tuple[str, ...]: ...
    @property
    def published(self) -> str: ...
    @property
    def task(self) -> str | None: ...
    def targets(self, options: SuiteOptions, dataset: str, /) -> tuple[Target, ...]: ...
    def trained_classes(self, options: SuiteOptions) -> str: ...
    def plan(self, options: SuiteOptions) -> list[SuiteRun]: ...
    def command(self, options: SuiteOptions, results: str | Path) -> str: ...
