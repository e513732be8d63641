"""BPL: a Gaussian over a shift of CoOp's context; a prediction is the mean over samples of it.

Source: Derakhshani et al. 2023, "Bayesian Prompt Learning for Image-Language Model Generalization", section 3, and its
public code in the form that its scripts run, where the Gaussian does not depend on the image. Learns 3,072 parameters
on ViT-B/16 with 4 tokens.

Shapes: B images, C classes, S samples, P context tokens, D text width, E joint embedding.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from procap.classifier import Classifier, HeadClassifier, cosine_logits, mean_log_probability, unit
from procap.clip import CLIP
from procap.methods.coop import CONTEXT_NAMES, ContextMethod, ContextOptions
from procap.methods.method import TRANSFER_TASKS, Noise, PublicLayout, PublishedOptions
from procap.methods.prompts import ClassPrompts, context_plan
from procap.plan import NO_CHANGE, Plan
from procap.recipe import Recipe
from procap.text import LabelSpace

PUBLISHED = {
    "caltech101": (20, 20), "oxford-pets": (40, 20), "stanford-cars": (20, 40), "oxford-flowers": (10, 40),
    "food101": (20, 20), "fgvc-aircraft": (10, 10), "sun397": (20, 10), "dtd": (40, 10), "eurosat": (20, 60),
    "ucf101": (5, 20), "imagenet": (10, 10),
}  # fmt: skip
"""Samples and epochs of the public scripts for base-to-novel, by data set."""


class BPLOptions(ContextOptions):
    samples: int = Field(10, ge=1, description="samples of the shift in each training step and in inference")
    kl_weight: float = Field(0.001, ge=0, description="weight of the divergence from N(0, 1), a mean over the width")


class BPL(ContextMethod):
    """BPL (Derakhshani et al. 2023): predictions averaged over samples of a Gaussian shift."""

    Options = BPLOptions
    title = "BPL"
    groups = ("prompts", "probabilistic")
    mini_lr = 0.16
    public_layout = PublicLayout(
        "prompt_learner",
        CONTEXT_NAMES | {"mean": "prompt_learner.mean_posterior", "logvar": "prompt_learner.std_posterior"},
    )
    published: ClassVar[PublishedOptions] = {name: {"samples": row[0]} for name, row in PUBLISHED.items()}
    options: BPLOptions
    inference_noise: Tensor

    def __init__(self, clip: CLIP, space: LabelSpace, options: BPLOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        width = clip.geometry.text_width
        self.mean = nn.Parameter(torch.zeros(1, width))
        # As in the public code: sigma starts between 1 and 1.65, far above the size of word embeddings.
        self.logvar = nn.Parameter(torch.rand(1, width, generator=generator))
        # Drawn once: the public code draws for every batch, so that its accuracy depends on the batch size.
        noise = torch.randn(options.samples, 1, width, generator=generator)
        # Not saved, because a loaded run is built from its seed, which draws it again.
        self.register_buffer("inference_noise", noise, persistent=False)

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.002, one image per step, the data set's epochs, 10 for transfer; there is no few-shot recipe."""
        epochs = 10 if task in TRANSFER_TASKS else PUBLISHED.get(dataset, (10, 40))[1]
        return Recipe(optimizer="sgd", lr=0.002, epochs=epochs, batch_size=1)

    def draw(self, generator: torch.Generator) -> Noise:
        """Draw the samples of a step [S, 1, D], the same for all images and classes."""
        return (torch.randn(self.inference_noise.shape, generator=generator),)

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        """Add each sampled shift to every context token: one token set for each sample."""
        standard = noise[0] if noise else self.inference_noise
        shifts = self.mean + standard * (self.logvar / 2).exp()
        # [P, D] and [S, 1, D] make [S, P, D]; the second dimension of [S, 1, P, D] is that of prompts.
        return NO_CHANGE, context_plan((self.context + shifts)[:, None])

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute minus the logarithm of the mean probability of the labels, and the weighted divergence."""
        image, text = self.features(images, noise)
        logits = torch.stack([cosine_logits(image, sample, self.scale()) for sample in text])
        divergence = (self.logvar.exp() + self.mean.square() - 1 - self.logvar).mean() / 2
        return {
            # The logarithm of the mean probability, not the mean of logarithms as in the usual bound (public code).
            "ce": F.nll_loss(mean_log_probability(logits), labels),
            "kl": self.options.kl_weight * divergence,
        }

    def make_classifier(self, image_plan: Plan, text: Tensor, space: LabelSpace) -> Classifier:
        """Make a classifier whose logits are logarithms of mean probabilities; text [S, C, E]."""
        head = partial(mean_logits, text=unit(text), scale=self.scale())
        return HeadClassifier(self.clip, head, text.shape[1], image_plan)


def mean_logits(features: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """Compute the log of the mean probability [B, C] over samples of normalised class features [S, C, E]."""
    return mean_log_probability(scale * torch.einsum("be,sce->sbc", unit(features), text))
