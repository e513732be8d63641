"""The frozen CLIP: two towers with one seam, a plan of token operations (`procap.plan`).

State-dict names are those of open_clip's CustomTextCLIP, every size is read from the weights, and attention is torch's
scaled dot product. With an empty plan the towers are CLIP's own encoders (Radford et al. 2021, section 2.4).

Shapes: B images, C classes (or any prompts), N either, L sequence, T token ids per prompt, D width, E joint embedding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from procap.errors import UserError
from procap.plan import INPUT, Plan, Track, check_layers

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Geometry:
    """The sizes of a ViT CLIP and its activation; everything that decides the shape of the computation."""

    image_size: int
    patch_size: int
    vision_width: int
    vision_layers: int
    vision_heads: int
    text_width: int
    text_layers: int
    text_heads: int
    context_length: int
    vocab_size: int
    embed_dim: int
    quick_gelu: bool
    vision_mlp: int = 0
    text_mlp: int = 0

    def __post_init__(self) -> None:
        for mlp, width in (("vision_mlp", self.vision_width), ("text_mlp", self.text_width)):
            if not getattr(self, mlp):
                object.__setattr__(self, mlp, 4 * width)


class TowerOutput(NamedTuple):
    """What a tower gives.

    features: [N, E], not normalised.
    tokens: final states [N, L, D] of every row, before the tower's last LayerNorm.
    rows: for each operation of the plan, the slice of L where its tokens ended up.
    """

    features: Tensor
    tokens: Tensor
    rows: tuple[slice, ...]


class LayerNorm(nn.LayerNorm):
    """LayerNorm computed in float32 whatever autocast or the weights' precision say."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps).to(input.dtype)


