"""Pack class prompts side by side without padding, and compute the rows that they share once.

A tower's text batch becomes one sequence [S, L, D]: first the prefix (the leading rows that are equal in all prompts
under a plan), then the remaining rows of every prompt, with whole prompts dealt to G groups of nearly equal size.
Linear layers run on these rows only; attention is one call over the groups with a mask that separates prompts.

Five prompts 0 to 4 with a prefix of three rows, in two groups of seven rows (a dot is padding):

    row        0 1 2 | 3 4 5 6 7 8 9 | 10 11 12 13 14 15 16
    prompt     prefix| 0 0 0 0 3 3 . |  1  1  1  2  2  4  4
    position   0 1 2 | 3 4 5 6 3 4 . |  3  4  5  3  4  3  4

A row attends to the prefix and to the rows of its own prompt up to itself. Prompt 3 has offset 4, its first row behind
the prefix, and 2 rows. Operations that insert tokens into the prefix make it longer and shift everything behind it.

Shapes: C prompts, T token ids per prompt, S token sets, L packed rows, G groups, Q prompts in a group, D width.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from procap.attention import AttentionPattern, RowMap
from procap.plan import INPUT, Plan, SequenceStates, TokenOp, blend

GROUP_ROWS = 64
"""Approximate rows of a group: more waste work on masked scores, fewer leave tiles of a fused kernel half empty."""


@dataclass(frozen=True)
class Placement:
    """Where the tokens of one operation go: prefix rows from `start`, then rows `at` of single prompts.

    shared: how many of the operation's tokens, counted from the first, go into the prefix.
    at, source: row `at[m]` of the sequence receives token `source[m]` of the operation, whose tokens are flattened to
        [C x P]; both [M].
    """

    start: int
    shared: int
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
        placement = self.layout.placements[index]
        x, sets, width = self.x, len(self.x), self.x.shape[-1]
        tokens = op.tokens.to(x.dtype)
        # [S, P, D] for token sets, else [1, P, D], or [1, C P, D] with one set per prompt.
        tokens = tokens.squeeze(1) if tokens.dim() == 4 else tokens.reshape(1, -1, width)
        shared = tokens[:, : placement.shared].expand(sets, -1, -1)
        if placement.insert:
            x = torch.cat([x[:, : placement.start], shared, x[:, placement.start :]], dim=1)
        elif placement.shared:
            end = placement.start + placement.shared
            shared = blend(shared, x[:, placement.start : end], op.share)
            x = x.slice_scatter(shared, 1, placement.start, end)
        if placement.at is not None and placement.source is not None:
            # [S, M, D], for the M rows of single prompts.
            single = tokens.index_select(1, placement.source).expand(sets, -1, -1)
            if op.share != 1:
                single = blend(single, x.index_select(1, placement.at), op.share)
            x = x.index_copy(1, placement.at, single)
        return self.with_states(x)


class PromptSet:
    """Tokenized prompts, ids [C, T], and the facts that their layout depends on, copied from the device once.

    lengths: tokens of each prompt, up to and including the end-of-text token.
    columns: how many leading columns an operation may address. A part has as many as the set that it was taken from,
        where they end with the last end-of-text token.
    same: whether a column holds the same id in all prompts.
    """

    def __init__(self, ids: Tensor, columns: int | None = None) -> None:
        host = ids.detach().cpu()
        self.ids = ids
        # The end token has the largest id of CLIP's vocabulary.
        self.lengths: tuple[int, ...] = tuple((host.argmax(dim=-1) + 1).tolist())
        self.columns = columns or max(self.lengths)
        self.same: tuple[bool, ...] = tuple((host == host[:1]).all(dim=0).tolist())
        self._subsets: dict[tuple[int, int], PromptSet] = {}
        self._layouts: dict[object, Layout | None] = {}
        self._constants: dict[object, Tensor] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    def subset(self, start: int, stop: int) -> PromptSet:
        """Return the prompts start..stop-1; a subset is made once and reused."""
        if (start, stop) == (0, len(self)):
            return self
        if (start, stop) not in self._subsets:
            with torch.inference_mode(False):
                self._subsets[start, stop] = PromptSet(self.ids[start:stop], self.columns)
        return self._subsets[start, stop]

    def layout(self, plan: Plan, layers: int, context: int) -> Layout | None:
        """Return how the prompts are packed under `plan`, or None for a plan that packing does not cover."""
        if plan.branches:
            # The rows that prompts share differ under dropout.
            return None
        # The form of the operations alone, no values: a training step with new tokens reuses the layout.
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
            self._constants[key] = compute()
        return self._constants[key]


@dataclass(frozen=True)
class Rows:
    """Which rows behind the prefix belong to which prompt.

    groups: the prompts of each group. size: rows of a group, padding included.
    counts, offsets: rows of each prompt [C] behind the prefix, and the number of the first of them, counted from there.
    """

    groups: list[list[int]]
    size: int
    counts: list[int]
    offsets: list[int]

    @classmethod
    def deal(cls, counts: list[int]) -> Rows:
        """Deal prompts of `counts` rows to groups."""
        # Attention costs about L x GROUP_ROWS scores instead of L x L.
        groups = fill_groups(counts, max(1, -(-sum(counts) // GROUP_ROWS)))
        size = max(sum(counts[prompt] for prompt in group) for group in groups)
        offsets = [0] * len(counts)
        for number, group in enumerate(groups):
            offset = number * size
            for prompt in group:
                offsets[prompt], offset = offset, offset + counts[prompt]
        return cls(groups, size, counts, offsets)

    @property
    def total(self) -> int:
        return len(self.groups) * self.size


def _lay_out(prompts: PromptSet, plan: Plan, layers: int, context: int) -> Layout | None:
    """Lay out prompts for a plan over `layers` blocks; None for a plan that packing does not cover."""
    # The picture at the top of this file shows a layout: the prefix, then groups of whole prompts.
    added = sum(op.tokens.shape[-2] for op in plan.tokens if op.mode == "insert" and op.layer == INPUT)
    # The sort is stable, so operations of one layer keep the order of the plan.
    shared = _shared_columns(prompts, sorted(plan.tokens, key=lambda op: op.layer))
    # A prompt that may be too long is left to `TextTower._fit`, which raises UserError.
    if shared is None or max(prompts.lengths) + added > context:
        return None
    # Each prompt keeps the rows behind the shared ones, up to its end token: later rows are read by no other row.
    rows, device = Rows.deal([length - shared for length in prompts.lengths]), prompts.ids.device
    placed = _place_operations(plan, shared, layers, rows, device)
    if placed is None:
        return None
    placements, prefixes = placed
    owners, is_grouped = _owners(rows), len(rows.groups) > 1
    masks = {prefix: _mask(owners, prefix) for prefix in set(prefixes.values())}

    def pattern(mask: Tensor, prefix: int, **more: bool) -> AttentionPattern:
        prefix = prefix if is_grouped else 0
        return AttentionPattern(mask=mask.to(device), groups=len(rows.groups), prefix=prefix, **more)

    ends, end_index = _end_rows(rows)
    # In the last block only the end rows are queries, so its mask has their rows of the whole mask.
    last = prefixes[layers - 1] if layers else prefixes[INPUT]
    if is_grouped:
        # [G, 1, Q, 1], counted within each group, as the rows of its mask [G, 1, R, prefix + R] are.
        within = (ends - torch.arange(len(rows.groups))[:, None] * rows.size)[:, None, :, None]
        ends_mask = masks[last].gather(2, within.expand(-1, 1, -1, last + rows.size))
    else:
        ends_mask = masks[last][ends[0] + last]
    ids, positions = _ids_and_positions(prompts, rows, shared, prefixes[INPUT])
    return Layout(
        ids=ids.to(device),
        positions=positions.to(device),
        placements=placements,
        patterns=tuple(pattern(masks[prefixes[layer]], prefixes[layer]) for layer in range(layers)),
        ends_pattern=pattern(ends_mask, last, prefix_queries=False),
        ends=(ends + last).flatten().to(device),
        end_index=end_index.to(device),
        num_rows=last + rows.total,
    )


def _place_operations(
    plan: Plan, shared: int, layers: int, rows: Rows, device: torch.device
) -> tuple[dict[int, Placement], dict[int, int]] | None:
    """Place every operation; returns the placements and the rows of the prefix at each layer, None if one has none."""
    prefix, placements, prefixes = shared, dict[int, Placement](), dict[int, int]()
    for layer in range(INPUT, layers):
        for index, op in enumerate(plan.tokens):
            if op.layer != layer:
                continue
            # An insertion behind the prefix would move rows of single prompts, whose offsets stay in all layers.
            if op.mode == "insert" and (op.start > prefix or op.tokens.dim() == 3):
                return None
            placements[index] = _place(op, prefix, rows, device)
            prefix += op.tokens.shape[-2] if op.mode == "insert" else 0
        prefixes[layer] = prefix
    return placements, prefixes


def _end_rows(rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the end rows [G, Q], counted behind the prefix, and each prompt's index [C] among them when flattened.

    Groups with fewer prompts are padded with the end row of their first prompt.
    """
    most = max(map(len, rows.groups))
    last = [offset + count - 1 for offset, count in zip(rows.offsets, rows.counts, strict=True)]
    padded = [group + group[:1] * (most - len(group)) for group in rows.groups]
    end_index = torch.zeros(len(rows.counts), dtype=torch.long)
    for number, group in enumerate(rows.groups):
        end_index[group] = number * most + torch.arange(len(group))
    return torch.tensor([[last[prompt] for prompt in group] for group in padded]), end_index


