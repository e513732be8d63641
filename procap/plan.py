"""Token operations as data: what a prompt method asks of a frozen tower.

A plan is a tuple of `TokenOp`. The tower keeps all bookkeeping (sequence length, causal mask, position of the end-of-text
token) and knows no method by name. An empty plan is the vanilla encoder.

Shapes: N rows in the tower's batch (images, or class prompts), P prompt tokens, L sequence length, D tower width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

INPUT = -1
"""The layer number of an operation that acts on the input embeddings.

For text it acts before the positional embedding is added; for vision after it was added and before `ln_pre`.
"""


@dataclass(frozen=True)
class TokenOp:
    """Put `tokens` into the sequence that enters block `layer` (0-based), or into the input (`layer=INPUT`).

    tokens: [P, D], the same for every row of the batch, or [N, P, D], one set per row.
    mode: "replace" overwrites rows start..start+P-1; "insert" puts them before row `start` and shifts the rest;
        "append" puts them behind the last row (`start` is then ignored).
    """

    layer: int
    mode: Literal["replace", "insert", "append"]
    tokens: Tensor
    start: int = 0


Plan = tuple[TokenOp, ...]


def apply_op(x: Tensor, op: TokenOp) -> Tensor:
    """Apply one operation to the states `x` [N, L, D]; gives [N, L, D] (replace) or [N, L + P, D] (insert, append)."""
    tokens = op.tokens.to(x.dtype)
    if tokens.dim() == 2:
        tokens = tokens.expand(x.shape[0], -1, -1)
    count = tokens.shape[1]
    start = x.shape[1] if op.mode == "append" else op.start
    end = start + count if op.mode == "replace" else start
    if not 0 <= start <= end <= x.shape[1]:
        raise ValueError(f"{op.mode} of {count} tokens at row {op.start} does not fit a sequence of {x.shape[1]} rows")
    return torch.cat([x[:, :start], tokens, x[:, end:]], dim=1)
