"""Token operations as data: what a prompt method asks of a frozen tower.

A plan is a tuple of `TokenOp`. The tower keeps all bookkeeping (sequence length, causal order, position of the
end-of-text token) and knows no method by name. An empty plan is the vanilla encoder.

Shapes: N rows in the tower's batch (images, or class prompts), P prompt tokens, L sequence length, D tower width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    start: a row of the sequence as it is when the operation acts, so after all earlier ones.
    """

    layer: int
    mode: Literal["replace", "insert", "append"]
    tokens: Tensor
    start: int = 0


Plan = tuple[TokenOp, ...]


def apply_op(x: Tensor, op: TokenOp) -> Tensor:
    """Apply one operation to the states `x` [N, L, D]; gives [N, L, D] (replace) or [N, L + P, D] (insert, append).

    Raises ValueError where the tokens do not fit the sequence.
    """
    tokens = op.tokens.to(x.dtype)
    if tokens.dim() == 2:
        tokens = tokens.expand(x.shape[0], -1, -1)
    count = tokens.shape[1]
    start = x.shape[1] if op.mode == "append" else op.start
    end = start + count if op.mode == "replace" else start
    if not 0 <= start <= end <= x.shape[1]:
        raise ValueError(f"{op.mode} of {count} tokens at row {op.start} does not fit a sequence of {x.shape[1]} rows")
    return torch.cat([x[:, :start], tokens, x[:, end:]], dim=1)


@dataclass(frozen=True)
class Track:
    """A sequence on its way through a tower.

    x: states [N, L, D].
    read_out: the row whose final state becomes the feature: a number, or one per row of the batch [N].
    rows: where the tokens of each operation are now, by the operation's place in the plan; an insertion inside a slice
        widens it.
    """

    x: Tensor
    read_out: int | Tensor
    rows: Mapping[int, slice] = field(default_factory=dict)

    def apply(self, plan: Plan, layer: int) -> Track:
        """The sequence after the operations of `plan` at `layer`, in the order of the plan."""
        track = self
        for index, op in enumerate(plan):
            if op.layer == layer:
                track = track._apply(index, op)
        return track

    def with_states(self, x: Tensor) -> Track:
        """The same bookkeeping over other states."""
        return replace(self, x=x)

    def in_plan_order(self) -> tuple[slice, ...]:
        """The slice of every operation, once all have been applied."""
        return tuple(self.rows[index] for index in range(len(self.rows)))

    def _apply(self, index: int, op: TokenOp) -> Track:
        x = apply_op(self.x, op)
        start = self.x.shape[1] if op.mode == "append" else op.start
        grown = x.shape[1] - self.x.shape[1]
        rows = {
            i: slice(r.start + grown * (start <= r.start), r.stop + grown * (start < r.stop))
            for i, r in self.rows.items()
        }
        rows[index] = slice(start, start + op.tokens.shape[-2])
        return Track(x, self.read_out + grown * (self.read_out >= start), rows)


def check_layers(plan: Plan, layers: int) -> None:
    """Raise ValueError for an operation at a layer that a tower of `layers` blocks does not have."""
    for op in plan:
        if not INPUT <= op.layer < layers:
            raise ValueError(f"a token operation at layer {op.layer}: the tower has blocks 0 to {layers - 1}")