def _ids_and_positions(prompts: PromptSet, rows: Rows, shared: int, prefix: int) -> tuple[Tensor, Tensor]:
    """Return the token ids before the operations on the input and the position numbers after them, for all rows."""
    ids = torch.zeros(shared + rows.total, dtype=torch.long)
    positions = torch.zeros(prefix + rows.total, dtype=torch.long)
    positions[:prefix] = torch.arange(prefix)
    host = prompts.ids.detach().cpu()
    ids[:shared] = host[0, :shared]
    for prompt, (offset, count) in enumerate(zip(rows.offsets, rows.counts, strict=True)):
        ids[shared + offset :][:count] = host[prompt, shared : shared + count]
        positions[prefix + offset :][:count] = torch.arange(prefix, prefix + count)
    return ids, positions


def _shared_columns(prompts: PromptSet, ordered: Sequence[TokenOp]) -> int | None:
    """Count the leading columns that are equal in all prompts and blocks; None: packing does not cover the plan."""
    same = list(prompts.same)
    # The column that each row of the sequence comes from, None for inserted ones.
    rows: list[int | None] = list(range(prompts.columns))
    for op in ordered:
        count, varies = op.tokens.shape[-2], op.tokens.dim() == 3
        end = op.start + count * (op.mode == "replace")
        # Appended tokens would follow the padding, which a packed sequence does not have.
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
                # Equal tokens replace whatever words the prompts had there. In a later block they would come too late:
                # the blocks below it have made the rows different.
                same[column] = True
    shared = next((column for column, equal in enumerate(same[: prompts.columns]) if not equal), prompts.columns)
    # The end token of the shortest prompt is read out for that prompt alone, so it cannot be shared.
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


