"""Average a method's weights over epochs with Gaussian weights.

Source: Khattak et al. 2023, "Self-regulating Prompts" (PromptSRC), section 3.2.2. The public code averages the frozen
weights as well; here only what is learned is averaged.
"""

from __future__ import annotations

import math

import torch
from torch import nn


def gaussian_weights(epochs: int, mean: float, std: float) -> list[float]:
    """Return the weights of epochs 1 to `epochs`: normal densities, scaled to sum to 1."""
    # The constant factor of the density cancels out.
    densities = [math.exp(-(((epoch - mean) / std) ** 2) / 2) for epoch in range(1, epochs + 1)]
    return [density / sum(densities) for density in densities]


class EpochAverage:
    """The weighted sum of the parameters of `method` at the ends of epochs."""

    def __init__(self, method: nn.Module, epochs: int, mean: float, std: float) -> None:
        self._parameters = dict(method.named_parameters())
        self._weights = gaussian_weights(epochs, mean, std)
        # Not `swa_utils.AveragedModel`, which would copy the whole method with the frozen towers.
        self.sums = {name: torch.zeros_like(parameter) for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def add(self, epoch: int) -> None:
        """Add the parameters at the end of `epoch` (0-based)."""
        for name, parameter in self._parameters.items():
            self.sums[name] += self._weights[epoch] * parameter

    @torch.no_grad()
    def apply(self) -> None:
        """Set the parameters to the sums, after the last epoch."""
        for name, parameter in self._parameters.items():
            parameter.copy_(self.sums[name])
