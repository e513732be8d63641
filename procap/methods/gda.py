"""GDA: Gaussian discriminant analysis of image features, added to zero-shot logits; nothing is trained.

Source: Wang et al. 2024, "A Hard-to-Beat Baseline for Training-Free CLIP-based Adaptation", and its public code. Stores
513 numbers per class on ViT-B/16, and the vectors from which it estimates new classes.

Shapes: N training images, V views of each, M validation images, B images, C classes, E joint embedding.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from procap.classifier import unit
from procap.clip import CLIP
from procap.methods.features import ClassWeights, FeatureBank, accuracy
from procap.methods.method import PublishedOptions
from procap.methods.options import SelectionOptions, ViewOptions
from procap.recipe import Recipe
from procap.text import LabelSpace

ALPHAS = tuple(10.0**power for power in range(-4, 3))
"""Factors of the Gaussians' logits that are compared."""
DEFAULT_ALPHA = 0.1
NEIGHBOURS, COPIES = 64, 16
"""Training vectors that stand for a new class, and copies of its class feature that are averaged with them."""


class GDAOptions(SelectionOptions, ViewOptions):
    covariance: Literal["shared", "class"] = Field(
        "shared",
        description="shared: of all deviations from class means, shrunk; class: the mean of the classes' covariances, "
        "with a pseudo-inverse, as the public code has it for base-to-novel",
    )
    views: int = Field(10, ge=2, description="random views of each image, which count as so many images")


def gaussian_logits(features: Tensor, text: Tensor, rows: Tensor, bias: Tensor, alpha: Tensor) -> Tensor:
    """Add `alpha` times the Gaussians' logits, by rows [C, E] and bias [C], to zero-shot ones by scaled text [C, E]."""
    image = unit(features)
    return image @ text.t() + alpha * (image @ rows.t() + bias)


def discriminant(means: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Compute rows [C, E] and bias [C] of equally frequent classes from means [C, E] and precision [E, E]."""
    rows = means @ precision
    return rows, -torch.tensor(len(means)).log() - (means * rows).sum(dim=1) / 2


def shrunk_precision(deviations: Tensor) -> Tensor:
    """Invert the covariance of deviations [N, E], shrunk by its trace (Kubokawa and Srivastava 2008)."""
    width, scatter = deviations.shape[1], deviations.t() @ deviations
    identity = torch.eye(width, device=scatter.device)
    return width * torch.linalg.inv(scatter + scatter.trace() / (len(deviations) - 1) * identity)


class GDA(ClassWeights):
    """GDA (Wang et al. 2024): Gaussian discriminant analysis, nothing is trained."""

    Options = GDAOptions
    title = "GDA"
    selection = "validation"
    takes_steps = False
    varying_rows = ("vectors",)
    needs_every_class = True
    published: ClassVar[PublishedOptions] = {"base-to-novel": {"covariance": "class"}}
    options: GDAOptions
    vectors: Tensor
    alpha: Tensor

    def __init__(self, clip: CLIP, space: LabelSpace, options: GDAOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        self.bias = nn.Parameter(torch.zeros(len(space.classnames)), requires_grad=False)
        self.register_buffer("vectors", torch.zeros(0, clip.geometry.embed_dim))
        self.register_buffer("alpha", torch.tensor(DEFAULT_ALPHA))

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return one pass over ten views of the images, in crops of half the image or more (ImageNet: 8 %)."""
        crops = (0.08, 1.0) if dataset == "imagenet" else (0.5, 1.0)
        return super().recipe(task, shots, dataset).model_copy(update={"crop_scale": crops})

    @torch.no_grad()
    def fit(self, bank: FeatureBank) -> None:
        """Estimate the class means and one covariance from the normalised features of all views."""
        self.vectors = unit(bank.features).flatten(0, 1)
        labels = bank.labels.repeat_interleave(bank.features.shape[1])
        counts = labels.bincount(minlength=len(self.rows))
        means = torch.zeros_like(self.rows).index_add_(0, labels, self.vectors) / counts[:, None]
        deviations = self.vectors - means[labels]
        if self.options.covariance == "shared":
            precision = shrunk_precision(deviations)
        else:
            # The covariance of each class weighs the same, whatever its number of images.
            weighted = deviations / (len(counts) * (counts - 1)).sqrt()[labels, None]
            precision = torch.linalg.pinv(weighted.t() @ weighted, hermitian=True)
        rows, bias = discriminant(means, precision)
        self.rows.copy_(rows)
        self.bias.copy_(bias)

    @torch.no_grad()
    def finish(self, bank: FeatureBank) -> None:
        """Set the factor to the one with the highest validation accuracy, the first of equals."""
        if not len(bank.val_labels):
            return
        parts = self.head(self.space).keywords
        scores = {}
        for alpha in ALPHAS:
            logits = gaussian_logits(bank.val_features, **parts | {"alpha": torch.tensor(alpha)})
            scores[alpha] = accuracy(logits, bank.val_labels)
        best = max(scores, key=lambda alpha: scores[alpha])
        self.alpha.fill_(best if scores[best] else DEFAULT_ALPHA)

    @torch.no_grad()
    def estimate_new(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Estimate rows and bias of new classes from class features [C, E] and the training vectors nearest to them."""
        means, width = torch.empty_like(text), text.shape[1]
        precision = text.new_zeros(width, width)
        for i, feature in enumerate(text):
            nearest = self.vectors[(self.vectors @ feature).topk(min(NEIGHBOURS, len(self.vectors))).indices]
            means[i] = (nearest.sum(dim=0) + COPIES * feature) / (len(nearest) + COPIES)
            precision += shrunk_precision(nearest - feature) / len(text)
        return discriminant(means, precision)

    def head(self, space: LabelSpace) -> partial[Tensor]:
        """Make the head; new classes are estimated from training vectors near their class features."""
        text, known = self.text(space), self.known(space)
        rows, bias = self.rows[known], self.bias[known]
        if len(new := (known < 0).nonzero()[:, 0]):
            # Products of lower precision would not fit the rows.
            with torch.autocast(text.device.type, enabled=False):
                rows[new], bias[new] = self.estimate_new(text[new].float())
        return partial(gaussian_logits, text=self.scale() * text, rows=rows, bias=bias, alpha=self.alpha)
