"""CoOp: learned context words before the class name, text side only.

Source: Zhou et al. 2022, "Learning to Prompt for Vision-Language Models", section 3.2, and its public code.
Learns n_ctx vectors of the text width: 2,048 parameters with 4 tokens on ViT-B/16.

Shapes: C classes, P context tokens, T token ids per prompt, D text width.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from procap.clip import CLIP
from procap.errors import UsageError
from procap.initialisation import normal
from procap.methods.method import TRANSFER_TASKS, Method, MethodOptions, Noise, PublicLayout, PublishedOptions
from procap.methods.prompts import ClassPrompts, context_plan, context_prompts, phrase_tokens, words_of
from procap.plan import NO_CHANGE, Plan
from procap.recipe import Recipe
from procap.text import LabelSpace

CONTEXT_NAMES = {"context": "prompt_learner.ctx"}


class ContextOptions(MethodOptions):
    n_ctx: int = Field(4, ge=1, description="learned context tokens; as many as ctx_init has words where it has any")
    ctx_init: str = Field("a photo of a", description="words to start from; empty draws N(0, 0.02)")

    @model_validator(mode="after")
    def _words_fit(self) -> Self:
        words = len(words_of(self.ctx_init))
        if words and words != self.n_ctx:
            raise ValueError(
                f"ctx_init '{self.ctx_init}' has {words} words but n_ctx = {self.n_ctx}: "
                f"give n_ctx = {words}, or an empty ctx_init for a random start"
            )
        return self

    @classmethod
    def of_length(cls, tokens: int) -> dict[str, object]:
        # Random at first where the number of the initial words differs.
        words = len(words_of(cls.model_fields["ctx_init"].default))
        return super().of_length(tokens) | ({"ctx_init": ""} if words not in (0, tokens) else {})


class ContextMethod(Method):
    """A method that learns CoOp's context."""

    public_layout: ClassVar[PublicLayout | None] = PublicLayout("prompt_learner", CONTEXT_NAMES, "prompt_learner")
    changes: ClassVar[tuple[str, ...]] = ("text",)
    options: ContextOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: ContextOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        self.context = nn.Parameter(self._initial_context(generator))

    def _initial_context(self, generator: torch.Generator) -> Tensor:
        return initial_context(self.clip, self.options, generator)

    def class_prompts(self, space: LabelSpace) -> ClassPrompts:
        """Tokenize "[SOS] context <class name> . [EOS]"."""
        return context_prompts(self.clip, space, self.options.n_ctx)

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        return NO_CHANGE, context_plan(self.context)


class CoOp(ContextMethod):
    """CoOp (Zhou et al. 2022): learned context words before the class name."""

    Options = ContextOptions
    title = "CoOp"
    mini_lr = 4e-2
    # CoOp's own paper draws 16 tokens at random; 4 from a phrase are those of the CoCoOp paper's comparison.
    published: ClassVar[PublishedOptions] = {"few-shot": {"n_ctx": 16, "ctx_init": ""}}

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.002, batch 32; 50 epochs on ImageNet, else 200, fewer for few-shot with under 8 shots.

        Source: CoOp's section 4.1 (few-shot), the CoCoOp paper's comparison (base to novel, transfer from ImageNet).
        """
        epochs = 200
        if task == "few-shot":
            epochs = 50 if shots == 1 else 100 if 1 < shots < 8 else 200
        if dataset == "imagenet" or task in TRANSFER_TASKS:
            epochs = 50
        return Recipe(optimizer="sgd", lr=0.002, epochs=epochs, batch_size=32)


def initial_context(clip: CLIP, options: ContextOptions, generator: torch.Generator) -> Tensor:
    """Return the embeddings of `ctx_init` [P, D], or N(0, 0.02^2) if it is empty."""
    n_ctx, words = options.n_ctx, words_of(options.ctx_init)
    if not words:
        return normal((n_ctx, clip.geometry.text_width), generator)
    tokens = phrase_tokens(clip, " ".join(words))
    # The public code assumes one token per word, and would cut the rest without a message.
    if len(tokens) != n_ctx:
        raise UsageError(
            f"ctx_init '{options.ctx_init}' is {len(tokens)} tokens, not {n_ctx}: use words of one token each"
        )
    return tokens
