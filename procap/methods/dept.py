"""DePT: a linear head with its own scale and shift of the features trains next to the similarities of a prompt method.

Source: Zhang et al. 2024, "DePT: Decoupled Prompt Tuning", section 3, and the behaviour of its public code. Learns
2,048 parameters, and 513 per class, more than the prompt method.

Shapes: B images, C classes, E joint embedding.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field
from torch import Tensor, nn

from procap.classifier import Classifier, HeadClassifier, cosine_logits
from procap.clip import CLIP
from procap.initialisation import linear
from procap.methods.coop import CONTEXT_NAMES, ContextMethod, ContextOptions
from procap.methods.maple import MAPLE_NAMES, MaPLe, MaPLeOptions
from procap.methods.method import Method, Noise, PublicLayout, PublishedOptions
from procap.plan import Plan
from procap.recipe import Recipe
from procap.text import LabelSpace

HEAD_RATE = 6.5
"""Learning rate of the new layers, times that of the prompts; the warm-up rate is the same for both."""
HEAD_NAMES = {"image_film": "film_lp_img.{}", "text_film": "film_lp_text.{}", "head": "linear_probe_proj.{}"}


def make_film(width: int) -> nn.ParameterDict:
    """Make a scale and a shift of every channel."""
    return nn.ParameterDict({"scale": torch.ones(width), "bias": torch.zeros(width)})


class Decoupled(Method):
    """What DePT adds to a prompt method, as a base class before that of the method.

    Where all names are of training classes, inference adds both heads' logits. With a new class among them, all have
    the logits of the similarities alone, because those of the linear head are on a scale of their own.
    """

    # In place of MaPLe's options for transfer: DePT's scripts have depth 9 for every task.
    published: ClassVar[PublishedOptions] = {}
    options: DePTOptions | DePTMaPLeOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: BaseModel, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        embed = clip.geometry.embed_dim
        self.image_film, self.text_film = make_film(embed), make_film(embed)
        self.head = linear(embed, len(space.classnames), generator)

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.0035, batch 4, 10 epochs; the public code is for base-to-novel and transfer only."""
        return Recipe(optimizer="sgd", lr=0.0035, epochs=10, batch_size=4)

    def lr_scales(self) -> dict[str, float]:
        return {name: HEAD_RATE for name, _ in self.named_parameters() if name.partition(".")[0] in HEAD_NAMES}

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute both cross-entropies; the linear head's is over the images and the text features of their classes."""
        image, text = self.features(images, noise)
        with torch.autocast(image.device.type, enabled=False):
            # Features that are not normalised: first those of the texts [B, E], then those of the images, [2 B, E].
            films = (self.text_film, text.float()[labels]), (self.image_film, image.float())
            rows = torch.cat([film["scale"] * features + film["bias"] for film, features in films])
            linear_loss = F.cross_entropy(self.head(rows), labels.repeat(2))
        similarity_loss = F.cross_entropy(cosine_logits(image, text, self.scale()), labels)
        weight = self.options.head_weight
        return {"ce": (1 - weight) * similarity_loss, "ce_linear": weight * linear_loss}

    def make_classifier(self, image_plan: Plan, text: Tensor, space: LabelSpace) -> Classifier:
        known = self.known(space)
        if (known < 0).any():
            return super().make_classifier(image_plan, text, space)
        # The scale and shift of the head's input are merged into it.
        rows, bias = self.head.weight[known], self.head.bias[known]
        linear_head = {"rows": rows * self.image_film["scale"], "bias": bias + rows @ self.image_film["bias"]}
        head = partial(decoupled_logits, text=text, scale=self.scale(), weight=self.options.head_weight, **linear_head)
        return HeadClassifier(self.clip, head, len(text), image_plan)


def decoupled_logits(
    features: Tensor, text: Tensor, scale: Tensor, rows: Tensor, bias: Tensor, weight: float
) -> Tensor:
    """Add cosine logits to `text` [C, E] and linear ones by rows [C, E] and bias [C], whose share is `weight`."""
    return (1 - weight) * cosine_logits(features, text, scale) + weight * F.linear(features, rows, bias)


HEAD_WEIGHT = Field(0.7, ge=0, le=1, description="weight of the linear head, out of 1, in the loss and in inference")


class DePTOptions(ContextOptions):
    n_ctx: int = Field(16, ge=1, description="learned context tokens; as many as ctx_init has words where it has any")
    ctx_init: str = Field("", description="words to start from; empty draws N(0, 0.02)")
    head_weight: float = HEAD_WEIGHT


class DePT(Decoupled, ContextMethod):
    """DePT (Zhang et al. 2024) on CoOp: a linear head next to the similarities."""

    Options = DePTOptions
    title = "DePT (CoOp)"
    mini_lr = 2.5e-3
    public_layout = PublicLayout("PromptLearner", CONTEXT_NAMES | HEAD_NAMES)
    options: DePTOptions


class DePTMaPLeOptions(MaPLeOptions):
    head_weight: float = HEAD_WEIGHT


class DePTMaPLe(Decoupled, MaPLe):
    """DePT (Zhang et al. 2024) on MaPLe: a linear head next to the similarities."""

    Options = DePTMaPLeOptions
    title = "DePT (MaPLe)"
    mini_lr = 4e-2
    public_layout = PublicLayout("MultiModalPromptLearner", MAPLE_NAMES | HEAD_NAMES)
    options: DePTMaPLeOptions
