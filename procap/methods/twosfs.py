"""2SFS: first the LayerNorms of both towers are tuned, then a linear classifier on top of them.

Source: Farina et al. 2025, "Rethinking Few-Shot Adaptation of Vision-Language Models in Two Stages", section 4, and its
public code. Learns 61,440 parameters on ViT-B/16 and then 512 per class.

Shapes: B images, C classes, E joint embedding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from procap.classifier import Classifier, cosine_logits, unit
from procap.clip import CLIP
from procap.methods.method import Method, Noise, PublicLayout
from procap.methods.options import TemplateOptions
from procap.methods.overrides import WeightOverrides, upper_names
from procap.methods.prompts import ClassPrompts, check_blocks
from procap.plan import Plan
from procap.recipe import Recipe
from procap.text import LabelSpace

STEPS_PER_SHOT = 300
NORMS, LINEAR = 0, 1
"""The stages of a training."""


class TwoSFSOptions(TemplateOptions):
    first_vision_block: int = Field(0, ge=0, description="first vision block (0-based) whose LayerNorms are tuned")
    first_text_block: int = Field(0, ge=0, description="first text block whose LayerNorms are tuned")
    first_stage: float = Field(
        0.6, ge=0, lt=1, description="share of the steps that tune the LayerNorms; the others train the classifier"
    )


class TwoSFS(Method):
    """2SFS (Farina et al. 2025): tuned LayerNorms, then a linear classifier."""

    Options = TwoSFSOptions
    vision_weights = "vision"
    title = "2SFS"
    groups = ("adapters",)
    mini_lr = 3e-3
    public_layout = PublicLayout("two_stages", {"rows": "classifier", "vision": "visual.{}", "text": "{}"}, dassl=False)
    options: TwoSFSOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: TwoSFSOptions, generator: torch.Generator) -> None:
        g = clip.geometry
        # As `Method.begin_stage` asks: a finished run that is loaded classifies by its rows.
        self.stage = LINEAR
        check_blocks(clip, g.vision_layers, first_vision_block=options.first_vision_block)
        check_blocks(clip, g.text_layers, first_text_block=options.first_text_block)
        super().__init__(clip, space, options, generator)
        # `ln_pre`, `ln_post` and `ln_final` stay frozen, as in the public code.
        self.vision = tuned_norms(clip.visual, options.first_vision_block)
        self.text = tuned_norms(clip.text, options.first_text_block)
        self.rows = nn.Parameter(self.class_features(space))

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return AdamW 2e-4, batch 32, 300 steps per shot, logged in ten parts.

        The public code has no configuration for transfer; that of the other tasks is used.
        """
        return Recipe(
            optimizer="adamw",
            lr=2e-4,
            weight_decay=0.01,
            epochs=10,
            # Training on all images (0 shots) has the budget of 16 shots.
            iterations=STEPS_PER_SHOT * (shots or 16),
            batch_size=32,
            drop_last=False,
            warmup="none",
            schedule="step",
            min_lr=1e-6,
            test_batch_size=32,
        )

    def stage_starts(self, steps: int) -> tuple[int, ...]:
        return 0, int(steps * self.options.first_stage)

    def begin_stage(self, stage: int) -> None:
        """Tune the LayerNorms, or classifier rows that start as the class features of the tuned text tower."""
        self.stage = stage
        for parameter in (*self.vision.parameters(), *self.text.parameters()):
            parameter.requires_grad_(stage == NORMS)
        self.rows.requires_grad_(stage == LINEAR)
        if stage == LINEAR:
            with torch.no_grad():
                self.rows.copy_(self.class_features(self.space))

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        return Plan(weights=self.vision.weights()), Plan(weights=self.text.weights())

    @torch.no_grad()
    def class_features(self, space: LabelSpace) -> Tensor:
        """Compute the class features [C, E] of the tuned text tower, normalised."""
        prompts = self.prompts_of(space)
        return unit(self.clip.encode_text(prompts.tokenized, self.plans(prompts)[1]))

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute the cross-entropy with the class features, or in the second stage with the rows."""
        if self.stage == NORMS:
            return super().loss(images, labels, noise)
        with torch.no_grad():
            image = self._encode_batch(images, self.plans(self.prompts)[0])
        return {"ce": F.cross_entropy(cosine_logits(image, self.rows, self.scale()), labels)}

    def make_classifier(self, image_plan: Plan, text: Tensor, space: LabelSpace) -> Classifier:
        """Make a classifier of the rows of the classes trained on, and of class features for all other names.

        Names are compared as they are written: "RIVER" is not "River", although both have the same tokens.
        """
        if self.stage == LINEAR:
            known = self.known(space)
            # New classes have position -1: they read the last row, which is not taken.
            text = torch.where((known >= 0)[:, None], self.rows[known], text)
        return super().make_classifier(image_plan, text, space)


def tuned_norms(tower: nn.Module, first: int) -> WeightOverrides:
    """Copy the LayerNorms of a tower's blocks from `first` on."""
    return WeightOverrides(tower, [name for name in upper_names(tower, first, ()) if "ln_" in name])
