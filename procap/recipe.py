"""Training recipes: optimizer, schedule, batch and augmentation of a method, as data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MOST_DEVIATIONS = 30
"""Most deviations between the mean of a Gaussian average and the nearest epoch: from 39 on weights are 0 in float64."""

Decay = Annotated[float, Field(ge=0, lt=1)]

READ_UNDER: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "momentum": ("optimizer", ("sgd",)),
    **dict.fromkeys(("betas", "eps"), ("optimizer", ("adam", "adamw"))),
    "drop_last": ("batches", ("random",)),
    "min_lr": ("schedule", ("step",)),
    **dict.fromkeys(("warmup_epochs", "warmup_lr"), ("warmup", ("constant", "linear"))),
    **dict.fromkeys(("crop_scale", "flip", "colour_jitter", "rotation"), ("augmentation", ("crop",))),
}
"""The fields that a training reads under some values of another field only, by name: that field and its values."""
OF_EVALUATION = "test_batch_size"
"""The field that changes no weights, but for the last bits of features that a method learns from."""


class Recipe(BaseModel):
    """Everything about the optimisation that changes the trained weights, and the batch of evaluations.

    An epoch is one pass over the training images. With `iterations` the training has that many steps, over as many
    passes as they take, and its epochs are equal parts of them, after which it is logged and validated.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = Field(gt=0, description="peak learning rate")
    vision_lr: float | None = Field(
        default=None, gt=0, description="learning rate of `TrainingHooks.vision_weights`; none: that of all others"
    )
    weight_decay: float = Field(default=5e-4, ge=0)
    momentum: float = Field(default=0.9, ge=0, lt=1, description="SGD only; no dampening, no Nesterov")
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.999), description="Adam and AdamW only")
    eps: float = Field(default=1e-8, gt=0, description="Adam and AdamW only")
    epochs: int = Field(ge=0)
    iterations: int | None = Field(
        default=None, ge=1, description="optimizer steps of the whole training, or none: epochs count"
    )
    batch_size: int = Field(ge=1, description="global batch: images per optimizer step over all processes")
    batches: Literal["random", "class"] = Field(
        default="random", description="images of any classes in a batch, or images of one class only"
    )
    drop_last: bool = Field(default=True, description="leave out the last batch of a pass if it is not full")
    schedule: Literal["epoch", "step"] = Field(
        default="epoch",
        description="warm-up and cosine per epoch, or per step: from lr to min_lr in each stage of the method",
    )
    min_lr: float = Field(default=0.0, ge=0, description="end of the cosine per step")
    warmup: Literal["none", "constant", "linear"] = "constant"
    warmup_epochs: int = Field(default=1, ge=0)
    warmup_lr: float = Field(default=1e-5, ge=0, description="constant warm-up's rate, linear warm-up's first one")
    average: tuple[float, Annotated[float, Field(gt=0)]] | None = Field(
        default=None, description="mean and deviation, in epochs, of a Gaussian average of the weights over epochs"
    )
    grad_clip: float | None = Field(default=None, gt=0, description="largest norm of the gradient, or no limit")
    augmentation: Literal["crop", "randaugment"] = Field(
        default="crop", description="random crops, or whole images squashed to a square and changed by RandAugment"
    )
    crop_scale: tuple[float, float] = Field(default=(0.08, 1.0), description="RandomResizedCrop's range of area")
    flip: bool = Field(default=True, description="random horizontal flip")
    colour_jitter: float = Field(default=0.0, ge=0, le=1, description="strength for brightness, contrast, saturation")
    rotation: float = Field(default=0.0, ge=0, le=180, description="largest random rotation, degrees")
    test_batch_size: int = Field(default=100, ge=1, description="images that are encoded together outside of steps")

    @model_validator(mode="after")
    def _a_step_in_every_epoch(self) -> Self:
        if self.iterations is not None and self.iterations < self.epochs:
            raise ValueError(f"{self.iterations} iterations are fewer than {self.epochs} epochs, their equal parts")
        return self

    def unread(self) -> dict[str, str]:
        """Name the fields that no training in this recipe reads, each with what would have to change; "" for epochs."""
        if not self.epochs:
            return dict.fromkeys(type(self).model_fields.keys() - {OF_EVALUATION}, "")
        return {
            name: f"{field}={' or '.join(values)}"
            for name, (field, values) in READ_UNDER.items()
            if getattr(self, field) not in values
        }

    def passes(self, images: int) -> float:
        """Compute how many passes over `images` images the training takes."""
        return self.iterations * min(self.batch_size, images) / images if self.iterations else self.epochs

    @model_validator(mode="after")
    def _weights_of_the_average(self) -> Self:
        if self.average is not None and self.epochs:
            mean, deviation = self.average
            if abs(mean - min(max(mean, 1), self.epochs)) / deviation > MOST_DEVIATIONS:
                raise ValueError(
                    f"average = {list(self.average)} gives no weight to any of {self.epochs} epochs: give a mean near "
                    "them, or a larger deviation"
                )
        return self

    @field_validator("crop_scale")
    @classmethod
    def _a_range_of_area(cls, scale: tuple[float, float]) -> tuple[float, float]:
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError("a range of the image's area, such as 0.08 to 1")
        return scale


