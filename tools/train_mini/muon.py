"""Implement Muon (Jordan et al. 2024): momentum with orthogonalised matrix updates.

The embedded CLIP gets as far in four thousand pictures as with AdamW in forty thousand. `torch.optim.Muon` iterates in
bfloat16, slow on a CPU, and treats the stacked query, key and value as one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def orthogonal(updates: Tensor) -> Tensor:
    """Approximate the nearest (semi-)orthogonal matrices to [N, R, C], R <= C, by five quintic Newton-Schulz steps."""
    x = updates / (updates.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Optimize weight matrices; a weight three times as tall as wide is a stacked query, key and value."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter with a gradient; matrices of one shape are orthogonalised together."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor, bool]]] = {}
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(momentum, group["momentum"])
                pieces = 3 if weight.shape[0] == 3 * weight.shape[1] else 1
                for part, block in zip(update.chunk(pieces), weight.chunk(pieces), strict=True):
                    tall = part.shape[0] > part.shape[1]
                    flat = part.T if tall else part
                    by_shape.setdefault((flat.shape[0], flat.shape[1]), []).append((flat, block, tall))
            for items in by_shape.values():
                steps = orthogonal(torch.stack([flat for flat, _, _ in items]))
                for change, (_, block, tall) in zip(steps, items, strict=True):
                    scale = max(1.0, block.shape[0] / block.shape[1]) ** 0.5
                    block.mul_(1 - group["lr"] * group["decay"])
                    block.add_(change.T if tall else change, alpha=-group["lr"] * scale)
