"""IVLP: independent prompts of both towers at the input and in the blocks after it, without any coupling.

Source: the baseline of Khattak et al. 2023, "MaPLe", section 3.2 ("independent V-L prompting"), and its public code.
Learns 30,720 parameters on ViT-B/16 with 2 + 2 tokens at depth 12. Without vision tokens it is MaPLe's language
prompting (24,576 with 4 tokens at depth 12).

Shapes: P prompt tokens, K prompted layers, Dt text width, Dv vision width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from procap.clip import CLIP
from procap.initialisation import normal
from procap.methods.method import Method, MethodOptions, Noise, PublicLayout
from procap.methods.prompts import ClassPrompts, check_blocks, deep_plans, phrase_context, phrase_prompts
from procap.plan import Plan
from procap.recipe import Recipe
from procap.text import LabelSpace

# The public code calls deep tokens of the text tower VPT as well.
IVLP_NAMES = {
    "tokens.text": "text_encoder.transformer.resblocks.{}.VPT_shallow",
    "tokens.vision": "image_encoder.transformer.resblocks.{}.VPT_shallow",
    "tokens.text.0": "prompt_learner.ctx",
    "tokens.vision.0": "image_encoder.VPT",
}


class DeepPrompts(nn.Module):
    """Learned tokens of every prompted layer i (0: the input): `text[i]` [P, Dt] and `vision[i]` [P, Dv]."""

    def __init__(self, text: Sequence[Tensor], vision: Sequence[Tensor]) -> None:
        super().__init__()
        self.text, self.vision = nn.ParameterList(text), nn.ParameterList(vision)


class IVLPOptions(MethodOptions):
    n_ctx: int = Field(2, ge=1, description="text tokens per layer; above 4 the phrase is not used")
    vision_tokens: int = Field(2, ge=0, description="vision tokens per layer; 0 prompts the text tower only")
    depth: int = Field(12, ge=1, description="prompted layers of the text tower, the input counted")
    vision_depth: int = Field(12, ge=0, description="prompted layers of the vision tower; 0 is no vision token at all")
    ctx_init: str = Field("a photo of a", description="phrase whose first n_ctx tokens start the text input")


class IVLP(Method):
    """IVLP (Khattak et al. 2023): independent deep prompts in both towers."""

    Options: ClassVar[type[MethodOptions]] = IVLPOptions
    title = "IVLP"
    mini_lr = 2.5e-3
    public_layout = PublicLayout("VLPromptLearner", IVLP_NAMES)
    options: IVLPOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: IVLPOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        o, g = options, clip.geometry
        check_blocks(clip, g.text_layers, depth=o.depth)
        check_blocks(clip, g.vision_layers, vision_depth=o.vision_depth)
        text = [phrase_context(clip, o.ctx_init, o.n_ctx, generator)]
        text += [normal((o.n_ctx, g.text_width), generator) for _ in range(o.depth - 1)]
        layers = o.vision_depth if o.vision_tokens else 0
        self.tokens = DeepPrompts(text, [normal((o.vision_tokens, g.vision_width), generator) for _ in range(layers)])

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.0035, batch 4, 5 epochs; 50 for few-shot, which the public code does not configure."""
        return Recipe(optimizer="sgd", lr=0.0035, epochs=50 if task == "few-shot" else 5, batch_size=4)

    def class_prompts(self, space: LabelSpace) -> ClassPrompts:
        return phrase_prompts(self.clip, space, self.options.ctx_init, self.options.n_ctx)

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        return deep_plans(self.clip, list(self.tokens.vision), list(self.tokens.text))
