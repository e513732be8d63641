"""Training recipes: optimizer, schedule, batch and augmentation of a method, as data."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Recipe(BaseModel):
    """Everything about the optimisation that changes the trained weights.

    The learning rate is constant inside an epoch and set at its start, as in the public trainers of the CoOp family.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = Field(gt=0, description="peak learning rate")
    weight_decay: float = Field(default=5e-4, ge=0)
    momentum: float = Field(default=0.9, ge=0, lt=1, description="SGD only; no dampening, no Nesterov")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="Adam and AdamW only")
    eps: float = Field(default=1e-8, gt=0, description="Adam and AdamW only")
    epochs: int = Field(ge=0)
    batch_size: int = Field(ge=1, description="global batch: images per optimizer step over all processes")
    warmup: Literal["none", "constant", "linear"] = "constant"
    warmup_epochs: int = Field(default=1, ge=0)
    warmup_lr: float = Field(default=1e-5, ge=0, description="constant warm-up's rate, linear warm-up's first epoch")
    average: tuple[float, float] | None = Field(
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
    test_batch_size: int = Field(default=100, ge=1)

    @field_validator("betas")
    @classmethod
    def _decays(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("two decay rates from 0 up to, not including, 1, such as 0.9 and 0.999")
        return betas

    @field_validator("crop_scale")
    @classmethod
    def _a_range_of_area(cls, scale: tuple[float, float]) -> tuple[float, float]:
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError("a range of the image's area, such as 0.08 to 1")
        return scale


def learning_rate(recipe: Recipe, epoch: int) -> float:
    """Compute the learning rate of `epoch` (0-based).

    Warm-up epochs are followed by a cosine over `recipe.epochs` that starts after the warm-up and so never reaches
    zero: Dassl's schedule, with which the published numbers of CoOp, CoCoOp, MaPLe and ProCAP were measured.
    """
    warm = 0 if recipe.warmup == "none" else recipe.warmup_epochs
    if epoch < warm:
        if recipe.warmup == "constant" or epoch == 0:
            return recipe.warmup_lr
        return recipe.lr * epoch / warm
    return 0.5 * recipe.lr * (1 + math.cos(math.pi * (epoch - warm) / recipe.epochs))
