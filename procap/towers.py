"""The two frozen towers, which methods change only through a plan (`procap.plan`).

State-dict names are those of open_clip's CustomTextCLIP. With an empty plan the towers are CLIP's own encoders (Radford
et al. 2021, section 2.4).

Shapes: B images, C prompts, N either, T token ids per prompt, S token sets, L sequence, D width, E joint embedding.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from procap.attention import Block, LayerNorm, on_live_rows
from procap.errors import UserError
from procap.exact_optimizations import ExactOptimizations
from procap.geometry import Geometry
from procap.packing import Layout, PackedSequence, PromptSet
from procap.plan import INPUT, NO_CHANGE, Plan, TokenSequence, call_with, check_plan

EXACT = ExactOptimizations()
"""All shortcuts, the default of both towers."""


AnySequence = TypeVar("AnySequence", TokenSequence, PackedSequence)
"""A batch between two blocks of a tower: padded, or packed."""


class VisionOutput(NamedTuple):
    """The output of the vision tower.

    features: [B, E], not normalised.
    tokens: final states [B, L, D] of every row, before `ln_post`; None unless asked for.
    op_rows: for each operation of the plan, the rows of `tokens` where its tokens ended up.
    op_states: final states [B, P, D] of the rows of the operation `plan.read_op`, after `ln_post`; None without one.
    """

    features: Tensor
    tokens: Tensor | None = None
    op_rows: tuple[slice, ...] = ()
    op_states: Tensor | None = None


class Transformer(nn.Module):
    """The blocks of a tower."""

    def __init__(self, width: int, layers: int, heads: int, mlp_width: int, quick_gelu: bool) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(Block(width, heads, mlp_width, quick_gelu) for _ in range(layers))

    def forward(
        self, sequence: AnySequence, plan: Plan, optimizations: ExactOptimizations, blocks: range | None = None
    ) -> AnySequence:
        """Run every block, or those in `blocks`, with the changes that `plan` makes to them.

        Gives the states of every row; with `optimizations.last_rows` only of those that are read out.
        """
        last = len(self.resblocks) - 1
        for layer in blocks or range(last + 1):
            block = self.resblocks[layer]
            sequence = sequence.apply(plan, layer)
            live = sequence.live if optimizations.frozen_rows and not plan.changes_block(layer) else None
            # `live` includes the rows between two operations; if it covers most rows, splitting saves nothing.
            if live is not None and 2 * (live.stop - live.start) > sequence.x.shape[1]:
                live = None
            pattern, select = sequence.pattern(layer), None
            if layer == last and optimizations.last_rows:
                pattern, select = sequence.reading(plan.read_op)
            x = block(sequence.x, pattern, live, select, optimizations.folded, plan.adapters.get(layer))
            # Attention has mixed the rows, so from here on all of them may depend on something learned.
            sequence = sequence.with_states(x)
        return sequence


class VisionTower(nn.Module):
    """Images [B, 3, H, W] to joint features [B, E], read out at the class token."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        g, width = geometry, geometry.vision_width
        self.num_tokens = 1 + (g.image_size // g.patch_size) ** 2
        self.conv1 = nn.Conv2d(3, width, g.patch_size, g.patch_size, bias=False)
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.positional_embedding = nn.Parameter(torch.empty(self.num_tokens, width))
        self.ln_pre = LayerNorm(width)
        self.transformer = Transformer(width, g.vision_layers, g.vision_heads, g.vision_mlp, g.quick_gelu)
        self.ln_post = LayerNorm(width)
        self.proj = nn.Parameter(torch.empty(width, g.embed_dim))

    def forward(
        self,
        images: Tensor,
        plan: Plan = NO_CHANGE,
        optimizations: ExactOptimizations = EXACT,
        keep_states: bool = False,
    ) -> VisionOutput:
        """Encode `images` with the tokens of `plan`; operations at INPUT act after the positional embedding.

        keep_states: give the final states of every row as well, which costs the whole last block.
        """
        check_plan(plan, len(self.transformer.resblocks), ("ln_post", "proj"))
        if keep_states:
            optimizations = replace(optimizations, last_rows=False)
        patches = self.embed(images, optimizations.folded)
        cls = self.class_embedding.to(patches.dtype).expand(len(patches), 1, -1)
        x = torch.cat([cls, patches], dim=1) + self.positional_embedding
        sequence = TokenSequence(x, read_out=0, causal=False).apply(plan, INPUT)
        live = sequence.live if optimizations.frozen_rows else None
        sequence = sequence.with_states(on_live_rows(self.ln_pre, sequence.x, live), live)
        sequence = call_with(self.transformer, "transformer", plan.weights, sequence, plan, optimizations)
        cls = sequence.x[:, 0] if optimizations.last_rows else sequence.x[:, sequence.read_out]
        cls, op_states = call_with(self.ln_post, "ln_post", plan.weights, cls), None
        features = project(cls, plan.weights.get("proj", self.proj))
        if plan.read_op is not None:
            rows = slice(1, None) if optimizations.last_rows else sequence.op_rows[plan.read_op]
            op_states = call_with(self.ln_post, "ln_post", plan.weights, sequence.x[:, rows])
        if keep_states:
            op_rows = tuple(sequence.op_rows[index] for index in range(len(plan.tokens)))
            return VisionOutput(features, sequence.x, op_rows, op_states)
        return VisionOutput(features, op_states=op_states)

    def embed(self, images: Tensor, folded: bool = True) -> Tensor:
        """Embed the patches of images [B, 3, H, W] as rows [B, L, D]: a convolution whose windows do not overlap.

        folded: compute it as one matrix product, which is faster and gives the rows without a transposition.
        """
        weight, size = self.conv1.weight, self.conv1.kernel_size[0]
        images = images.to(weight.dtype)
        if not folded:
            return self.conv1(images).flatten(2).transpose(1, 2)
        high, wide = (length // size * size for length in images.shape[-2:])
        cells = images[..., :high, :wide].unflatten(3, (-1, size)).unflatten(2, (-1, size))
        return F.linear(cells.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2), weight.flatten(1))


class TextTower(nn.Module):
    """Token ids [C, T] to joint features [C, E], read out at the end-of-text token, which has the largest id."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        g, width = geometry, geometry.text_width
        # nn.Embedding's constructor would draw random weights, which takes seconds on the meta device.
        self.token_embedding = nn.Embedding.from_pretrained(torch.empty(g.vocab_size, width))
        self.positional_embedding = nn.Parameter(torch.empty(g.context_length, width))
        self.transformer = Transformer(width, g.text_layers, g.text_heads, g.text_mlp, g.quick_gelu)
        self.ln_final = LayerNorm(width)
        self.text_projection = nn.Parameter(torch.empty(width, g.embed_dim))

    def forward(
        self, prompts: Tensor | PromptSet, plan: Plan = NO_CHANGE, optimizations: ExactOptimizations = EXACT
    ) -> Tensor:
        """Encode `prompts` with the tokens of `plan`; operations at INPUT act before the positional embedding.

        prompts: token ids, or a `PromptSet` of them, which is laid out once and not at every call; on a GPU a tensor
            of ids makes the host wait for the device.
        Returns features [C, E], not normalised, or [S, C, E] under S token sets.
        Raises UserError when a prompt with its inserted tokens is longer than the context.
        """
        check_plan(plan, len(self.transformer.resblocks), ("ln_final", "text_projection"))
        if plan.read_op is not None:
            raise ValueError("only the image tower reads out the rows of an operation")
        if not isinstance(prompts, PromptSet):
            prompts = PromptSet(prompts)
        return self._in_chunks(prompts, plan, optimizations)

    def count_rows(self, prompts: PromptSet, plan: Plan, optimizations: ExactOptimizations = EXACT) -> int:
        """Count the rows that blocks compute for one token set, without regard to chunks."""
        layout = self._layout(prompts, plan, optimizations)
        if layout is not None:
            return layout.num_rows
        return len(prompts) * (prompts.columns if optimizations.trim or optimizations.pack else prompts.ids.shape[1])

    def _layout(self, prompts: PromptSet, plan: Plan, optimizations: ExactOptimizations) -> Layout | None:
        if not (optimizations.pack or optimizations.prefix):
            return None
        context, layers = self.positional_embedding.shape[0], len(self.transformer.resblocks)
        return prompts.layout(plan, layers, context, optimizations.trim, optimizations.pack, optimizations.prefix)

    def _in_chunks(self, prompts: PromptSet, plan: Plan, optimizations: ExactOptimizations) -> Tensor:
        """Encode in chunks of at most `chunk_rows` rows: [C, E], or [S, C, E] if the plan holds token sets."""
        sets = plan.num_sets
        limit, rows = optimizations.chunk_rows, self.count_rows(prompts, plan, optimizations)
        if limit is None or rows * max(sets, 1) <= limit:
            return self._encode(prompts, plan, optimizations)
        # Prompts are divided first; if a part has fewer rows than the limit, several token sets share a chunk.
        parts = min(len(prompts), -(-rows // limit))
        cuts = [len(prompts) * part // parts for part in range(parts + 1)]
        sets_at_once = max(1, limit * parts // rows)
        recompute = torch.is_grad_enabled() and plan.learns

        def encode(first: int, start: int, stop: int) -> Tensor:
            chosen = slice(first, first + sets_at_once)
            some = plan.with_tokens(_part_of(op.tokens, chosen, slice(start, stop)) for op in plan.tokens)
            return self._encode(prompts.part(start, stop), some, optimizations)

        features = []
        for first in range(0, max(sets, 1), sets_at_once):
            chunks = [
                checkpoint(encode, first, *cut, use_reentrant=False, preserve_rng_state=False)
                if recompute
                else encode(first, *cut)
                for cut in pairwise(cuts)
            ]
            features.append(torch.cat(chunks, dim=-2))
        return torch.cat(features) if sets else features[0]

    def _encode(self, prompts: PromptSet, plan: Plan, optimizations: ExactOptimizations) -> Tensor:
        sets = plan.num_sets
        layout = self._layout(prompts, plan, optimizations)
        if layout is None:
            if not sets:
                return self._read(self._padded(prompts, plan, optimizations), plan)
            each = [self._padded(prompts, plan.for_set(number), optimizations) for number in range(sets)]
            return torch.stack([self._read(sequence, plan) for sequence in each])
        layers = len(self.transformer.resblocks)
        # The last block is never constant: with `last_rows` it gives other rows than it gets.
        first = min(plan.first_change(layers), layers - 1)
        is_training = torch.is_grad_enabled() and plan.learns and not self.positional_embedding.requires_grad
        if optimizations.constant_states and first > 0 and is_training:
            x = self._constant_states(prompts, layout, first, optimizations).expand(max(sets, 1), -1, -1)
            sequence = PackedSequence(x, layout)
        else:
            sequence, first = self._embed(layout, plan), 0
        blocks = range(first, layers)
        x = call_with(self.transformer, "transformer", plan.weights, sequence, plan, optimizations, blocks).x
        ends = x if optimizations.last_rows else x.index_select(1, layout.ends)
        features = self._project(ends.index_select(1, layout.slots), plan)
        return features if sets else features[0]

    def _embed(self, layout: Layout, plan: Plan) -> PackedSequence:
        """Make the input [S, L, D] of the first block."""
        x = self.token_embedding(layout.ids).expand(max(plan.num_sets, 1), -1, -1)
        sequence = PackedSequence(x, layout).apply(plan, INPUT)
        return sequence.with_states(sequence.x + self.positional_embedding[layout.positions], sequence.live)

    def _constant_states(
        self, prompts: PromptSet, layout: Layout, first: int, optimizations: ExactOptimizations
    ) -> Tensor:
        """Return the input [1, L, D] of block `first` under a plan without changes before it, computed once."""
        device = layout.ids.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

        def compute() -> Tensor:
            with torch.no_grad():
                return self.transformer(self._embed(layout, NO_CHANGE), NO_CHANGE, optimizations, range(first)).x

        return prompts.constant((self, id(layout), first, optimizations, dtype), compute)

    def _padded(self, prompts: PromptSet, plan: Plan, optimizations: ExactOptimizations) -> TokenSequence:
        ids = prompts.ids[:, : prompts.columns] if optimizations.trim or optimizations.pack else prompts.ids
        sequence = TokenSequence(self.token_embedding(ids), read_out=ids.argmax(dim=-1), causal=True).apply(plan, INPUT)
        x = self._fit(sequence) + self.positional_embedding[: sequence.x.shape[1]]
        sequence = sequence.with_states(x, sequence.live)
        return call_with(self.transformer, "transformer", plan.weights, sequence, plan, optimizations)

    def _project(self, ends: Tensor, plan: Plan) -> Tensor:
        ends = call_with(self.ln_final, "ln_final", plan.weights, ends)
        return project(ends, plan.weights.get("text_projection", self.text_projection))

    def _read(self, sequence: TokenSequence, plan: Plan) -> Tensor:
        if sequence.x.shape[1] == 1:
            ends = sequence.x[:, 0]
        else:
            ends = sequence.x[torch.arange(len(sequence.x), device=sequence.x.device), sequence.read_out]
        return self._project(ends, plan)

    def _fit(self, sequence: TokenSequence) -> Tensor:
        context = self.positional_embedding.shape[0]
        if sequence.x.shape[1] <= context:
            return sequence.x
        # Insertion has pushed rows beyond the last position: padding is cut, words and inserted tokens must not be.
        needed = max(
            [int(torch.as_tensor(sequence.read_out).max()) + 1, *(rows.stop for rows in sequence.op_rows.values())]
        )
        if needed > context:
            raise UserError(f"a prompt needs {needed} tokens, CLIP reads {context}: shorten names or learned prompts")
        return sequence.x[:, :context]


def _part_of(tokens: Tensor, sets: slice, prompts: slice) -> Tensor:
    """Select an operation's tokens for some of the sets and prompts."""
    return tokens[sets] if tokens.dim() == 4 else tokens[prompts] if tokens.dim() == 3 else tokens


def project(states: Tensor, projection: Tensor) -> Tensor:
    """Project read-out states to joint features, outside autocast: bfloat16 rounds logits near 25 to steps of 0.125."""
    with torch.autocast(states.device.type, enabled=False):
        return states.to(projection.dtype) @ projection
