"""Inference with a trained method: prompts and class features are computed once, then images become logits.

Shapes: B images, C classes, E joint embedding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

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
    """

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


class HeadClassifier(Classifier):
    """Images [B, 3, H, W] to logits [B, C] by a head on the frozen image tower's features."""

    def __init__(self, clip: CLIP, head: Callable[[Tensor], Tensor], num_classes: int) -> None:
        """head: maps features [B, E], not normalised, to logits [B, C] in float32; a copy is kept."""
        self.clip, self.image_plan, self.num_classes = clip, NO_CHANGE, num_classes
        self.head = copy.deepcopy(head)
        if isinstance(self.head, nn.Module):
            self.head.eval()

    def logits(self, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):
            return self.head(features.float())


class SampledClassifier:
    """Images [B, 3, H, W] to log-probabilities [B, C]: the logarithm of the mean of several classifiers' probabilities.

    They serve as logits, because their softmax is that mean. The image tower runs once for each classifier.
    """

    def __init__(self, classifiers: Sequence[Classifier]) -> None:
        self.classifiers = tuple(classifiers)
        self.num_classes = self.classifiers[0].num_classes

    def __call__(self, images: Tensor) -> Tensor:
        with torch.inference_mode():
            logs = torch.stack([torch.log_softmax(classifier(images), dim=1) for classifier in self.classifiers])
            return torch.logsumexp(logs, dim=0) - math.log(len(logs))
