"""MaPLe: deep text prompts, and vision prompts that linear layers project from them.

Source: Khattak et al. 2023, "MaPLe: Multi-modal Prompt Learning", section 3.2, and its public code.
Learns 3,555,072 parameters on ViT-B/16 with 2 tokens at depth 9 (1,185,024 at depth 3).

Shapes: C classes, P prompt tokens, K prompted layers, Dt text width, Dv vision width.
"""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
from pydantic import Field
from torch import nn

from procap.clip import CLIP
from procap.initialisation import linear, normal
from procap.methods.method import TRANSFER_TASKS, Method, MethodOptions, Noise, PublicLayout, PublishedOptions
from procap.methods.prompts import ClassPrompts, check_blocks, deep_plans, phrase_context, phrase_prompts
from procap.plan import Plan
from procap.recipe import Recipe
from procap.text import LabelSpace

MAPLE_NAMES = {
    "context": "prompt_learner.ctx",
    "projection": "prompt_learner.proj.{}",
    "deep_context": "prompt_learner.compound_prompts_text.{}",
    "deep_projection": "prompt_learner.compound_prompt_projections.{}",
}


class MaPLeOptions(MethodOptions):
    n_ctx: int = Field(2, ge=1, description="prompt tokens per layer; above 4 the phrase is not used")
    depth: int = Field(9, ge=1, description="prompted layers of both towers, the input counted")
    ctx_init: str = Field(
        "a photo of a", description="phrase whose first n_ctx tokens start the input prompt; the rest stays, fixed"
    )
    fp16_rounding: bool = Field(
        False, description="round vision and deep text prompts to fp16 at insertion, as the public code does"
    )


class MaPLe(Method):
    """MaPLe (Khattak et al. 2023): deep text prompts projected to vision prompts."""

    Options: ClassVar[type[MethodOptions]] = MaPLeOptions
    title = "MaPLe"
    mini_lr = 1e-2
    public_layout = PublicLayout("MultiModalPromptLearner", MAPLE_NAMES)
    published: ClassVar[PublishedOptions] = {"transfer": {"depth": 3}}
    options: MaPLeOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: MaPLeOptions, generator: torch.Generator) -> None:
        check_blocks(clip, clip.geometry.layers, depth=options.depth)
        super().__init__(clip, space, options, generator)
        o, text, vision = options, clip.geometry.text_width, clip.geometry.vision_width
        self.context = nn.Parameter(phrase_context(clip, o.ctx_init, o.n_ctx, generator))
        self.projection = linear(text, vision, generator)
        self.deep_context = nn.ParameterList(normal((o.n_ctx, text), generator) for _ in range(o.depth - 1))
        # The public code initialises one layer and copies it, so the deep projections start out equal.
        layer = linear(text, vision, generator)
        self.deep_projection = nn.ModuleList(copy.deepcopy(layer) for _ in range(o.depth - 1))

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD, batch 4: 0.0035 for 5 epochs; 0.0026 for 2 epochs when transferring from ImageNet.

        The public code has no few-shot configuration; 0.0035 for 50 epochs is that of SkipTuning's re-implementation.
        """
        if task in TRANSFER_TASKS:
            return Recipe(optimizer="sgd", lr=0.0026, epochs=2, batch_size=4)
        return Recipe(optimizer="sgd", lr=0.0035, epochs=50 if task == "few-shot" else 5, batch_size=4)

    def class_prompts(self, space: LabelSpace) -> ClassPrompts:
        return phrase_prompts(self.clip, space, self.options.ctx_init, self.options.n_ctx)

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        deep = list(self.deep_context)
        vision = [self.projection(self.context)]
        vision += [project(tokens) for project, tokens in zip(self.deep_projection, deep, strict=True)]
        # Not the context of the input: the public code casts all other prompts where it inserts them.
        if self.options.fp16_rounding:
            vision, deep = ([tokens.half().to(tokens.dtype) for tokens in levels] for levels in (vision, deep))
        return deep_plans(self.clip, vision, [self.context, *deep])
