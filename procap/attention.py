"""Transformer blocks of both towers, and the patterns of attention.

Attention is torch's scaled dot product, on shapes and masks that its fused kernels take.

Shapes: N sequences, L rows, D width, H heads, G groups of rows, Q queries per group, P prefix rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from procap.low_rank import LowRank

RowMap = Callable[[Tensor], Tensor]
"""States [N, L, D] to states of some of their rows [N, Q, D]."""


@dataclass(frozen=True)
class AttentionPattern:
    """Which rows attend to which.

    groups: 1: queries attend to all rows under `mask` or `causal`. More: the rows behind the first `prefix` ones are
        that many groups of equal size, each attends to the prefix and to itself under `mask`.
    mask: added to the scores: [Q, L] or [N, 1, Q, L] for one group, [G, 1, Q, P + L / G] for several.
    causal: rows attend to themselves and earlier ones; the prefix of several groups always does.
    prefix_queries: the queries include the prefix rows.
    attending: the only row that attends to all; each of the others gets its own value.
    """

    causal: bool = False
    mask: Tensor | None = None
    groups: int = 1
    prefix: int = 0
    prefix_queries: bool = True
    attending: int | None = None

    def apply(self, q: Tensor, kv: Tensor, heads: int) -> Tensor:
        """Compute attention of queries [N, Q, D] to keys and values [N, L, 2 D]; returns [N, Q, D].

        G groups become items of the batch, [N G, Q / G, D] and [N G, P + L / G, 2 D], each with a copy of the prefix.
        """
        if self.attending is not None:
            row, values = slice(self.attending, self.attending + 1), kv.chunk(2, dim=-1)[1]
            return values.slice_scatter(attend(q[:, row], kv, heads), 1, row.start, row.stop)
        if self.groups == 1:
            return attend(q, kv, heads, self.mask, self.causal)
        assert self.mask is not None
        # In the last block only end rows are queries, and none of them lies in the prefix.
        items, prefix_queries = len(q), self.prefix if self.prefix_queries else 0
        # `split` instead of slices: the gradient of a slice is a full-size tensor that is zero elsewhere.
        prefix_kv, group_kv = kv.split([self.prefix, kv.shape[1] - self.prefix], dim=1)
        prefix_q, group_q = q.split([prefix_queries, q.shape[1] - prefix_queries], dim=1)
        group_kv = group_kv.unflatten(1, (self.groups, -1))
        if self.prefix:
            # Fused kernels need contiguous keys per sequence; the copy costs about 1 % of a linear layer.
            # [N, G, P + L / G, 2 D].
            group_kv = torch.cat([prefix_kv[:, None].expand(-1, self.groups, -1, -1), group_kv], dim=2)
        # The batch of attention is item by item, each with its G groups, so the masks of the groups repeat per item.
        mask = self.mask if items == 1 else self.mask.repeat(items, 1, 1, 1)
        group_q = group_q.unflatten(1, (self.groups, -1)).flatten(0, 1)
        mixed = attend(group_q, group_kv.flatten(0, 1), heads, mask).reshape(items, -1, q.shape[-1])
        if not prefix_queries:
            return mixed
        # The prefix is the same for all groups, so its own queries are computed once.
        return torch.cat([attend(prefix_q, prefix_kv, heads, causal=True), mixed], dim=1)


FULL = AttentionPattern()
"""Every row attends to every row, as images do."""
CAUSAL = AttentionPattern(causal=True)
"""Every row attends to itself and to earlier rows, as text does."""


def attend(q: Tensor, kv: Tensor, heads: int, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Compute multi-head attention of q [N, Q, D] to kv [N, L, 2 D]; returns [N, Q, D]."""
    k, v = kv.chunk(2, dim=-1)
    # Each [N, H, rows, D / H].
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    mask = None if mask is None else mask.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal).transpose(1, 2).flatten(2)


class LayerNorm(nn.LayerNorm):
    """LayerNorm computed in float32, regardless of autocast and of the weights' precision."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps).to(input.dtype)


class QuickGELU(nn.Module):
    """The sigmoid approximation of GELU that OpenAI's weights were trained with: silu(s x) / s."""

    SLOPE = 1.702

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.SLOPE * x)


