"""MMLoP: low-rank prompts of both towers with a shared factor, and a correction of the class features' common drift.

Source: the paper's text alone (arXiv 2602.21397, "MMLoP", sections on the method and details); no public code exists.
Where it is silent, PromptSRC's code decides, from which it takes its prompts, teachers and weights.
Learns 11,556 parameters on ViT-B/16 with 4 tokens of rank 1 at depth 9.

Shapes: B images, C classes, P prompt tokens, r rank, Dt text width, Dv vision width, E joint embedding.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from procap.classifier import Classifier, cosine_logits, unit
from procap.clip import CLIP
from procap.initialisation import normal
from procap.methods.method import Method, MethodOptions, Noise, PublishedOptions
from procap.methods.prompts import ClassPrompts, check_blocks, context_prompts, deep_plans
from procap.methods.promptsrc import teacher_templates
from procap.plan import Plan
from procap.recipe import Recipe
from procap.teacher import text_bank
from procap.text import LabelSpace


class MMLoPOptions(MethodOptions):
    n_ctx: int = Field(4, ge=1, description="prompt tokens per layer and tower")
    rank: int = Field(1, ge=1, description="rank of the prompts of a layer")
    depth: int = Field(9, ge=1, description="prompted layers of both towers, the input counted")
    init_std: float = Field(0.05, gt=0, description="standard deviation of every factor at the start")
    shared_factor: bool = Field(True, description="one token-side factor per layer for both towers, or one each")
    drift_correction: bool = Field(True, description="move the class features so that their mean is the frozen one")
    text_weight: float = Field(25.0, ge=0, description="weight of the L1 distance of the class features")
    image_weight: float = Field(10.0, ge=0, description="weight of the L1 distance of the image features")
    logit_weight: float = Field(1.0, ge=0, description="weight of the symmetric KL divergence of the predictions")


class MMLoP(Method):
    """MMLoP (2026), after the paper's text: low-rank prompts, drift correction."""

    Options = MMLoPOptions
    title = "MMLoP (after its text)"
    mini_lr = 1e-2
    published: ClassVar[PublishedOptions] = {"transfer": {"depth": 3}}
    options: MMLoPOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: MMLoPOptions, generator: torch.Generator) -> None:
        check_blocks(clip, clip.geometry.layers, depth=options.depth)
        super().__init__(clip, space, options, generator)
        o, g = options, clip.geometry

        def factors(rows: int, columns: int) -> nn.ParameterList:
            return nn.ParameterList(normal((rows, columns), generator, o.init_std) for _ in range(o.depth))

        self.rows = factors(o.n_ctx, o.rank)
        self.vision_rows = None if o.shared_factor else factors(o.n_ctx, o.rank)
        self.vision, self.text = factors(o.rank, g.vision_width), factors(o.rank, g.text_width)

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.0025, 30 epochs (few-shot and domain generalisation 50); batch 4 and warm-up are PromptSRC's."""
        epochs = 50 if task in ("few-shot", "domain-generalization") else 30
        return Recipe(optimizer="sgd", lr=0.0025, epochs=epochs, batch_size=4)

    def class_prompts(self, space: LabelSpace) -> ClassPrompts:
        return context_prompts(self.clip, space, self.options.n_ctx)

    def teacher(self, space: LabelSpace) -> Tensor:
        """Return the text teacher [C, E] of the classes of `space`; that of the classes trained on is kept."""

        def compute() -> Tensor:
            return text_bank(self.clip, space, teacher_templates(), average="average-first")

        return self.constant("teacher", compute) if space == self.space else compute()

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        vision_rows = self.rows if self.vision_rows is None else self.vision_rows
        vision = [rows @ columns for rows, columns in zip(vision_rows, self.vision, strict=True)]
        text = [rows @ columns for rows, columns in zip(self.rows, self.text, strict=True)]
        return deep_plans(self.clip, vision, text)

    def correct_drift(self, text: Tensor, teacher: Tensor) -> Tensor:
        """Return class features [C, E] of length one, whose drift from the frozen ones has mean zero if switched on.

        With g the frozen and p the prompted features, g + (p - g) - mean(p - g) is p - mean(p) + mean(g).
        """
        # The means are over the classes of the list, so the correction of a class depends on which others are in it.
        text = unit(text)
        if self.options.drift_correction:
            text = unit(text - text.mean(dim=0) + teacher.mean(dim=0))
        return text

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute the cross-entropy and the distances to the frozen CLIP, with a symmetric KL divergence over B x C."""
        o, scale = self.options, self.scale()
        image, text = self.features(images, noise)
        teacher = self.teacher(self.space)
        text = self.correct_drift(text, teacher)
        teacher_image = self._frozen_features(images)
        logits, teacher_logits = cosine_logits(image, text, scale), cosine_logits(teacher_image, teacher, scale)
        log_p, log_q = logits.log_softmax(-1), teacher_logits.log_softmax(-1)
        # Half of KL(p || q) + KL(q || p).
        kl = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum() / 2
        return {
            "ce": F.cross_entropy(logits, labels),
            "text": o.text_weight * F.l1_loss(text, teacher),
            "image": o.image_weight * F.l1_loss(unit(image), teacher_image),
            "kl": o.logit_weight * kl / logits.numel(),
        }

    def make_classifier(self, image_plan: Plan, text: Tensor, space: LabelSpace) -> Classifier:
        return super().make_classifier(image_plan, self.correct_drift(text, self.teacher(space)), space)
