"""Define the configuration of a run: what is trained and evaluated, its identity, and where it runs."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from procap.errors import UsageError, unknown_name
from procap.methods import data_use
from procap.methods.options import is_chosen_on_test
from procap.recipe import OF_EVALUATION, Recipe
from runner.devices import check_device_name
from shards.default_paths import data_root
from shards.image_selection import Classes, parse_classes
from shards.names import has_control
from shards.uneven_samples import BALANCED, Sampling
from shards.urls import redact

# Incremented when the meaning of a field changes: runs before it then have other hashes and are trained again.
IDENTITY_SCHEMA = 2
LEFT_OUT = (OF_EVALUATION, "betas", "momentum", "warmup_epochs", "warmup_lr")
"""Recipe fields that the identity leaves out where they are not read; others then have their default."""

RecipeName = Literal["published", "procap", "custom"]
Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


# Bounds refuse files whose numbers cannot be right, before anything is computed from them.
Count = Annotated[int, Field(ge=0, le=10**10)]
"""A number of images, steps or parameters in a stored document."""
Bytes = Annotated[int, Field(ge=0, le=10**15)]
"""A size in memory in a stored document."""
Amount = Annotated[float, Field(ge=0, le=1e15)]
"""A measured quantity in a stored document, such as seconds."""
Throughput = Annotated[float, Field(gt=0, le=1e12)]
"""A measured number per second in a stored document."""
LOCAL_FOLDER = re.compile("(?:^|(?<=:))[/~](?!/)[^:]*/")
"""The folder of a path that is absolute, or begins with ~, in the value of an option."""
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
    weights_digest: str = Field(
        default="", pattern="^([0-9a-f]{16})?$", description="of a file of weights; empty for weights with a name"
    )
    dataset: str
    classes: Classes
    shots: int = Field(default=16, ge=0, description="training images per class; 0 takes all of them")
    sampling: Sampling = BALANCED
    seed: int = Field(default=1, ge=0, lt=2**32)
    precision: Precision = "fp32"
    held_out: str = Field(default="", pattern="^([1-9]/[1-9])?$", description="fold of the images left out, as 1/4")
    init: str = Field(default="", description="folder of the run that the training starts from, in these results")
    init_digest: str = Field(default="", pattern="^([0-9a-f]{64})?$", description="SHA-256 of its checkpoint")

    @field_validator("method", "dataset", "backbone")
    @classmethod
    def _names_a_folder(cls, name: str, info: ValidationInfo) -> str:
        """Refuse names that would leave the results: they are parts of `path`, and the file may come from outside."""
        last = Path(name).stem if info.field_name == "backbone" else name
        if has_control(name) or "/" in last or last in ("", ".", ".."):
            raise ValueError("this cannot be the name of a folder")
        return name

    def identity(self) -> dict[str, Any]:
        """Return the fields that change the trained weights and no others, so that equal trainings are one run.

        A file of weights, or a run to start from, counts by the digest of its content: paths differ between machines.
        A file that an option names counts by its name; `TrainResult.files` has its digest.
        """
        plain = self.portable().model_dump(mode="json", exclude={"recipe_name", "init"})
        # Left out instead of empty, so that runs without them keep the hash they had before these fields existed.
        for name in ("init_digest", "held_out", "sampling"):
            if plain[name] in ("", BALANCED):
                del plain[name]
        if self.weights_digest:
            plain |= {"backbone": self.backbone_name, "pretrained": None}
        recipe, schema = plain["recipe"], IDENTITY_SCHEMA
        # What this recipe does not read must not make two runs of one training.
        for name in (OF_EVALUATION, *self.recipe.unread()):
            if name in LEFT_OUT:
                del recipe[name]
            else:
                recipe[name] = Recipe.model_fields[name].default
        # Without epochs nothing is trained, so zero-shot CLIP is one run under all recipes and samplings.
        if not self.recipe.epochs:
            plain["recipe"] = None
            plain.pop("sampling", None)
        elif self.recipe.schedule == "step" and self.recipe.warmup != "none":
            # Under schema 2 a schedule per step had no warm-up.
            schema = 3
        return {"schema": schema, **plain}

    def portable(self) -> RunConfig:
        """Return this configuration with ./NAME for a local file, without its folder."""
        fields = {name: LOCAL_FOLDER.sub("./", path) for name in ("backbone", "pretrained", "init")
                  if (path := getattr(self, name))}  # fmt: skip
        options = {
            name: LOCAL_FOLDER.sub("./", value) if isinstance(value, str) else value
            for name, value in self.options.items()
        }
        return self.model_copy(update={**fields, "options": options})

    @property
    def hash(self) -> str:
        """The first 8 hex digits of the SHA-256 of the identity as canonical JSON (sorted keys, no spaces)."""
        text = json.dumps(self.identity(), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def __hash__(self) -> int:
        # pydantic's hash of a frozen model fails on the dict of options.
        return hash(self.hash)

    @property
    def chosen_on_test(self) -> bool:
        """Whether weights or settings are chosen by test accuracy, as some public code does (‡ in tables)."""
        return is_chosen_on_test(self.options)

    @property
    def stability_hint(self) -> str:
        """What to try if numbers are not finite, as part of an error message."""
        return "a lower lr" if self.precision == "fp32" else "a lower lr or --precision fp32"

    @property
    def path(self) -> str:
        """The run's folder below the results, readable and unique: base/shapes/maple/mini/16shot/seed1-3fa29c10."""
        shots = f"{self.shots}shot" if self.shots else "fullshot"
        return f"{self.classes}/{self.dataset}/{self.method}/{self.backbone_name}/{shots}/seed{self.seed}-{self.hash}"

    @staticmethod
    def parse_path(path: str) -> dict[str, str]:
        """Return the parts of a run's `path`, which may have folders before it, by name."""
        names = ("classes", "dataset", "method", "backbone", "shots", "seed")
        return dict(zip(names, path.split("/")[-6:], strict=True))

    @property
    def backbone_name(self) -> str:
        """The name of the architecture, or that of the file that has its own."""
        return Path(self.backbone).stem if "/" in self.backbone else self.backbone


