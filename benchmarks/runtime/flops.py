"""Count floating-point operations of training steps and evaluated batches with torch's FlopCounterMode.

    python -m benchmarks.runtime.flops        rewrite benchmarks/suites/flops.json, on which estimates of cost rest

A multiplication and an addition are two operations; element-wise work is left out. Counted is what is executed by plain
eager code: work under compiled or fused kernels must be counted on towers without them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from benchmarks.suites.cost import FLOPS_FILE
from procap.clip import CLIP
from procap.geometry import Geometry
from procap.methods.method import Method
from shards.rng import generator

FUSED = "PROCAP_FUSED"
"""The switch that `procap.kernels.refinement` reads."""
VIT_B_16 = Geometry(
    image_size=224,
    patch_size=16,
    vision_width=768,
    vision_layers=12,
    vision_heads=12,
    text_width=512,
    text_layers=12,
    text_heads=8,
    context_length=77,
    vocab_size=49408,
    embed_dim=512,
    quick_gelu=True,
)
LARGE = replace(VIT_B_16, vision_width=1024, vision_layers=24, vision_heads=16, text_width=768, text_heads=12)
GEOMETRIES = {
    "ViT-B-16": VIT_B_16,
    "ViT-B-32": replace(VIT_B_16, patch_size=32),
    "ViT-L-14": replace(LARGE, patch_size=14, embed_dim=768),
}
METHODS = ("zeroshot", "coop", "cocoop", "maple", "procap")
IMAGES, CLASSES = (1, 2), (10, 110)
"""Sizes that are counted; operations are bilinear in both."""

# Fused attention on a CPU, which torch's own table leaves out.
CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *rest, **more: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda gradient, q, k, v, *rest, **more: sdpa_backward_flop_count(gradient, q, k, v)
    ),
}


def count_flops(work: Callable[[], object], method: Method | None = None) -> float:
    """Operations of `work`, which runs once, eagerly and without fused kernels.

    method: whose weights need no gradient in `work`; the counter looks for the place of those that do in the graph,
    which inference mode has not got.
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
    """Operations of the forward and backward pass of one training step; gradients are dropped."""
    noise = tuple(one.to(images.device) for one in method.draw(generator(1, "noise", 0)))

    def step() -> None:
        sum(method.loss(images, labels, noise).values(), torch.zeros((), device=images.device)).backward()

    total = count_flops(step)
    method.zero_grad(set_to_none=True)
    return total


def _count_step(clip: CLIP, name: str, images: int, classes: int) -> float:
    from benchmarks.runtime.scaling import made_up

    return count_step(*made_up(clip, name, classes, images))


def _count_evaluation(clip: CLIP, name: str, images: int, classes: int) -> float:
    from benchmarks.runtime.scaling import made_up

    method, pixels, _ = made_up(clip, name, classes, images)
    return count_flops(lambda: method.classifier()(pixels), method)


def bilinear(count: Callable[[int, int], float]) -> list[float]:
    """Coefficients of 1, B, C and B C through the counted sizes."""
    rows = [[1.0, b, c, b * c] for b in IMAGES for c in CLASSES]
    counted = [count(b, c) for b in IMAGES for c in CLASSES]
    solved = torch.linalg.solve(torch.tensor(rows, dtype=torch.float64), torch.tensor(counted, dtype=torch.float64))
    return [max(0.0, float(f"{value:.6g}")) for value in solved]


def empty_clip(geometry: Geometry) -> CLIP:
    """A model whose weights were never written: only its shapes count."""
    with torch.device("meta"):
        clip = CLIP(geometry)
    return clip.to_empty(device="cpu").requires_grad_(False)


def count_backbone(clip: CLIP) -> dict[str, dict[str, Any]]:
    """The table of one backbone, by method."""
    from benchmarks.runtime.scaling import made_up

    table: dict[str, dict[str, Any]] = {}
    for name in METHODS:
        trains = name != "zeroshot"
        built, *_ = made_up(clip, name, CLASSES[0], 1)
        table[name] = {
            "step": bilinear(lambda b, c, name=name: _count_step(clip, name, b, c)) if trains else [0.0] * 4,  # type: ignore[misc]
            "eval": bilinear(lambda b, c, name=name: _count_evaluation(clip, name, b, c)),  # type: ignore[misc]
            "learnables": sum(parameter.numel() for parameter in built.parameters()),
        }
    return table


def main() -> int:
    """Write the table."""
    from procap.weights.mini import load_mini
    from runner.results import write_json

    table = {"mini": count_backbone(load_mini())}
    for name, geometry in GEOMETRIES.items():
        table[name] = count_backbone(empty_clip(geometry))
    write_json(FLOPS_FILE, table)
    print(f"{FLOPS_FILE} is written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
