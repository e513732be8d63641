"""Reference and fast: the two ways in which the runtime benchmark lets one and the same method work.

Reference is the way of public code: every row of every class prompt, prompts and class features anew for every batch,
at test time too; eager, with the optimizer that torch chooses by itself. Fast is what this program does by itself, with
what `--accelerate` allows on the device. Both give the same numbers up to rounding.

Shapes: B images, C classes.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from procap.classifier import cosine_logits
from procap.clip import CLIP
from procap.exact_optimizations import NO_SAVINGS
from procap.methods.method import Method
from runner.acceleration import Acceleration, keep_compiled
from runner.config import RunConfig
from runner.engine import Engine

ModeName = Literal["reference", "fast"]
MODES: tuple[ModeName, ...] = ("reference", "fast")

Classify = Callable[[Tensor], Tensor]
Models = dict[ModeName, CLIP]

FUSED = "PROCAP_FUSED"
"""What `procap.kernels.refinement` reads."""


def towers(clip: CLIP, mode: ModeName) -> CLIP:
    """The frozen model as a mode uses it; weights are shared."""
    return clip.with_savings(NO_SAVINGS) if mode == "reference" else clip


def models(clip: CLIP, ways: Acceleration) -> Models:
    """`clip` for each mode, compiled for fast mode where `ways` says so: reference mode then has a copy of its own."""
    if not ways.compile:
        return {mode: towers(clip, mode) for mode in MODES}
    from procap.kernels.compiled import compile_blocks

    plain = copy.deepcopy(clip)
    keep_compiled()
    compile_blocks(clip)
    return {"reference": towers(plain, "reference"), "fast": clip}


def ways_of(mode: ModeName, ways: Acceleration) -> Acceleration:
    """Public code has none."""
    return ways if mode == "fast" else Acceleration()


def compile_cache(ways: Acceleration) -> dict[str, Any] | None:
    """The folder of compiled programs, and whether it holds any yet; None where nothing is compiled."""
    if not ways.compile:
        return None
    keep_compiled()
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    warm = folder.is_dir() and any(folder.iterdir())
    return {"folder": str(folder), "state": "warm" if warm else "cold"}


@contextmanager
def at_work(mode: ModeName) -> Iterator[None]:
    """Where a mode computes: the fused cross-attention is not for reference mode."""
    before = os.environ.get(FUSED)
    if mode == "reference":
        os.environ[FUSED] = "off"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(FUSED, None)
        else:
            os.environ[FUSED] = before


def engine_of(method: Method, config: RunConfig, mode: ModeName) -> Engine:
    """What carries out steps; in reference mode with the optimizer's implementation that torch chooses by itself."""
    engine = Engine(method, config)
    if mode == "reference":
        for group in engine.optimizer.param_groups:
            group.update(fused=None, lr=config.recipe.lr)
            if "capturable" in group:
                group["capturable"] = False
    return engine


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
