"""Build, grow, train and store the embedded CLIP; used by `__main__.py`.

Shapes: B images, N prompts, R used vocabulary rows, L sequence, D width, E joint embedding, F teacher features.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from open_clip import SimpleTokenizer
from open_clip.model import CLIP
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from runner.results import write_bytes
from shards.catalogue import CATALOGUE
from tools.train_mini.teacher import FAMILY_NAMES, IMAGE, Pool, Teacher

DEPTH = 12
# Common templates around a class name; a family's own templates are used as often as all of these together.
PHRASES = (
    "{}.", "a {}.", "a photo of {}.", "a photo of a {}.", "a photo of the {}.", "a photo of many {}.",
    "a picture of a {}.", "a drawing of a {}.", "a small {}.", "a large {}.", "a clean image of a {}.", "{}",
    "a photo of a {}", "a good photo of a {}.", "a bad photo of a {}.", "a close-up photo of a {}.",
    "a photo of one {}.", "an image of the {}.", "this is a {}.",
)  # fmt: skip


@dataclass(frozen=True)
class MiniRecipe:
    """The settings of the training; written next to the weights."""

    seed: int = 0
    images: int = 700_000
    minutes: float = 46.0
    batch: int = 48
    rate: float = 1.5e-3
    matrix_rate: float = 0.02
    decay: float = 0.05
    shallow: int = 3
    deepen_at: tuple[float, float] = (0.2, 0.5)
    width: int = 128
    text_width: int = 64
    embed: int = 128
    patch: int = 8
    per_family: int = 26_400
    teacher_images: int = 250_000

    def command(self) -> str:
        """The command line of a training with these settings."""
        options = f"--seed {self.seed} --images {self.images} --minutes {self.minutes:g}"
        return f"python -m tools.train_mini {options}"


@dataclass(frozen=True)
class Vocabulary:
    """The rows of CLIP's vocabulary that mini has, and prompts as compact ids."""

    tokenizer: SimpleTokenizer
    rows: tuple[int, ...]

    def ids(self, prompts: list[str]) -> Tensor:
        """Return int64 [N, L] positions in `rows`, cut after the last end-of-text token, which has the largest id."""
        tokens = self.tokenizer(prompts)
        tokens = tokens[:, : int(tokens.argmax(1).max()) + 1]
        return torch.searchsorted(torch.tensor(self.rows), tokens.contiguous())


def phrases(family: str) -> tuple[str, ...]:
    """Return the family's own templates, with and without a full stop."""
    dataset = CATALOGUE[family]
    return (dataset.template, *dataset.templates, *(f"{template}." for template in dataset.templates))


def vocabulary(pool: Pool) -> Vocabulary:
    """Collect every token that a prompt or caption of the training can contain, including the padding."""
    texts = set(pool.captions)
    for name in FAMILY_NAMES:
        for template in (*phrases(name), *PHRASES):
            texts.update(template.format(classname) for classname in CATALOGUE[name].classnames)
    tokenizer = SimpleTokenizer()
    return Vocabulary(tokenizer, tuple(sorted({int(row) for row in tokenizer(sorted(texts)).unique()} | {0})))


