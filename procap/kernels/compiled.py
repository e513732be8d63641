"""Compile the row-wise parts of the towers' blocks with torch.compile: norms, biases, activations and residuals.

Only what works on rows one by one is compiled, and for any number of rows, so that a handful of programs serves both
towers at every number of classes and images; attention keeps its own fused kernels. The numbers are those of the plain
parts up to rounding.
"""

from __future__ import annotations

import torch

from procap.attention import Block
from procap.clip import CLIP

MAX_PROGRAMS = 64
"""Compiled variants of one part: widths, gradients or none, precisions. The default limit of torch is 8."""


def compile_blocks(clip: CLIP, backend: str = "inductor") -> None:
    """Compile the row-wise parts of every block of `clip`, for all methods and models that share its weights.

    Compiling happens at first use; torch keeps the result on disk. Blocks that are compiled stay as they are.
    """
    # The setting is documented, although its module has a private name. Since torch 2.15 each thread has its own, and
    # Ray runs every trial in a new thread: so it is set at every call.
    torch._dynamo.config.recompile_limit = max(MAX_PROGRAMS, torch._dynamo.config.recompile_limit)
    for block in (module for module in clip.modules() if isinstance(module, Block)):
        if "before_attention" in vars(block):
            continue
        for part in ("before_attention", "after_attention"):
            # Set on the block, not on its class: other models in the process stay plain.
            setattr(block, part, torch.compile(getattr(block, part), dynamic=True, backend=backend))
