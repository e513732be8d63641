"""Token operations as data: what a prompt method changes in a frozen tower.

A plan is a tuple of `TokenOp`. The tower does all bookkeeping (sequence length, causal order, position of the
end-of-text token) and contains no method by name. An empty plan is the vanilla encoder.

Shapes: N rows in the tower's batch (images, or class prompts), P prompt tokens, S token sets, L sequence length,
D tower width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from procap.attention import CAUSAL, FULL, AttentionPattern, RowMap

INPUT = -1
"""The layer number of an operation that acts on the input embeddings.

For text it acts before the positional embedding is added; for vision after it was added and before `ln_pre`.
"""


@dataclass(frozen=True)
class TokenOp:
    """Put `tokens` into the sequence that enters block `layer` (0-based), or into the input (`layer=INPUT`).

    tokens: [P, D], the same for every row of the batch; [N, P, D], one set per row; or, for text, [S, 1, P, D]: the
        prompts are encoded under S sets at once, each the same for every row.
    mode: "replace" overwrites rows start..start+P-1; "insert" puts them before row `start` and shifts the rest;
        "append" puts them behind the last row (`start` is then ignored).
    start: a row of the sequence as it is when the operation acts, so after all earlier ones.
    """

    layer: int
    mode: Literal["replace", "insert", "append"]
    tokens: Tensor
    start: int = 0


Plan = tuple[TokenOp, ...]


def for_prompts(plan: Plan, start: int, stop: int) -> Plan:
    """Restrict `plan` to the rows start..stop-1 of the tower's batch."""
    return tuple(
        replace(op, tokens=op.tokens[start:stop]) if op.tokens.dim() == 3 and len(op.tokens) > 1 else op for op in plan
    )


def apply_op(x: Tensor, op: TokenOp) -> Tensor:
    """Apply one operation to the states `x` [N, L, D]; gives [N, L, D] (replace) or [N, L + P, D] (insert, append).

    Raises ValueError if the tokens do not fit the sequence.
    """
    tokens = op.tokens.to(x.dtype)
    tokens = tokens.expand(len(x), *tokens.shape[-2:])
    count = tokens.shape[1]
    start = x.shape[1] if op.mode == "append" else op.start
    end = start + count if op.mode == "replace" else start
    if not 0 <= start <= end <= x.shape[1]:
        raise ValueError(f"{op.mode} of {count} tokens at row {op.start} does not fit a sequence of {x.shape[1]} rows")
    if op.mode == "replace":
        return x.slice_scatter(tokens, 1, start, end)
    return torch.cat([x[:, :start], tokens, x[:, end:]], dim=1)


def live_rows(x: Tensor, live: slice | None, op: TokenOp, rows: slice, grown: int = 0) -> slice | None:
    """Return the rows that depend on learned values after `op` has put its tokens into `rows` of the sequence `x`.

    live: these rows before `op`. None, here and as the result, means no row if `x` has no gradient, else every row.
    grown: how many rows `op` has inserted at `rows.start`.
    The result is one slice, so it may include frozen rows between two sets of learned tokens.
    """
    learned = op.tokens.requires_grad
    if live is None:
        return rows if learned and not x.requires_grad else None
    start = live.start + grown * (rows.start <= live.start)
    stop = live.stop + grown * (rows.start < live.stop)
    return slice(min(start, rows.start), max(stop, rows.stop)) if learned else slice(start, stop)


@dataclass(frozen=True)
class TokenSequence:
    """A batch of sequences of equal length between two blocks of a tower.

    x: states [N, L, D].
    read_out: the row whose final state becomes the feature: a number, or one per row of the batch [N].
    causal: rows see only themselves and earlier rows, inserted tokens included.
    rows: where the tokens of each operation are now, by the operation's place in the plan; an insertion inside a slice
        widens it.
    live: the rows that depend on something learned (`live_rows`).
    """

    x: Tensor
    read_out: int | Tensor
    causal: bool
    rows: Mapping[int, slice] = field(default_factory=dict)
    live: slice | None = None

    def apply(self, plan: Plan, layer: int) -> TokenSequence:
        """Apply the operations of `plan` at `layer`, in the order of the plan."""
        sequence = self
        for index, op in enumerate(plan):
            if op.layer == layer:
                sequence = sequence._apply(index, op)
        return sequence

    def with_states(self, x: Tensor, live: slice | None = None) -> TokenSequence:
        """Replace the states and keep the bookkeeping."""
        return replace(self, x=x, live=live)

    def pattern(self, layer: int) -> AttentionPattern:
        """Return which rows attend to which in block `layer`."""
        return CAUSAL if self.causal else FULL

    def reading(self) -> tuple[AttentionPattern, RowMap]:
        """Return the attention pattern of the row that is read out, and a function that selects this row."""
        row = self.read_out
        if isinstance(row, int):
            if self.causal:
                raise ValueError("a causal sequence is read out at one row per prompt")
            return FULL, lambda x: x[:, row : row + 1]
        earlier = torch.arange(self.x.shape[1], device=row.device) <= row[:, None]
        mask = torch.zeros_like(earlier, dtype=torch.float32).masked_fill(~earlier, float("-inf"))
        batch = torch.arange(len(row), device=row.device)
        return AttentionPattern(mask=mask[:, None, None]), lambda x: x[batch, row][:, None]

    def in_plan_order(self) -> tuple[slice, ...]:
        """Return the slice of every operation's tokens; call it after all operations have been applied."""
        return tuple(self.rows[index] for index in range(len(self.rows)))

    def _apply(self, index: int, op: TokenOp) -> TokenSequence:
        x = apply_op(self.x, op)
        start = self.x.shape[1] if op.mode == "append" else op.start
        grown = x.shape[1] - self.x.shape[1]
        rows = {
            i: slice(r.start + grown * (start <= r.start), r.stop + grown * (start < r.stop))
            for i, r in self.rows.items()
        }
        rows[index] = slice(start, start + op.tokens.shape[-2])
        live = live_rows(self.x, self.live, op, rows[index], grown)
        return replace(self, x=x, read_out=self.read_out + grown * (self.read_out >= start), rows=rows, live=live)


def check_layers(plan: Plan, layers: int) -> None:
    """Raise ValueError for an operation at a layer that a tower of `layers` blocks does not have."""
    for op in plan:
        if not INPUT <= op.layer < layers:
            raise ValueError(f"a token operation at layer {op.layer}: the tower has blocks 0 to {layers - 1}")
