"""ProLIP: the projection of the image tower, trained on the features before it and held near CLIP's own.

Source: Fahes et al. 2025, the public code of ProLIP. Learns 393,216 parameters on ViT-B/16.

Shapes: N training images, B images, C classes, D width of the image tower, E joint embedding.
"""

from __future__ import annotations

from functools import partial

import torch
from pydantic import Field
from torch import Tensor, nn

from procap.classifier import Classifier, cosine_logits
from procap.clip import CLIP
from procap.methods.features import FeatureBank, FeatureMethod, Head
from procap.methods.method import Noise
from procap.methods.options import ViewOptions
from procap.methods.prompts import ClassPrompts
from procap.plan import NO_CHANGE, Plan
from procap.recipe import Recipe
from procap.text import LabelSpace

ALL_IMAGES = 100_000
"""A batch size above the number of few-shot samples of any data set."""


class ProLIPOptions(ViewOptions):
    penalty: float | None = Field(
        None, ge=0, description="weight of the squared distance to CLIP's projection; none: one over the shots"
    )


def projected_logits(features: Tensor, projection: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """Compute the logits [B, C] of features [B, D] before the `projection` [D, E], against class features [C, E]."""
    return cosine_logits(features @ projection, text, scale)


class ProLIP(FeatureMethod):
    """ProLIP (Fahes et al. 2025): the image tower's projection, held near CLIP's."""

    Options = ProLIPOptions
    title = "ProLIP"
    changes = ("image",)
    options: ProLIPOptions
    penalty: Tensor

    def __init__(self, clip: CLIP, space: LabelSpace, options: ProLIPOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        self.projection = nn.Parameter(self.start.detach().clone())
        # Not saved: `fit` sets it before every training.
        self.register_buffer("penalty", torch.tensor(options.penalty or 0.0), persistent=False)

    @property
    def start(self) -> Tensor:
        """CLIP's own projection [D, E]."""
        projection: Tensor = self.clip.visual.proj
        return projection

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return Adam 1e-5 with eps 1e-4, all images in a batch, 300 epochs, for every task and data set."""
        changes = {"optimizer": "adam", "lr": 1e-5, "eps": 1e-4, "weight_decay": 0.0, "schedule": "step"}
        changes |= {"epochs": 300, "batch_size": ALL_IMAGES}
        return super().recipe(task, shots, dataset).model_copy(update=changes)

    def image_plan(self) -> Plan:
        """Return the plan under which the image tower gives the features before its projection."""
        return Plan(weights={"proj": torch.eye(len(self.start), device=self.start.device)})

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        return Plan(weights={"proj": self.projection}), NO_CHANGE

    def fit(self, bank: FeatureBank) -> None:
        """Set the weight of the distance, by default to one over the number of images of a class."""
        if self.options.penalty is None:
            self.penalty.copy_(1 / bank.labels.bincount().max())

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute the cross-entropy, and the weighted sum of the squared changes of the projection."""
        distance = (self.projection - self.start).square().sum()
        return super().loss(images, labels, noise) | {"distance": self.penalty * distance}

    def head(self, space: LabelSpace) -> Head:
        """Make the head on features [B, D] before the projection, for training."""
        return partial(projected_logits, projection=self.projection, text=self.text(space), scale=self.scale())

    @torch.no_grad()
    def classifier(self, space: LabelSpace | None = None) -> Classifier:
        return Classifier(self.clip, self.plans(self.prompts)[0], self.text(space or self.space), self.scale())
