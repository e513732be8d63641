"""Plans: what a method changes in a frozen tower, as data.

The tower does all bookkeeping (sequence length, causal order, position of the end-of-text token) and contains no method
by name. An empty plan is the vanilla encoder. A row is one position of a sequence, an item one sequence of the batch.

Shapes: N items of the tower's batch (images, or class prompts), P prompt tokens, S token sets, L sequence length,
D tower width.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from procap.attention import CAUSAL, FULL, AttentionPattern, RowMap
from procap.low_rank import LowRank

BLOCKS = "transformer.resblocks."
"""The first part of the names of a block's weights in a tower's state dict; the block's number follows."""

INPUT = -1
"""The layer number of an operation that acts on the input embeddings.

For text it acts before the positional embedding is added; for vision after it was added and before `ln_pre`.
"""


@dataclass(frozen=True)
class TokenOp:
    """Put `tokens` into the sequence that enters block `layer` (0-based), or into the input (`layer=INPUT`).

    tokens: [P, D], the same for every item of the batch; [N, P, D], one set per item; or, for text, [S, 1, P, D]: the
        prompts are encoded under S sets at once, each the same for every prompt.
    mode: "replace" overwrites rows start..start+P-1; "insert" puts them before row `start` and shifts the rest;
        "append" puts them behind the last row (`start` is then ignored).
    start: a row of the sequence as it is when the operation acts, so after all earlier ones.
    share: of the tokens in rows that are replaced; the rest is what the rows hold.
    """

    layer: int
    mode: Literal["replace", "insert", "append"]
    tokens: Tensor
    start: int = 0
    share: float = 1.0


@dataclass(frozen=True)
class Plan:
    """What a method changes in a frozen tower.

    tokens: token operations; those of one layer act in this order.
    adapters: by block (0-based), a row-wise module next to the block, on `ln_1` of its input x [N, L, D]: the block's
        output becomes block(x) + adapter(ln_1(x)). Attention and MLP of the block do not see what the adapter adds.
    weights: tensors, learned or not, that replace the tower's own, by their names in the tower's state dict: those of
        blocks, of the LayerNorms before (vision only) and after them, and of the projection.
    read_op: index in `tokens` of an operation that inserts rows, whose final states the vision tower returns as well.
    branches: by block (0-based), low-rank branches next to the projections of its attention, for training with dropout;
        without dropout the same change is one of `weights`.
    """

    tokens: tuple[TokenOp, ...] = ()
    adapters: Mapping[int, nn.Module] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    read_op: int | None = None
    branches: Mapping[int, LowRank] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tokens or self.adapters or self.weights or self.branches)

    @property
    def num_sets(self) -> int:
        """How many token sets the prompts are encoded under; 0: no operation has a dimension of sets."""
        return max((len(op.tokens) for op in self.tokens if op.tokens.dim() == 4), default=0)

    @property
    def learns(self) -> bool:
        """Whether a gradient flows to anything in the plan."""
        tensors = [*(op.tokens for op in self.tokens), *self.weights.values()]
        tensors += [parameter for adapter in self.adapters.values() for parameter in adapter.parameters()]
        tensors += [factor for branch in self.branches.values() for pair in branch.factors.values() for factor in pair]
        return any(tensor.requires_grad for tensor in tensors)

    def first_change(self, layers: int) -> int:
        """Return the first block, of `layers`, whose input or weights the plan changes; INPUT if it is the input."""
        changed = [layer for layer in range(layers) if self.changes_block(layer)]
        # `ln_pre` comes before the first block, so another one changes the input.
        changed += [INPUT for name in self.weights if name.startswith("ln_pre.")]
        return min([layers, *changed, *(op.layer for op in self.tokens)])

    def changes_block(self, layer: int) -> bool:
        """Whether block `layer` has an adapter, a branch, or other weights than the tower's own."""
        overridden = any(name.startswith(f"{BLOCKS}{layer}.") for name in self.weights)
        return overridden or layer in self.adapters or layer in self.branches

    def select(self, items: slice, sets: slice = slice(None)) -> Plan:
        """Restrict the plan to some of the images or prompts of the tower's batch, and to some token sets."""
        # By the dimensions of an operation's tokens: for all items, one set per item, or token sets.
        chosen = {2: slice(None), 3: items, 4: sets}
        # Dropout numbers the items of the whole batch, so that a chunk must know where it begins.
        branches = {layer: branch.starting_at(items.start) for layer, branch in self.branches.items()}
        return replace(self, branches=branches).with_tokens(op.tokens[chosen[op.tokens.dim()]] for op in self.tokens)

    def for_set(self, number: int) -> Plan:
        """Restrict the plan to one of its token sets."""
        return self.with_tokens(op.tokens[number, 0] if op.tokens.dim() == 4 else op.tokens for op in self.tokens)

    def with_tokens(self, tokens: Iterable[Tensor]) -> Plan:
        """Return the same plan with other tensors in its operations."""
        return replace(
            self, tokens=tuple(replace(op, tokens=each) for op, each in zip(self.tokens, tokens, strict=True))
        )

    def snapshot(self) -> Plan:
        """Return a copy for inference that training does not change."""
        # Without branches: they are for training, and in inference `weights` contain them.
        return Plan(
            tuple(replace(op, tokens=op.tokens.detach().clone()) for op in self.tokens),
            {layer: copy.deepcopy(adapter).requires_grad_(False) for layer, adapter in self.adapters.items()},
            {name: weight.detach().clone() for name, weight in self.weights.items()},
            self.read_op,
        )


