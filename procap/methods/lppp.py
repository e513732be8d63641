"""LP++: a linear classifier on frozen features, blended with the class features by one learned factor per class.

Source: Huang et al. 2024, "LP++: A Surprisingly Strong Linear Probe for Few-Shot CLIP", section 3, and its public code.
Learns 514 parameters per class on ViT-B/16.

Shapes: N training images, M validation images, B images, C classes, E joint embedding.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field
from torch import Tensor, nn

from procap.classifier import unit
from procap.clip import CLIP
from procap.initialisation import linear
from procap.methods.features import ClassWeights, FeatureBank, Head, accuracy
from procap.methods.method import MethodOptions
from procap.text import LabelSpace

MOMENTUM = 0.9
ALPHA_START = 250
"""Times the mean cosine of the training images to their class, the initial factor of every class."""
ALPHA_EVERY = 10
"""Full-batch steps from one change of the factors to the next."""


class LPPPOptions(MethodOptions):
    steps: int = Field(300, ge=1, description="full-batch gradient steps")


def blended_logits(features: Tensor, rows: Tensor, bias: Tensor, alpha: Tensor, text: Tensor) -> Tensor:
    """Compute linear logits by rows [C, E] and bias [C], plus alpha [C] times the cosines to the class features."""
    image = unit(features)
    return F.linear(image, rows, bias) + alpha * (image @ text.t())


class LPPP(ClassWeights):
    """LP++ (Huang et al. 2024): a linear probe blended with the class features."""

    Options = LPPPOptions
    title = "LP++"
    selection = "validation"
    takes_steps = False
    knows_new_classes = False
    options: LPPPOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: LPPPOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        start = linear(clip.geometry.embed_dim, len(space.classnames), generator)
        self.bias = nn.Parameter(start.bias.detach().clone(), requires_grad=False)
        self.alpha = nn.Parameter(torch.zeros(len(space.classnames)), requires_grad=False)

    @classmethod
    def unread_fields(cls, options: BaseModel) -> set[str]:
        # `fit` takes the first view of each image.
        return super().unread_fields(options) | {"epochs"}

    def head(self, space: LabelSpace) -> Head:
        known = self.known(space)
        learned = {"rows": self.rows[known], "bias": self.bias[known], "alpha": self.alpha[known]}
        return partial(blended_logits, **learned, text=self.text(space))

    @torch.no_grad()
    def fit(self, bank: FeatureBank) -> None:
        """Descend on rows and bias with momentum in every step, and on alpha in every tenth.

        As in the public code, alpha moves along the sum of all its gradients so far, and the step with the highest
        validation accuracy counts, of equal ones the last.
        """
        image, text = unit(bank.features[:, 0]), self.text(self.space)
        one_hot = F.one_hot(bank.labels, len(text)).float()
        cosines = image @ text.t()
        # Sums of each class's features, not means, as in the public code.
        self.rows.copy_(one_hot.t() @ image)
        self.alpha.fill_(ALPHA_START * (cosines * one_hot).sum(dim=1).mean())
        lr, lr_alpha = step_sizes(image, cosines)
        learned, velocity = (self.rows, self.bias), (torch.zeros_like(self.rows), torch.zeros_like(self.bias))
        alpha_gradient, best, kept = torch.zeros_like(self.alpha), -1.0, list[Tensor]()
        for step in range(1, self.options.steps + 1):
            logits = self.head(self.space)(image)
            # The gradient of the mean cross-entropy with respect to the logits, [N, C]; autograd is off here.
            error = (logits.softmax(dim=1) - one_hot) / len(image)
            alpha_gradient += (error * cosines).sum(dim=0)
            for parameter, momentum, gradient in zip(
                learned, velocity, (error.t() @ image, error.sum(dim=0)), strict=True
            ):
                momentum.mul_(MOMENTUM).add_(gradient)
                parameter.sub_(lr * momentum)
            if step % ALPHA_EVERY == 0:
                self.alpha.sub_(lr_alpha * alpha_gradient)
            if len(bank.val_labels):
                score = accuracy(self.head(self.space)(bank.val_features), bank.val_labels)
                if score >= best:
                    best, kept = score, [value.clone() for value in (self.rows, self.bias, self.alpha)]
        # Without validation images nothing is kept, and the last step counts.
        for parameter, value in zip((self.rows, self.bias, self.alpha), kept, strict=False):
            parameter.copy_(value)


def step_sizes(image: Tensor, cosines: Tensor) -> tuple[float, float]:
    """Compute the step sizes of rows and factors from features [N, E] and cosines [N, C]: inverse curvature bounds."""
    # Eigenvalues come in ascending order.
    largest = torch.linalg.eigvalsh((image.t() @ image).double())[-1]
    return float(4 * len(image) / largest), float(len(image) / (4 * cosines.square().sum(dim=0).max()))
