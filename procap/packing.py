"""Pack class prompts side by side without padding, and compute the rows that they share once.

A tower's text batch becomes one sequence [S, L, D]: first the prefix (the leading rows that are equal in all prompts
under a plan), then the remaining rows of every prompt, with whole prompts dealt to G groups of nearly equal size.
Linear layers run on these rows only; attention is one call over the groups with a mask that separates prompts.

Shapes: C prompts, T token ids per prompt, S token sets, L packed rows, G groups, Q prompts in a group, D width.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from procap.attention import AttentionPattern, RowMap
from procap.plan import INPUT, Plan, SequenceStates, TokenOp, live_rows

GROUP_ROWS = 64
"""Approximate rows of a group: more waste work on masked scores, fewer leave tiles of a fused kernel half empty."""


@dataclass(frozen=True)
class Placement:
    """Where the tokens of one operation go: prefix rows from `start`, then rows `at` of single prompts.

    shared: how many of the operation's tokens, counted from the first, go into the prefix.
    at, source: row `at[m]` of the sequence receives token `source[m]` of the operation, whose tokens are flattened to
        [C x P]; both [M].
    rows: the smallest slice of the sequence that holds all these rows.
    """

    start: int
    shared: int
    rows: slice
    insert: bool = False
    at: Tensor | None = None
    source: Tensor | None = None


@dataclass(frozen=True)
class Layout:
    """Everything about a packed batch except its states; fixed for a set of prompts and the shapes of a plan.

    ids, positions: [L] token ids before the operations on the input, and position numbers after them.
    placements: by the operation's index in the plan.
    patterns: attention of every block. ends_pattern: of the last block if its only queries are the end rows.
    ends: [G x Q] rows of the end-of-text tokens, which are read out. end_index: [C] each prompt's index in `ends`.
    num_rows: L at the last block.
    """

    ids: Tensor
    positions: Tensor
    placements: dict[int, Placement]
    patterns: tuple[AttentionPattern, ...]
    ends_pattern: AttentionPattern
    ends: Tensor
    end_index: Tensor
    num_rows: int


@dataclass(frozen=True)
class PackedSequence(SequenceStates):
    """A packed batch of the text tower: states [S, L, D] and their layout; the end rows [G x Q] are read out."""

    layout: Layout

    def pattern(self, layer: int) -> AttentionPattern:
        return self.layout.patterns[layer]

    def read_out_rows(self, index: int | None = None) -> tuple[AttentionPattern, RowMap]:
        return self.layout.ends_pattern, lambda x: x.index_select(1, self.layout.ends)

    def _apply(self, index: int, op: TokenOp) -> Self:
        place = self.layout.placements[index]
        x, sets, width = self.x, len(self.x), self.x.shape[-1]
        tokens = op.tokens.to(x.dtype)
        tokens = tokens.squeeze(1) if tokens.dim() == 4 else tokens.reshape(1, -1, width)
        shared = tokens[:, : place.shared].expand(sets, -1, -1)
        if place.insert:
            x = torch.cat([x[:, : place.start], shared, x[:, place.start :]], dim=1)
        elif place.shared:
            x = x.slice_scatter(shared, 1, place.start, place.start + place.shared)
        if place.at is not None and place.source is not None:
            x = x.index_copy(1, place.at, tokens.index_select(1, place.source).expand(sets, -1, -1))
        grown = x.shape[1] - self.x.shape[1]
        return replace(self, x=x, live=live_rows(self.x, self.live, op, place.rows, grown))


class PromptSet:
    """Tokenized prompts, ids [C, T], and the facts that their layout depends on, copied from the device once.

    lengths: tokens of each prompt, up to and including the end-of-text token.
    columns: rows that an operation may address: up to the last end-of-text token of the set that a part belongs to.
    same: whether a column holds the same id in all prompts.
    """

    def __init__(self, ids: Tensor, columns: int | None = None) -> None:
        host = ids.detach().cpu()
        self.ids = ids
        self.lengths: tuple[int, ...] = tuple((host.argmax(dim=-1) + 1).tolist())
        self.columns = columns or max(self.lengths)
        self.same: tuple[bool, ...] = tuple((host == host[:1]).all(dim=0).tolist())
        self._parts: dict[tuple[int, int], PromptSet] = {}
        self._layouts: dict[object, Layout | None] = {}
        self._constants: dict[object, Tensor] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    def part(self, start: int, stop: int) -> PromptSet:
        """Return the prompts start..stop-1; a part is made once and reused."""
        if (start, stop) == (0, len(self)):
            return self
        if (start, stop) not in self._parts:
            with torch.inference_mode(False):
                self._parts[start, stop] = PromptSet(self.ids[start:stop], self.columns)
        return self._parts[start, stop]

    def layout(self, plan: Plan, layers: int, context: int) -> Layout | None:
        """Return how the prompts are packed under `plan`, or None for a plan that packing does not cover."""
        form = tuple((op.layer, op.mode, op.start, op.tokens.dim(), op.tokens.shape[-2]) for op in plan.tokens)
        key = (form, layers, context)
        if key not in self._layouts:
            # The layout is reused in training, where tensors created in inference mode cannot be used.
            with torch.inference_mode(False):
                self._layouts[key] = _lay_out(self, plan, layers, context)
        return self._layouts[key]

    def constant(self, key: object, compute: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that depends on the prompts and `key` alone; it is computed at the first use."""
        if key not in self._constants:
            tensor = compute()
            if type(tensor) is not Tensor:
                # A fake tensor, on which operations are counted, is of no use outside the counting.
                return tensor
            self._constants[key] = tensor
        return self._constants[key]


