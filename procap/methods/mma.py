"""MMA: small adapters next to the upper blocks of both towers, which meet in a layer that both share.

Source: Yang et al. 2024, "MMA: Multi-Modal Adapter for Vision-Language Models", section 3.2, and its public code.
Learns 674,560 parameters on ViT-B/16.

Shapes: N sequences, L rows, D width, A adapter width.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor, nn

from procap.clip import CLIP
from procap.initialisation import normal
from procap.methods.method import STRICT, Method, Noise, PublicLayout
from procap.methods.prompts import ClassPrompts, check_blocks, template_prompts
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


class MMAOptions(BaseModel):
    """The options of MMA."""

    model_config = STRICT

    width: int = Field(32, ge=1, description="width of the adapters")
    scale: float = Field(0.001, gt=0, description="factor of what the adapters add")
    first_block: int = Field(4, ge=0, description="first block (0-based) with an adapter")
    last_block: int | None = Field(None, ge=0, description="last block with an adapter; none: the tower's last")
    template: str = Field("a photo of a {}.", description="prompt of every class, on every data set")
    scale_gradient: bool = Field(
        True, description="give the adapters the gradient of a scale of 1, as the public code does; else the true one"
    )

    @model_validator(mode="after")
    def _has_blocks(self) -> MMAOptions:
        if self.last_block is not None and self.last_block < self.first_block:
            raise ValueError(f"last_block = {self.last_block} is before first_block = {self.first_block}")
        return self


class MMA(Method):
    """Multi-modal adapters."""

    Options = MMAOptions
    summary: ClassVar[str] = "MMA (Yang et al. 2024): adapters next to the upper blocks of both towers"
    public_layout = PublicLayout("adapter_learner", {}, module="adapter_learner")
    options: MMAOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: MMAOptions, generator: torch.Generator) -> None:
        highest = clip.geometry.layers - 1
        last = highest if options.last_block is None else options.last_block
        check_blocks(clip, highest, first_block=options.first_block, last_block=last)
        super().__init__(clip, space, options, generator)
        self.blocks = range(options.first_block, last + 1)
        a, text, vision = options.width, clip.geometry.text_width, clip.geometry.vision_width
        self.text_down, self.text_up = self._layers(text, a, generator), self._layers(a, text, generator)
        self.vision_down, self.vision_up = self._layers(vision, a, generator), self._layers(a, vision, generator)
        self.shared = self._layers(a, a, generator)

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.0015 without warm-up, 5 epochs, batch 16; 128 on ImageNet.

        The public code has no few-shot configuration; that of base-to-novel is used.
        """
        batch = 128 if dataset.lower() == "imagenet" else 16
        return Recipe(optimizer="sgd", lr=0.0015, epochs=5, batch_size=batch, warmup="none")

    def class_prompts(self, space: LabelSpace) -> ClassPrompts:
        return template_prompts(self.clip, space, self.options.template)

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        return self._plan(self.vision_down, self.vision_up), self._plan(self.text_down, self.text_up)

    def _plan(self, down: nn.ModuleList, up: nn.ModuleList) -> Plan:
        return Plan(
            adapters={
                block: Adapter(down[i], self.shared[i], up[i], self.options.scale, self.options.scale_gradient)
                for i, block in enumerate(self.blocks)
            }
        )

    def _layers(self, inputs: int, outputs: int, generator: torch.Generator) -> nn.ModuleList:
        """Build a layer per block with Kaiming's normal initialisation for the fan-out, and zero biases."""
        layers = nn.ModuleList()
        for _ in self.blocks:
            layer = nn.Linear(inputs, outputs, device="meta")
            layer.weight = nn.Parameter(normal((outputs, inputs), generator, std=(2 / outputs) ** 0.5))
            layer.bias = nn.Parameter(torch.zeros(outputs))
            layers.append(layer)
        return layers

    def public_names(self) -> dict[str, str]:
        names = {
            "text_down": "text_adapter.{}.down.0",
            "text_up": "text_adapter.{}.up",
            "vision_down": "visual_adapter.{}.down.0",
            "vision_up": "visual_adapter.{}.up",
            "shared": "shared_adapter.{}.0",
        }
        # The public code counts blocks from 1.
        return {
            f"{ours}.{index}.{part}": f"adapter_learner.{theirs.format(block + 1)}.{part}"
            for ours, theirs in names.items()
            for index, block in enumerate(self.blocks)
            for part in ("weight", "bias")
        }
