"""A plain implementation to test the fast one against: full prompts, and everything recomputed for every batch.

Written from the papers and independently of `procap.clip`'s forward: attention is an explicit softmax, sequences are
Python lists of rows, nothing is truncated, cached or fused. Slow on purpose; `plain` lets a whole method run over it.

Shapes: B images, C prompts, N either, T token ids, L sequence, D width, H heads, E joint embedding.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from procap.clip import CLIP
from procap.packing import PromptSet
from procap.plan import INPUT, Plan

if TYPE_CHECKING:
    from procap.methods.method import Method
    from procap.text import LabelSpace


def encode_image(clip: CLIP, images: Tensor, plan: Plan = ()) -> Tensor:
    """Encode images [B, 3, H, W] to features [B, E], not normalised (Dosovitskiy et al. 2021; Radford et al. 2021)."""
    tower, patch = clip.visual, clip.geometry.patch_size
    patches = F.unfold(images, kernel_size=patch, stride=patch).transpose(1, 2) @ tower.conv1.weight.flatten(1).T
    states = [tower.class_embedding.expand(len(images), -1), *patches.unbind(dim=1)]
    rows = [(index, state + tower.positional_embedding[index]) for index, state in enumerate(states)]
    rows = _splice(rows, plan, INPUT)
    rows = [(label, _layer_norm(state, tower.ln_pre)) for label, state in rows]
    rows = _transformer(rows, tower.transformer.resblocks, clip.geometry.vision_heads, plan, causal=False)
    cls = next(state for label, state in rows if label == 0)
    return _layer_norm(cls, tower.ln_post) @ tower.proj


def encode_text(clip: CLIP, ids: Tensor, plan: Plan = ()) -> Tensor:
    """Encode token ids [C, T], padded to the whole context, to features [C, E], not normalised."""
    tower, context = clip.text, clip.geometry.context_length
    ids = F.pad(ids, (0, context - ids.shape[1]))
    rows = list(enumerate(tower.token_embedding.weight[ids].unbind(dim=1)))
    rows = _splice(rows, plan, INPUT)[:context]
    rows = [(label, state + tower.positional_embedding[index]) for index, (label, state) in enumerate(rows)]
    rows = _transformer(rows, tower.transformer.resblocks, clip.geometry.text_heads, plan, causal=True)
    by_label = dict(rows)
    ends = torch.stack([by_label[int(end)][prompt] for prompt, end in enumerate(ids.argmax(dim=1))])
    return _layer_norm(ends, tower.ln_final) @ tower.text_projection


def reference_logits(method: Method, images: Tensor, space: LabelSpace | None = None) -> Tensor:
    """Compute logits [B, C] of `method`, encoding prompts, classes and images with the plain encoders."""
    return with_plain_encoders(method).classifier(space)(images)


def with_plain_encoders(method: Method) -> Method:
    """Return `method` over the plain encoders; both share their parameters, so training one trains the other."""
    return method.with_clip(cast(CLIP, PlainCLIP(method.clip)))


class PlainCLIP:
    """A CLIP whose encoders are the two of this file; all other attributes are those of the wrapped model."""

    def __init__(self, clip: CLIP) -> None:
        self._clip = clip

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clip, name)

    def encode_image(self, images: Tensor, plan: Plan = ()) -> Tensor:
        return encode_image(self._clip, images, plan)

    def encode_text(self, prompts: Tensor | PromptSet, plan: Plan = ()) -> Tensor:
        """Encode the whole context, one token set after another."""
        ids = prompts if isinstance(prompts, Tensor) else prompts.ids
        sets = [op for op in plan if op.tokens.dim() == 4]
        if not sets:
            return encode_text(self._clip, ids, plan)
        each = (
            tuple(replace(op, tokens=op.tokens[number, 0]) if op.tokens.dim() == 4 else op for op in plan)
            for number in range(len(sets[0].tokens))
        )
        return torch.stack([encode_text(self._clip, ids, one) for one in each])


Row = tuple[int, Tensor]
"""A row's index in the sequence before any operation (-1 for an added row), and its states [N, D]."""


def _splice(rows: list[Row], plan: Plan, layer: int) -> list[Row]:
    rows = list(rows)
    batch = len(rows[0][1])
    for op in plan:
        if op.layer != layer:
            continue
        tokens = op.tokens if op.tokens.dim() == 3 else op.tokens.expand(batch, *op.tokens.shape)
        new = [(-1, token) for token in tokens.unbind(dim=1)]
        if op.mode == "replace":
            over = slice(op.start, op.start + len(new))
            rows[over] = [(place, token) for (place, _), (_, token) in zip(rows[over], new, strict=True)]
        elif op.mode == "append":
            rows = rows + new
        else:
            rows = rows[: op.start] + new + rows[op.start :]
    return rows


def _transformer(rows: list[Row], blocks: nn.ModuleList, heads: int, plan: Plan, causal: bool) -> list[Row]:
    for layer, block in enumerate(blocks):
        rows = _splice(rows, plan, layer)
        x = torch.stack([state for _, state in rows], dim=1)
        x = x + _attention(_layer_norm(x, cast(nn.LayerNorm, block.ln_1)), cast(nn.Module, block.attn), heads, causal)
        x = x + cast(nn.Module, block.mlp)(_layer_norm(x, cast(nn.LayerNorm, block.ln_2)))
        rows = [(label, state) for (label, _), state in zip(rows, x.unbind(dim=1), strict=True)]
    return rows


def _attention(x: Tensor, attention: nn.Module, heads: int, causal: bool) -> Tensor:
    weights = attention.get_parameter("in_proj_weight").chunk(3)
    biases = attention.get_parameter("in_proj_bias").chunk(3)
    q, k, v = (
        (x @ weight.T + bias).unflatten(-1, (heads, -1)).transpose(1, 2)
        for weight, bias in zip(weights, biases, strict=True)
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    mixed = (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
    return mixed @ attention.get_parameter("out_proj.weight").T + attention.get_parameter("out_proj.bias")


def _layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = centred.square().mean(dim=-1, keepdim=True)
    return centred / (variance + norm.eps).sqrt() * norm.weight + norm.bias