def _lay_out(prompts: PromptSet, plan: Plan, layers: int, context: int) -> Layout | None:
    ordered = sorted(enumerate(plan.tokens), key=lambda item: item[1].layer)
    added = sum(op.tokens.shape[-2] for op in plan.tokens if op.mode == "insert" and op.layer == INPUT)
    shared = _shared_columns(prompts, [op for _, op in ordered])
    if shared is None or max(prompts.lengths) + added > context:
        return None
    own = [length - shared for length in prompts.lengths]
    groups = fill_groups(own, max(1, -(-sum(own) // GROUP_ROWS)))
    size = max(sum(own[c] for c in group) for group in groups)
    first = [0] * len(own)
    for number, group in enumerate(groups):
        at = number * size
        for c in group:
            first[c], at = at, at + own[c]

    # `ahead` counts the prefix rows, which insertions make longer; `aheads` holds it for every layer.
    device, ahead = prompts.ids.device, shared
    placements: dict[int, Placement] = {}
    patterns = []
    aheads = {}
    for layer in range(INPUT, layers):
        for index, op in ordered:
            if op.layer == layer:
                if op.mode == "insert" and (op.start > ahead or op.tokens.dim() == 3):
                    return None
                placements[index] = _place(op, ahead, first, own, device)
                ahead += op.tokens.shape[-2] if op.mode == "insert" else 0
        aheads[layer] = ahead
    owners = _owners(groups, own, size)
    masks = {p: _mask(owners, p) for p in set(aheads.values())}
    many = len(groups) > 1
    for layer in range(layers):
        p = aheads[layer]
        patterns.append(AttentionPattern(mask=masks[p].to(device), groups=len(groups), prefix=p if many else 0))

    # The end row of every prompt. Groups with fewer prompts are padded with the end row of their first prompt.
    most = max(map(len, groups))
    end_of = [start + count - 1 for start, count in zip(first, own, strict=True)]
    ends = torch.tensor([[end_of[c] for c in group + group[:1] * (most - len(group))] for group in groups])
    end_index = torch.zeros(len(own), dtype=torch.long)
    for number, group in enumerate(groups):
        end_index[group] = number * most + torch.arange(len(group))
    if many:
        within = (ends - torch.arange(len(groups))[:, None] * size)[:, None, :, None]
        ends_mask = masks[ahead].gather(2, within.expand(-1, 1, -1, ahead + size))
    else:
        ends_mask = masks[ahead][ends[0] + ahead]
    ids = torch.zeros(shared + len(groups) * size, dtype=torch.long)
    positions = torch.zeros(aheads[INPUT] + len(groups) * size, dtype=torch.long)
    positions[: aheads[INPUT]] = torch.arange(aheads[INPUT])
    host = prompts.ids.detach().cpu()
    ids[:shared] = host[0, :shared]
    for c, (start, count) in enumerate(zip(first, own, strict=True)):
        ids[shared + start : shared + start + count] = host[c, shared : shared + count]
        positions[aheads[INPUT] + start :][:count] = torch.arange(aheads[INPUT], aheads[INPUT] + count)
    return Layout(
        ids.to(device),
        positions.to(device),
        placements,
        tuple(patterns),
        AttentionPattern(
            mask=ends_mask.to(device), groups=len(groups), prefix=ahead if many else 0, prefix_queries=False
        ),
        (ends + ahead).flatten().to(device),
        end_index.to(device),
        ahead + len(groups) * size,
    )


def _shared_columns(prompts: PromptSet, ordered: Sequence[TokenOp]) -> int | None:
    """Count the leading columns that are equal in all prompts and blocks; None: packing does not cover the plan."""
    same = list(prompts.same)
    # The column that each row of the sequence comes from, None for inserted ones.
    rows: list[int | None] = list(range(prompts.columns))
    for op in ordered:
        count, varies = op.tokens.shape[-2], op.tokens.dim() == 3
        end = op.start + count * (op.mode == "replace")
        if op.mode == "append" or not 0 <= op.start <= end <= len(rows):
            return None
        if op.mode == "insert":
            rows[op.start : op.start] = [None] * count
            continue
        for column in rows[op.start : end]:
            if column is None:
                if varies:
                    return None
            elif varies:
                same[column] = False
            elif op.layer == INPUT:
                same[column] = True
    shared = next((column for column, equal in enumerate(same[: prompts.columns]) if not equal), prompts.columns)
    return min(shared, min(prompts.lengths) - 1)


def fill_groups(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Deal the indices of `sizes` to at most `count` groups of similar total: the largest first, into the emptiest."""
    heap = [(0, number) for number in range(count)]
    groups: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, number = heapq.heappop(heap)
        groups[number].append(index)
        heapq.heappush(heap, (load + sizes[index], number))
    return [group for group in groups if group]


def _place(op: TokenOp, ahead: int, first: Sequence[int], own: Sequence[int], device: torch.device) -> Placement:
    count = op.tokens.shape[-2]
    if op.mode == "insert":
        return Placement(op.start, count, slice(op.start, op.start + count), insert=True)
    end = op.start + count
    shared = max(0, min(end, ahead) - op.start)
    at, source = [], []
    for row in range(op.start + shared, end):
        for c, (start, length) in enumerate(zip(first, own, strict=True)):
            # A prompt that ends before this row does not have it: rows after its end token would never be attended to.
            if row - ahead < length:
                at.append(start + row)
                source.append((c * count if op.tokens.dim() == 3 else 0) + row - op.start)
    lowest = op.start if shared else min(at, default=op.start)
    placement = Placement(op.start, shared, slice(lowest, max(at, default=op.start + shared - 1) + 1))
    if not at:
        return placement
    return replace(placement, at=torch.tensor(at, device=device), source=torch.tensor(source, device=device))


def _owners(groups: Sequence[Sequence[int]], own: Sequence[int], size: int) -> Tensor:
    """Return the prompt that each of the R rows of each group belongs to [G, R]; -1: none."""
    owners = torch.full((len(groups), size), -1)
    for number, group in enumerate(groups):
        belongs = torch.tensor(group).repeat_interleave(torch.tensor([own[c] for c in group]))
        owners[number, : len(belongs)] = belongs
    return owners


def _mask(owners: Tensor, ahead: int) -> Tensor:
    """Return the mask of a pattern: zero where a row attends, minus infinity elsewhere."""
    allowed = (owners[:, :, None] == owners[:, None, :]).tril()
    allowed = torch.nn.functional.pad(allowed, (ahead, 0), value=True)
    if len(owners) == 1:
        prefix = torch.ones(ahead, allowed.shape[-1], dtype=torch.bool).tril()
        return torch.where(torch.cat([prefix, allowed[0]]), 0.0, -torch.inf)
    return torch.where(allowed, 0.0, -torch.inf)[:, None]
