"""Zero-shot CLIP: hand-written templates, nothing learned.

Source: Radford et al. 2021, section 3.1; templates as in the public code of CoOp (its two zero-shot trainers).
Learns 0 parameters. Shapes: B images, C classes.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from procap.classifier import Classifier
from procap.methods.data_use import DataUse
from procap.methods.method import Method, MethodOptions, Noise
from procap.methods.prompts import ClassPrompts
from procap.plan import NO_CHANGE, Plan
from procap.recipe import Recipe
from procap.teacher import text_bank
from procap.text import LabelSpace

ENSEMBLE = (
    "itap of a {}.",
    "a bad photo of the {}.",
    "a origami {}.",
    "a photo of the large {}.",
    "a {} in a video game.",
    "art of the {}.",
    "a photo of the small {}.",
)
"""The seven templates that Radford et al. chose for ImageNet."""


class ZeroShotOptions(MethodOptions):
    templates: Literal["single", "ensemble"] = Field(
        "single",
        description="the data set's own template, or the mean over seven general ones and it (on ImageNet: the seven)",
    )


class ZeroShot(Method):
    """Zero-shot CLIP: hand-written templates, nothing is trained."""

    Options: ClassVar[type[MethodOptions]] = ZeroShotOptions
    title = "CLIP (zero-shot)"
    groups: ClassVar[tuple[str, ...]] = ()
    selection = "-"
    uses = DataUse(labelled="none")
    changes = ()
    options: ZeroShotOptions

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return a recipe of zero epochs: there is nothing to train."""
        # Every recipe has a rate; without epochs it is not read.
        return Recipe(lr=1e-3, epochs=0, batch_size=32)

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        return NO_CHANGE, NO_CHANGE

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute the cross-entropy for display; it has no gradient."""
        return {"ce": F.cross_entropy(self.classifier()(images), labels)}

    def classifier(self, space: LabelSpace | None = None) -> Classifier:
        space = space or self.space
        if self.options.templates == "single":
            return super().classifier(space)
        of_dataset = () if space.dataset == "imagenet" else (space.template,)
        return Classifier(self.clip, NO_CHANGE, text_bank(self.clip, space, (*ENSEMBLE, *of_dataset)), self.scale())