def _place(op: TokenOp, prefix: int, rows: Rows, device: torch.device) -> Placement:
    """Place the tokens of one operation in a sequence with `prefix` rows before those of single prompts."""
    count = op.tokens.shape[-2]
    if op.mode == "insert":
        return Placement(op.start, count, insert=True)
    end = op.start + count
    shared = max(0, min(end, prefix) - op.start)
    at, source = [], []
    for position in range(op.start + shared, end):
        for prompt, (offset, length) in enumerate(zip(rows.offsets, rows.counts, strict=True)):
            # Rows behind the end token of a prompt are not stored, because nothing attends to them.
            if position - prefix < length:
                # Row prefix + offset + (position - prefix) of the sequence.
                at.append(offset + position)
                source.append((prompt * count if op.tokens.dim() == 3 else 0) + position - op.start)
    if not at:
        return Placement(op.start, shared)
    at_rows, from_tokens = (torch.tensor(numbers, device=device) for numbers in (at, source))
    return Placement(op.start, shared, at=at_rows, source=from_tokens)


def _owners(rows: Rows) -> Tensor:
    """Return the prompt that each of the R rows of each group belongs to [G, R]; -1 for padding."""
    owners = torch.full((len(rows.groups), rows.size), -1)
    for number, group in enumerate(rows.groups):
        belongs = torch.tensor(group).repeat_interleave(torch.tensor([rows.counts[prompt] for prompt in group]))
        owners[number, : len(belongs)] = belongs
    return owners


def _mask(owners: Tensor, prefix: int) -> Tensor:
    """Return the mask of a pattern with `prefix` rows before the groups: zero to attend, minus infinity not to."""
    # Rows of one prompt follow each other, so within a prompt the lower triangle is its causal order.
    # Padding (-1) attends to itself, because a row that attends to nothing would be NaN.
    allowed = (owners[:, :, None] == owners[:, None, :]).tril()
    # All rows see the whole prefix, which precedes them: [G, R, R] becomes [G, R, prefix + R].
    allowed = torch.nn.functional.pad(allowed, (prefix, 0), value=True)
    if len(owners) == 1:
        among_prefix = torch.ones(prefix, allowed.shape[-1], dtype=torch.bool).tril()
        return torch.where(torch.cat([among_prefix, allowed[0]]), 0.0, -torch.inf)
    return torch.where(allowed, 0.0, -torch.inf)[:, None]
