"""Count floating-point operations of training steps and evaluated batches with torch's FlopCounterMode.

A multiplication and an addition are two operations; element-wise work is left out. The counter sees only plain
eager operations: count compiled or fused work on towers without such kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from procap.methods.method import Method
from shards.rng import generator

FUSED = "PROCAP_FUSED"
"""Environment variable with which `procap.kernels` disables fused kernels."""
# Fused attention on a CPU, which torch's own table leaves out.
CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *rest, **more: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda gradient, q, k, v, *rest, **more: sdpa_backward_flop_count(gradient, q, k, v)
    ),
}


def count_flops(work: Callable[[], object], method: Method | None = None) -> float:
    """Count the operations of `work`, which runs once, eagerly and without fused kernels.

    method: gradients of its weights are disabled, as the counter would look up their place in the autograd graph,
    which does not exist in inference mode.
    """
    frozen = [] if method is None else [weight for weight in method.parameters() if weight.requires_grad]
    for weight in frozen:
        weight.requires_grad_(False)
    counter = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
    try:
        with without_fused_kernels(), torch.compiler.set_stance("force_eager"), counter:
            work()
    finally:
        for weight in frozen:
            weight.requires_grad_(True)
    return float(counter.get_total_flops())


@contextmanager
def without_fused_kernels() -> Iterator[None]:
    """Run ProCAP's cross-attention as plain torch operations."""
    before = os.environ.get(FUSED)
    os.environ[FUSED] = "off"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(FUSED, None)
        else:
            os.environ[FUSED] = before


def count_step(method: Method, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Count operations of the forward and backward pass of one training step; gradients are dropped."""
    noise = tuple(one.to(images.device) for one in method.draw(generator(1, "noise", 0)))

    def step() -> None:
        sum(method.loss(images, labels, noise).values(), torch.zeros((), device=images.device)).backward()

    total = count_flops(step)
    method.zero_grad(set_to_none=True)
    return total
