"""The residual cross-attention that ProCAP's prompt tokens are refined with.

Shapes: P prompt tokens, Dq width of the rows that are updated, Dk width of the rows attended to, H heads; Dv and Dt
widths of vision and text.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from procap.initialisation import linear

Level = tuple[Tensor, Tensor]
"""Tokens of a level: v [P, Dv] of vision and t [P, Dt] of text."""


class CrossAttention(nn.Module):
    """One residual multi-head cross-attention: x [P, Dq] is updated from y [P, Dk].

    Keys have no bias: it would add the same to all scores of a query and vanish in the softmax.
    """

    def __init__(
        self,
        width: int,
        other: int,
        generator: torch.Generator,
        *,
        heads: int,
        head_width: int,
        norm: Literal["pre", "post", "none"] = "pre",
        zero_output: bool = True,
    ) -> None:
        """width, other: Dq and Dk. norm: place of the LayerNorms. zero_output: the module starts as the identity."""
        super().__init__()
        inner = heads * head_width
        self.heads = heads
        self.norm = norm
        self.query = linear(width, inner, generator)
        self.key = linear(other, inner, generator, bias=False)
        self.value = linear(other, inner, generator)
        self.output = linear(inner, width, generator)
        # Drawn before it becomes zero, so that this option changes no other initial value. While it is zero, queries,
        # keys and values get no gradient: in the first step only the output projection learns.
        if zero_output:
            nn.init.zeros_(self.output.weight)
            nn.init.zeros_(self.output.bias)
        if norm == "pre":
            self.norm_query, self.norm_other = nn.LayerNorm(width), nn.LayerNorm(other)
        elif norm == "post":
            self.norm_output = nn.LayerNorm(width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Update rows x [P, Dq] from rows y [P, Dk]; returns [P, Dq]."""
        # Section 3.2 has a residual update "with normalization", Algorithm 1 (lines 12 and 13) has no norm.
        # In the direction of the text y is W_p V, so `norm_other` acts after W_p.
        if self.norm == "pre":
            return x + self.attend(self.norm_query(x), self.norm_other(y))
        updated = x + self.attend(x, y)
        return self.norm_output(updated) if self.norm == "post" else updated

    def attend(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute multi-head attention of queries from x to keys and values from y, [P, Dq]."""
        # Add a batch dimension, because fused kernels accept four dimensions only.
        q, k, v = (
            projected.unflatten(-1, (self.heads, -1)).transpose(0, 1)[None]
            for projected in (self.query(x), self.key(y), self.value(y))
        )
        # From [1, H, P, inner / H] back to [P, inner].
        return self.output(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1))


def refine_level(v: Tensor, t: Tensor, projection: nn.Module, to_vision: nn.Module, to_text: nn.Module) -> Level:
    """Compute the next level of tokens v and t; both directions read the current level.

    projection: W_p from Dv to Dt. to_vision, to_text: a `CrossAttention` each.
    """
    # Lines 11 to 13 of Algorithm 1.
    return to_vision(v, t), to_text(t, projection(v))
