"""Compile with torch.compile what a GPU launches as many small kernels; the numbers are the plain ones up to rounding.

Compiling happens at first use; torch keeps the result on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from procap.attention import Block
from procap.clip import CLIP
from procap.cross_attention import Level, refine_level

MAX_PROGRAMS = 64
"""Compiled variants of one part: widths, gradients or none, precisions. The default limit of torch is 8."""


def allow_programs() -> None:
    """Raise torch's limit of compiled variants to MAX_PROGRAMS in this thread."""
    # The setting is documented, although its module has a private name. Since torch 2.15 each thread has its own, and
    # Ray runs every trial in a new thread.
    torch._dynamo.config.recompile_limit = max(MAX_PROGRAMS, torch._dynamo.config.recompile_limit)


def compile_blocks(clip: CLIP, backend: str = "inductor") -> None:
    """Compile norms, biases, activations and residuals of every block of `clip`, for all models that share its weights.

    Only what works on rows one by one is compiled, and for any number of rows, so that a handful of programs serves
    both towers at every number of classes and images; attention keeps its own fused kernels. Blocks that are compiled
    stay as they are.
    """
    for block in (module for module in clip.modules() if isinstance(module, Block)):
        if "before_attention" in vars(block):
            continue
        for part in ("before_attention", "after_attention"):
            # Set on the block, not on its class: other models in the process stay plain.
            setattr(block, part, torch.compile(getattr(block, part), dynamic=True, backend=backend))


@cache
def compiled_level(backend: str = "inductor") -> Callable[..., Level]:
    """Return `refine_level` compiled: one program serves all levels of a training, whose shapes are equal."""
    return torch.compile(refine_level, dynamic=False, backend=backend)
