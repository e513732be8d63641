"""TaskRes: a learned residual of the class features; both towers stay as they are.

Source: Yu et al. 2023, "Task Residual for Tuning Vision-Language Models", section 3.2, and its public code. Learns 512
parameters per class on ViT-B/16.

Shapes: B images, C classes, E joint embedding.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from procap.classifier import cosine_logits
from procap.clip import CLIP
from procap.methods.features import FeatureMethod, Head
from procap.methods.method import PublicLayout, PublishedOptions
from procap.methods.options import ViewOptions
from procap.methods.zeroshot import ENSEMBLE
from procap.recipe import Recipe
from procap.text import LabelSpace


class TaskResOptions(ViewOptions):
    alpha: float = Field(0.5, gt=0, description="factor on the residual")


class WrittenText(FeatureMethod):
    """A method with the class features of TaskRes' public code, which CLAP's has taken over.

    Names keep their underscores, and the data set's template counts on ImageNet as well.
    """

    def templates(self, space: LabelSpace) -> tuple[str, ...]:
        """Return the prompts of a class: on ImageNet the seven of CLIP and, as everywhere, the data set's template."""
        seven = ENSEMBLE if space.dataset == "imagenet" else ()
        return (*seven, space.template)

    def text(self, space: LabelSpace) -> Tensor:
        """Compute class features [C, E]: the mean over `templates`, not normalised."""
        return self.prompt_features(space, as_written=True).mean(dim=0)


class TaskRes(WrittenText):
    """TaskRes (Yu et al. 2023): a learned residual of every class feature."""

    Options = TaskResOptions
    title = "TaskRes"
    public_layout = PublicLayout(
        "prompt_learner",
        {"residual": "prompt_learner.text_feature_residuals"},
        module="prompt_learner",
        unused=("base_text_features",),
    )
    published: ClassVar[PublishedOptions] = {"oxford-flowers": {"alpha": 1.0}}
    options: TaskResOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: TaskResOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        self.residual = nn.Parameter(torch.zeros(len(space.classnames), clip.geometry.embed_dim))

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return Adam 2e-3 (ImageNet 2e-4), batch 256, 100 epochs for up to 4 shots, else 200."""
        epochs = 100 if 0 < shots <= 4 else 200
        lr = 2e-4 if dataset == "imagenet" else 2e-3
        return Recipe(optimizer="adam", lr=lr, epochs=epochs, batch_size=256)

    def head(self, space: LabelSpace) -> Head:
        """Make the head; new classes among the others have no residual."""
        residual: Tensor = self.residual
        if space.classnames != self.space.classnames:
            known = self.known(space)
            # New classes have position -1: they read the last row, which the factor removes.
            residual = self.residual.detach()[known] * (known >= 0)[:, None]
        text = self.text(space) + self.options.alpha * residual
        return partial(cosine_logits, text=text, scale=self.scale())
