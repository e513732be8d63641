"""Inference with a trained method: prompts and class features are computed once, then images become logits.

Shapes: B images, C classes, E joint embedding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from procap.plan import NO_CHANGE, Plan

if TYPE_CHECKING:
    from procap.clip import CLIP


def unit(features: Tensor) -> Tensor:
    """Scale rows of `features` [..., E] to length one, in float32; no epsilon, as in CLIP."""
    features = features.float()
    return features / features.norm(dim=-1, keepdim=True)


def cosine_logits(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """Compute `scale * cos(image, text)` of image features [B, E] and text features [C, E]; [B, C] in float32.

    Autocast is disabled: at CLIP's scale of 100 bfloat16 would round logits near 25 to steps of 0.125.
    """
    with torch.autocast(image.device.type, enabled=False):
        return scale.float() * unit(image) @ unit(text).t()


class Classifier:
    """Images [B, 3, H, W] to logits [B, C] under fixed prompts and class names; draws no random number.

    A snapshot: training the method further does not change it. Works under autocast, never records gradients.

    keeps_class_features: they are the same for all images.
    views: of each image; with several, it classifies images [B, views, 3, H, W], whose first view is the plain one.
    score_name: of `score`, its own score of images of unknown classes; empty: the highest probability (MCM).
    """

    keeps_class_features: ClassVar[bool] = True
    score_name: ClassVar[str] = ""
    views: int = 1

    def __init__(
        self, clip: CLIP, image_plan: Plan, class_features: Tensor, scale: Tensor, adapter: nn.Module | None = None
    ) -> None:
        """`class_features` [C, E] of any length (stored normalised); `scale` multiplies the cosine (CLIP: 100).

        adapter: maps the image features [B, E] before they are compared; a copy is kept.
        The bias of a CLIP trained with a sigmoid is added to the logits.
        """
        self.clip = clip
        self.image_plan = image_plan.snapshot()
        self.class_features = unit(class_features.detach())
        self.scale = scale.detach().float().clone()
        self.num_classes = class_features.shape[0]
        self.adapter = copy.deepcopy(nn.Identity() if adapter is None else adapter).requires_grad_(False).eval()

    def __call__(self, images: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.logits(self.encode(images))

    def encode(self, images: Tensor) -> Tensor:
        """Compute the image tower's features [B, E] of images [B, 3, H, W]."""
        return self.clip.encode_image(images, self.image_plan)

    def logits(self, features: Tensor) -> Tensor:
        """Compute logits [B, C] of image features [B, E] that `encode` returned."""
        features = self.adapter(features)
        with torch.autocast(features.device.type, enabled=False):
            logits = self.scale * unit(features) @ self.class_features.t()
            return logits if self.clip.logit_bias is None else logits + self.clip.logit_bias

    def score(self, features: Tensor) -> Tensor:
        """Compute how well images fit the classes [B], higher for known ones, if there is a `score_name`."""
        raise NotImplementedError


class HeadClassifier(Classifier):
    """Images [B, 3, H, W] to logits [B, C] by a head on the image tower's features."""

    def __init__(
        self, clip: CLIP, head: Callable[[Tensor], Tensor], num_classes: int, image_plan: Plan = NO_CHANGE
    ) -> None:
        """head: maps features [B, E], not normalised, to logits [B, C] in float32; a copy is kept."""
        self.clip, self.image_plan, self.num_classes = clip, image_plan.snapshot(), num_classes
        # A partial is copied with its tensors; callers disable gradients, because a tensor with a graph has no copy.
        self.head = copy.deepcopy(head)
        if isinstance(self.head, nn.Module):
            self.head.eval()

    def logits(self, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):
            return self.head(features.float())


class OnlineClassifier(HeadClassifier):
    """Test images, one after the other, to logits that depend on the images before them.

    `logits` gets features [N, E] of a whole stream in its order, from the same initial state in each call: an
    evaluation calls it once with all images of a target, in an order that is drawn from the run's seed.
    order: makes a different order, positions [N], from the number of images and the run's seed.
    """

    order: Callable[[int, int], Tensor] | None = None


class AveragedClassifier(Classifier):
    """Images [B, 3, H, W] to the mean logits [B, C] of several classifiers, each of which runs its own image tower.

    probabilities: to the logarithm of their mean probability instead, whose softmax is that mean.
    """

    def __init__(self, members: Sequence[Classifier], *, probabilities: bool) -> None:
        self.members, self.probabilities = members, probabilities
        # Pictures and exports read `image_plan`, which is one tower's only: the last member's, ReBaPL's newest sample.
        self.clip, self.image_plan, self.num_classes = members[0].clip, members[-1].image_plan, members[0].num_classes

    def encode(self, images: Tensor) -> Tensor:
        # [B, S, E] for S members: the images stay in front.
        return torch.stack([member.encode(images) for member in self.members], dim=1)

    def logits(self, features: Tensor) -> Tensor:
        pairs = zip(self.members, features.unbind(dim=1), strict=True)
        # [S, B, C].
        logits = torch.stack([member.logits(part) for member, part in pairs])
        return mean_log_probability(logits) if self.probabilities else logits.mean(dim=0)


def mean_log_probability(logits: Tensor) -> Tensor:
    """Compute the logarithm of the mean probability [B, C] over the samples of logits [S, B, C]."""
    return logits.log_softmax(dim=2).logsumexp(dim=0) - math.log(len(logits))
