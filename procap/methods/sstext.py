"""SS-Text: class means that the class features regularise, in closed form and without any choice.

Source: the public code of SS-Text (Silva-Rodríguez et al. 2025). Stores 512 numbers per class on ViT-B/16.

Shapes: N training images, B images, C classes, E joint embedding.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from procap.methods.features import ClassWeights, FeatureBank
from procap.methods.method import MethodOptions
from procap.text import LabelSpace

SMALLEST = 1e-3
"""The smallest weight of the text."""


class SSTextOptions(MethodOptions):
    """The options of SS-Text; with "equal" and without `repel` it is SS-Text without the plus of the public code."""

    weighting: Literal["class", "equal"] = Field(
        "class", description="weight of the text: one over the images of the class, or over all images"
    )
    repel: bool = Field(True, description="subtract the direction of twice a class's weights minus their mean")


class SSText(ClassWeights):
    """SS-Text+ (Silva-Rodriguez et al. 2025): class means, regularised by text."""

    Options = SSTextOptions
    title = "SS-Text+"
    selection = "-"
    takes_steps = False
    augments = False
    options: SSTextOptions

    def text(self, space: LabelSpace) -> Tensor:
        """Compute class features [C, E]: the mean over `templates`, not normalised."""
        return self.prompt_features(space).mean(dim=0)

    @torch.no_grad()
    def fit(self, bank: FeatureBank) -> None:
        """Add the scaled sum of each class's features, which are not normalised, to its class feature."""
        text = self.text(self.space)
        counts = bank.labels.bincount(minlength=len(text)).to(text)
        sums = torch.zeros_like(text).index_add_(0, bank.labels, bank.features[:, 0]) * self.scale()
        # A class without images has an infinite weight of the text, and so keeps its class feature.
        weights = 1 / (counts if self.options.weighting == "class" else counts.sum().expand_as(counts))
        rows = sums / (counts.sum() * weights.clamp(min=SMALLEST))[:, None] + text
        if self.options.repel:
            rows = rows - F.normalize(2 * rows - rows.mean(dim=0), dim=1)
        self.rows.copy_(rows)
