"""A plain implementation to test the fast one against: full prompts, and everything recomputed for every batch.

Written from the papers and independently of the code that it judges, of which it takes data alone: weights, plans and
geometry. Attention is an explicit softmax, sequences are Python lists of rows; padding is encoded too, and nothing is
cached or fused. Slow on purpose; `with_plain_encoders` lets a whole method run over it.

Shapes: B images, C prompts, N either, T token ids, L sequence, D width, H heads, E joint embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from procap.clip import CLIP
from procap.geometry import Geometry
from procap.low_rank import Dropout, LowRank
from procap.plan import BLOCKS, INPUT, NO_CHANGE, Plan
from procap.prompt_packing import PromptSet

if TYPE_CHECKING:
    from procap.methods.method import Method


def encode_image(clip: CLIP, images: Tensor, plan: Plan = NO_CHANGE) -> Tensor:
    """Encode images [B, 3, H, W] to features [B, E], not normalised (Dosovitskiy et al. 2021; Radford et al. 2021)."""
    rows, weights = _final_image_rows(clip, images, plan)
    cls = next(state for label, state in rows if label == 0)
    return _layer_norm(cls, weights, "ln_post") @ weights["proj"]


def read_image_rows(clip: CLIP, images: Tensor, plan: Plan) -> Tensor:
    """Return the final states [B, P, D] of the rows that operation `plan.read_op` has inserted, after `ln_post`."""
    assert plan.read_op is not None
    rows, weights = _final_image_rows(clip, images, plan)
    inserted = [state for label, state in rows if label == _label(plan.read_op)]
    return _layer_norm(torch.stack(inserted, dim=1), weights, "ln_post")


def encode_patches(clip: CLIP, images: Tensor, plan: Plan = NO_CHANGE) -> tuple[Tensor, Tensor]:
    """Return the states [B, N, D] of the patches, whose last block has no attention, and features [B, E].

    As in GalLoP's public code, the last block is computed a second time for the patches.
    """
    rows, weights = _final_image_rows(clip, images, plan, mixes=False)
    patches = torch.stack([state for label, state in rows if label > 0], dim=1)
    return _layer_norm(patches, weights, "ln_post"), encode_image(clip, images, plan)


def _final_image_rows(clip: CLIP, images: Tensor, plan: Plan, mixes: bool = True) -> tuple[list[Row], Weights]:
    tower, patch = clip.visual, clip.geometry.patch_size
    weights = dict(tower.named_parameters()) | dict(plan.weights)
    # [B, 3 S S, N] to [B, N, D]: `unfold` has the pixels of a patch (size S) in the order of the convolution's weight.
    patches = F.unfold(images, kernel_size=patch, stride=patch).transpose(1, 2) @ tower.conv1.weight.flatten(1).T
    states = [tower.class_embedding.expand(len(images), -1), *patches.unbind(dim=1)]
    rows = [(index, state + tower.positional_embedding[index]) for index, state in enumerate(states)]
    rows = _splice(rows, plan, INPUT)
    rows = [(label, _layer_norm(state, weights, "ln_pre")) for label, state in rows]
    return _transformer(rows, clip.geometry, weights, plan, causal=False, mixes=mixes), weights


def encode_text(clip: CLIP, ids: Tensor, plan: Plan = NO_CHANGE) -> Tensor:
    """Encode token ids [C, T], padded to the whole context, to features [C, E], not normalised."""
    tower, context = clip.text, clip.geometry.context_length
    weights = dict(tower.named_parameters()) | dict(plan.weights)
    ids = F.pad(ids, (0, context - ids.shape[1]))
    rows = list(enumerate(tower.token_embedding.weight[ids].unbind(dim=1)))
    # Insertions push padding beyond the context, where there are no positions.
    rows = _splice(rows, plan, INPUT)[:context]
    rows = [(label, state + tower.positional_embedding[index]) for index, (label, state) in enumerate(rows)]
    rows = _transformer(rows, clip.geometry, weights, plan, causal=True)
    # Labels are the indices before any operation, so the end token is found where it has moved.
    by_label = dict(rows)
    ends = torch.stack([by_label[int(end)][prompt] for prompt, end in enumerate(ids.argmax(dim=1))])
    return _layer_norm(ends, weights, "ln_final") @ weights["text_projection"]


def with_plain_encoders(method: Method) -> Method:
    """Return `method` over the plain encoders; both share their parameters, so training one trains the other."""
    return method.with_clip(cast(CLIP, PlainCLIP(method.clip)))


EPSILON = 1e-5
"""The epsilon of every LayerNorm of CLIP."""


class PlainCLIP:
    """A CLIP whose encoders are the two of this file; all other attributes are those of the wrapped model."""

    def __init__(self, clip: CLIP) -> None:
        self._clip = clip

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clip, name)

    def encode_image(self, images: Tensor, plan: Plan = NO_CHANGE) -> Tensor:
        return encode_image(self._clip, images, plan)

    def encode_image_rows(self, images: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        return encode_image(self._clip, images, plan), read_image_rows(self._clip, images, plan)

    def encode_image_with_frozen(self, images: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
        return *self.encode_image_rows(images, plan), self.encode_image(images)

    def encode_patches(self, images: Tensor, plan: Plan = NO_CHANGE) -> tuple[Tensor, Tensor]:
        return encode_patches(self._clip, images, plan)

    def encode_text(self, prompts: Tensor | PromptSet, plan: Plan = NO_CHANGE) -> Tensor:
        """Encode the whole context, one token set after another."""
        ids = prompts if isinstance(prompts, Tensor) else prompts.ids
        if not plan.num_sets:
            return encode_text(self._clip, ids, plan)
        return torch.stack([encode_text(self._clip, ids, plan.for_set(number)) for number in range(plan.num_sets)])

    def encode_text_from(self, block: int, prompts: PromptSet, chosen: Tensor, plan: Plan) -> Tensor:
        """Encode the chosen prompts from their first block on."""
        return encode_text(self._clip, prompts.ids[chosen], plan)


Row = tuple[int, Tensor]
"""A row's index in the sequence before any operation, or `_label` of the operation that added it; its states [N, D]."""

