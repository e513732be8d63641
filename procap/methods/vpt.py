"""VPT: learned tokens in the vision tower only; the text side is CLIP's own.

Source: Jia et al. 2022, "Visual Prompt Tuning" (deep variant), as MaPLe's public code runs it on CLIP.
Learns 73,728 parameters on ViT-B/16 with 8 tokens at depth 12.

Shapes: P prompt tokens, K prompted layers, Dv vision width.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn

from procap.clip import CLIP
from procap.initialisation import normal
from procap.methods.method import Method, Noise, PublicLayout
from procap.methods.options import TemplateOptions
from procap.methods.prompts import ClassPrompts, check_blocks, deep_plans
from procap.plan import Plan
from procap.recipe import Recipe
from procap.text import LabelSpace


class VPTOptions(TemplateOptions):
    n_ctx: int = Field(8, ge=1, description="vision tokens per layer")
    depth: int = Field(12, ge=1, description="prompted layers, the input counted")


class VPT(Method):
    """VPT (Jia et al. 2022): deep prompts in the vision tower only."""

    Options = VPTOptions
    changes = ("image",)
    title = "VPT"
    mini_lr = 2.5e-3
    public_layout = PublicLayout(
        "prompt_learner",
        {"tokens": "image_encoder.transformer.resblocks.{}.VPT_shallow", "tokens.0": "image_encoder.VPT"},
    )
    options: VPTOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: VPTOptions, generator: torch.Generator) -> None:
        check_blocks(clip, clip.geometry.vision_layers, depth=options.depth)
        super().__init__(clip, space, options, generator)
        shape = (options.n_ctx, clip.geometry.vision_width)
        self.tokens = nn.ParameterList(normal(shape, generator) for _ in range(options.depth))

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.0025, batch 4, 5 epochs; 50 for few-shot learning, where no public recipe exists."""
        return Recipe(optimizer="sgd", lr=0.0025, epochs=50 if task == "few-shot" else 5, batch_size=4)

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        return deep_plans(self.clip, list(self.tokens), ())