class MLP(nn.Sequential):
    """Linear, activation, linear, under the names of CLIP's state dict."""

    c_fc: nn.Linear
    gelu: nn.Module
    c_proj: nn.Linear

    def __init__(self, width: int, hidden: int, quick_gelu: bool) -> None:
        gelu = QuickGELU() if quick_gelu else nn.GELU()
        super().__init__(OrderedDict(c_fc=nn.Linear(width, hidden), gelu=gelu, c_proj=nn.Linear(hidden, width)))

    def folded(self, x: Tensor) -> Tensor:
        """Compute `forward` with QuickGELU's scalings folded into the matrix products and the bias addition.

        One elementwise pass over the hidden states remains (x * sigmoid(s x) takes three), and the backward pass keeps
        one tensor of that width instead of two.
        """
        if not isinstance(self.gelu, QuickGELU):
            return self(x)
        slope, rows = self.gelu.SLOPE, x.flatten(0, -2)
        # The bias is scaled separately: with `beta` != 1 a GPU's matrix product cannot fuse the addition of the bias.
        scaled = torch.addmm(slope * self.c_fc.bias, rows, self.c_fc.weight.t(), alpha=slope)
        narrow = F.linear(F.silu(scaled), self.c_proj.weight)
        # Scaled after the product instead of inside it, so that the backward pass scales the narrow tensor as well.
        # `view_as` comes first because torch.compile of 2.11 drops the scale of a sum directly after a product.
        return torch.add(self.c_proj.bias.to(narrow.dtype), narrow.view_as(x), alpha=1 / slope)


class Attention(nn.Module):
    """Multi-head self-attention with the parameter names of `nn.MultiheadAttention`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.width = width
        # The rows are those of queries, then of keys, then of values, `width` of each.
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def queries(self, x: Tensor) -> Tensor:
        return F.linear(x, self.in_proj_weight[: self.width], self.in_proj_bias[: self.width])

    def keys_values(self, x: Tensor) -> Tensor:
        return F.linear(x, self.in_proj_weight[self.width :], self.in_proj_bias[self.width :])

    def queries_keys_values(self, x: Tensor) -> Tensor:
        return F.linear(x, self.in_proj_weight, self.in_proj_bias)


class Block(nn.Module):
    """One pre-norm residual block."""

    def __init__(self, width: int, heads: int, mlp_width: int, quick_gelu: bool) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln_2 = LayerNorm(width)
        self.mlp = MLP(width, mlp_width, quick_gelu)

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        read: RowMap | None = None,
        folded: bool = False,
        adapter: nn.Module | None = None,
        branch: LowRank | None = None,
    ) -> Tensor:
        """Compute the block's output [N, L, D], or [N, Q, D] for the rows that `read` selects.

        pattern: the attention of the rows that are computed.
        folded: compute the MLP in fewer passes (`MLP.folded`).
        adapter: a row-wise module whose output on `ln_1(x)` is added to the block's.
        branch: low-rank branches next to the projections of the attention.
        """
        # A branch reads rows by itself, later.
        rows = x if read is None or (branch is not None and adapter is None) else read(x)
        if branch is not None:
            out = self._with_branch(x, pattern, read, folded, branch)
        else:
            if read is None:
                q, kv = self.before_attention(x).split([self.attn.width, 2 * self.attn.width], dim=-1)
            else:
                # Every row is a key, but only the rows that are read are queries and take part in the residual.
                q, kv = self.attn.queries(self.ln_1(rows)), self.attn.keys_values(self.ln_1(x))
            out = self.after_attention(rows, pattern.apply(q, kv, self.attn.heads), folded)
        return out if adapter is None else out + adapter(self.ln_1(rows))

    def _with_branch(
        self, x: Tensor, pattern: AttentionPattern, read: RowMap | None, folded: bool, branch: LowRank
    ) -> Tensor:
        rows = self.ln_1(x)
        qkv = self.attn.queries_keys_values(rows) + branch.queries_keys_values(rows)
        q, kv = qkv.split([self.attn.width, 2 * self.attn.width], dim=-1)
        # Rows are selected after the projections, because dropout numbers the rows of the whole sequence.
        if read is not None:
            q, x = read(q), read(x)
        mixed = pattern.apply(q, kv, self.attn.heads)
        # `after_attention` adds the output projection to x before the MLP, so the branch of that projection joins x.
        return self.after_attention(x + branch.output(mixed, rows, read), mixed, folded)

    def before_attention(self, x: Tensor) -> Tensor:
        """Compute queries, keys and values [N, L, 3 D] of states [N, L, D]; row-wise, as is `after_attention`."""
        return self.attn.queries_keys_values(self.ln_1(x))

    def after_attention(self, x: Tensor, mixed: Tensor, folded: bool = False) -> Tensor:
        """Compute the block's output from its input x [N, L, D] and the result `mixed` [N, L, D] of attention."""
        x = x + self.attn.out_proj(mixed)
        rows = self.ln_2(x)
        return x + (self.mlp.folded(rows) if folded else self.mlp(rows))
