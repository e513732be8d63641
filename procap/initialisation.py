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
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
    return layer
