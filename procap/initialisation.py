"""Draw initial values from a given generator, never from torch's global random state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def normal(shape: Sequence[int], generator: torch.Generator, std: float = 0.02) -> Tensor:
    """Draw a tensor of N(0, std^2) from `generator`."""
    return std * torch.randn(tuple(shape), generator=generator)


def linear(inputs: int, outputs: int, generator: torch.Generator, bias: bool = True) -> nn.Linear:
    """Build a linear layer with torch's default initialisation, drawn from `generator` alone."""
    # A layer on the meta device draws nothing, as with `nn.utils.skip_init`, which takes 0.4 s to import sympy.
    layer = nn.Linear(inputs, outputs, bias=bias, device="meta")
    for name, parameter in layer.named_parameters():
        # This is the bound of kaiming_uniform_ with a = sqrt(5), torch's default for weights, and that of biases.
        values = torch.empty(parameter.shape).uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
        setattr(layer, name, nn.Parameter(values))
    return layer
