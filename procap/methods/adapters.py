"""An adapter behind a tower, for `Method.image_adapter` and `Method.text_adapter`.

Shapes: N features, E joint embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from procap.initialisation import linear


class FeatureAdapter(nn.Sequential):
    """A bottleneck of two linear layers, blended with its input, as in CLIP-Adapter (Gao et al. 2021, section 3.2)."""

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
