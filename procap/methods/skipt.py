"""SkipT: the upper blocks of both towers are trained, on the classes that are most similar to the images of a batch.

Source: Wu et al. 2025, "Skip Tuning: Pre-trained Vision-Language Models are Effective and Efficient Adapters
Themselves", section 3, and its public code. Learns 62,099,456 parameters on ViT-B/16.

The public code stores the states of all images that enter the first trained block before an epoch. Each image is
augmented once per epoch and used once in it, so here its states are computed in the step, which costs the same and
stores nothing. States of the class prompts never change; they are computed once.

Shapes: B images, C classes, K chosen classes, E joint embedding.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from procap.classifier import cosine_logits, unit
from procap.clip import CLIP
from procap.methods.method import TRANSFER_TASKS, Method, MethodOptions, Noise, PublicLayout, PublishedOptions
from procap.methods.overrides import WeightOverrides, upper_names
from procap.methods.prompts import ClassPrompts, check_blocks, template_prompts
from procap.plan import Plan
from procap.recipe import Recipe
from procap.teacher import text_bank
from procap.text import LabelSpace

TEMPLATES = {
    "imagenet-sketch": "a sketch of a {}.",
    "imagenet-a": "a bad photo of a {}.",
    "imagenet-r": "a rendition of a {}.",
    "caltech101": "itap of a {}.",
    "dtd": "itap of a {}.",
    "fgvc-aircraft": "a bright photo of a {}, a type of aircraft.",
    "food101": "a photo of the nice {}.",
    "oxford-flowers": "a close-up photo of a {}.",
    "oxford-pets": "a bad photo of a {}, a type of pet.",
    "stanford-cars": "a photo of the {}, a type of car.",
    "ucf101": "a photo of a {}, a type of sport.",
}
"""The public code's templates, where they differ from those of the data sets."""

SHORT = ("imagenet", "sun397", "food101")
"""Data sets that are trained for a quarter of the epochs."""

SMALLEST_CLASS = 4
"""With fewer images per class the public code draws batches of any classes."""

OWN_CLASS = 1e4
"""Similarity of an image to its own class, so that this comes first."""


class SkipTOptions(MethodOptions):
    first_block: int = Field(6, ge=0, description="first block (0-based) of both towers that is trained")
    top_ratio: float = Field(0.5, gt=0, le=1, description="share of the classes, the most similar, that is always used")
    max_top: int = Field(50, ge=1, description="most classes that are always used")
    decay: float = Field(0.3, gt=0, description="scale of the exponential decay over the other classes (lambda)")
    keep_labels: bool = Field(
        True, description="use the classes of all images of a batch; the published recipe does not, see `SkipT.loss`"
    )