class QuickGELU(nn.Module):
    """The sigmoid approximation of GELU that OpenAI's weights were trained with."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Attention(nn.Module):
    """Multi-head self-attention with the parameter names of `nn.MultiheadAttention`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, causal: bool) -> Tensor:
        rows, length, width = x.shape
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out_proj(mixed.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    """One pre-norm residual block, [N, L, D] to [N, L, D]."""

    def __init__(self, width: int, heads: int, mlp_width: int, quick_gelu: bool) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln_2 = LayerNorm(width)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(width, mlp_width))
        self.mlp.add_module("gelu", QuickGELU() if quick_gelu else nn.GELU())
        self.mlp.add_module("c_proj", nn.Linear(mlp_width, width))

    def forward(self, x: Tensor, causal: bool) -> Tensor:
        x = x + self.attn(self.ln_1(x), causal)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """The blocks of a tower; `causal` rows see only themselves and earlier rows, inserted tokens included."""

    def __init__(self, width: int, layers: int, heads: int, mlp_width: int, quick_gelu: bool, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.resblocks = nn.ModuleList(Block(width, heads, mlp_width, quick_gelu) for _ in range(layers))

    def forward(self, track: Track, plan: Plan = ()) -> Track:
        """Run every block, with the operations of `plan` before the block they name."""
        for layer, block in enumerate(self.resblocks):
            track = track.apply(plan, layer)
            track = track.with_states(block(track.x, self.causal))
        return track


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
        self.transformer = Transformer(width, g.vision_layers, g.vision_heads, g.vision_mlp, g.quick_gelu, causal=False)
        self.ln_post = LayerNorm(width)
        self.proj = nn.Parameter(torch.empty(width, g.embed_dim))

    def forward(self, images: Tensor, plan: Plan = ()) -> TowerOutput:
        """Encode `images` with the tokens of `plan`; operations at INPUT act after the positional embedding."""
        check_layers(plan, len(self.transformer.resblocks))
        patches = self.conv1(images.to(self.conv1.weight.dtype)).flatten(2).transpose(1, 2)
        cls = self.class_embedding.to(patches.dtype).expand(len(patches), 1, -1)
        x = torch.cat([cls, patches], dim=1) + self.positional_embedding
        track = Track(x, read_out=0).apply(plan, INPUT)
        track = self.transformer(track.with_states(self.ln_pre(track.x)), plan)
        features = project(self.ln_post(track.x[:, track.read_out]), self.proj)
        return TowerOutput(features, track.x, track.in_plan_order())


class TextTower(nn.Module):
    """Token ids [C, T] to joint features [C, E], read out at the end-of-text token, which has the largest id."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        g, width = geometry, geometry.text_width
        # nn.Embedding's own constructor draws a table first, which on the meta device takes seconds.
        self.token_embedding = nn.Embedding.from_pretrained(torch.empty(g.vocab_size, width))
        self.positional_embedding = nn.Parameter(torch.empty(g.context_length, width))
        self.transformer = Transformer(width, g.text_layers, g.text_heads, g.text_mlp, g.quick_gelu, causal=True)
        self.ln_final = LayerNorm(width)
        self.text_projection = nn.Parameter(torch.empty(width, g.embed_dim))

    def forward(self, ids: Tensor, plan: Plan = (), truncate: bool = True) -> TowerOutput:
        """Encode `ids` with the tokens of `plan`; operations at INPUT act before the positional embedding.

        truncate: drop the rows behind the last end-of-text token of the batch. Attention is causal, so no feature
            depends on them. On a GPU this waits for the device; `trim` the ids once and pass False where that matters.
        Raises UserError when a prompt with its inserted tokens is longer than the context.
        """
        check_layers(plan, len(self.transformer.resblocks))
        if truncate:
            ids = trim(ids)
        track = Track(self.token_embedding(ids), read_out=ids.argmax(dim=-1)).apply(plan, INPUT)
        track = track.with_states(self._fit(track) + self.positional_embedding[: track.x.shape[1]])
        track = self.transformer(track, plan)
        end_states = track.x[torch.arange(len(ids), device=ids.device), track.read_out]
        return TowerOutput(project(self.ln_final(end_states), self.text_projection), track.x, track.in_plan_order())

    def _fit(self, track: Track) -> Tensor:
        context = self.positional_embedding.shape[0]
        if track.x.shape[1] <= context:
            return track.x
        # Insertion pushed padding beyond the last position: padding may go, words and inserted tokens may not.
        needed = max([int(torch.as_tensor(track.read_out).max()) + 1, *(rows.stop for rows in track.rows.values())])
        if needed > context:
            raise UserError(f"a prompt needs {needed} tokens, CLIP reads {context}: shorten names or learned prompts")
        return track.x[:, :context]


class CLIP(nn.Module):
    """Both towers and the temperature, frozen, in evaluation mode.

    geometry, name, pretrained, image_mean, image_std say what was loaded and how its images are normalised.
    """

    def __init__(
        self,
        geometry: Geometry,
        name: str = "custom",
        pretrained: str = "random",
        image_mean: Sequence[float] = OPENAI_MEAN,
        image_std: Sequence[float] = OPENAI_STD,
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self.name = name
        self.pretrained = pretrained
        self.image_mean = tuple(image_mean)
        self.image_std = tuple(image_std)
        self.visual = VisionTower(geometry)
        self.text = TextTower(geometry)
        self.logit_scale = nn.Parameter(torch.empty(()))

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], geometry: Geometry, **about: object) -> CLIP:
        """A CLIP with the weights of `state` (CustomTextCLIP names), as float32; ValueError names what does not fit."""
        # Without storage first: no default initialisation runs, and the global random state stays untouched.
        with torch.device("meta"):
            clip = cls(geometry, **about)  # type: ignore[arg-type]
        if problems := differences(clip.state_dict(), state):
            raise ValueError("; ".join(problems))
        weights = {name: state[name].detach().float().clone() for name in clip.state_dict()}
        clip.load_state_dict(weights, assign=True)
        return clip.requires_grad_(False).eval()

    @classmethod
    def random(cls, geometry: Geometry, seed: int = 0, **about: object) -> CLIP:
        """A CLIP with random weights, scaled as CLIP's own initialisation, from `seed` alone."""
        with torch.device("meta"):
            shapes = cls(geometry).state_dict()
        generator = torch.Generator().manual_seed(seed)
        state = {name: _initial(name, like, geometry, generator) for name, like in shapes.items()}
        return cls.from_state(state, geometry, **about)

    def train(self, mode: bool = True) -> CLIP:
        """Stays in evaluation mode: a frozen model inside a module that is switched to training must not change."""
        return super().train(False)

    @property
    def device(self) -> torch.device:
        return self.logit_scale.device

    def encode_image(self, images: Tensor, plan: Plan = ()) -> Tensor:
        """Features [B, E] of images [B, 3, H, W], not normalised."""
        return self.visual(images, plan).features

    def encode_text(self, ids: Tensor, plan: Plan = (), truncate: bool = True) -> Tensor:
        """Features [C, E] of token ids [C, T], not normalised."""
        return self.text(ids, plan, truncate).features

    def token_embedding(self, ids: Tensor) -> Tensor:
        """Word embeddings [..., D] of token ids [...], without positions."""
        return self.text.token_embedding(ids)

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Token ids [C, context_length] on this model's device; UserError names a text that is too long."""
        from procap.tokenizer import tokenize

        return tokenize(texts, self.geometry.context_length).to(self.device)

    def digest(self) -> str:
        """Sixteen hexadecimal digits of a SHA-256 over the geometry and every weight."""
        sha = hashlib.sha256(repr(self.geometry).encode())
        for name, weight in sorted(self.state_dict().items()):
            sha.update(name.encode())
            sha.update(weight.detach().cpu().float().contiguous().numpy().tobytes())
        return sha.hexdigest()[:16]


def project(states: Tensor, projection: Tensor) -> Tensor:
    """Joint features of read-out states, outside autocast: bfloat16 logits at temperature 1/100 step by 0.125."""
    with torch.autocast(states.device.type, enabled=False):
        return states.to(projection.dtype) @ projection


def trim(ids: Tensor) -> Tensor:
    """`ids` [C, T] without the columns behind the last end-of-text token of the batch."""
    return ids[:, : int(ids.argmax(dim=-1).max()) + 1]


def differences(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """How the names and shapes of `found` differ from those of `wanted`, the first few in words."""
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    shapes = [
        f"{name} is {list(found[name].shape)}, expected {list(like.shape)}"
        for name, like in wanted.items()
        if name in found and found[name].shape != like.shape
    ]
    problems = shapes[:2] + [f"and {len(shapes) - 2} more shapes"] * (len(shapes) > 2)
    for word, names in (("lacks", missing), ("has unknown", extra)):
        if names:
            problems.append(f"{word} {', '.join(names[:3])}" + f" and {len(names) - 3} more" * (len(names) > 3))
    return problems


def _initial(name: str, like: Tensor, geometry: Geometry, generator: torch.Generator) -> Tensor:
    """CLIP's initialisation of one parameter (openai/CLIP, `initialize_parameters`), for both towers alike."""
    if name == "logit_scale":
        return torch.tensor(1 / 0.07).log()
    if like.dim() == 1 and name.endswith("weight"):
        return torch.ones(like.shape)
    if name.endswith("bias"):
        return torch.zeros(like.shape)
    vision = name.startswith("visual.")
    width = geometry.vision_width if vision else geometry.text_width
    layers = geometry.vision_layers if vision else geometry.text_layers
    if name.endswith("token_embedding.weight"):
        std = 0.02
    elif name.endswith(("out_proj.weight", "c_proj.weight")):
        std = (2 * layers * width) ** -0.5
    elif name.endswith("c_fc.weight"):
        std = (2 * width) ** -0.5
    else:
        std = width**-0.5
    return std * torch.randn(like.shape, generator=generator)
