"""Baselines on frozen image features alone: a linear probe, and the nearest class mean.

Source: Radford et al. 2021, appendix A.3 (logistic regression whose strength is chosen on validation images).

Shapes: N training images, M validation images, B images, C classes, E joint embedding.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from procap.classifier import unit
from procap.clip import CLIP
from procap.methods.data_use import DataUse
from procap.methods.features import ClassWeights, FeatureBank, Head, accuracy
from procap.methods.method import MethodOptions
from procap.text import LabelSpace

STRENGTHS = (1e-4, 1e-2, 1.0, 1e2, 1e4, 1e6)
"""Inverse weights of the L2 penalty that are compared on validation images."""
ITERATIONS = 1000


class Baseline(ClassWeights):
    """What both baselines share: one view of each image, prepared as test images are, and no rule for new classes."""

    takes_steps = False
    augments = False
    uses = DataUse(names="none")
    knows_new_classes = False
    needs_every_class = True


class ProbeOptions(MethodOptions):
    strength: float = Field(
        1.0, gt=0, description="inverse weight of the L2 penalty, unless validation images choose one"
    )


class LinearProbe(Baseline):
    """Linear probe: logistic regression on frozen image features."""

    Options = ProbeOptions
    title = "Linear probe"
    selection = "validation"
    options: ProbeOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: ProbeOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        self.bias = nn.Parameter(torch.zeros(len(space.classnames)), requires_grad=False)

    @torch.no_grad()
    def fit(self, bank: FeatureBank) -> None:
        """Fit the rows for each strength, and keep those of the best validation accuracy, then likelihood."""
        search = len(bank.val_labels) > 0
        scores = {}
        for strength in STRENGTHS if search else (self.options.strength,):
            rows, bias = regress(bank.features[:, 0], bank.labels, len(self.rows), strength)
            scores[strength] = self._score(rows, bias, bank) if search else (0.0, 0.0)
            if scores[strength] == max(scores.values()):
                self.rows.copy_(rows)
                self.bias.copy_(bias)

    def _score(self, rows: Tensor, bias: Tensor, bank: FeatureBank) -> tuple[float, float]:
        """Return the accuracy on validation images, and their mean log-likelihood."""
        logits = F.linear(bank.val_features, rows, bias)
        return accuracy(logits, bank.val_labels), -float(F.cross_entropy(logits, bank.val_labels))

    def head(self, space: LabelSpace) -> Head:
        known = self.known(space)
        return partial(F.linear, weight=self.rows[known], bias=self.bias[known])


def regress(features: Tensor, labels: Tensor, classes: int, strength: float) -> tuple[Tensor, Tensor]:
    """Fit a logistic regression to features [N, E] and labels [N]; returns rows [C, E] and bias [C].

    A class without images gets a bias that is never the largest.
    """
    from sklearn.linear_model import LogisticRegression

    # Its objective sums over images, so that the penalty weighs less the more images there are.
    model = LogisticRegression(C=strength, max_iter=ITERATIONS)
    model.fit(features.cpu().double().numpy(), labels.cpu().numpy())
    rows, bias = (torch.from_numpy(values).to(features) for values in (model.coef_, model.intercept_))
    if len(model.classes_) == 2:
        # For two classes scikit-learn fits one row, the second logit: halves of either sign have the same softmax.
        rows, bias = torch.cat([-rows, rows]) / 2, torch.cat([-bias, bias]) / 2
    all_rows = features.new_zeros(classes, features.shape[1])
    # Not -inf: an evaluation refuses logits that are not finite.
    all_bias = features.new_full((classes,), torch.finfo(features.dtype).min)
    present = torch.from_numpy(model.classes_).to(labels)
    all_rows[present], all_bias[present] = rows, bias
    return all_rows, all_bias


class NearestMean(Baseline):
    """Nearest mean: cosines to the mean feature of each class."""

    title = "Nearest mean"
    selection = "-"

    @torch.no_grad()
    def fit(self, bank: FeatureBank) -> None:
        """Sum the normalised features of each class, which has the direction of their mean."""
        self.rows.index_add_(0, bank.labels, unit(bank.features[:, 0]))
