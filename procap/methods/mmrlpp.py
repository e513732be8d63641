"""MMRL++: MMRL with one shared projection for each tower, low-rank changes of it, and tokens that pass through blocks.

Source: Guo and Gu 2025, "MMRL++: Parameter-Efficient and Interaction-Aware Representation Learning for Vision-Language
Models", section 3, and its public code. Learns 813,312 parameters on ViT-B/16.

Shapes: P representation tokens, R their width, Q rank, Dt text width, Dv vision width, E joint embedding.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from procap.initialisation import linear
from procap.methods.method import PublicLayout, name_options
from procap.methods.mmrl import MMRL, MMRLOptions
from procap.recipe import Recipe

PUBLISHED = {
    "imagenet": (0.9, 0.2), "fgvc-aircraft": (0.9, 2.0), "ucf101": (0.9, 3.0), "dtd": (0.9, 7.0),
    "oxford-pets": (0.7, 0.01), "stanford-cars": (0.7, 6.0), "caltech101": (0.6, 3.0), "sun397": (0.5, 3.0),
    "oxford-flowers": (0.4, 7.0), "eurosat": (0.2, 0.01), "food101": (0.1, 1.0),
    "transfer": (0.9, 0.1), "other": (0.9, 0.2),
}  # fmt: skip
"""Share of fresh tokens and weight of the distances, by data set."""


class MMRLPPOptions(MMRLOptions):
    rank: int = Field(4, ge=1, description="rank of the change of the projection in each block")
    projection_rank: int = Field(64, ge=1, description="rank of the change of the image tower's projection")
    fresh: float = Field(
        0.9,
        ge=0,
        le=1,
        description="share of new tokens in a block; the rest is their state after the block before (beta)",
    )


class SharedProjection(nn.Module):
    """Tokens [P, R] to tokens [P, D] of each block: one matrix, a low-rank change and a bias for each block."""

    def __init__(self, width: int, tower_width: int, blocks: int, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        shared = linear(width, tower_width, generator)
        self.weight = shared.weight

        def draw_down() -> Tensor:
            # As in the public code, the bound depends on the rank and not on the width.
            return torch.empty(tower_width, rank).uniform_(-(rank**-0.5), rank**-0.5, generator=generator)

        self.A = nn.ParameterList(draw_down() for _ in range(blocks))
        self.B = nn.ParameterList(torch.zeros(rank, width) for _ in range(blocks))
        self.bias = nn.ParameterList(shared.bias.detach().clone() for _ in range(blocks))

    def forward(self, tokens: Tensor) -> list[Tensor]:
        factors = zip(self.A, self.B, self.bias, strict=True)
        # A [D, Q] and B [Q, R] have the names of the public code, the reverse of LoRA's.
        return [tokens @ (self.weight + down @ up).t() + bias for down, up, bias in factors]


class MMRLPP(MMRL):
    """MMRL++ (Guo and Gu 2025): MMRL with shared projections and tokens that pass through blocks."""

    Options = MMRLPPOptions
    title = "MMRL++"
    mini_lr = 2.5e-3
    public_layout = PublicLayout(
        "MultiModalRepresentationLearner",
        {
            "A": "image_encoder.A",
            "B": "image_encoder.B",
            "tokens": "representation_learner.compound_rep_tokens",
            "to_vision": "representation_learner.srra_r2vproj.srra.{2}.{1}",
            "to_vision.weight": "representation_learner.srra_r2vproj.weight",
            "to_text": "representation_learner.srra_r2tproj.srra.{2}.{1}",
            "to_text.weight": "representation_learner.srra_r2tproj.weight",
        },
    )
    published = name_options(("fresh", "reg_weight"), PUBLISHED)
    options: MMRLPPOptions

    def _add_projection(self, generator: torch.Generator) -> None:
        g, rank = self.clip.geometry, self.options.projection_rank
        # Drawn as the factors of the blocks; with B at zero a training starts at CLIP's own projection.
        start = torch.empty(g.vision_width, rank).uniform_(-(rank**-0.5), rank**-0.5, generator=generator)
        self.A, self.B = nn.Parameter(start), nn.Parameter(torch.zeros(rank, g.embed_dim))

    def _token_projections(self, width: int, blocks: int, generator: torch.Generator) -> SharedProjection:
        return SharedProjection(self.options.width, width, blocks, self.options.rank, generator)

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return MMRL's recipe; for few-shot on other sets than ImageNet 0.002 and 100 epochs."""
        recipe = super().recipe(task, shots, dataset)
        if task == "few-shot" and dataset != "imagenet":
            return recipe.model_copy(update={"lr": 0.002, "epochs": 100})
        return recipe

    @property
    def projection(self) -> Tensor:  # type: ignore[override]
        """The projection [Dv, E] of the read-out tokens: CLIP's own, and a low-rank change."""
        # Computed anew in every step, where MMRL holds a parameter of this name.
        return self.clip.visual.proj + self.A @ self.B

    @property
    def fresh(self) -> float:  # type: ignore[override]
        return self.options.fresh
