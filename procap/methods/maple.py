"""MaPLe: deep text prompts, and vision prompts that linear layers project from them.

Source: Khattak et al. 2023, "MaPLe: Multi-modal Prompt Learning", section 3.2, and its public code.
Learns 3,555,072 parameters on ViT-B/16 with 2 tokens at depth 9 (1,185,024 at depth 3).

Shapes: C classes, P prompt tokens, K prompted layers, Dt text width, Dv vision width.
"""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

from procap.clip import CLIP
from procap.initialisation import linear, normal
from procap.methods.method import STRICT, TRANSFER_TASKS, Method, Noise, PublicLayout
from procap.methods.prompts import ClassPrompts, check_blocks, deep_plans, phrase_context, phrase_prompts
from procap.plan import Plan
from procap.recipe import Recipe
from procap.text import LabelSpace


class MaPLeOptions(BaseModel):
    model_config = STRICT

    n_ctx: int = Field(2, ge=1, description="prompt tokens per layer; above 4 the phrase is not used")
    depth: int = Field(9, ge=1, description="prompted layers of both towers, the input counted")
    ctx_init: str = Field(
        "a photo of a", description="phrase whose first n_ctx tokens start the input prompt; the rest stays, fixed"
    )
    fp16_rounding: bool = Field(
        False, description="round vision and deep text prompts to fp16 at insertion, as the public code does"
    )


class MaPLe(Method):
    """Multi-modal prompt learning; the coupling goes from text to vision only."""

    Options = MaPLeOptions
    summary: ClassVar[str] = "MaPLe (Khattak et al. 2023): deep text prompts projected to vision prompts"
    public_layout = PublicLayout("MultiModalPromptLearner")
    options: MaPLeOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: MaPLeOptions, generator: torch.Generator) -> None:
        check_blocks(clip, clip.geometry.layers, depth=options.depth)
        super().__init__(clip, space, options, generator)
        parts = coupled_prompts(clip, options.n_ctx, options.depth, options.ctx_init, generator)
        self.context, self.projection, self.deep_context, self.deep_projection = parts

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD, batch 4: 0.0035 for 5 epochs; 0.0026 for 2 epochs when transferring from ImageNet.

        The public code has no few-shot configuration; 0.0035 for 50 epochs is that of SkipTuning's re-implementation.
        """
        if task in TRANSFER_TASKS:
            return Recipe(optimizer="sgd", lr=0.0026, epochs=2, batch_size=4)
        return Recipe(optimizer="sgd", lr=0.0035, epochs=50 if task == "few-shot" else 5, batch_size=4)

    @classmethod
    def task_options(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> dict[str, object]:
        """Return depth 3 when transferring from ImageNet, else no options."""
        return {"depth": 3} if task in TRANSFER_TASKS else {}

    def class_prompts(self, space: LabelSpace) -> ClassPrompts:
        return phrase_prompts(self.clip, space, self.options.ctx_init, self.options.n_ctx)

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        parts = (self.context, self.projection, self.deep_context, self.deep_projection)
        return coupled_plans(self.clip, *parts, fp16_rounding=self.options.fp16_rounding)

    def public_names(self) -> dict[str, str]:
        return coupled_names(self.options.depth)


def coupled_prompts(
    clip: CLIP, n_ctx: int, depth: int, ctx_init: str, generator: torch.Generator
) -> tuple[nn.Parameter, nn.Linear, nn.ParameterList, nn.ModuleList]:
    """Initialise MaPLe's prompts: input tokens and their projection, tokens and projections of the deeper layers."""
    text, vision = clip.geometry.text_width, clip.geometry.vision_width
    context = nn.Parameter(phrase_context(clip, ctx_init, n_ctx, generator))
    projection = linear(text, vision, generator)
    deep_context = nn.ParameterList(normal((n_ctx, text), generator) for _ in range(depth - 1))
    # The public code initialises one layer and copies it, so the deep projections start out equal.
    one = linear(text, vision, generator)
    return context, projection, deep_context, nn.ModuleList(copy.deepcopy(one) for _ in range(depth - 1))


def coupled_plans(
    clip: CLIP,
    context: Tensor,
    projection: nn.Module,
    deep_context: nn.ParameterList,
    deep_projection: nn.ModuleList,
    *,
    fp16_rounding: bool = False,
) -> tuple[Plan, Plan]:
    """Build the plans of MaPLe's prompts: text tokens, and vision tokens projected from them."""
    deep = list(deep_context)
    vision = [projection(context)]
    vision += [project(tokens) for project, tokens in zip(deep_projection, deep, strict=True)]
    if fp16_rounding:
        vision = [round_to_half(tokens) for tokens in vision]
        deep = [round_to_half(tokens) for tokens in deep]
    return deep_plans(clip, vision, [context, *deep])


def coupled_names(depth: int) -> dict[str, str]:
    """Map the parameters of MaPLe's prompts to their names in the public code of MaPLe and CoPrompt."""
    names = {f"projection.{part}": f"prompt_learner.proj.{part}" for part in ("weight", "bias")}
    for i in range(depth - 1):
        names[f"deep_context.{i}"] = f"prompt_learner.compound_prompts_text.{i}"
        for part in ("weight", "bias"):
            names[f"deep_projection.{i}.{part}"] = f"prompt_learner.compound_prompt_projections.{i}.{part}"
    return {"context": "prompt_learner.ctx"} | names


def round_to_half(tokens: Tensor) -> Tensor:
    """Round values and gradient to fp16, and keep the tensor's own precision."""
    return tokens.half().to(tokens.dtype)