def build(recipe: MiniRecipe, rows: int, layers: int) -> CLIP:
    """Build an untrained CLIP with a vocabulary of `rows`, 2-D sine positions, and residual branches near zero."""
    torch.manual_seed(recipe.seed)
    vision = {"layers": layers, "width": recipe.width, "patch_size": recipe.patch, "image_size": IMAGE}
    text = {"layers": layers, "width": recipe.text_width, "heads": recipe.text_width // 64, "vocab_size": rows}
    model = CLIP(recipe.embed, vision | {"output_tokens": True}, text, quick_gelu=True)
    model.visual.positional_embedding.data[1:] = 0.3 * sines(IMAGE // recipe.patch, recipe.width)
    for block in [*model.visual.transformer.resblocks, *model.transformer.resblocks]:
        for branch in (block.attn.out_proj, block.mlp.c_proj):
            branch.weight.data.mul_((2 * layers) ** -0.5)
            branch.bias.data.zero_()
    return model


def sines(side: int, width: int) -> Tensor:
    """Compute 2-D sine-cosine positions [side * side, width] (He et al. 2022, MAE, appendix)."""
    rates = 1000.0 ** -(torch.arange(width // 4) / (width // 4))
    angles = torch.arange(side)[:, None] * rates
    line = torch.cat([angles.sin(), angles.cos()], 1)
    rows = line[:, None].expand(side, side, -1)
    return torch.cat([rows, rows.transpose(0, 1)], 2).reshape(side * side, width)


def deepen(model: CLIP) -> None:
    """Insert after every block of both towers a copy that has no effect yet."""
    for tower in (model.visual.transformer, model.transformer):
        blocks: list[nn.Module] = []
        for block in tower.resblocks:
            extra = copy.deepcopy(block)
            for branch in (extra.attn.out_proj, extra.mlp.c_proj):
                branch.weight.data.zero_()
                branch.bias.data.zero_()
            blocks += [block, extra]
        tower.resblocks = nn.ModuleList(blocks)
        tower.layers = len(blocks)


def encode_text(model: CLIP, ids: Tensor) -> Tensor:
    """Encode compact ids [N, L] to unit text features [N, E]; causal, so tokens after end-of-text are skipped."""
    length = ids.shape[1]
    x = model.token_embedding(ids) + model.positional_embedding[:length]
    x = model.ln_final(model.transformer(x, attn_mask=model.attn_mask[:length, :length]))
    x = x[torch.arange(len(x)), ids.argmax(1)] @ model.text_projection
    return functional.normalize(x, dim=-1)


class Student(nn.Module):
    """mini and the heads used only in training: masks and the teacher's features from the patches."""

    def __init__(self, clip: CLIP, recipe: MiniRecipe, features: int = 128) -> None:
        super().__init__()
        self.clip = clip
        self.mask = nn.Linear(recipe.width, 16)
        self.dense = nn.Linear(recipe.width, features)
        self.pooled = nn.Linear(recipe.embed, features * 4)

    def losses(self, images: Tensor, masks: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
        """Compute unit image features [B, E] and the summed dense loss."""
        early: list[Tensor] = []
        blocks = self.clip.visual.transformer.resblocks
        # Predict the masks from an early block: the blocks after it can build on the segmentation.
        hook = blocks[len(blocks) // 3 - 1].register_forward_hook(lambda _block, _inputs, output: early.append(output))
        pooled, tokens = self.clip.visual(images)
        hook.remove()
        with torch.no_grad():
            seen, _ = teacher(images)
            summary = functional.adaptive_avg_pool2d(functional.relu(seen), 2).flatten(1)
            summary = functional.layer_norm(summary, summary.shape[1:])
            seen = functional.layer_norm(seen.flatten(2).transpose(1, 2), seen.shape[1:2])
        side = images.shape[-1] // 8
        inside = masks.reshape(-1, side, 4, side, 4).transpose(2, 3).reshape(len(images), side * side, 16)
        seen_early = functional.layer_norm(early[0][:, 1:], early[0].shape[2:])
        dense = functional.mse_loss(self.dense(tokens), seen)
        dense = dense + 0.5 * functional.mse_loss(self.pooled(pooled), summary)
        dense = dense + 0.5 * functional.binary_cross_entropy_with_logits(self.mask(seen_early), inside)
        return functional.normalize(pooled, dim=-1), dense


def save_weights(model: CLIP, words: Vocabulary, recipe: MiniRecipe, out: Path) -> None:
    """Save fp16 weights under open_clip's names; of the vocabulary only the used rows."""
    model = copy.deepcopy(model)
    while len(model.transformer.resblocks) < DEPTH:
        deepen(model)
    weights = model.state_dict()
    weights.pop("attn_mask", None)
    state = {name: value.detach().to(torch.float16).contiguous() for name, value in weights.items()}
    state["logit_scale"] = model.logit_scale.detach().clamp(max=math.log(100)).to(torch.float16)
    state["token_rows"] = torch.tensor(words.rows)
    vision = {"image_size": IMAGE, "layers": DEPTH, "width": recipe.width, "patch_size": recipe.patch}
    text = {"width": recipe.text_width, "heads": recipe.text_width // 64, "layers": DEPTH}
    config = {"embed_dim": recipe.embed, "quick_gelu": True, "vision_cfg": vision, "text_cfg": text}
    metadata = {"config": json.dumps(config), "seed": str(recipe.seed), "command": recipe.command()}
    write_bytes(out, save(state, metadata))