def epoch_rate(recipe: Recipe, epoch: int, cycles: int = 1) -> float:
    """Compute the learning rate of `epoch` (0-based) under the schedule per epoch.

    Warm-up epochs are followed by a cosine over `recipe.epochs` that starts after the warm-up and so never reaches
    zero: Dassl's schedule, with which the published numbers of CoOp, CoCoOp and MaPLe were measured. ProCAP's
    paper names a warm-up and a cosine without details. With several cycles the cosine is repeated over equal parts of
    the epochs.
    """
    warm = 0 if recipe.warmup == "none" else recipe.warmup_epochs
    if epoch < warm:
        return _warmup_rate(recipe, epoch, warm)
    # The warm-up delays restarts, as in ReBaPL's public code: a later cycle begins with an epoch at the lowest rate.
    cycle = max(1, recipe.epochs // cycles)
    return 0.5 * recipe.lr * (1 + math.cos(math.pi * ((epoch - warm) % cycle) / cycle))


def _warmup_rate(recipe: Recipe, done: int, warm: int) -> float:
    """Compute the rate after `done` of `warm` epochs or steps of the warm-up."""
    # Dassl's linear warm-up starts at `warmup_lr` as well; what follows it has the full rate.
    return recipe.warmup_lr if recipe.warmup == "constant" or done == 0 else recipe.lr * done / warm


def warmup_warning(recipe: Recipe, images: int) -> str:
    """Explain that most epochs on `images` are warm-up epochs, so that a training may hardly learn; else ""."""
    if recipe.warmup == "none" or not 0 < recipe.epochs < 2 * recipe.warmup_epochs:
        return ""
    warm = last = min(recipe.epochs, recipe.warmup_epochs)
    length, is_per_step = recipe.warmup_epochs, recipe.schedule == "step"
    if is_per_step:
        # A warm-up per step ends with the training at the latest.
        steps = recipe.iterations or recipe.epochs * max(1, images // recipe.batch_size)
        length = last = steps * warm // recipe.epochs
    if (highest := _warmup_rate(recipe, last - 1, length)) > recipe.lr / 2 and is_per_step:
        return ""
    return (
        f"may hardly learn: {warm} of {recipe.epochs} epochs warm up at a rate of {highest:g} or less instead of "
        f"{recipe.lr:g}; give {2 * recipe.warmup_epochs} epochs or more"
    )


def step_rate(recipe: Recipe, step: int, steps: int, warm: int = 0) -> float:
    """Compute the learning rate of `step` (0-based) of a stage of `steps` steps under the schedule per step.

    The first `warm` steps are the warm-up; the cosine falls over the others.
    """
    if step < warm:
        return _warmup_rate(recipe, step, warm)
    # As by torch's CosineAnnealingLR, the last step is still one step short of `min_lr`.
    return recipe.min_lr + 0.5 * (recipe.lr - recipe.min_lr) * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def format_value(value: Any) -> str:
    """Format a setting as `--option` and `--recipe-field` take it: text as it is, everything else as JSON."""
    return value if isinstance(value, str) and value else json.dumps(value)
