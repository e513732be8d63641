"""CLAP: a linear probe on CLIP's cosines, which starts at the class features and stays near those of good classes.

Source: Silva-Rodríguez et al. 2024, "A Closer Look at the Few-Shot Adaptation of Large Vision-Language Models", and its
public code. Learns 512 parameters per class on ViT-B/16.

Shapes: N training images, V views of each, B images, C classes, E joint embedding.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from procap.classifier import cosine_logits
from procap.clip import CLIP
from procap.methods.features import ClassWeights, FeatureBank
from procap.methods.method import Noise, PublicLayout
from procap.methods.options import ViewOptions
from procap.methods.taskres import WrittenText
from procap.recipe import Recipe
from procap.text import LabelSpace


class CLAPOptions(ViewOptions):
    views: int = Field(20, ge=1, description="random views of each image, of which batches are drawn")
    constraint: bool = Field(True, description="keep the weights near the class features; without it: ZS-LP")


class CLAP(WrittenText, ClassWeights):
    """CLAP (Silva-Rodriguez et al. 2024): a linear probe near the class features."""

    Options = CLAPOptions
    title = "CLAP"
    pools_views = True
    public_layout = PublicLayout(
        "adapter",
        {"rows": "adapter.prototypes"},
        module="adapter",
        unused=("base_text_features", "logit_scale"),
    )
    options: CLAPOptions
    multipliers: Tensor

    def __init__(self, clip: CLIP, space: LabelSpace, options: CLAPOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        self.rows.data.copy_(self.text(space))
        # Not saved: `fit` computes them before every training, and inference does not need them.
        self.register_buffer("multipliers", torch.zeros(len(space.classnames)), persistent=False)

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.1, batch 256, 300 epochs, for every task and data set."""
        return Recipe(optimizer="sgd", lr=0.1, weight_decay=0.0, epochs=300, batch_size=256)

    @torch.no_grad()
    def fit(self, bank: FeatureBank) -> None:
        """Set the multiplier of each class: its mean zero-shot probability over all views of its images."""
        labels = bank.labels.repeat_interleave(bank.features.shape[1])
        logits = cosine_logits(bank.features.flatten(0, 1), self.text(self.space), self.scale())
        chosen = logits.softmax(dim=1).gather(1, labels[:, None])[:, 0]
        # A class without images is not held: the public code divides by zero.
        counts = labels.bincount(minlength=len(self.multipliers)).clamp(min=1)
        self.multipliers.zero_().index_add_(0, labels, chosen).div_(counts)

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute the cross-entropy, and the mean over classes of the multiplied squared distance to the text."""
        terms = super().loss(images, labels, noise)
        if self.options.constraint:
            distances = (self.rows - self.text(self.space)).square().sum(dim=1)
            terms["constraint"] = (self.multipliers * distances).mean()
        return terms