class SkipT(Method):
    """SkipT (Wu et al. 2025): upper blocks of both towers, on the most similar classes."""

    Options = SkipTOptions
    vision_weights = "vision"
    title = "SkipT"
    groups = ()
    mini_lr = 1e-4
    # The public code saves both towers whole, with the embedding of all words.
    public_layout = PublicLayout(
        "learnable_params",
        {"vision": "image_encoder.{}", "text": "text_encoder.{}"},
        unused=("text_encoder.token_embedding.",),
    )
    published: ClassVar[PublishedOptions] = {"other": {"keep_labels": False}}
    options: SkipTOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: SkipTOptions, generator: torch.Generator) -> None:
        check_blocks(clip, clip.geometry.layers - 1, first_block=options.first_block)
        super().__init__(clip, space, options, generator)
        self.vision = WeightOverrides(clip.visual, upper_names(clip.visual, options.first_block, ("ln_post", "proj")))
        after = ("ln_final", "text_projection")
        self.text = WeightOverrides(clip.text, upper_names(clip.text, options.first_block, after))
        # One draw per rank of similarity for the whole training, as in the public code; a resumed run draws it again.
        self.uniform = torch.rand(len(space.classnames), generator=generator)

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 2e-5 (text) and 5e-6 (vision), batch 4 of one class, 20 epochs; few-shot 1e-5 and 40 epochs."""
        few_shot, transfer = task == "few-shot", task in TRANSFER_TASKS
        lr, vision_lr = (1e-5, None) if few_shot else (1e-5, 1e-6) if transfer else (2e-5, 5e-6)
        return Recipe(
            optimizer="sgd",
            lr=lr,
            vision_lr=vision_lr,
            epochs=(40 if few_shot else 20) // (4 if dataset in SHORT else 1),
            batch_size=4,
            batches="random" if 0 < shots < SMALLEST_CLASS else "class",
            warmup="none" if few_shot else "constant",
            warmup_lr=1e-8 if transfer else 1e-6,
        )

    def class_prompts(self, space: LabelSpace) -> ClassPrompts:
        return template_prompts(self.clip, space, template_of(space))

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        return Plan(weights=self.vision.weights()), Plan(weights=self.text.weights())

    def used_ranks(self, first: int) -> Tensor:
        """Return the ranks of similarity whose classes are used: the first ones, and those drawn at the start."""
        used = self.uniform < keep_odds(len(self.uniform), self.options)
        used[:first] = True
        return used.nonzero().flatten().to(self.clip.device)

    def chosen_classes(self, image: Tensor, labels: Tensor) -> Tensor:
        """Return the classes [K] that a step on image features [B, E] uses, in ascending order.

        Classes are ranked by their largest similarity to an image; how many are used depends on B.
        """
        # The classes of B images have the first B ranks at most.
        first = len(labels) if self.options.keep_labels else 0
        # Kept for each size of a batch, because without `drop_last` the last one is smaller.
        ranks = self.constant(f"ranks {first}", lambda: self.used_ranks(first))
        prototypes = self.constant("text", lambda: text_bank(self.clip, self.space, [template_of(self.space)]))
        similarity = unit(image.detach()) @ prototypes.t()
        similarity = similarity.scatter(1, labels[:, None], OWN_CLASS).amax(dim=0)
        return similarity.argsort(descending=True)[ranks].sort().values

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute the cross-entropy over the chosen classes.

        Without `keep_labels` the label of an image whose class is not chosen becomes the first chosen class, as in the
        public code. With batches of one class this cannot happen.
        """
        image_plan, text_plan = self.plans(self.prompts, noise)
        image = self._encode_batch(images, image_plan)
        # In float32, because bfloat16 would round similarities of different classes to the same number.
        with torch.autocast(image.device.type, enabled=False):
            chosen = self.chosen_classes(image, labels)
        text = self.clip.encode_text_from(self.options.first_block, self.prompts.tokenized, chosen, text_plan)
        # From [B, K]: where each label is among the chosen classes, 0 if it is not there.
        targets = (chosen == labels[:, None]).int().argmax(dim=1)
        return {"ce": F.cross_entropy(cosine_logits(image, text, self.scale()), targets)}


def keep_odds(classes: int, options: SkipTOptions) -> Tensor:
    """Compute the probability [C] that the class of each rank is used.

    It is 1 for the first ranks, then an exponential density, scaled to go from 1 to 0: so the rank after the first ones
    is always used and the last one never. A single rank after them has 0 / 0, which is never used either. With
    `top_ratio` 1 all classes are used, as in the public code, whatever `max_top` is.
    """
    if options.top_ratio == 1:
        return torch.ones(classes)
    top = min(math.ceil(options.top_ratio * classes), options.max_top)
    density = torch.exp(-torch.linspace(0, 5, classes - top) / options.decay) / options.decay
    if top < classes:
        density = (density - density.min()) / (density.max() - density.min())
    return torch.cat([torch.ones(top), density])


def template_of(space: LabelSpace) -> str:
    """Return the template of a data set's prompts."""
    return TEMPLATES.get(space.dataset, space.template)
