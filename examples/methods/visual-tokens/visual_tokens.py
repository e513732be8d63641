"""VisualTokens: tokens learned at the input of the image tower."""

import torch
from pydantic import Field
from torch import nn

from procap.clip import CLIP
from procap.methods.method import Method, MethodOptions, Noise
from procap.methods.prompts import ClassPrompts
from procap.plan import INPUT, NO_CHANGE, Plan, TokenOp
from procap.recipe import Recipe
from procap.text import LabelSpace


class VisualTokensOptions(MethodOptions):
    n_ctx: int = Field(4, ge=1, description="tokens appended to the patches")


class VisualTokens(Method):
    """Learned tokens behind the image patches; text as in zero-shot CLIP."""

    Options = VisualTokensOptions
    options: VisualTokensOptions
    title = "Visual tokens"
    colour = "#6a3d9a"

    def __init__(self, clip: CLIP, space: LabelSpace, options: VisualTokensOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        shape = (options.n_ctx, clip.geometry.vision_width)
        self.context = nn.Parameter(0.02 * torch.randn(shape, generator=generator))

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        return Recipe(optimizer="sgd", lr=0.0025, epochs=10, batch_size=16)

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        return Plan((TokenOp(INPUT, "append", self.context),)), NO_CHANGE