class EvalSettings(FrozenModel):
    """How a trained run is evaluated; no part of its identity. Results under other settings have files of their own."""

    precision: Precision | None = Field(default=None, description="of the arithmetic; None: that of the training")
    resize: Literal["crop", "squash"] = Field(
        default="crop", description="crop: as the backbone was trained; squash: the whole image"
    )
    samples: int = Field(
        default=0, ge=0, description="draws of Gaussian tokens, whose probabilities are averaged; 0: their means alone"
    )
    temperature: Literal["shots"] | None = Field(default=None, description="shots: logits are divided by a fitted T")

    def for_run(self, config: RunConfig) -> EvalSettings:
        """Return these settings for a run, with its own precision as None.

        Raises UsageError for samples of a method without Gaussian tokens, and for a temperature of a run whose few-shot
        images cannot be held out.
        """
        if self.samples:
            from procap.methods import method_class
            from procap.methods.hooks import GaussianMethod

            cls = method_class(config.method)
            if not (issubclass(cls, GaussianMethod) and cls.has_gaussians(cls.Options.model_validate(config.options))):
                raise UsageError(
                    f"--samples {self.samples}: {config.method} has no Gaussian tokens under these options"
                )
        if self.temperature and (why := _describe_leak(config)):
            raise UsageError(f"--temperature {self.temperature}: {why}")
        return self.model_copy(update={"precision": None}) if self.precision == config.precision else self

    def sample_fields(self, config: RunConfig) -> tuple[str, ...]:
        """Name which of shots, sampling and seed the results of a run depend on."""
        if config.recipe.epochs:
            return "shots", "sampling", "seed"
        if self.temperature:
            return "shots", "seed"
        # It orders the images to which a method adapts.
        return ("seed",) if data_use(config.method).unlabelled == "test" else ()

    @property
    def name(self) -> str:
        """What differs from the default, as `fp32, squash, 8 samples`; empty if nothing does."""
        samples = f"{self.samples} sample{'s' * (self.samples > 1)}" if self.samples else ""
        temperature = f"temperature {self.temperature}" if self.temperature else ""
        return ", ".join(filter(None, (self.precision, self.resize * (self.resize != "crop"), samples, temperature)))

    @property
    def changes(self) -> dict[str, Any]:
        """The fields that differ from the default, in a fixed order: the canonical JSON of the settings."""
        return self.model_dump(mode="json", exclude_defaults=True)


