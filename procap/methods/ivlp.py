"""IVLP: independent prompts of both towers at the input and in the blocks after it, without any coupling.

Source: the baseline of Khattak et al. 2023, "MaPLe", section 3.2 ("independent V-L prompting"), and its public code.
Learns 30,720 parameters on ViT-B/16 with 2 + 2 tokens at depth 12. Without vision tokens it is MaPLe's language
prompting (24,576 with 4 tokens at depth 12).

Shapes: P prompt tokens, K prompted layers, Dt text width, Dv vision width.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

from procap.clip import CLIP
from procap.initialisation import normal
from procap.methods.method import STRICT, Method, Noise, PublicLayout
from procap.methods.prompts import ClassPrompts, check_blocks, deep_plans, phrase_context, phrase_prompts
from procap.plan import Plan
from procap.recipe import Recipe
from procap.text import LabelSpace


class DeepPrompts(nn.Module):
    """Learned tokens of every prompted layer i (0: the input): `text[i]` [P, Dt] and `vision[i]` [P, Dv]."""

    def __init__(
        self,
        clip: CLIP,
        text: Tensor,
        text_depth: int,
        vision_tokens: int,
        vision_depth: int,
        generator: torch.Generator,
    ) -> None:
        """Start the text input with `text` [P, Dt], and every other layer with N(0, 0.02^2)."""
        super().__init__()
        check_blocks(clip, clip.geometry.text_layers, depth=text_depth)
        check_blocks(clip, clip.geometry.vision_layers, vision_depth=vision_depth)
        levels = vision_depth if vision_tokens else 0
        self.text = nn.ParameterList([text, *(normal(text.shape, generator) for _ in range(text_depth - 1))])
        shape = (vision_tokens, clip.geometry.vision_width)
        self.vision = nn.ParameterList(normal(shape, generator) for _ in range(levels))

    def plans(self, clip: CLIP) -> tuple[Plan, Plan]:
        return deep_plans(clip, list(self.vision), list(self.text))

    def public_names(self, prefix: str) -> dict[str, str]:
        """Map names of parameters below `prefix` to those of the public code of IVLP and PromptSRC."""
        names = {}
        for tower, encoder, first in (
            ("text", "text_encoder", "prompt_learner.ctx"),
            ("vision", "image_encoder", "image_encoder.VPT"),
        ):
            for layer in range(len(getattr(self, tower))):
                deep = f"{encoder}.transformer.resblocks.{layer}.VPT_shallow"
                names[f"{prefix}{tower}.{layer}"] = deep if layer else first
        return names


class IVLPOptions(BaseModel):
    model_config = STRICT

    n_ctx: int = Field(2, ge=1, description="text tokens per layer; above 4 the phrase is not used")
    vision_tokens: int = Field(2, ge=0, description="vision tokens per layer; 0 prompts the text tower only")
    depth: int = Field(12, ge=1, description="prompted layers of the text tower, the input counted")
    vision_depth: int = Field(12, ge=0, description="prompted layers of the vision tower; 0 is no vision token at all")
    ctx_init: str = Field("a photo of a", description="phrase whose first n_ctx tokens start the text input")


class IVLP(Method):
    """Independent vision and language prompts."""

    Options = IVLPOptions
    summary: ClassVar[str] = "IVLP (Khattak et al. 2023): independent deep prompts in both towers"
    public_layout = PublicLayout("VLPromptLearner")
    options: IVLPOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: IVLPOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        text = phrase_context(clip, options.ctx_init, options.n_ctx, generator)
        self.tokens = DeepPrompts(clip, text, options.depth, options.vision_tokens, options.vision_depth, generator)

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.0035, batch 4, 5 epochs, for every task; the public code has no few-shot configuration."""
        return Recipe(optimizer="sgd", lr=0.0035, epochs=50 if task == "few-shot" else 5, batch_size=4)

    def class_prompts(self, space: LabelSpace) -> ClassPrompts:
        return phrase_prompts(self.clip, space, self.options.ctx_init, self.options.n_ctx)

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        return self.tokens.plans(self.clip)

    def public_names(self) -> dict[str, str]:
        return self.tokens.public_names("tokens.")
