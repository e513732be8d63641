"""Count floating-point operations with torch's FlopCounterMode, on tensors without data: nothing is computed.

A multiplication and an addition are two operations; element-wise work is left out. The counter sees only plain
eager operations: count compiled or fused work on towers without such kernels.

python -m benchmarks.runtime.flops [BACKBONE ...]     rewrite benchmarks/suites/flops.json, which estimates of cost use
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from benchmarks.runtime.data import synthetic_case
from benchmarks.suites.cost import FLOPS_FILE, load_flops
from procap.clip import CLIP
from procap.methods import METHODS, method_class
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
BACKBONES = ("mini", "ViT-B-16", "ViT-B-32", "ViT-L-14")
IMAGES, CLASSES = (1, 2), (10, 110)
"""Sizes that are counted; operations are bilinear in images and encoded classes."""
RECORDED = (1, 2, 3, 5, 10, 25, 50, 100, 200, 1000)
"""Numbers of classes for which the table has how many a step encodes, if not all."""
STAGE_STEPS = 1000
"""Steps of a training whose stages are weighed."""


def count_flops(work: Callable[[], object], method: Method | None = None, *, compute: bool = False) -> float:
    """Count the operations of `work` on tensors without data, or with `compute` with data, for work that reads numbers.

    method: gradients of its weights are disabled, as the counter cannot look up their graph in inference mode.
    """
    trained = [] if method is None else [weight for weight in method.parameters() if weight.requires_grad]
    for weight in trained:
        weight.requires_grad_(False)
    counter = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
    try:
        with (
            without_fused_kernels(),
            torch.compiler.set_stance("force_eager"),
            nullcontext() if compute else FakeTensorMode(allow_non_fake_inputs=True),
            counter,
        ):
            work()
    finally:
        for weight in trained:
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
    """Count operations of the forward and backward pass of one training step, averaged over the stages of a training.

    What is computed once in a training, such as the features of a text teacher, is left out.
    """
    noise = tuple(one.to(images.device) for one in method.draw(generator(1, "noise", 0)))
    starts = (*method.stage_starts(STAGE_STEPS), STAGE_STEPS)

    def step() -> None:
        sum(method.loss(images, labels, noise).values(), torch.zeros((), device=images.device)).backward()

    total = 0.0
    for stage, (first, end) in enumerate(pairwise(starts)):
        method.begin_stage(stage)
        method.loss(images[:1], labels[:1], noise)
        total += count_flops(step, compute=True) * (end - first) / STAGE_STEPS
        method.zero_grad(set_to_none=True)
    return total


def count_evaluation(method: Method, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Count operations of one evaluated batch and the features of the classes trained on; tokenizing reads numbers."""
    return count_flops(lambda: method.classifier()(images), method, compute=True)


def bilinear(
    clip: CLIP, name: str, count: Callable[..., float], encoded: Callable[[int], float] = float
) -> list[float]:
    """Fit the coefficients of 1, B, E and B E to counts of B images and C classes; `encoded` maps C to E."""
    rows = [[1.0, b, encoded(c), b * encoded(c)] for b in IMAGES for c in CLASSES]
    counts = [count(*synthetic_case(clip, name, c, b)) for b in IMAGES for c in CLASSES]
    solved = torch.linalg.solve(torch.tensor(rows, dtype=torch.float64), torch.tensor(counts, dtype=torch.float64))
    return [max(0.0, float(f"{value:.6g}")) for value in solved]


def main(backbones: Sequence[str]) -> int:
    """Count for `backbones`, by default all, and write the table."""
    from procap.weights.loading import load_clip
    from runner.results import write_json

    table = load_flops()
    for backbone in backbones or BACKBONES:
        clip = load_clip(backbone, None if backbone == "mini" else "random")
        table[backbone] = {name: count_method(clip, name) for name in METHODS}
        write_json(FLOPS_FILE, table)
        print(f"{backbone} is written to {FLOPS_FILE}")
    return 0


def count_method(clip: CLIP, name: str) -> dict[str, Any]:
    """Return the coefficients of a step and of an evaluation, and the number of learned parameters."""
    encoded = method_class(name).classes_per_step
    some = {"encoded": [[c, round(encoded(c), 3)] for c in RECORDED]} if encoded(CLASSES[1]) != CLASSES[1] else {}
    return some | {
        "step": [0.0] * 4 if name == "zeroshot" else bilinear(clip, name, count_step, encoded),
        "eval": bilinear(clip, name, count_evaluation),
        "learnables": sum(weight.numel() for weight in synthetic_case(clip, name, 10, 1)[0].parameters()),
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
