"""TDA: zero-shot logits, corrected by two caches of the test images so far; nothing is trained.

Source: Karmanov et al. 2024, "Efficient Test-Time Adaptation of Vision-Language Models", and its public code, which on
the variants of ImageNet averages 64 views of an image, and here has one. Learns 0 parameters.

Shapes: N images of a stream, B images of a part of it, M cached images, C classes, E joint embedding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from procap.classifier import OnlineClassifier, unit
from procap.methods.data_use import DataUse
from procap.methods.zeroshot import ZeroShot, ZeroShotOptions
from procap.text import LabelSpace

PUBLIC = {
    "imagenet": (2.0, 5.0),
    "imagenet-a": (2.0, 5.0),
    "imagenetv2": (1.0, 8.0),
    "imagenet-r": (1.0, 8.0),
    "imagenet-sketch": (2.363, 7.45),
    "caltech101": (5.0, 5.0),
    "dtd": (2.0, 3.0),
    "sun397": (2.0, 3.0),
    "eurosat": (4.0, 8.0),
    "fgvc-aircraft": (2.0, 2.0),
    "food101": (1.0, 1.0),
    "oxford-flowers": (1.0, 5.0),
    "oxford-pets": (2.0, 7.0),
    "stanford-cars": (1.0, 7.0),
    "ucf101": (3.0, 8.0),
}
"""`alpha` and `beta` of the public code by data set. It gives no rule, and reads no split but the test split."""
BLOCK = 256
"""Images whose votes are computed at once."""


class TDAOptions(ZeroShotOptions):
    """The options of TDA. The defaults are the public code's for ImageNet, which were not chosen on other data."""

    selection: Literal["none", "test"] = Field(
        "none",
        description="none: the same constants on all data; test: the public code's alpha and beta of each data set, "
        "presumably those with the highest test accuracy",
    )
    order: Literal["seed", "public"] = Field(
        "seed", description="of test images, by the run's seed; public: the public code's (seed 1, first data set)"
    )
    capacity: int = Field(3, ge=1, description="images per class in the positive cache")
    alpha: float = Field(2.0, ge=0, description="factor of the positive cache's votes")
    beta: float = Field(5.0, ge=0, description="how fast they fall with the distance")
    negative_capacity: int = Field(2, ge=1, description="images per class in the negative cache")
    negative_alpha: float = Field(0.117, ge=0, description="factor of the negative cache's votes")
    negative_beta: float = Field(1.0, ge=0, description="how fast they fall with the distance")
    lowest_entropy: float = Field(0.2, description="of an image in the negative cache: nats over log2(classes)")
    highest_entropy: float = Field(0.5, description="of an image in the negative cache: nats over log2(classes)")
    lowest_probability: float = Field(0.03, description="of a class against which an image in it votes")
    highest_probability: float = Field(1.0, description="of a class against which an image in it votes")

    def for_dataset(self, dataset: str) -> TDAOptions:
        """With `selection` "test", fill in the public code's constants for a data set; ImageNet's for unknown ones."""
        if self.selection == "none":
            return self
        alpha, beta = PUBLIC.get(dataset, PUBLIC["imagenet"])
        return self.model_copy(update={"alpha": alpha, "beta": beta})


def public_order(count: int, seed: int) -> Tensor:
    """Draw the order [N] in which the public code's loader has the images of its first data set; its seed is 1."""
    stream = torch.Generator().manual_seed(seed)
    # The loader draws a seed for its workers before that of its sampler.
    _, seed = torch.empty(2, dtype=torch.int64).random_(generator=stream).tolist()
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def find_exits(labels: Tensor, entropies: Tensor, admitted: Tensor, capacity: int) -> Tensor:
    """Find for each image [N] the position of the first one that no longer meets it in the cache.

    An admitted image enters under its label, into a full class in place of the one with the highest entropy if its own
    is lower. It meets itself. Its exit is N if it stays, its own position if it never enters.
    """
    values, exits = entropies.tolist(), list(range(len(labels)))
    cached = defaultdict[int, list[int]](list)
    for image, (label, is_admitted) in enumerate(zip(labels.tolist(), admitted.tolist(), strict=True)):
        images = cached[label]
        if not is_admitted or (len(images) == capacity and values[image] >= values[images[-1]]):
            continue
        if len(images) == capacity:
            exits[images.pop()] = image
        images.append(image)
        images.sort(key=values.__getitem__)
        exits[image] = len(exits)
    return torch.tensor(exits)


def count_votes(images: Tensor, exits: Tensor, marks: Tensor, beta: float) -> Tensor:
    """Add up the votes [N, C] that normalised images [N, E] get from those that they meet in a cache.

    exits [N]: see `find_exits`. marks [N, C] bool: the classes for which an image votes, by exp(-beta * (1 - cosine)).
    """
    votes = torch.zeros(marks.shape, device=images.device)
    positions = torch.arange(len(images), device=images.device)
    # Which images meet does not depend on votes: a block is a product with all that are in the cache during it.
    for block in positions.split(BLOCK):
        keys = positions[(positions <= block[-1]) & (exits > block[0])]
        meets = (keys <= block[:, None]) & (block[:, None] < exits[keys])
        affinity = torch.exp(-beta * (1 - images[block] @ images[keys].t())) * meets
        votes[block] = affinity @ marks[keys].float()
    return votes


def tda_logits(features: Tensor, text: Tensor, scale: Tensor, options: TDAOptions) -> Tensor:
    """Compute logits [N, C] of the features [N, E] of a stream, in its order, with normalised text [C, E]."""
    images, classes = unit(features), len(text)
    logits = scale * images @ text.t()
    log_probabilities = logits.log_softmax(dim=1)
    probabilities, labels = log_probabilities.exp(), logits.argmax(dim=1)
    entropies = -(probabilities * log_probabilities).sum(dim=1)
    # As in the public code: nats over bits. A single class has the share 0 / 0, which no limits admit.
    shares = entropies / math.log2(classes) if classes > 1 else torch.full_like(entropies, math.nan)
    unsure = (options.lowest_entropy < shares) & (shares < options.highest_entropy)
    likely = (options.lowest_probability < probabilities) & (probabilities < options.highest_probability)
    is_predicted = labels[:, None] == torch.arange(classes, device=labels.device)
    # The decisions are made on the host, from one copy.
    on_host = labels.cpu(), entropies.cpu()
    entered = find_exits(*on_host, torch.ones(len(labels), dtype=torch.bool), options.capacity).to(labels.device)
    logits = logits + options.alpha * count_votes(images, entered, is_predicted, options.beta)
    entered = find_exits(*on_host, unsure.cpu(), options.negative_capacity).to(labels.device)
    return logits - options.negative_alpha * count_votes(images, entered, likely, options.negative_beta)


class TDA(ZeroShot):
    """TDA (Karmanov et al. 2024): caches of test images, nothing is trained."""

    Options = TDAOptions
    title = "TDA"
    groups = ("test-time",)
    uses = DataUse(labelled="none", unlabelled="test")
    options: TDAOptions

    @torch.no_grad()
    def classifier(self, space: LabelSpace | None = None) -> OnlineClassifier:
        space = space or self.space
        text, options = super().classifier(space).class_features, self.options.for_dataset(space.dataset)
        head = partial(tda_logits, text=text, scale=self.scale(), options=options)
        classifier = OnlineClassifier(self.clip, head, len(text))
        classifier.order = public_order if self.options.order == "public" else None
        return classifier
