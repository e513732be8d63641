"""Tip-Adapter: few-shot features vote for their classes, zero-shot CLIP adds its logits; Tip-Adapter-F trains them.

Source: Zhang et al. 2022, "Tip-Adapter: Training-free Adaption of CLIP for Few-shot Classification", sections 3.1
and 3.2, and its public code. Tip-Adapter-F learns 512 parameters per training image on ViT-B/16.

Shapes: N training images, V views of each, M validation images, B images, C classes, E joint embedding.
"""

from __future__ import annotations

from functools import partial

import torch
from pydantic import Field
from torch import Tensor, nn

from procap.classifier import unit
from procap.clip import CLIP
from procap.methods.features import FeatureBank, FeatureMethod, accuracy
from procap.methods.method import name_options
from procap.methods.options import SelectionOptions, ViewOptions
from procap.recipe import Recipe
from procap.text import LabelSpace

BETAS, ALPHAS = 200, 20
"""Values of beta and alpha that the search compares."""
SMALLEST = 0.1
PUBLISHED = {
    "caltech101": (3, 12, 5), "dtd": (2, 13, 13), "eurosat": (2, 12, 10), "fgvc-aircraft": (5, 30, 30),
    "food101": (1.17, 10, 10), "oxford-flowers": (10, 50, 50), "oxford-pets": (1.17, 7, 3),
    "stanford-cars": (3, 20, 10), "sun397": (1.17, 12, 10), "ucf101": (3, 7, 3), "imagenet": (1.17, 7, 3),
}  # fmt: skip
"""alpha, and the ends of the search for beta and alpha, of the public code by data set."""


class TipAdapterOptions(SelectionOptions, ViewOptions):
    alpha: float = Field(1.17, gt=0, description="weight of the votes against the zero-shot logits")
    beta: float = Field(1.0, gt=0, description="how fast a vote falls with the distance from the image")
    beta_end: float = Field(7.0, gt=SMALLEST, description="end of the search for beta, which starts at 0.1")
    alpha_end: float = Field(3.0, gt=SMALLEST, description="end of the search for alpha, which starts at 0.1")
    views: int = Field(10, ge=1, description="random views of each image, whose features are averaged")


