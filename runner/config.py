"""Configure runs: what is trained and evaluated, its identity, and where it runs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from procap.errors import UsageError, explain_invalid, unknown_name
from procap.methods import ADDED_OPTIONS
from procap.recipe import ADDED_FIELDS, Recipe
from runner.acceleration import acceleration_names
from runner.environment import check_device_name
from shards.fewshot import Classes, parse_classes
from shards.names import has_control

IDENTITY_SCHEMA = 1

RecipeName = Literal["published", "procap", "custom"]
Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


Count = Annotated[int, Field(ge=0, le=10**10)]
"""A number of images, steps or parameters in a stored document."""
Bytes = Annotated[int, Field(ge=0, le=10**15)]
"""A size in memory in a stored document."""
Amount = Annotated[float, Field(ge=0, le=1e15)]
"""A measured quantity in a stored document, such as seconds."""
Rate = Annotated[float, Field(gt=0, le=1e12)]
"""A measured number per second in a stored document."""
TargetName = Annotated[str, Field(pattern="^[^:]+:[^:]+:[^:]+$", description="dataset:classes:split")]


class FrozenModel(BaseModel):
    """A document whose fields cannot be changed, and which refuses unknown fields, NaN and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunConfig(FrozenModel):
    """One training, resolved: defaults are filled in and names are in their canonical spelling. Made by `plan_run`."""

    method: str
    options: dict[str, Any] = Field(default_factory=dict, description="the method's own, every one of them")
    recipe: Recipe
    recipe_name: RecipeName = Field(default="published", description="for people; the recipe itself is what counts")
    backbone: str = "mini"
    pretrained: str | None = Field(
        default=None, description="weights tag, a local file, or None for the backbone's own"
    )
    dataset: str
    classes: Classes = "all"
    shots: int = Field(default=16, ge=0, description="training images per class; 0 takes all of them")
    seed: int = Field(default=1, ge=0, lt=2**32)
    precision: Precision = "fp32"

    @field_validator("method", "dataset", "backbone")
    @classmethod
    def _names_a_folder(cls, name: str, info: ValidationInfo) -> str:
        """Refuse names that would leave the results: they are parts of `path`, and the file may come from outside."""
        last = Path(name).stem if info.field_name == "backbone" else name
        if has_control(name) or "/" in last or last in ("", ".", ".."):
            raise ValueError("this cannot be the name of a folder")
        return name

    @field_validator("options", "recipe")
    @classmethod
    def _finite(cls, fields: Any) -> Any:
        for name, value in (fields.model_dump() if isinstance(fields, Recipe) else fields).items():
            numbers = value if isinstance(value, list | tuple) else [value]
            if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
                raise ValueError(f"{name} must be a finite number")
        return fields

    @field_validator("options")
    @classmethod
    def _complete(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Add the options that the method got after the run was stored."""
        return {**ADDED_OPTIONS.get(info.data.get("method", ""), {}), **options}

    def identity(self) -> dict[str, Any]:
        """Return the fields that change the trained weights and no others, so that equal trainings are one run."""
        plain = self.model_dump(mode="json", exclude={"recipe_name"})
        recipe = plain["recipe"]
        unread = {"test_batch_size", "betas" if self.recipe.optimizer == "sgd" else "momentum"}
        if self.recipe.warmup == "none":
            unread |= {"warmup_epochs", "warmup_lr"}
        fields = type(self.recipe).model_fields
        unread |= {name for name in ADDED_FIELDS if getattr(self.recipe, name) == fields[name].default}
        added = ADDED_OPTIONS.get(self.method, {})
        plain["options"] = dict(option for option in plain["options"].items() if option not in added.items())
        plain["recipe"] = {name: recipe[name] for name in recipe if name not in unread} if self.recipe.epochs else None
        return {"schema": IDENTITY_SCHEMA, **plain}

    @property
    def hash(self) -> str:
        """The first 8 hex digits of the SHA-256 of the identity as canonical JSON (sorted keys, no spaces)."""
        text = json.dumps(self.identity(), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def __hash__(self) -> int:
        return hash(self.hash)

    @property
    def stability_hint(self) -> str:
        """What to try if numbers are not finite, as part of an error message."""
        return "a lower lr" if self.precision == "fp32" else "a lower lr or --precision fp32"

    @property
    def path(self) -> str:
        """The run's folder below the results, readable and unique: base/shapes/maple/mini/16shot/seed1-3fa29c10."""
        shots = f"{self.shots}shot" if self.shots else "fullshot"
        backbone = Path(self.backbone).stem if "/" in self.backbone else self.backbone
        return f"{self.classes}/{self.dataset}/{self.method}/{backbone}/{shots}/seed{self.seed}-{self.hash}"


class EvalSettings(FrozenModel):
    """How a trained run is evaluated; no part of its identity. Results under other settings have files of their own."""

    precision: Precision | None = Field(default=None, description="of the arithmetic; None: that of the training")
    resize: Literal["crop", "squash"] = Field(
        default="crop", description="shorter side to the input size and centre crop, or the whole image squashed"
    )
    samples: int = Field(
        default=0, ge=0, description="draws of Gaussian tokens, whose probabilities are averaged; 0: their means alone"
    )

    def for_run(self, config: RunConfig) -> EvalSettings:
        """Return these settings for a run, with its own precision as None.

        Raises UsageError for samples of a method without Gaussian tokens.
        """
        if self.samples:
            _check_samples(self.samples, config)
        return self.model_copy(update={"precision": None}) if self.precision == config.precision else self

    @property
    def label(self) -> str:
        """What differs from the default, as `fp32, squash, 8 samples`; empty if nothing does."""
        samples = f"{self.samples} sample{'s' * (self.samples > 1)}" if self.samples else ""
        return ", ".join(filter(None, (self.precision, self.resize * (self.resize != "crop"), samples)))

    @property
    def changes(self) -> dict[str, Any]:
        """The fields that differ from the default, in a fixed order: the canonical JSON of the settings."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @property
    def flags(self) -> list[str]:
        """The flags of `procap eval` and `procap bench` that give these settings."""
        names = {"precision": "--eval-precision", "resize": "--eval-resize", "samples": "--samples"}
        return [word for name, value in self.changes.items() for word in (names[name], str(value))]


def _check_samples(samples: int, config: RunConfig) -> None:
    from procap.methods import method_class

    kind = method_class(config.method)
    if not kind.has_gaussians(kind.Options.model_validate(config.options)):
        raise UsageError(f"--samples {samples}: {config.method} has no Gaussian tokens under these options")


@dataclass(frozen=True)
class Target:
    """What a trained run is tested on: classes of a data set, and a split."""

    dataset: str
    classes: Classes = "all"
    split: str = "test"

    @classmethod
    def parse(cls, text: str, data: Path | None = None) -> Target:
        """Read `shapes`, `shapes:novel` or `shapes:novel:test`; data sets are those of the catalogue and of `data`."""
        from shards.resolve import resolve_dataset

        read = cls.parse_unchecked(text)
        dataset = resolve_dataset(read.dataset, data)
        if read.split not in dataset.counts:
            raise unknown_name(f"split of {dataset.name}", read.split, dataset.counts)
        return cls(dataset.name, read.classes, read.split)

    @classmethod
    def parse_unchecked(cls, text: str) -> Target:
        """Parse dataset[:classes[:split]] without looking the data set up, which may be unknown on this machine."""
        name, *rest = text.split(":")
        if len(rest) > 2 or not all((name, *rest)):
            raise UsageError(f"target '{text}' is not dataset[:classes[:split]], as in shapes:novel:test")
        return cls(name, parse_classes(rest[0]) if rest else "all", rest[1] if len(rest) == 2 else "test")

    def file(self, settings: EvalSettings) -> str:
        """Name the file of a result, as `digits-base-test.json` or `digits-base-test.fp32-squash-8-samples.json`."""
        label = settings.label.replace(", ", "-").replace(" ", "-")
        return f"{self.dataset}-{self.classes}-{self.split}{label and '.'}{label}.json"

    def __str__(self) -> str:
        return f"{self.dataset}:{self.classes}:{self.split}"


ENGINES = ("ddp", "deepspeed")
"""The implementations that average gradients over processes."""


@dataclass(frozen=True)
class RuntimeConfig:
    """Where and how a run is executed; no field changes its training, and only two its evaluations.

    workers: threads that decode images; None: see `runner.environment.num_decoders`.
    features: folder of `runner.features`; None computes image features for every evaluation.
    accelerate: accelerations, as `runner.acceleration.Acceleration.parse` parses them.
    limit, evaluation: the first N images of a target, and the settings; both are recorded with each result.
    timeout: longest time in seconds that a process waits for others.
    store: the URL that the folder `results` stands for on this machine, see `runner.remote_results`.
    no_cache: read shards from start to end for evaluation and for training on all images, from a URL without a copy.
    """

    data: Path
    results: Path
    device: str = "auto"
    workers: int | None = None
    checkpoint_seconds: float = 30.0
    limit: int | None = None
    evaluation: EvalSettings = field(default_factory=EvalSettings)
    tracking_uri: str | None = None
    log_checkpoints: bool = False
    quiet: bool = False
    features: Path | None = None
    accelerate: str = "auto"
    timeout: float = 300.0
    engine: str = "ddp"
    zero_stage: int | None = None
    store: str | None = None
    no_cache: bool = False

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise unknown_name("engine", self.engine, ENGINES)
        if self.engine != "deepspeed" and self.zero_stage is not None:
            raise UsageError("--zero-stage is DeepSpeed's: add --engine deepspeed")
        if self.zero_stage not in (None, 0, 1, 2):
            raise UsageError(
                f"ZeRO stage {self.zero_stage} is not supported: use 0, 1 or 2 (3 would share out frozen weights)"
            )
        check_device_name(self.device)
        acceleration_names(self.accelerate)
        if self.workers is not None and self.workers < 0:
            raise UsageError(f"workers = {self.workers}: 0 or more threads can decode images")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit = {self.limit}: at least 1 image is needed")


def plan_run(
    *,
    method: str,
    dataset: str,
    classes: str = "",
    shots: int = 16,
    seed: int = 1,
    backbone: str = "mini",
    pretrained: str | None = None,
    precision: str = "fp32",
    recipe: str = "published",
    task: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    data: Path | None = None,
) -> RunConfig:
    """Resolve names, defaults and recipes into a `RunConfig`. Raises UsageError.

    classes: by default "base", or "all" of a data set of test images alone, which has no halves.
    recipe: "published" is the method's published recipe for `task`, "procap" is ProCAP's; `overrides` change fields.
    task: selects the published recipe and options; None: "few-shot" on all classes, else "base-to-novel".
    options: fields of the method; the others get the values published for `task` (recipe "published"), else defaults.
    data: folder of packed sets that are not in the catalogue. A derived set uses the recipe of its base.
    """
    from procap.methods import method_class, method_options
    from shards.resolve import resolve_dataset

    if recipe not in ("published", "procap"):
        raise unknown_name("recipe", recipe, ("published", "procap"))
    found = resolve_dataset(dataset, data)
    classes = parse_classes(classes or ("all" if found.test_only else "base"))
    fields = {"dataset": found.name, "classes": classes, "shots": shots, "seed": seed}
    fields |= {"method": method, "precision": precision}
    # Once before the method is known, whose import takes longer than everything else here.
    _make_config(_make_recipe({"lr": 1.0, "epochs": 0, "batch_size": 1, **(overrides or {})}), fields)
    kind = method_class(method)
    from procap.methods.method import TASKS

    task = task or ("few-shot" if classes == "all" else "base-to-novel")
    if task not in TASKS:
        raise unknown_name("task", task, TASKS)
    own = kind.recipe(task, shots, found.base)
    base = own if recipe == "published" else method_class("procap").recipe(task, shots, found.base)
    changes = dict(overrides or {})
    if own.epochs == 0:
        changes["epochs"] = 0
    if "epochs" in changes:
        # Without `iterations` epochs are passes over the images, as a user who gives their number expects.
        changes = {"iterations": None, **changes}
    resolved = _make_recipe({**base.model_dump(), **changes})
    if own.epochs and not resolved.epochs:
        raise UsageError(f"epochs = 0 trains nothing, which {method} needs: give 1 or more, or `--methods zeroshot`")
    published = kind.task_options(task, shots, found.base) if recipe == "published" else {}
    filled = method_options(method, {**published, **(options or {})}).model_dump(mode="json")
    from procap.weights.architectures import canonical_name

    backbone, pretrained = canonical_name(backbone, pretrained)
    recipe_name = "custom" if resolved != base and own.epochs > 0 else recipe
    fields |= {"options": filled, "recipe_name": recipe_name, "backbone": backbone, "pretrained": pretrained}
    return _make_config(resolved, fields)


def control_options(method: str, recipe: str) -> dict[str, Any]:
    """Return the options of a method where the recipe is chosen by name: in ProCAP's, MaPLe has as many tokens."""
    return {"n_ctx": 4} if (method, recipe) == ("maple", "procap") else {}


def recipe_settings(
    config: RunConfig, task: str | None = None, recipe: str = "published"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options, and the fields of the recipe, that a recipe has for a run; see `plan_run`."""
    from procap.methods import method_class, method_options
    from shards.resolve import base_name

    kind, task = method_class(config.method), task or ("few-shot" if config.classes == "all" else "base-to-novel")
    case = task, config.shots, base_name(config.dataset)
    own = kind.task_options(*case) if recipe == "published" else control_options(config.method, recipe)
    options = method_options(config.method, own).model_dump(mode="json")
    return options, (kind if recipe == "published" else method_class("procap")).recipe(*case).model_dump(mode="json")


def changed_settings(
    config: RunConfig, task: str | None = None, recipe: str = "published"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options, and the fields of the recipe, that differ from those of a recipe; see `plan_run`."""
    options, fields = recipe_settings(config, task, recipe)
    return (
        {name: value for name, value in config.options.items() if value != options.get(name, value)},
        {name: value for name, value in config.recipe.model_dump(mode="json").items() if value != fields[name]},
    )


def nearest_recipe(config: RunConfig, task: str | None = None) -> str:
    """Return whose recipe a run differs from in the fewest settings, "published" or "procap"."""
    return min(("published", "procap"), key=lambda name: sum(map(len, changed_settings(config, task, name))))


def check_recipe(changes: Mapping[str, Any]) -> None:
    """Raise UsageError for a field of a recipe that is wrong whatever the others are."""
    if changes.get("epochs") == 0:
        raise UsageError("epochs = 0 trains nothing: give 1 or more, or `procap eval --methods zeroshot`")
    try:
        Recipe.model_validate({"lr": 1, "epochs": 1, "batch_size": 1, **changes})
    except ValidationError as error:
        if error.errors()[0]["loc"]:
            raise explain_invalid(error, "recipe", Recipe.model_fields) from error


def _make_recipe(fields: Mapping[str, Any]) -> Recipe:
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        raise explain_invalid(error, "recipe", Recipe.model_fields) from error


def _make_config(recipe: Recipe, fields: Mapping[str, Any]) -> RunConfig:
    try:
        return RunConfig(recipe=recipe, **fields)
    except ValidationError as error:
        raise explain_invalid(error, "run", RunConfig.model_fields) from error
