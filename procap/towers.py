"""The two frozen towers, which methods change only through a plan (`procap.plan`).

State-dict names are those of open_clip's CustomTextCLIP. With an empty plan the towers are CLIP's own encoders (Radford
et al. 2021, section 2.4).

Both take exact shortcuts, none of which changes results beyond rounding:
- Text prompts are packed side by side without padding, and the rows that all of them share are computed once
  (`procap.prompt_packing`). Under a plan that packing does not cover they are padded to the longest of them.
- Text is encoded in chunks; training recomputes a chunk in the backward pass instead of keeping its activations.
- In training, the packed text states that enter the first block that a plan changes are computed once for each set of
  prompts; they do not depend on anything learned.
- The last block computes only the rows that are read out, which attend to all rows.
- QuickGELU's scalings are folded into the adjacent matrix products.
`optimized=False` takes none of them, as public code does: every column of every prompt and every row of every block.

Shapes: B images, C prompts, N either, T token ids per prompt, S token sets, L sequence, D width, E joint embedding.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from procap.attention import Block, LayerNorm
from procap.errors import UserError
from procap.geometry import Geometry
from procap.plan import INPUT, NO_CHANGE, Plan, SequenceStates, TokenSequence, call_with, check_plan
from procap.prompt_packing import Layout, PackedSequence, PromptSet

CHUNK_ROWS = 8192
"""Most text rows in the tower at a time. With ViT-B/16 in float32 a row keeps 287 kB for the backward pass (12 widths
of 512 in 12 layers), so these are 2.4 GB. ImageNet's 1,000 names fill about 5,000 rows, and a step on them with 32
images stays below 8 GB in total, 6 GB with 2,048 rows."""

AnySequence = TypeVar("AnySequence", bound=SequenceStates)
"""The batch of a tower: a `TokenSequence` or a `PackedSequence`."""


class Transformer(nn.Module):
    """The blocks of a tower."""

    def __init__(self, width: int, layers: int, heads: int, mlp_width: int, quick_gelu: bool) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(Block(width, heads, mlp_width, quick_gelu) for _ in range(layers))

    def forward(
        self, sequence: AnySequence, plan: Plan, optimized: bool, every_row: bool, blocks: range | None = None
    ) -> AnySequence:
        """Run every block, or those in `blocks`, with the changes that `plan` makes to them.

        every_row: give the states of every row, not only of those that are read out.
        """
        last = len(self.resblocks) - 1
        for layer in range(last + 1) if blocks is None else blocks:
            block = self.resblocks[layer]
            # First the tokens enter, then the block attends over them: layer l of a plan is the input of block l.
            sequence = sequence.apply(plan, layer)
            pattern, select = sequence.pattern(layer), None
            # Only the rows of the last block that are read out are needed: all rows are keys, few are queries.
            if layer == last and not every_row:
                pattern, select = sequence.read_out_rows(plan.read_op)
            x = block(sequence.x, pattern, select, optimized, plan.adapters.get(layer), plan.branches.get(layer))
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

    def forward(self, images: Tensor, plan: Plan = NO_CHANGE, optimized: bool = True) -> tuple[Tensor, Tensor | None]:
        """Encode `images` with the tokens of `plan`; operations at INPUT act after the positional embedding.

        Returns features [B, E], not normalised, and the final states [B, P, D] of the rows of the operation
        `plan.read_op`, after `ln_post`; None without one.
        """
        sequence = self._embed(images, plan)
        sequence = call_with(self.transformer, "transformer", plan.weights, sequence, plan, optimized, not optimized)
        return self._read_out(sequence, plan, optimized)

    def encode_with_frozen(self, images: Tensor, plan: Plan, optimized: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return what `forward` returns under `plan`, and features [B, E] without it.

        The blocks below the first one that the plan changes are computed once.
        """
        layers = len(self.transformer.resblocks)
        first = plan.first_change(layers)
        if first == INPUT or not optimized:
            return *self(images, plan, optimized), self(images, NO_CHANGE, optimized)[0]
        below, above = range(first), range(first, layers)
        with torch.no_grad():
            # No operation of the plan acts below `first`, so both passes share these states.
            sequence = self.transformer(self._embed(images, plan), NO_CHANGE, True, False, below)
            frozen = self.transformer(sequence, NO_CHANGE, True, False, above)
            features = self._read_out(frozen, NO_CHANGE, True)[0]
        sequence = call_with(self.transformer, "transformer", plan.weights, sequence, plan, True, False, above)
        return *self._read_out(sequence, plan, True), features

    def encode_patches(self, images: Tensor, plan: Plan, optimized: bool) -> tuple[Tensor, Tensor]:
        """Return the states of the patches [B, N, D] after `ln_post`, and what `forward` returns, features [B, E].

        In the last block the class token attends as always, while each other row keeps its own value: the patches get
        the output map and the MLP, but nothing from other rows.
        """
        sequence = replace(self._embed(images, plan), unmixed=len(self.transformer.resblocks) - 1)
        sequence = call_with(self.transformer, "transformer", plan.weights, sequence, plan, optimized, True)
        rows = call_with(self.ln_post, "ln_post", plan.weights, sequence.own_rows(plan))
        # The class token stays the first of them.
        return rows[:, 1:], project(rows[:, 0], plan.weights.get("proj", self.proj))

    def _embed(self, images: Tensor, plan: Plan) -> TokenSequence:
        """Make the input [B, L, D] of the first block."""
        check_plan(plan, len(self.transformer.resblocks), ("ln_pre", "ln_post", "proj"))
        patches = self.conv1(images.to(self.conv1.weight.dtype)).flatten(2).transpose(1, 2)
        cls = self.class_embedding.to(patches.dtype).expand(patches.shape[0], 1, -1)
        x = torch.cat([cls, patches], dim=1) + self.positional_embedding
        sequence = TokenSequence(x, read_out=0, causal=False).apply(plan, INPUT)
        return sequence.with_states(call_with(self.ln_pre, "ln_pre", plan.weights, sequence.x))

    def _read_out(self, sequence: TokenSequence, plan: Plan, optimized: bool) -> tuple[Tensor, Tensor | None]:
        # Optimized, the last block gives only the rows that are read out: the class token, then those of `read_op`.
        cls = sequence.x[:, 0 if optimized else sequence.read_out]
        cls, states = call_with(self.ln_post, "ln_post", plan.weights, cls), None
        if plan.read_op is not None:
            rows = slice(1, None) if optimized else sequence.op_rows[plan.read_op]
            states = call_with(self.ln_post, "ln_post", plan.weights, sequence.x[:, rows])
        return project(cls, plan.weights.get("proj", self.proj)), states


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

    def forward(self, prompts: Tensor | PromptSet, plan: Plan = NO_CHANGE, optimized: bool = True) -> Tensor:
        """Encode `prompts` with the tokens of `plan`; operations at INPUT act before the positional embedding.

        prompts: token ids, or a `PromptSet` of them, which is laid out once and not at every call; on a GPU a tensor
            of ids makes the host wait for the device.
        Returns features [C, E], not normalised, or [S, C, E] under S token sets.
        Raises UserError when a prompt with its inserted tokens is longer than the context.
        """
        check_plan(plan, len(self.transformer.resblocks), ("ln_final", "text_projection"))
        if not isinstance(prompts, PromptSet):
            prompts = PromptSet(prompts)
        return self._encode_chunks(prompts, plan) if optimized else self._encode(prompts, plan, optimized=False)

    def encode_from(self, block: int, prompts: PromptSet, chosen: Tensor, plan: Plan, optimized: bool = True) -> Tensor:
        """Encode the prompts `chosen` [K] to features [K, E] under a plan that changes nothing before `block`.

        The states of all prompts that enter `block` are computed at the first call and kept with the prompts.
        """
        ids = prompts.ids[:, : prompts.columns] if optimized else prompts.ids

        def compute() -> Tensor:
            with torch.no_grad():
                x = self.token_embedding(ids) + self.positional_embedding[: ids.shape[1]]
                # Nothing is read out below the last block, so that any row will do.
                sequence = TokenSequence(x, read_out=0, causal=True)
                return self.transformer(sequence, NO_CHANGE, optimized, False, range(block)).x if block else x

        # The precision is part of the key, because a run can be evaluated at another one than it is trained at.
        states = prompts.constant((self, block, optimized, _cast_type(ids.device.type)), compute)
        # [C, T, D] of all prompts to [K, T, D].
        sequence = TokenSequence(states[chosen], read_out=ids.argmax(dim=-1)[chosen], causal=True)
        blocks = range(block, len(self.transformer.resblocks))
        sequence = call_with(self.transformer, "transformer", plan.weights, sequence, plan, optimized, False, blocks)
        return self._project(sequence.x[:, 0], plan)

    def _layout(self, prompts: PromptSet, plan: Plan) -> Layout | None:
        return prompts.layout(plan, len(self.transformer.resblocks), self.positional_embedding.shape[0])

    def _encode_chunks(self, prompts: PromptSet, plan: Plan) -> Tensor:
        """Encode in chunks of at most `CHUNK_ROWS` rows: [C, E], or [S, C, E] if the plan holds token sets."""
        sets, layout, limit = plan.num_sets, self._layout(prompts, plan), CHUNK_ROWS
        rows = layout.num_rows if layout else len(prompts) * prompts.columns
        if rows * max(sets, 1) <= limit:
            return self._encode(prompts, plan, optimized=True)
        # Prompts are divided first; if a part has fewer rows than the limit, several token sets share a chunk.
        parts = min(len(prompts), -(-rows // limit))
        cuts = [len(prompts) * part // parts for part in range(parts + 1)]
        sets_at_once = max(1, limit * parts // rows)
        # Without a gradient nothing is kept for a backward pass, and recomputing would only cost time.
        recompute = torch.is_grad_enabled() and plan.learns

        def encode(first: int, start: int, stop: int) -> Tensor:
            some = plan.select(slice(start, stop), slice(first, first + sets_at_once))
            return self._encode(prompts.subset(start, stop), some, optimized=True)

        features = []
        for first in range(0, max(sets, 1), sets_at_once):
            # The tower draws nothing (dropout follows from a seed), so recomputing needs no saved random state.
            chunks = [
                checkpoint(encode, first, *cut, use_reentrant=False, preserve_rng_state=False)
                if recompute
                else encode(first, *cut)
                for cut in pairwise(cuts)
            ]
            # Prompts are the last dimension but one, with and without token sets.
            features.append(torch.cat(chunks, dim=-2))
        return torch.cat(features) if sets else features[0]

    def _encode(self, prompts: PromptSet, plan: Plan, *, optimized: bool) -> Tensor:
        sets = plan.num_sets
        layout = self._layout(prompts, plan) if optimized else None
        if layout is None:
            if not sets:
                return self._encode_padded(prompts, plan, optimized)
            return torch.stack([self._encode_padded(prompts, plan.for_set(n), optimized) for n in range(sets)])
        layers = len(self.transformer.resblocks)
        # The last block is never constant: it gives other rows than it gets.
        first = min(plan.first_change(layers), layers - 1)
        # Inference encodes a set of prompts once, so that kept states would only take memory.
        is_training = torch.is_grad_enabled() and plan.learns and not self.positional_embedding.requires_grad
        if first > 0 and is_training:
            x = self._constant_states(prompts, layout, first).expand(max(sets, 1), -1, -1)
            sequence = PackedSequence(x, layout)
        else:
            sequence, first = self._embed(layout, plan), 0
        blocks = range(first, layers)
        ends = call_with(self.transformer, "transformer", plan.weights, sequence, plan, True, False, blocks).x
        # The last block gives [S, G Q, D], with padding where a group has fewer prompts; [S, C, D] are selected.
        features = self._project(ends.index_select(1, layout.end_index), plan)
        return features if sets else features[0]

    def _embed(self, layout: Layout, plan: Plan) -> PackedSequence:
        """Make the input [S, L, D] of the first block."""
        x = self.token_embedding(layout.ids).expand(max(plan.num_sets, 1), -1, -1)
        sequence = PackedSequence(x, layout).apply(plan, INPUT)
        return sequence.with_states(sequence.x + self.positional_embedding[layout.positions])

    def _constant_states(self, prompts: PromptSet, layout: Layout, first: int) -> Tensor:
        """Return the input [1, L, D] of block `first` under a plan without changes before it, computed once."""
        dtype = _cast_type(layout.ids.device.type)

        def compute() -> Tensor:
            with torch.no_grad():
                return self.transformer(self._embed(layout, NO_CHANGE), NO_CHANGE, True, False, range(first)).x

        # `prompts` keeps the layout, so its id is not used again.
        return prompts.constant((self, id(layout), first, dtype), compute)

    def _encode_padded(self, prompts: PromptSet, plan: Plan, optimized: bool) -> Tensor:
        # Causal rows do not see later ones, so the columns behind the last end token are left out.
        ids = prompts.ids[:, : prompts.columns] if optimized else prompts.ids
        sequence = TokenSequence(self.token_embedding(ids), read_out=ids.argmax(dim=-1), causal=True).apply(plan, INPUT)
        x = self._fit(sequence) + self.positional_embedding[: sequence.x.shape[1]]
        sequence = sequence.with_states(x)
        sequence = call_with(self.transformer, "transformer", plan.weights, sequence, plan, optimized, not optimized)
        if optimized:
            return self._project(sequence.x[:, 0], plan)
        return self._project(sequence.x[torch.arange(len(ids), device=ids.device), sequence.read_out], plan)

    def _project(self, ends: Tensor, plan: Plan) -> Tensor:
        ends = call_with(self.ln_final, "ln_final", plan.weights, ends)
        return project(ends, plan.weights.get("text_projection", self.text_projection))

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


class OpenClipTower(nn.Module):
    """A tower of open_clip that is none of the two above, computed by open_clip's own module; no plan changes it.

    num_tokens: unknown. tokenizer: open_clip's name of the model, for a vocabulary other than CLIP's.
    """

    num_tokens = 0

    def __init__(self, module: nn.Module, tokenizer: str = "") -> None:
        super().__init__()
        self.module = module
        self.tokenizer = tokenizer

    def forward(self, inputs: Tensor | PromptSet, plan: Plan = NO_CHANGE, optimized: bool = True) -> Tensor:
        """Encode images [B, 3, H, W] or token ids [C, T] to joint features [B, E] or [C, E], not normalised."""
        if plan:
            raise ValueError("a tower of open_clip takes no plan")
        ids = inputs.ids if isinstance(inputs, PromptSet) else inputs
        # The prompts of all classes are encoded in parts; callers choose how many images are in a batch.
        is_text = ids.dim() == 2
        outputs = [self.module(part) for part in (ids.split(max(1, CHUNK_ROWS // ids.shape[1])) if is_text else [ids])]
        # CoCa's towers also return the states of all rows.
        return torch.cat([output[0] if isinstance(output, tuple) else output for output in outputs])


def _cast_type(device: str) -> torch.dtype | None:
    """Return the type that autocast computes in, or None if it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def project(states: Tensor, projection: Tensor) -> Tensor:
    """Project read-out states to joint features, outside autocast: bfloat16 rounds logits near 25 to steps of 0.125."""
    with torch.autocast(states.device.type, enabled=False):
        return states.to(projection.dtype) @ projection
