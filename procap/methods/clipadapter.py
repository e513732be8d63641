"""CLIP-Adapter: a bottleneck on the image features, blended with them.

Source: Gao et al. 2021, "CLIP-Adapter: Better Vision-Language Models with Feature Adapters", section 3.2, and its
public code. Learns 131,072 parameters on ViT-B/16.

Shapes: B images, C classes, N features, E joint embedding.
"""

from __future__ import annotations

from functools import partial

import torch
from pydantic import Field
from torch import Tensor, nn

from procap.classifier import cosine_logits
from procap.clip import CLIP
from procap.initialisation import linear
from procap.methods.features import FeatureMethod, Head
from procap.methods.method import PublicLayout
from procap.methods.options import ViewOptions
from procap.recipe import Recipe
from procap.text import LabelSpace


class ClipAdapterOptions(ViewOptions):
    share: float = Field(0.2, ge=0, le=1, description="share of the adapter's output in an image feature")


class FeatureAdapter(nn.Sequential):
    """A bottleneck of two linear layers, blended with its input."""

    def __init__(self, width: int, share: float, generator: torch.Generator) -> None:
        """width: E. share: of the bottleneck in the result."""
        hidden = max(1, width // 4)
        down, up = linear(width, hidden, generator, bias=False), linear(hidden, width, generator, bias=False)
        # A ReLU behind the second layer as well, as in the public code, so the bottleneck subtracts nothing.
        super().__init__(down, nn.ReLU(), up, nn.ReLU())
        self.share = share

    def forward(self, features: Tensor) -> Tensor:
        """Map features [N, E] that are not normalised."""
        return self.share * super().forward(features) + (1 - self.share) * features


def adapted_logits(features: Tensor, adapter: FeatureAdapter, text: Tensor, scale: Tensor) -> Tensor:
    """Compute the logits [B, C] of adapted image features against class features [C, E]."""
    return cosine_logits(adapter(features), text, scale)


class ClipAdapter(FeatureMethod):
    """CLIP-Adapter (Gao et al. 2021): a bottleneck on the image features."""

    Options = ClipAdapterOptions
    title = "CLIP-Adapter"
    public_layout = PublicLayout("clip_adapter", {"adapter": "adapter.fc.{}"}, module="adapter")
    options: ClipAdapterOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: ClipAdapterOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        self.adapter = FeatureAdapter(clip.geometry.embed_dim, options.share, generator)

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return CoOp's recipe for ImageNet, which the public code names: SGD 0.002, batch 32, 50 epochs."""
        return Recipe(optimizer="sgd", lr=0.002, epochs=50, batch_size=32)

    def templates(self, space: LabelSpace) -> tuple[str, ...]:
        # A single one on ImageNet as well, as in the public code.
        return (space.template,)

    def head(self, space: LabelSpace) -> Head:
        return partial(adapted_logits, adapter=self.adapter, text=self.text(space), scale=self.scale())
