"""TCP: class-aware tokens, made from each class's frozen text feature, that replace the context in a middle block.

Source: Yao et al. 2024, "TCP: Textual-based Class-aware Prompt tuning", section 3.2, and its public code.
Learns 331,904 parameters on ViT-B/16.

Shapes: C classes, P context tokens, D text width, E joint embedding.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn

from procap.attention import QuickGELU
from procap.clip import CLIP
from procap.initialisation import linear
from procap.methods.cocoop import META_NET_NAMES
from procap.methods.coop import CONTEXT_NAMES
from procap.methods.kgcoop import KgCoOp, KgCoOpOptions
from procap.methods.method import Noise, PublicLayout
from procap.methods.prompts import ClassPrompts, check_blocks, context_prompts
from procap.plan import Plan, TokenOp
from procap.recipe import Recipe
from procap.text import LabelSpace

PROMPTS = {
    "oxford-pets": "{}, a type of pet.",
    "oxford-flowers": "{}, a type of flower.",
    "fgvc-aircraft": "{}, a type of aircraft.",
    "dtd": "{} texture.",
    "stanford-cars": "{}, a type of car",
    "food101": "{}, a type of food.",
    "ucf101": "person doing {}.",
}
"""The words behind the context, where they are not the class name and a full stop (Cars has no full stop)."""

REFERENCE_TEMPLATES = {
    "fgvc-aircraft": "a photo of an aircraft {}.",
    "dtd": "a photo of a {}, a type of texture.",
    "food101": "a photo of a {}, a type of food.",
}
"""Where the public code's reference differs from the zero-shot template of the data set."""


class TCPOptions(KgCoOpOptions):
    ctx_init: str = Field("", description="words to start from; empty draws N(0, 0.02)")
    hidden: int = Field(128, ge=1, description="hidden width of the network that makes the class tokens")
    block: int = Field(8, ge=0, description="block (0-based) at whose input the class tokens replace the context")


class TCP(KgCoOp):
    """TCP (Yao et al. 2024): class-aware tokens from frozen text features."""

    Options = TCPOptions
    title = "TCP"
    mini_lr = 2.5e-3
    public_layout = PublicLayout("prompt_learner", CONTEXT_NAMES | META_NET_NAMES, module="prompt_learner")
    reference_templates = REFERENCE_TEMPLATES
    options: TCPOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: TCPOptions, generator: torch.Generator) -> None:
        check_blocks(clip, clip.geometry.text_layers - 1, block=options.block)
        super().__init__(clip, space, options, generator)
        width = clip.geometry.text_width
        self.meta_net = nn.Sequential(
            linear(clip.geometry.embed_dim, options.hidden, generator),
            QuickGELU(),
            linear(options.hidden, options.n_ctx * width, generator),
        )

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return Adam 0.002 with eps 1e-3, batch 32, 50 epochs; 25 on ImageNet and SUN397."""
        epochs = 25 if dataset in ("imagenet", "sun397") else 50
        return Recipe(optimizer="adam", lr=0.002, eps=1e-3, epochs=epochs, batch_size=32, test_batch_size=500)

    def class_prompts(self, space: LabelSpace) -> ClassPrompts:
        """Tokenize "[SOS] context <words of the data set> [EOS]" and encode the reference of every class."""
        words = PROMPTS.get(space.dataset, "{}.")
        ids = context_prompts(self.clip, space, self.options.n_ctx, words).ids
        return ClassPrompts(ids, reference=self.reference(space))

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        assert prompts.reference is not None
        width = self.clip.geometry.text_width
        # [C, E] to [C, P D] to [C, P, D]: a set of tokens for each class.
        tokens = self.meta_net(prompts.reference).unflatten(-1, (self.options.n_ctx, width))
        image_plan, context = super().plans(prompts, noise)
        # Up to this block the context acts on the rows behind it: it has a gradient although it is replaced.
        return image_plan, Plan((*context.tokens, TokenOp(self.options.block, "replace", tokens, start=1)))