NO_CHANGE = Plan()
"""The empty plan: CLIP's own encoder."""


def apply_op(x: Tensor, op: TokenOp) -> Tensor:
    """Apply one operation to the states `x` [N, L, D]; gives [N, L, D] (replace) or [N, L + P, D] (insert, append).

    Raises ValueError if the tokens do not fit the sequence.
    """
    tokens = op.tokens.to(x.dtype)
    tokens = tokens.expand(x.shape[0], *tokens.shape[-2:])
    count = tokens.shape[1]
    start = x.shape[1] if op.mode == "append" else op.start
    end = start + count if op.mode == "replace" else start
    if not 0 <= start <= end <= x.shape[1]:
        raise ValueError(f"{op.mode} of {count} tokens at row {op.start} does not fit a sequence of {x.shape[1]} rows")
    # Out of place, because `x` can be states of the frozen tower that other passes read as well.
    if op.mode == "replace":
        return x.slice_scatter(blend(tokens, x[:, start:end], op.share), 1, start, end)
    return torch.cat([x[:, :start], tokens, x[:, end:]], dim=1)


def blend(tokens: Tensor, rows: Tensor, share: float) -> Tensor:
    """Mix tokens with the states of the rows that they replace."""
    return tokens if share == 1 else share * tokens + (1 - share) * rows


def shift_rows(rows: slice, at: int, count: int) -> slice:
    """Return where `rows` are after `count` rows were inserted at row `at`; an insertion inside widens the slice."""
    return slice(rows.start + count * (at <= rows.start), rows.stop + count * (at < rows.stop))


@dataclass(frozen=True)
class SequenceStates(ABC):
    """The states `x` [N, L, D] of a batch between two blocks of a tower, which a plan's operations change."""

    x: Tensor

    def apply(self, plan: Plan, layer: int) -> Self:
        """Apply the operations of `plan` at `layer`, in the order of the plan.

        Raises ValueError for tokens of a different width, which a reshape of the text tower would cut up.
        """
        sequence, width = self, self.x.shape[-1]
        for index, op in enumerate(plan.tokens):
            if op.layer == layer:
                if op.tokens.shape[-1] != width:
                    raise ValueError(f"tokens {[*op.tokens.shape]} do not fit a tower of width {width}")
                sequence = sequence._apply(index, op)
        return sequence

    def with_states(self, x: Tensor) -> Self:
        """Replace the states and keep all else."""
        return replace(self, x=x)

    @abstractmethod
    def pattern(self, layer: int) -> AttentionPattern:
        """Return which rows attend to which in block `layer`."""

    @abstractmethod
    def read_out_rows(self, index: int | None = None) -> tuple[AttentionPattern, RowMap]:
        """Return the attention pattern of the rows that are read out, and a function that selects these rows.

        index: also return the rows of this operation, after the read-out row; in a sequence without causal order.
        """

    @abstractmethod
    def _apply(self, index: int, op: TokenOp) -> Self:
        """Apply operation `index` of the plan."""


