"""TPT: CoOp's context, tuned for each test image alone until random views of it get the same certain prediction.

Source: Shu et al. 2022, "Test-Time Prompt Tuning for Zero-Shot Generalization", and its public code. Learns n_ctx
vectors of the text width for each image: 2,048 parameters with 4 tokens on ViT-B/16.

Shapes: B test images, V views of each, K of them kept, C classes, P context tokens, D text width, E joint embedding.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from procap.classifier import Classifier, mean_log_probability, unit
from procap.methods.coop import ContextMethod, ContextOptions, CoOp
from procap.methods.data_use import DataUse
from procap.methods.method import PublicLayout, PublishedOptions
from procap.methods.prompts import context_plan
from procap.plan import NO_CHANGE
from procap.recipe import Recipe
from procap.text import LabelSpace

DECAY = 0.01
LOSS_SCALE = 1024.0
"""Keeps gradients in the range of fp16. The public code begins with 1,000; a power of two changes no bit of others."""


class TPTOptions(ContextOptions):
    """The options of TPT: one setting for all data."""

    views: int = Field(64, ge=2, description="views of a test image: the plain one, and random ones")
    share: float = Field(0.1, gt=0, le=1, description="of the views, those with the lowest entropies, that count")
    steps: int = Field(1, ge=1, description="optimizer steps for each image")
    rate: float = Field(5e-3, gt=0, description="learning rate of these steps")


def entropies(log_probabilities: Tensor) -> Tensor:
    """Compute the entropies [...] of log-probabilities [..., C], in nats; a probability of zero adds nothing."""
    finite = log_probabilities.clamp(min=torch.finfo(log_probabilities.dtype).min)
    return -(finite.exp() * finite).sum(dim=-1)


def choose_views(logits: Tensor, share: float) -> Tensor:
    """Choose the share of the views whose logits [B, V, C] have the lowest entropies: positions [B, K]."""
    count = max(1, int(share * logits.shape[1]))
    return entropies(logits.log_softmax(dim=2)).argsort(dim=1, stable=True)[:, :count]


def marginal_entropy(logits: Tensor) -> Tensor:
    """Compute the entropy [B] of the mean probabilities over the views of logits [B, K, C]."""
    return entropies(mean_log_probability(logits.transpose(0, 1)))


class TPTClassifier(Classifier):
    """Images [B, V, 3, H, W] to logits [B, C] of their first views, each under a context tuned for it.

    Images [B, 3, H, W] have one view, which is all that the context is then tuned on.
    """

    keeps_class_features = False

    def __init__(self, method: TPT, space: LabelSpace) -> None:
        self.clip, self.image_plan, self.num_classes = method.clip, NO_CHANGE, len(space.classnames)
        self.options, self.views = method.options, method.options.views
        self.prompts = method.prompts_of(space).tokenized
        self.context, self.scale = method.context.detach().clone(), method.scale()

    def encode(self, images: Tensor) -> Tensor:
        """Compute the image tower's features [B, V, E]."""
        images = images if images.dim() == 5 else images[:, None]
        return self.clip.encode_image(images.flatten(0, 1)).unflatten(0, images.shape[:2])

    def logits(self, features: Tensor) -> Tensor:
        # Callers record no gradient, and are in inference mode, whose tensors no backward pass may keep.
        with torch.inference_mode(False), torch.enable_grad():
            features = unit(features.clone())
            contexts = self.tune(features)
            with torch.no_grad():
                return self.compare(features[:, :1], contexts)[:, 0]

    def tune(self, features: Tensor) -> Tensor:
        """Tune the context for each image by its normalised features [B, V, E]: [B, 1, P, D]."""
        contexts = self.context.repeat(len(features), 1, 1, 1).requires_grad_()
        # Elementwise, so that one optimizer takes the steps of all images.
        optimizer = torch.optim.AdamW([contexts], self.options.rate, weight_decay=DECAY)
        chosen = None
        for _ in range(self.options.steps):
            logits = self.compare(features if chosen is None else chosen, contexts)
            if chosen is None:
                kept = choose_views(logits.detach(), self.options.share)[:, :, None]
                chosen, logits = features.take_along_dim(kept, 1), logits.take_along_dim(kept, 1)
            (gradient,) = torch.autograd.grad(LOSS_SCALE * marginal_entropy(logits).sum(), contexts)
            contexts.grad = gradient / LOSS_SCALE
            optimizer.step()
        return contexts.detach()

    def compare(self, features: Tensor, contexts: Tensor) -> Tensor:
        """Compute logits [B, V, C] of normalised features [B, V, E] under the context of each image [B, 1, P, D]."""
        text = self.clip.encode_text(self.prompts, context_plan(contexts))
        with torch.autocast(features.device.type, enabled=False):
            return self.scale * features @ unit(text).transpose(1, 2)


class TPT(ContextMethod):
    """TPT (Shu et al. 2022): CoOp's context, tuned for each test image; nothing is trained."""

    Options = TPTOptions
    title = "TPT"
    groups = ("test-time",)
    selection = "-"
    uses = DataUse(labelled="none", unlabelled="test")
    # Its public code saves nothing.
    public_layout: ClassVar[PublicLayout | None] = None
    options: TPTOptions

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return a recipe of zero epochs: there is nothing to train."""
        # Eight images of 64 views at a time. Every recipe has a rate; without epochs it is not read.
        return Recipe(lr=2e-3, epochs=0, batch_size=32, test_batch_size=512)

    def test_views(self, dataset: str) -> tuple[int, bool]:
        """Return the number of views, and that AugMix changes those of all data but ImageNet and its variants."""
        return self.options.views, not dataset.startswith("imagenet")

    def classifier(self, space: LabelSpace | None = None) -> Classifier:
        return TPTClassifier(self, space or self.space)


class TPTCoOp(TPT):
    """TPT (Shu et al. 2022) from CoOp's trained context."""

    title = "TPT (CoOp)"
    selection = "last step"
    uses = DataUse(unlabelled="test")
    published: ClassVar[PublishedOptions] = CoOp.published
    public_layout = ContextMethod.public_layout
    mini_lr = 4e-2

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return CoOp's recipe."""
        return CoOp.recipe(task, shots, dataset).model_copy(update={"test_batch_size": 512})
