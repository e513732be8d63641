"""Reference and fast: the two ways in which the runtime benchmark lets one and the same method work.

Reference is the way of public code: every row of every class prompt, prompts and class features anew for every batch,
at test time too. Fast is what this program does by itself. Both give the same numbers up to rounding.

Shapes: B images, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from procap.classifier import cosine_logits
from procap.clip import CLIP
from procap.methods.method import Method
from procap.recipe import Recipe
from procap.savings import NO_SAVINGS
from runner.assemble import make_optimizer

ModeName = Literal["reference", "fast"]
MODES: tuple[ModeName, ...] = ("reference", "fast")

Classify = Callable[[Tensor], Tensor]


def towers(clip: CLIP, mode: ModeName) -> CLIP:
    """The frozen model as a mode uses it; weights are shared."""
    return clip.with_savings(NO_SAVINGS) if mode == "reference" else clip


def optimizer_of(method: Method, recipe: Recipe, mode: ModeName) -> torch.optim.Optimizer:
    """The recipe's optimizer; in reference mode with the implementation that torch chooses by itself."""
    optimizer = make_optimizer(method, recipe)
    if mode == "reference":
        for group in optimizer.param_groups:
            group["fused"] = None
    return optimizer


def classifier_of(method: Method, mode: ModeName) -> Classify:
    """Images [B, 3, H, W] to logits [B, C], in the way of the mode; `method` is over the towers of that mode."""
    known = method.classifier()
    # Where the text depends on the image there is nothing to keep, in either mode.
    return known if mode == "fast" or known.depends_on_image else EveryBatch(method)


class EveryBatch:
    """Classification that keeps nothing but the tokenized names from one batch to the next."""

    def __init__(self, method: Method) -> None:
        self.method = method

    def __call__(self, images: Tensor) -> Tensor:
        method, clip = self.method, self.method.clip
        with torch.inference_mode():
            image_plan, text_plan = method.plans(method.prompts)
            text = clip.encode_text(method.prompts.tokenized, text_plan)
            return cosine_logits(clip.encode_image(images, image_plan), text, method.scale())
