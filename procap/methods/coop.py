"""CoOp: learned context words before (or around) the class name, text side only.

Source: Zhou et al. 2022, "Learning to Prompt for Vision-Language Models", section 3.2, and its public code.
Learns n_ctx vectors of the text width: 2,048 parameters with 4 tokens on ViT-B/16, times C when class-specific.

Shapes: C classes, P context tokens, T token ids per prompt, D text width.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from procap.clip import CLIP
from procap.errors import UsageError
from procap.initialisation import normal
from procap.methods.method import TRANSFER_TASKS, Method, Noise, PublicLayout
from procap.methods.prompts import ClassPrompts, ContextOptions, context_op, context_prompts, initial_context
from procap.plan import NO_CHANGE, Plan
from procap.recipe import Recipe
from procap.text import LabelSpace


class CoOpOptions(ContextOptions):
    class_position: Literal["end", "middle", "front"] = Field("end", description="where the class name stands")
    csc: bool = Field(False, description="class-specific context: its own tokens for each class, ctx_init empty")

    @model_validator(mode="after")
    def _own_tokens_start_at_random(self) -> CoOpOptions:
        if self.csc and self.ctx_init.strip():
            raise ValueError("csc starts at random: it needs an empty ctx_init")
        return self


class CoOp(Method):
    """Context optimization."""

    Options = CoOpOptions
    summary: ClassVar[str] = "CoOp (Zhou et al. 2022): learned context words before the class name"
    public_layout = PublicLayout("prompt_learner", module="prompt_learner")
    options: CoOpOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: CoOpOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        if options.csc:
            context = normal((len(space.classnames), options.n_ctx, clip.geometry.text_width), generator)
        else:
            context = initial_context(clip, options.ctx_init, options.n_ctx, generator)
        self.context = nn.Parameter(context)

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.002, batch 32; 50 epochs on ImageNet, else 200, fewer for few-shot with under 8 shots.

        Source: CoOp's section 4.1 (few-shot), the CoCoOp paper's comparison (base to novel, transfer from ImageNet).
        """
        epochs = 200
        if task == "few-shot":
            epochs = 50 if shots == 1 else 100 if 1 < shots < 8 else 200
        if dataset.lower() == "imagenet" or task in TRANSFER_TASKS:
            epochs = 50
        return Recipe(optimizer="sgd", lr=0.002, epochs=epochs, batch_size=32)

    @classmethod
    def task_options(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> dict[str, object]:
        """Start 16 tokens at random for few-shot learning, and 4 from "a photo of a" for every other task."""
        return {"n_ctx": 16, "ctx_init": ""} if task == "few-shot" else {}

    def class_prompts(self, space: LabelSpace) -> ClassPrompts:
        """Tokenize "[SOS] context <class name> . [EOS]"; positions "middle" and "front" move the context."""
        if self.options.csc and space.classnames != self.space.classnames:
            raise UsageError("coop with csc = true has learned one context per class: it knows no other class names")
        n_ctx = self.options.n_ctx
        prompts = context_prompts(self.clip, space, n_ctx)
        ids = prompts.ids
        if self.options.class_position == "end":
            return prompts
        before = n_ctx // 2 if self.options.class_position == "middle" else 0
        lengths = self.clip.tokenize(space.names()).argmax(dim=1, keepdim=True) - 1
        slot = torch.arange(n_ctx, device=ids.device)
        slots = 1 + slot + torch.where(slot < before, 0, lengths)
        return ClassPrompts(move_names(ids, lengths, n_ctx, before), slots)

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        return NO_CHANGE, Plan((context_op(self.clip, prompts, self.context),))

    def public_names(self) -> dict[str, str]:
        return {"context": "prompt_learner.ctx"}


def move_names(ids: Tensor, lengths: Tensor, n_ctx: int, before: int) -> Tensor:
    """Move each class name (`lengths` [C, 1] tokens) in `ids` [C, T] before all but `before` context tokens."""
    row = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    first = 1 + before
    in_name = (row >= first) & (row < first + lengths)
    in_context = (row >= first + lengths) & (row < 1 + n_ctx + lengths)
    source = torch.where(in_name, row + n_ctx - before, torch.where(in_context, row - lengths, row))
    return ids.gather(1, source)
