"""KgCoOp: CoOp's context, held near the class features of hand-written templates.

Source: Yao et al. 2023, "Visual-Language Prompt Tuning with Knowledge-guided Context Optimization", section 3.2, and
its public code. Learns 2,048 parameters on ViT-B/16.

Shapes: C classes, E joint embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from procap.classifier import cosine_logits
from procap.methods.coop import CONTEXT_NAMES, ContextMethod, ContextOptions
from procap.methods.method import MethodOptions, Noise, PublicLayout
from procap.recipe import Recipe
from procap.teacher import text_bank
from procap.text import LabelSpace

REFERENCE_TEMPLATES = {"dtd": "a photo of a {}, a type of texture."}
"""Where the public code's reference differs from the zero-shot template of the data set."""


class KgCoOpOptions(ContextOptions):
    kg_weight: float = Field(8.0, ge=0, description="weight of the distance to the reference features (lambda)")
    reference_template: str | None = Field(None, description="template of the reference; none: the public code's")


class KgCoOp(ContextMethod):
    """KgCoOp (Yao et al. 2023): CoOp near the features of hand-written prompts."""

    Options: ClassVar[type[MethodOptions]] = KgCoOpOptions
    title = "KgCoOp"
    mini_lr = 4e-2
    public_layout = PublicLayout(
        "prompt_learner", CONTEXT_NAMES, module="prompt_learner", unused=("bias_vectors", "meta_net.")
    )
    reference_templates: ClassVar[Mapping[str, str]] = REFERENCE_TEMPLATES
    options: KgCoOpOptions

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.002, batch 128, 100 epochs, for every task and data set."""
        return Recipe(optimizer="sgd", lr=0.002, epochs=100, batch_size=128)

    def reference(self, space: LabelSpace) -> Tensor:
        """Compute the frozen class features [C, E] of the reference template, normalised."""
        template = self.options.reference_template or self.reference_templates.get(space.dataset, space.template)
        return text_bank(self.clip, space, [template])

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute the cross-entropy, and kg_weight times one minus the mean cosine of all classes to the reference."""
        image, text = self.features(images, noise)
        # The epsilon is that of the public code; torch's default is 1e-8.
        reference = self.prompts.reference
        if reference is None:
            reference = self.constant("reference", lambda: self.reference(self.space))
        distance = 1 - F.cosine_similarity(text.float(), reference, eps=1e-7).mean()
        return {
            "ce": F.cross_entropy(cosine_logits(image, text, self.scale()), labels),
            "kg": self.options.kg_weight * distance,
        }
