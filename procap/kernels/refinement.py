"""One level of ProCAP's cross-attention, both directions: eager, or in fused kernels on a GPU.

The eager implementation is the reference; `tests/test_procap_triton.py` compares the kernels' values and gradients with
it. `--accelerate fused` switches the kernels on for every supported shape and for LayerNorms of the inputs, ProCAP's
default; `train.json` records which was used. Under autocast the kernels stay in float32, while eager products are in
its narrow type. No second derivative exists.

Shapes: P prompt tokens, Dv vision width, Dt text width, I inner width (H heads).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from procap.cross_attention import CrossAttention

if TYPE_CHECKING:
    from procap.kernels.launch import Direction

MAX_TOKENS = 16
"""Most prompt tokens: their tiles of all keys take 65,536 bytes of shared memory. 32 tokens would take 131,072, and an
RTX 4090 has 101,376."""

MAX_WIDTH = 2048
"""Widest row that a program of the kernels holds as one tile."""


def refine_level(
    v: Tensor, t: Tensor, projection: nn.Linear, vision: nn.Module, text: nn.Module, *, fused: bool
) -> tuple[Tensor, Tensor]:
    """Compute the next level of tokens v [P, Dv] and t [P, Dt]; both directions read the current level.

    fused: use the kernels for shapes that they support.
    """
    to_v, to_t = cast(CrossAttention, vision), cast(CrossAttention, text)
    level = fused_level if fused and has_kernels(v, t, projection, to_v, to_t) else eager_level
    return level(v, t, projection, to_v, to_t)


def has_kernels(v: Tensor, t: Tensor, projection: nn.Linear, vision: nn.Module, text: nn.Module) -> bool:
    """Whether the kernels support a level: CUDA, few tokens, widths that fit a tile, the default LayerNorms.

    Tokens are float32 or bfloat16.
    """
    to_v, to_t = cast(CrossAttention, vision), cast(CrossAttention, text)
    fits = len(v) <= MAX_TOKENS and max(v.shape[1], t.shape[1], to_v.query.out_features) <= MAX_WIDTH
    if not (v.is_cuda and v.dtype in (torch.float32, torch.bfloat16) and to_v.norm == "pre" and fits):
        return False
    weights = [projection.weight, projection.bias, *parameters(to_v), *parameters(to_t)]
    # Sharded parameters are empty here: they are gathered when their module is called, but the kernels do not call it.
    return all(x.numel() and x.is_contiguous() and x.dtype == v.dtype for x in weights)


def eager_level(
    v: Tensor, t: Tensor, projection: nn.Linear, vision: CrossAttention, text: CrossAttention
) -> tuple[Tensor, Tensor]:
    # Lines 11 to 13 of Algorithm 1: both directions read v and t of the level below.
    return vision(v, t), text(t, projection(v))


def fused_level(
    v: Tensor, t: Tensor, projection: nn.Linear, vision: CrossAttention, text: CrossAttention
) -> tuple[Tensor, Tensor]:
    """Compute a level with the kernels."""
    weights = projection.weight, projection.bias, *parameters(vision), *parameters(text)
    new_v, new_t = FusedLevel.apply(vision.heads, vision.norm_query.eps, v.contiguous(), t.contiguous(), *weights)
    return new_v, new_t


def parameters(attention: CrossAttention) -> list[Tensor]:
    """List the parameters in the order of `procap.kernels.launch.Direction`."""
    a = attention
    layers = a.query, a.key, a.value, a.output, a.norm_query, a.norm_other
    return [parameter for layer in layers for parameter in layer.parameters()]


class FusedLevel(torch.autograd.Function):
    """A level in kernels, from v, t, and the tensors of the projection and of both directions."""

    @staticmethod
    def forward(ctx: Any, heads: int, eps: float, v: Tensor, t: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        from procap.kernels.launch import forward

        new_v, new_t, z, rows = forward(v, t, *_group(weights), heads, eps)
        ctx.heads, ctx.eps = heads, eps
        ctx.save_for_backward(v, t, z, rows, *weights)
        return new_v, new_t

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_v: Tensor, g_t: Tensor) -> tuple[Tensor | None, ...]:
        from procap.kernels.launch import backward

        v, t, z, rows, *weights = ctx.saved_tensors
        gradients = g_v.contiguous(), g_t.contiguous()
        dv, dt, projection, *directions = backward(gradients, v, t, z, rows, *_group(weights), ctx.heads, ctx.eps)
        return None, None, dv, dt, *projection, *(gradient for direction in directions for gradient in direction)


def _group(weights: Sequence[Tensor]) -> tuple[Sequence[Tensor], Direction, Direction]:
    """Divide the tensors of a level into those of the projection, and of either direction."""
    from procap.kernels.launch import Direction

    # Two tensors of W_p, then equally many of either direction.
    middle = 1 + len(weights) // 2
    return weights[:2], Direction(*weights[2:middle]), Direction(*weights[middle:])
