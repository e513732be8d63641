"""ProGrad: CoOp whose gradient may not point against the one that keeps zero-shot CLIP's predictions.

Source: Zhu et al. 2023, "Prompt-aligned Gradient for Prompt Tuning", section 3.3, and its public code. Learns 8,192
parameters on ViT-B/16 with 16 tokens.

Shapes: B images, C classes, P context tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from procap.classifier import cosine_logits
from procap.errors import UsageError
from procap.methods.coop import ContextMethod, ContextOptions
from procap.methods.method import Noise
from procap.methods.prompts import phrase_tokens
from procap.recipe import Recipe
from procap.teacher import text_bank

TEMPLATES = {
    "oxford-pets": "a type of pet, a photo of a {}.", "oxford-flowers": "a type of flower, a photo of a {}.",
    "fgvc-aircraft": "a type of aircraft, a photo of a {}.", "dtd": "a texture of {}.",
    "food101": "a type of food, a photo of {}.",
}  # fmt: skip
"""The teacher's templates, where they differ from those of the data sets."""
WEAKER = ("oxford-flowers", "dtd", "eurosat")
"""Data sets with a smaller share of the projection for 8 shots and more."""


class ProGradOptions(ContextOptions):
    n_ctx: int = Field(16, ge=1, description="learned context tokens; the words of the template are the last of them")
    ctx_init: str = Field("", description="words to start from instead of those of the template")
    share: float = Field(1.0, ge=0, le=1, description="share of the conflicting component that is removed (lambda)")
    temperature: float = Field(
        1.0, gt=0, description="of the teacher's and the student's predictions that are compared"
    )

    @model_validator(mode="after")
    def _words_fit(self) -> Self:
        # Unlike CoOp's, the words may be fewer than the tokens.
        return self


class ProGrad(ContextMethod):
    """ProGrad (Zhu et al. 2023): CoOp without the gradient against zero-shot CLIP."""

    Options = ProGradOptions
    title = "ProGrad"
    mini_lr = 6e-4
    options: ProGradOptions

    @property
    def template(self) -> str:
        """The teacher's template."""
        return TEMPLATES.get(self.space.dataset, self.space.template)

    def _initial_context(self, generator: torch.Generator) -> Tensor:
        """Return the embeddings of the template's words [P, D], behind as many zero vectors as are left."""
        words = self.options.ctx_init or self.template.replace("{}", "").replace(".", "").strip(" ,")
        tokens, n_ctx = phrase_tokens(self.clip, words), self.options.n_ctx
        if len(tokens) > n_ctx:
            raise UsageError(
                f"'{words}' is {len(tokens)} tokens, more than n_ctx = {n_ctx}: give n_ctx = {len(tokens)}"
            )
        return torch.cat([tokens.new_zeros(n_ctx - len(tokens), tokens.shape[1]), tokens])

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.002, batch 32; 50 to 200 epochs by shots for few-shot, 100 otherwise, 50 on ImageNet."""
        epochs = (50 if shots == 1 else 100 if 1 < shots < 8 else 200) if task == "few-shot" else 100
        if dataset == "imagenet":
            epochs = 50
        return Recipe(optimizer="sgd", lr=0.002, epochs=epochs, batch_size=32)

    @classmethod
    def task_options(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> dict[str, object]:
        """Return a smaller share for many shots on three data sets."""
        many = task == "few-shot" and (shots >= 8 or not shots)
        return {"share": 0.8} if many and dataset in WEAKER else {}

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute the cross-entropies with the labels and with the predictions of zero-shot CLIP."""
        image, text = self.features(images, noise)
        logits, t = cosine_logits(image, text, self.scale()), self.options.temperature
        teacher_text = self.constant("teacher", lambda: text_bank(self.clip, self.space, [self.template]))
        # The image tower is CLIP's own in both.
        teacher = cosine_logits(image, teacher_text, self.scale())
        return {
            "ce": F.cross_entropy(logits, labels),
            # The temperature divides the gradient by t^2, which the factor undoes (Hinton et al. 2015).
            # The entropy of the teacher, which the divergence subtracts, has no gradient.
            "kl": F.cross_entropy(logits / t, (teacher / t).softmax(dim=1)) * t**2,
        }

    def combine_gradients(self, gradients: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Remove from the first gradient its component against the second; the second is never descended itself."""
        combined = {}
        for name, gradient in gradients["ce"].items():
            general = gradients["kl"][name]
            # The loss scale of fp16 cancels here, and is a factor of everything else.
            direction = general / general.norm()
            along = (gradient * direction).sum()
            # A gradient of zero has no direction: the comparison with NaN is false.
            combined[name] = torch.where(along < 0, gradient - self.options.share * along * direction, gradient)
        return combined
