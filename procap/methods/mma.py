"""MMA: small adapters next to the upper blocks of both towers, which meet in a layer that both share.

Source: Yang et al. 2024, "MMA: Multi-Modal Adapter for Vision-Language Models", section 3.2, and its public code.
Learns 674,560 parameters on ViT-B/16.

Shapes: N sequences, L rows, D width, A adapter width.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from procap.clip import CLIP
from procap.initialisation import normal
from procap.methods.method import Method, Noise, PublicLayout
from procap.methods.options import TemplateOptions
from procap.methods.prompts import ClassPrompts, check_blocks
from procap.plan import Plan
from procap.recipe import Recipe
from procap.text import LabelSpace


class ScaleGradient(torch.autograd.Function):
    """The identity, whose backward pass multiplies the gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class Adapter(nn.Module):
    """Compute scale * up(relu(shared(relu(down(x))))) of rows [N, L, D].

    As in the public code, the parameters get the gradient of an adapter with scale 1, because the gradient is divided
    by `scale` behind them; before them it is multiplied by `scale` again, so that the rows get the true gradient.
    Without `scale_gradient` the parameters get the true gradient as well.
    """

    def __init__(
        self, down: nn.Module, shared: nn.Module, up: nn.Module, scale: float, scale_gradient: bool = True
    ) -> None:
        super().__init__()
        self.down, self.shared, self.up, self.scale = down, shared, up, scale
        self.factor = scale if scale_gradient else 1.0

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.down(ScaleGradient.apply(rows, self.factor)).relu()
        out = self.up(self.shared(hidden).relu()) * self.scale
        return ScaleGradient.apply(out, 1 / self.factor)


class MMAOptions(TemplateOptions):
    width: int = Field(32, ge=1, description="width of the adapters")
    scale: float = Field(0.001, gt=0, description="factor of what the adapters add")
    first_block: int = Field(4, ge=0, description="first block (0-based) with an adapter; all later ones have one")
    scale_gradient: bool = Field(
        True, description="give the adapters the gradient of a scale of 1, as the public code does; else the true one"
    )


class MMA(Method):
    """MMA (Yang et al. 2024): adapters next to the upper blocks of both towers."""

    Options = MMAOptions
    title = "MMA"
    groups = ("adapters",)
    mini_lr = 0.16
    public_layout = PublicLayout(
        "adapter_learner",
        {
            "text_down": "adapter_learner.text_adapter.{1}.down.0.{2}",
            "text_up": "adapter_learner.text_adapter.{1}.up.{2}",
            "vision_down": "adapter_learner.visual_adapter.{1}.down.0.{2}",
            "vision_up": "adapter_learner.visual_adapter.{1}.up.{2}",
            "shared": "adapter_learner.shared_adapter.{1}.0.{2}",
        },
        module="adapter_learner",
    )
    options: MMAOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: MMAOptions, generator: torch.Generator) -> None:
        check_blocks(clip, clip.geometry.layers - 1, first_block=options.first_block)
        super().__init__(clip, space, options, generator)
        a, text, vision = options.width, clip.geometry.text_width, clip.geometry.vision_width
        self.text_down, self.text_up = self._layers(text, a, generator), self._layers(a, text, generator)
        self.vision_down, self.vision_up = self._layers(vision, a, generator), self._layers(a, vision, generator)
        self.shared = self._layers(a, a, generator)

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.0015 without warm-up, 5 epochs, batch 16; 128 on ImageNet.

        The public code has no few-shot configuration; that of base-to-novel is used.
        """
        batch = 128 if dataset == "imagenet" else 16
        return Recipe(optimizer="sgd", lr=0.0015, epochs=5, batch_size=batch, warmup="none")

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        return self._plan(self.vision_down, self.vision_up), self._plan(self.text_down, self.text_up)

    def _plan(self, down: nn.ModuleDict, up: nn.ModuleDict) -> Plan:
        adapters = {
            # Made in every step: it only holds layers and scale. A plan counts blocks from 0.
            int(number) - 1: Adapter(down[number], shared, up[number], self.options.scale, self.options.scale_gradient)
            for number, shared in self.shared.items()
        }
        return Plan(adapters=adapters)

    def _layers(self, inputs: int, outputs: int, generator: torch.Generator) -> nn.ModuleDict:
        """Build a layer per block with Kaiming's normal initialisation for the fan-out, and zero biases.

        Their names are the numbers of the blocks, which the public code counts from 1.
        """
        layers = nn.ModuleDict()
        for block in range(self.options.first_block, self.clip.geometry.layers):
            layer = nn.Linear(inputs, outputs, device="meta")
            layer.weight = nn.Parameter(normal((outputs, inputs), generator, std=(2 / outputs) ** 0.5))
            layer.bias = nn.Parameter(torch.zeros(outputs))
            layers[str(block + 1)] = layer
        return layers