def cache_logits(features: Tensor, text: Tensor, keys: Tensor, votes: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Add to zero-shot logits the votes of the training images for their classes.

    text [C, E] scaled, keys [N, E]; votes [N, C]: one-hot, zero for an image of no class of the head.
    """
    image = unit(features)
    return image @ text.t() + alpha * sum_votes(image @ keys.t(), votes, beta)


def sum_votes(affinities: Tensor, votes: Tensor, beta: Tensor | float) -> Tensor:
    """Sum the votes [N, C] with weights that fall with the distance, 1 - affinities [B, N]; returns [B, C]."""
    return (-beta * (1 - affinities)).exp() @ votes


class TipAdapter(FeatureMethod):
    """Tip-Adapter (Zhang et al. 2022): votes of few-shot features, nothing is trained."""

    Options = TipAdapterOptions
    title = "Tip-Adapter"
    varying_rows = ("keys", "key_labels", "best_keys")
    selection = "validation"
    takes_steps = False
    published = name_options(("alpha", "beta_end", "alpha_end"), PUBLISHED)
    options: TipAdapterOptions
    key_labels: Tensor
    alpha: Tensor
    beta: Tensor

    def __init__(self, clip: CLIP, space: LabelSpace, options: TipAdapterOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        self.keys = nn.Parameter(torch.zeros(0, clip.geometry.embed_dim), requires_grad=False)
        self.register_buffer("key_labels", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("alpha", torch.tensor(options.alpha))
        self.register_buffer("beta", torch.tensor(options.beta))

    @torch.no_grad()
    def fit(self, bank: FeatureBank) -> None:
        """Store the normalised mean feature of each training image as a key."""
        # A new tensor, because its rows are as many as images (`varying_rows`); Tip-Adapter-F trains it.
        self.keys = nn.Parameter(unit(bank.features.mean(dim=1)), requires_grad=self.keys.requires_grad)
        self.key_labels = bank.labels.clone()

    def head(self, space: LabelSpace) -> partial[Tensor]:
        """Return the head, in which an image votes in no class that it does not show, and new classes get no votes."""
        # A new class has position -1, which no label equals.
        votes = (self.key_labels[:, None] == self.known(space)).float()
        # The public code has a literal 100 here, which is the scale of OpenAI's models.
        text = self.scale() * self.text(space)
        return partial(cache_logits, text=text, keys=self.keys, votes=votes, alpha=self.alpha, beta=self.beta)

    @torch.no_grad()
    def finish(self, bank: FeatureBank) -> None:
        """Set alpha and beta to the pair with the highest validation accuracy, the first of equals."""
        if not len(bank.val_labels):
            return
        image, parts = unit(bank.val_features), self.head(self.space).keywords
        zero_shot, affinities = image @ parts["text"].t(), image @ self.keys.t()
        scores = {}
        for beta in search_values(self.options.beta_end, BETAS):
            votes = sum_votes(affinities, parts["votes"], beta)
            for alpha in search_values(self.options.alpha_end, ALPHAS):
                scores[alpha, beta] = accuracy(zero_shot + alpha * votes, bank.val_labels)
        # `max` keeps the first of equals; beta is the outer loop, as in the public code.
        best_alpha, best_beta = max(scores, key=lambda pair: scores[pair])
        self.alpha.fill_(best_alpha)
        self.beta.fill_(best_beta)


def search_values(end: float, count: int) -> list[float]:
    """Return `count` values from 0.1 on, evenly spaced; `end` itself is left out."""
    return [SMALLEST + i * (end - SMALLEST) / count for i in range(count)]


class TipAdapterF(TipAdapter):
    """Tip-Adapter-F (Zhang et al. 2022): Tip-Adapter with trained features.

    The keys are trained. With the public rule, those of the epoch with the best test accuracy count.

    best_keys, best_accuracy: of the epochs so far; tensors of the method, so that a resumed training has them.
    """

    title = "Tip-Adapter-F"
    takes_steps = True
    best_keys: Tensor
    best_accuracy: Tensor

    def __init__(self, clip: CLIP, space: LabelSpace, options: TipAdapterOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        self.keys.requires_grad_()
        if options.selection == "test":
            self.register_buffer("best_keys", torch.zeros_like(self.keys))
            self.register_buffer("best_accuracy", torch.tensor(-1.0))

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return AdamW 1e-3, batch 256, 20 epochs and 100 on EuroSAT; the public code is for few-shot only."""
        changes = {"optimizer": "adamw", "eps": 1e-4, "weight_decay": 0.01, "schedule": "step"}
        changes["epochs"] = 100 if dataset == "eurosat" else 20
        return super().recipe(task, shots, dataset).model_copy(update=changes)

    @torch.no_grad()
    def end_epoch(self, epoch: int, recipe: Recipe) -> None:
        # With the alpha and beta of the start, as in the public code: `finish` searches others afterwards.
        if self.options.selection == "test" and (score := self._test_accuracy(self.bank)) > self.best_accuracy:
            self.best_accuracy.fill_(score)
            self.best_keys = self.keys.detach().clone()

    @torch.no_grad()
    def finish(self, bank: FeatureBank) -> None:
        """Choose alpha and beta for the trained keys; by the public rule only if that has a higher test accuracy."""
        if self.options.selection == "validation":
            return super().finish(bank)
        self.keys.copy_(self.best_keys)
        start = self.alpha.clone(), self.beta.clone()
        super().finish(bank)
        if self._test_accuracy(bank) <= self.best_accuracy:
            self.alpha.copy_(start[0])
            self.beta.copy_(start[1])

    def _test_accuracy(self, bank: FeatureBank) -> float:
        return accuracy(self.head(self.space)(bank.test_features), bank.test_labels)