Weights = Mapping[str, Tensor]
"""The weights of a tower by name, with those that the plan replaces."""


def _label(operation: int) -> int:
    # Negative, because the rows of the sequence itself have the labels 0 and up.
    return -1 - operation


def _splice(rows: list[Row], plan: Plan, layer: int) -> list[Row]:
    rows = list(rows)
    batch = len(rows[0][1])
    for index, op in enumerate(plan.tokens):
        if op.layer != layer:
            continue
        tokens = op.tokens if op.tokens.dim() == 3 else op.tokens.expand(batch, *op.tokens.shape)
        new = [(_label(index), token) for token in tokens.unbind(dim=1)]
        if op.mode == "replace":
            over = slice(op.start, op.start + len(new))
            rows[over] = [
                (label, op.share * token + (1 - op.share) * state)
                for (label, state), (_, token) in zip(rows[over], new, strict=True)
            ]
        elif op.mode == "append":
            rows = rows + new
        else:
            rows = rows[: op.start] + new + rows[op.start :]
    return rows


def _transformer(
    rows: list[Row], geometry: Geometry, weights: Weights, plan: Plan, *, causal: bool, mixes: bool = True
) -> list[Row]:
    """Pass all blocks. mixes: rows attend to each other in the last block, instead of keeping their values."""
    heads = geometry.text_heads if causal else geometry.vision_heads
    layers = geometry.text_layers if causal else geometry.vision_layers
    for layer in range(layers):
        rows = _splice(rows, plan, layer)
        start = torch.stack([state for _, state in rows], dim=1)
        name = f"{BLOCKS}{layer}."
        branch = plan.branches.get(layer)
        normed, attends = _layer_norm(start, weights, f"{name}ln_1"), mixes or layer < layers - 1
        x = start + _attention(normed, weights, f"{name}attn.", heads if attends else None, causal, branch)
        hidden = _linear(_layer_norm(x, weights, f"{name}ln_2"), weights, f"{name}mlp.c_fc")
        # QuickGELU of Radford et al.'s code, or the exact GELU (Hendrycks and Gimpel 2016).
        share = torch.sigmoid(1.702 * hidden) if geometry.quick_gelu else (1 + torch.erf(hidden / math.sqrt(2))) / 2
        x = x + _linear(hidden * share, weights, f"{name}mlp.c_proj")
        if layer in plan.adapters:
            x = x + plan.adapters[layer](_layer_norm(start, weights, f"{name}ln_1"))
        rows = [(label, state) for (label, _), state in zip(rows, x.unbind(dim=1), strict=True)]
    return rows


def _attention(
    x: Tensor, all_weights: Weights, name: str, heads: int | None, causal: bool, branch: LowRank | None
) -> Tensor:
    """Compute the attention of states [N, L, D]. heads: without, each row gets its own value instead."""
    weights = all_weights[f"{name}in_proj_weight"].chunk(3)
    biases = all_weights[f"{name}in_proj_bias"].chunk(3)
    q, k, v = (
        (x @ weight.T + bias + _low_rank(branch, letter, x, x)).unflatten(-1, (heads or 1, -1)).transpose(1, 2)
        for letter, weight, bias in zip("qkv", weights, biases, strict=True)
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    mixed = (v if heads is None else scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
    return _linear(mixed, all_weights, f"{name}out_proj") + _low_rank(branch, "o", mixed, x)


def _low_rank(branch: LowRank | None, projection: str, x: Tensor, rows: Tensor) -> Tensor | float:
    if branch is None or projection not in branch.factors:
        return 0.0
    down, up = branch.factors[projection]
    kept = 1.0 if branch.dropout is None else _dropout_factors(branch.dropout, "qkvo".index(projection), rows)
    return (x * kept) @ down.T @ up.T


def _dropout_factors(dropout: Dropout, projection: int, rows: Tensor) -> Tensor:
    """Return 0 or 1 / (1 - rate) for each element of `rows` [N, L, D], by the definition of `Dropout`.

    A byte of a hash of seed, item, row and column decides: MurmurHash3's finalizer, here in 64 bits of which 32 count.
    """
    count, length, width = rows.shape
    items, row, column = (torch.arange(size, device=rows.device) for size in rows.shape)
    low, high = dropout.seed % 2**32, (dropout.seed >> 31) % 2**32
    keys = _mix(_mix((dropout.first + dropout.step * items + low) % 2**32) ^ high).view(count, 1, 1)
    cells = (4096 * row.view(length, 1) + column.view(1, width)) * 0x9E3779B9 % 2**32
    steps = round(256 * dropout.rate)
    is_kept = (_mix(cells ^ keys) >> 8 * projection) % 256 >= steps
    return is_kept.to(rows.dtype) / (1 - steps / 256)


def _mix(x: Tensor) -> Tensor:
    # Products wrap around at 2^64, which leaves their lower 32 bits right.
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


def _linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _layer_norm(x: Tensor, weights: Weights, name: str) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = centred.square().mean(dim=-1, keepdim=True)
    return centred / (variance + EPSILON).sqrt() * weights[f"{name}.weight"] + weights[f"{name}.bias"]
