"""The base class of methods that learn from image features, which the frozen image tower computes once.

Shapes: N training images, V views of each, M validation images, T test images, B images of a batch, C classes, P
prompts of a class, E joint embedding.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import Tensor, nn

from procap.classifier import Classifier, HeadClassifier, cosine_logits
from procap.clip import CLIP
from procap.errors import UserError
from procap.methods.method import Method, Noise
from procap.methods.options import ViewOptions
from procap.methods.prompts import ClassPrompts
from procap.methods.zeroshot import ENSEMBLE
from procap.plan import NO_CHANGE, Plan
from procap.recipe import OF_EVALUATION, Recipe
from procap.teacher import text_bank, text_features
from procap.text import LabelSpace

Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class FeatureBank:
    """Frozen image features of a run's few-shot samples, float32 and not normalised.

    features [N, V, E], labels [N]: training images. val_features [M, E], val_labels [M]: validation images, at most
        four of each class; M is 0 for a data set without a val split, and if the method does not choose by them. For
        the public rule of a method all of val, or of test without a val split.
    test_features [T, E], test_labels [T]: test images, for the public rule of a method; T is 0 otherwise.
    """

    features: Tensor
    labels: Tensor
    val_features: Tensor
    val_labels: Tensor
    test_features: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    test_labels: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))


class FeatureMethod(Method):
    """A method that leaves the blocks of both towers unchanged and learns a head on their features.

    A training encodes the views of its images, calls `fit`, takes the recipe's steps on batches of features if a
    parameter requires a gradient, and calls `finish`. `head` defines training and inference alike.

    takes_steps: `fit` leaves a parameter that requires a gradient.
    augments: views are random, as the recipe says, and as many as `fixed_views`, or as epochs. Otherwise there is one
        view, prepared as test images are, and with `mirrors` its mirror image as a second one.
    pools_views: a batch has any views of any images, and an epoch as many steps as without. Otherwise all features
        of an epoch are of one view.
    bank: what a training learns from, from `fit` on.
    """

    changes: ClassVar[tuple[str, ...]] = ()
    groups: ClassVar[tuple[str, ...]] = ("adapters",)
    takes_steps: ClassVar[bool] = True
    augments: ClassVar[bool] = True
    mirrors: ClassVar[bool] = False
    pools_views: ClassVar[bool] = False
    bank: FeatureBank

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return one pass over the images, without steps."""
        recipe = Recipe(lr=1e-3, epochs=1, batch_size=256, warmup="none", drop_last=False)
        # The crops of Tip-Adapter's public code, larger than RandomResizedCrop's by default.
        return recipe.model_copy(update={"crop_scale": (0.5, 1.0)}) if cls.augments else recipe

    @classmethod
    def unread_fields(cls, options: BaseModel) -> set[str]:
        # A view of each image for each epoch is all that a closed form takes from a recipe.
        of_images = {"epochs", "augmentation", "crop_scale", "flip", "colour_jitter", "rotation"}
        unread = {"vision_lr", "batches"} if cls.takes_steps else {*Recipe.model_fields} - of_images - {OF_EVALUATION}
        if not cls.augments:
            unread |= of_images - {"epochs"}
        has_epochs = cls.takes_steps or (cls.augments and not cls.fixed_views(options))
        return unread if has_epochs else unread | {"epochs"}

    @classmethod
    def fixed_views(cls, options: BaseModel) -> int:
        """Return the number of random views that epochs use in turn; 0: each epoch has a new one."""
        return options.views if isinstance(options, ViewOptions) else 0

    def image_plan(self) -> Plan:
        """Return what the image tower computes the features of a training under."""
        return NO_CHANGE

    def fit(self, bank: FeatureBank) -> None:
        """Set what does not need the recipe's steps: a closed form, initial values, or all by a loop over `bank`."""

    def finish(self, bank: FeatureBank) -> None:
        """Set what is chosen after the last step."""

    @abstractmethod
    def head(self, space: LabelSpace) -> Head:
        """Return the map of image features [B, E], not normalised, to logits [B, C] of the classes of `space`.

        A module, or a partial function whose tensors are keyword arguments, so that a classifier can copy them. Other
        spaces than that of the training have new classes only if `knows_new_classes`.
        """

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        return NO_CHANGE, NO_CHANGE

    def templates(self, space: LabelSpace) -> tuple[str, ...]:
        """Return the prompts of a class: the data set's template, on ImageNet the seven of CLIP."""
        return ENSEMBLE if space.dataset == "imagenet" else (space.template,)

    def text(self, space: LabelSpace) -> Tensor:
        """Compute class features [C, E], normalised: the mean over normalised `templates`."""
        if space == self.space:
            return self.constant("text", lambda: text_bank(self.clip, space, self.templates(space)))
        return text_bank(self.clip, space, self.templates(space))

    def prompt_features(self, space: LabelSpace, *, as_written: bool = False) -> Tensor:
        """Compute the features [P, C, E] of `templates` for each class, not normalised.

        as_written: names keep their underscores, as in some public code.
        """

        def encode() -> Tensor:
            names = space.classnames
            texts = [
                [t.format(name) for name in names] if as_written else space.prompts(t) for t in self.templates(space)
            ]
            return torch.stack([text_features(self.clip, prompts) for prompts in texts])

        return self.constant("prompts", encode) if space == self.space else encode()

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute the cross-entropy of a global batch; `images` are its features [B, E]."""
        # As in `HeadClassifier`: a head computes in float32 in training and inference alike.
        with torch.autocast(images.device.type, enabled=False):
            return {"ce": F.cross_entropy(self.head(self.space)(images), labels)}

    @torch.no_grad()
    def classifier(self, space: LabelSpace | None = None) -> Classifier:
        space = space or self.space
        new = self.known(space) < 0
        if not self.knows_new_classes and new.any():
            name = space.classnames[int(new.nonzero()[0])]
            raise UserError(f"{type(self).__name__} has no rule for classes that it did not learn, such as '{name}'")
        return HeadClassifier(self.clip, self.head(space), len(space.classnames))


class ClassWeights(FeatureMethod):
    """A method with E weights for each class, which are compared with features by their cosine.

    rows: the weights [C, E] of the classes trained on. A new class has its class feature.
    """

    def __init__(self, clip: CLIP, space: LabelSpace, options: BaseModel, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        weights = torch.zeros(len(space.classnames), clip.geometry.embed_dim)
        # Without gradients a training takes no steps: `fit` does all of it.
        self.rows = nn.Parameter(weights, requires_grad=self.takes_steps)

    def weights_of(self, space: LabelSpace) -> Tensor:
        """Return the weights [C, E] of the classes of `space`, for new ones their class features."""
        if space.classnames == self.space.classnames:
            return self.rows
        known = self.known(space)
        weights = self.rows.detach()[known]
        return weights if (known >= 0).all() else torch.where((known >= 0)[:, None], weights, self.text(space))

    def head(self, space: LabelSpace) -> Head:
        return partial(cosine_logits, text=self.weights_of(space), scale=self.scale())


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Compute the share of logits [M, C] whose largest entry is at the label, in [0, 1]."""
    return float((logits.argmax(dim=1) == labels).double().mean())
