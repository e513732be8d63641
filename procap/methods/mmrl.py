"""MMRL: learned tokens, projected to each tower, enter its upper blocks; images are also read out at these tokens.

Source: Guo and Gu 2025, "MMRL: Multi-Modal Representation Learning for Vision-Language Models", section 3, and its
public code. Learns 4,992,256 parameters on ViT-B/16 (18,762,496 with the width of 2,048 for EuroSAT).

Shapes: B images, C classes, P representation tokens, R their width, Dt text width, Dv vision width, E joint embedding.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from procap.classifier import Classifier, cosine_logits
from procap.clip import CLIP
from procap.initialisation import linear, normal
from procap.methods.method import TRANSFER_TASKS, Method, MethodOptions, Noise, PublicLayout, PublishedOptions
from procap.methods.prompts import ClassPrompts, check_blocks
from procap.parallel import gather_batch
from procap.plan import Plan, TokenOp
from procap.recipe import Recipe
from procap.teacher import text_bank
from procap.text import LabelSpace


class MMRLOptions(MethodOptions):
    n_tokens: int = Field(5, ge=1, description="representation tokens")
    width: int = Field(512, ge=1, description="width of the tokens, before they are projected to each tower")
    first_block: int = Field(5, ge=0, description="first block (0-based) that gets tokens; all later ones do as well")
    alpha: float = Field(0.7, ge=0, le=1, description="weight of the class branch, out of 1")
    reg_weight: float = Field(0.5, ge=0, description="weight of both distances to the frozen features (lambda)")
    scale: float = Field(100.0, gt=0, description="factor of the cosines")


class TokenProjections(nn.ModuleList):
    """Tokens [P, R] to tokens [P, D] of each block: a linear layer for each."""

    def forward(self, tokens: Tensor) -> list[Tensor]:
        return [layer(tokens) for layer in self]


class MMRL(Method):
    """MMRL (Guo and Gu 2025): representation tokens in the upper blocks of both towers."""

    Options: ClassVar[type[MethodOptions]] = MMRLOptions
    title = "MMRL"
    mini_lr = 2.5e-3
    public_layout = PublicLayout(
        "MultiModalRepresentationLearner",
        {
            "projection": "image_encoder.proj_rep",
            "tokens": "representation_learner.compound_rep_tokens",
            "to_vision": "representation_learner.compound_rep_tokens_r2vproj.{}",
            "to_text": "representation_learner.compound_rep_tokens_r2tproj.{}",
        },
    )
    # The weight of the distances (lambda) by task and data set.
    published: ClassVar[PublishedOptions] = {
        "transfer": {"reg_weight": 0.2},
        "stanford-cars": {"reg_weight": 7.0},
        "fgvc-aircraft": {"reg_weight": 6.0},
        "sun397": {"reg_weight": 6.0},
        "dtd": {"reg_weight": 6.0},
        "food101": {"reg_weight": 5.0},
        "oxford-flowers": {"reg_weight": 4.0},
        "ucf101": {"reg_weight": 3.0},
        "oxford-pets": {"reg_weight": 0.2},
        "eurosat": {"reg_weight": 0.01, "width": 2048},
        "other": {"reg_weight": 0.5},
    }
    # Share of new tokens in the rows of each block: MMRL replaces them whole, MMRL++ mixes.
    fresh = 1.0
    options: MMRLOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: MMRLOptions, generator: torch.Generator) -> None:
        g, first = clip.geometry, options.first_block
        check_blocks(clip, g.layers - 1, first_block=first)
        super().__init__(clip, space, options, generator)
        self._add_projection(generator)
        self.tokens = nn.Parameter(normal((options.n_tokens, options.width), generator))
        self.to_vision = self._token_projections(g.vision_width, g.vision_layers - first, generator)
        self.to_text = self._token_projections(g.text_width, g.text_layers - first, generator)

    def _add_projection(self, generator: torch.Generator) -> None:
        """Add the projection [Dv, E] of the read-out tokens."""
        g = self.clip.geometry
        self.projection = nn.Parameter(normal((g.vision_width, g.embed_dim), generator, std=g.vision_width**-0.5))

    def _token_projections(self, width: int, blocks: int, generator: torch.Generator) -> nn.Module:
        """Make the projections of the tokens [P, R] to those of each block of a tower."""
        layer = linear(self.options.width, width, generator)
        # The public code initialises one layer per tower and copies it, so the layers start out equal.
        return TokenProjections(copy.deepcopy(layer) for _ in range(blocks))

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return AdamW 0.001, batch 4, 10 epochs; batch 32 for few-shot (50), ImageNet (5) and transfer (1 epoch)."""
        epochs = 50 if task == "few-shot" else 10
        if dataset == "imagenet" or task in TRANSFER_TASKS:
            epochs = 1 if task in TRANSFER_TASKS else 5
        # 10 epochs mean base-to-novel, ImageNet excepted; in a single one the warm-up would be all of the training.
        return Recipe(
            optimizer="adamw",
            lr=0.001,
            epochs=epochs,
            batch_size=4 if epochs == 10 else 32,
            warmup="none" if epochs == 1 else "constant",
            crop_scale=(0.5, 1.0),
            test_batch_size=250,
        )

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        """Insert the tokens behind the class token and the start token at `first_block`, then replace them."""
        return replace(self._plan(self.to_vision), read_op=0), self._plan(self.to_text)

    def _plan(self, projections: nn.Module) -> Plan:
        inserted, *later = projections(self.tokens)
        first = self.options.first_block
        operations = [TokenOp(b, "replace", t, start=1, share=self.fresh) for b, t in enumerate(later, first + 1)]
        # Behind the start token they see no word of a prompt, so that all classes share their rows (`prompt_packing`).
        return Plan((TokenOp(first, "insert", inserted, start=1), *operations))

    def scale(self) -> Tensor:
        # Filled on the device: a copy from the host would make it wait, and could not be captured as a CUDA graph.
        return torch.full((), self.options.scale, device=self.clip.device)

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute both branches' cross-entropies and the distances of both modalities to the frozen features."""
        o, prompts, scale = self.options, self.prompts, self.scale()
        image_plan, text_plan = self.plans(prompts, noise)
        features, rows, frozen = self.clip.encode_image_with_frozen(images, image_plan)
        image, frozen = gather_batch(self.group, features), gather_batch(self.group, frozen).float()
        represented = gather_batch(self.group, represent(rows, self.projection))
        text = self._encode_classes(prompts.tokenized, text_plan)
        frozen_text = self.constant("text", lambda: text_bank(self.clip, self.space, [self.space.template]))
        return {
            "ce": o.alpha * F.cross_entropy(cosine_logits(image, text, scale), labels),
            "ce_rep": (1 - o.alpha) * F.cross_entropy(cosine_logits(represented, text, scale), labels),
            "reg_image": o.reg_weight * (1 - F.cosine_similarity(image.float(), frozen).mean()),
            "reg_text": o.reg_weight * (1 - F.cosine_similarity(text.float(), frozen_text).mean()),
        }

    def make_classifier(self, image_plan: Plan, text: Tensor, space: LabelSpace) -> Classifier:
        """Make a classifier of both branches for the classes trained on; with others, of the class branch alone."""
        if space == self.space:
            return FusedClassifier(self, image_plan, text)
        return super().make_classifier(replace(image_plan, read_op=None), text, space)


class FusedClassifier(Classifier):
    """A classifier whose logits are the weighted mean of the class branch's and the representation branch's."""

    def __init__(self, method: MMRL, image_plan: Plan, text: Tensor) -> None:
        super().__init__(method.clip, image_plan, text, method.scale())
        self.projection, self.alpha = method.projection.detach().clone(), method.options.alpha

    def encode(self, images: Tensor) -> Tensor:
        """Compute both branches' features [B, 2, E] of images [B, 3, H, W]."""
        features, rows = self.clip.encode_image_rows(images, self.image_plan)
        return torch.stack([features, represent(rows, self.projection)], dim=1)

    def logits(self, features: Tensor) -> Tensor:
        # [B, 2, C]: both branches are compared with the same class features.
        classes, represented = super().logits(features).unbind(dim=1)
        return self.alpha * classes + (1 - self.alpha) * represented


def represent(rows: Tensor, projection: Tensor) -> Tensor:
    """Project the mean of the tokens' final states [B, P, Dv] to features [B, E]."""
    with torch.autocast(rows.device.type, enabled=False):
        # `ln_post` has normalised every token, and the mean comes after it, as in the public code.
        return rows.float().mean(dim=1) @ projection