def _describe_leak(config: RunConfig) -> str:
    """Explain why no few-shot image of a run is new to a training on the others; empty if each is."""
    from procap.methods import method_class
    from procap.methods.hooks import TaughtMethod

    cls, is_trained = method_class(config.method), config.recipe.epochs > 0
    has_teacher = issubclass(cls, TaughtMethod) and cls.teacher_run(cls.Options(**config.options)) is not None
    reasons = {
        "has no shots of which some can be held out: train with --shots 2 or more": config.shots < 2,
        "is chosen by test images: train with --option selection=validation": config.chosen_on_test,
        "has learned from every image, without labels": config.options.get("unlabelled", "few-shot") != "few-shot",
        "learns from a finished run, which may have seen the images to hold out": config.init or has_teacher,
    }
    return next((f"{config.path} {why}" for why, applies in reasons.items() if applies and is_trained), "")


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
        name = settings.name.replace(", ", "-").replace(" ", "-")
        return f"{self.dataset}-{self.classes}-{self.split}{name and '.'}{name}.json"

    def __str__(self) -> str:
        return f"{self.dataset}:{self.classes}:{self.split}"


ENGINES = ("ddp", "deepspeed")
"""The implementations that average gradients over processes."""
ACCELERATIONS = ("compile", "graphs", "images", "fused")
"""Names of `--accelerate`, see `runner.acceleration.Acceleration`."""


def acceleration_names(text: str) -> list[str]:
    """Split `auto`, `off` or names with commas between; the first two name none. Raises UsageError."""
    names = [] if text in ("auto", "off") else text.split(",")
    if not {*names} <= {*ACCELERATIONS}:
        known = ", ".join(ACCELERATIONS)
        raise UsageError(f"--accelerate {text}: known are auto, off, and {known} with commas between")
    return names


@dataclass(frozen=True)
class RuntimeConfig:
    """Where and how a run is executed; no field changes its training, and only two its evaluations.

    data: the folder of packed data sets, by default the one of the command line.
    workers: threads that decode images; None: see `runner.devices.num_decoders`.
    state_seconds: a training saves its state when the last one is that old.
    accelerate: accelerations, as `runner.acceleration.Acceleration.parse` parses them.
    limit, evaluation: the first N images of a target, and the settings; both are recorded with each result.
    timeout: longest time in seconds that a process waits for others.
    results_url: the URL whose local copy the folder `results` is, see `runner.remote_results`; None without one.
    no_cache: stream the shards of a URL for evaluation and for training on all images, without a copy on the disk.
    deterministic: see `runner.devices.set_deterministic`; for CUDA, as CPUs compute equal bits without it.
    """

    data: Path = field(default_factory=data_root)
    results: Path = Path("results")
    device: str = "auto"
    workers: int | None = None
    state_seconds: float = 30.0
    limit: int | None = None
    evaluation: EvalSettings = field(default_factory=EvalSettings)
    tracking_uri: str | None = None
    quiet: bool = False
    accelerate: str = "auto"
    timeout: float = 300.0
    engine: str = "ddp"
    zero_stage: int | None = None
    results_url: str | None = None
    no_cache: bool = False
    deterministic: bool = False

    @property
    def shown_results(self) -> str:
        """The results as users name them: their folder, or their URL without what may be secret in it."""
        return redact(self.results_url or str(self.results))

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise unknown_name("engine", self.engine, ENGINES)
        if self.engine != "deepspeed" and self.zero_stage is not None:
            raise UsageError("--zero-stage is DeepSpeed's: add --engine deepspeed")
        if self.zero_stage not in (None, 1, 2):
            raise UsageError(f"ZeRO stage {self.zero_stage} is not supported: use 1 or 2, or --engine ddp for stage 0")
        check_device_name(self.device)
        acceleration_names(self.accelerate)