@dataclass(frozen=True)
class TokenSequence(SequenceStates):
    """A batch of sequences of equal length: images, or prompts padded to the longest of them.

    read_out: the row whose final state becomes the feature: a number, or one per item [N].
    causal: rows see only themselves and earlier rows, inserted tokens included.
    op_rows: where the tokens of each operation are now, by the operation's index in the plan.
    unmixed: the block in which only the read-out row attends to others; the rest get their own values.
    """

    read_out: int | Tensor
    causal: bool
    op_rows: Mapping[int, slice] = field(default_factory=dict)
    unmixed: int | None = None

    def pattern(self, layer: int) -> AttentionPattern:
        if layer == self.unmixed and isinstance(self.read_out, int):
            return AttentionPattern(attending=self.read_out)
        return CAUSAL if self.causal else FULL

    def own_rows(self, plan: Plan) -> Tensor:
        """Return the states of the rows that were there before the operations of `plan` inserted others."""
        # A replacement stands at rows that were there before; those of prompts are left out by what added them.
        inserted = [rows for index, rows in self.op_rows.items() if plan.tokens[index].mode != "replace"]
        count = self.x.shape[1]
        kept = {row for row in range(count) if not any(rows.start <= row < rows.stop for rows in inserted)}
        starts = sorted(row for row in kept if row - 1 not in kept)
        stops = sorted(row + 1 for row in kept if row + 1 not in kept)
        # A list of rows would be copied to the device, for which the host would wait.
        return torch.cat([self.x[:, start:stop] for start, stop in zip(starts, stops, strict=True)], dim=1)

    def read_out_rows(self, index: int | None = None) -> tuple[AttentionPattern, RowMap]:
        row = self.read_out
        if isinstance(row, int):
            if index is not None:
                also = self.op_rows[index]
                return FULL, lambda x: torch.cat([x[:, row : row + 1], x[:, also]], dim=1)
            return FULL, lambda x: x[:, row : row + 1]
        # Each prompt ends at a different row, so its single query needs a mask in place of the causal order.
        earlier = torch.arange(self.x.shape[1], device=row.device) <= row[:, None]
        mask = torch.zeros_like(earlier, dtype=torch.float32).masked_fill(~earlier, float("-inf"))
        batch = torch.arange(len(row), device=row.device)
        # [N, 1, 1, L]: the single query of an item has one mask for all heads.
        return AttentionPattern(mask=mask[:, None, None]), lambda x: x[batch, row][:, None]

    def _apply(self, index: int, op: TokenOp) -> Self:
        x = apply_op(self.x, op)
        start = self.x.shape[1] if op.mode == "append" else op.start
        grown = x.shape[1] - self.x.shape[1]
        rows = slice(start, start + op.tokens.shape[-2])
        op_rows = {other: shift_rows(each, start, grown) for other, each in self.op_rows.items()} | {index: rows}
        # A number or a tensor [N]: the comparison counts as 0 or 1 in both.
        read_out = self.read_out + grown * (self.read_out >= start)
        return replace(self, x=x, read_out=read_out, op_rows=op_rows)


def call_with(module: nn.Module, name: str, weights: Mapping[str, Tensor], *arguments: Any) -> Any:
    """Call `module`, the part `name` of a tower, with those of `weights` that belong to it in place of its own."""
    replaced = {key.removeprefix(f"{name}."): weight for key, weight in weights.items() if key.startswith(f"{name}.")}
    # Weights are replaced for this call alone, because all methods share the tower.
    return functional_call(module, replaced, arguments) if replaced else module(*arguments)


def check_plan(plan: Plan, layers: int, others: Sequence[str]) -> None:
    """Raise ValueError for a change that a tower of `layers` blocks does not have.

    others: names of the parts next to the blocks whose weights a plan may replace as well.
    """
    for name in plan.weights:
        if not name.startswith((BLOCKS, *others)):
            raise ValueError(
                f"a plan replaces {name}: it can replace weights of blocks and of {', '.join(others)} only"
            )
    for layer in [*(op.layer for op in plan.tokens), *plan.adapters, *plan.branches]:
        if not INPUT <= layer < layers:
            raise ValueError(f"a plan changes layer {layer}: the tower has blocks 0 to {layers - 1}")
