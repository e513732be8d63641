"""Check the plain path: numbers of each precision, attention, and repeated trainings.

Shapes: N sequences, H heads, Q queries, L keys, D width of a head.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.device_check.case import (
    METHODS,
    DeviceCase,
    Skipped,
    compute,
    largest_difference,
    learned_of,
    make_training,
    require_close,
)
from procap.errors import UserError
from runner.devices import set_deterministic
from shards.rng import generator

TOLERANCES = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.03}
"""Largest relative difference of a gradient from float32 on a CPU; most of them are ten times as close."""
FP16_SCALE = 128.0
ATTENTION_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
WIDTH, STEPS = 64, 20


def check_plain(case: DeviceCase) -> dict[str, Any]:
    """Compare losses, logits and gradients in every precision with float32 on the CPU."""
    differences: dict[str, Any] = {}
    model = case.load(torch.device("cpu"))
    for name in METHODS:
        training, images, labels = make_training(case, name, (10, 4), clip=model)
        exact = compute(training, training.batch(images, labels, 0))
        for precision, tolerance in TOLERANCES.items():
            if precision == "fp32" and not case.on_gpu:
                continue
            training, images, labels = make_training(case, name, (10, 4), precision)
            batch, scale = training.batch(images, labels, 0), FP16_SCALE if precision == "fp16" else 1.0
            difference = largest_difference(compute(training, batch, scale), exact)
            differences |= require_close({f"{name} {precision}": difference}, tolerance)
    return differences


ATTENTION: dict[str, tuple[tuple[int, int, int, int], str]] = {
    "image rows": ((4, 12, 205, 205), ""),
    "end row of images": ((32, 12, 1, 205), ""),
    "text": ((20, 8, 77, 77), "causal"),
    "groups of prompts": ((20, 8, 56, 60), "mask"),
    "64 masked keys": ((20, 8, 60, 64), "mask"),
    "192 masked keys, low scores": ((8, 8, 60, 192), "mask, low"),
}
"""Shapes N, H, Q, L. mask: every query sees the first of each pair of keys. low: scores far below zero."""


def _draw_attention(shape: tuple[int, int, int, int], form: str) -> tuple[list[Tensor], Tensor | None]:
    """Draw queries [N, H, Q, D], keys and values [N, H, L, D], and the additive mask [1, 1, Q, L]."""
    items, heads, queries, keys = shape
    draw = generator(0, "attention", sum(shape))
    q, k, v = (torch.randn(items, heads, rows, WIDTH, generator=draw) for rows in (queries, keys, keys))
    if "low" in form:
        direction = torch.randn(WIDTH, generator=draw)
        q, k = q * 0.1 + 5 * direction, k * 0.1 - 5 * direction
    mask = torch.zeros(1, 1, queries, keys)
    mask[..., 1::2] = -torch.inf
    return [q, k, v], mask if "mask" in form else None


def check_attention(case: DeviceCase) -> dict[str, Any]:
    """Compare every backend of fused attention but cuDNN's with plain float32 arithmetic."""
    backends = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    return {backend.name.lower(): dict(_compare_attention(case, backend)) for backend in backends}


def check_cudnn(case: DeviceCase) -> dict[str, Any]:
    """Compare cuDNN's attention with plain float32 arithmetic."""
    case.require_gpu()
    torch.backends.cuda.enable_cudnn_sdp(True)
    compared = dict(_compare_attention(case, SDPBackend.CUDNN_ATTENTION))
    if set(compared.values()) == {"not supported"}:
        raise Skipped("not supported on this device")
    return compared


def _compare_attention(case: DeviceCase, backend: SDPBackend) -> Iterator[tuple[str, Any]]:
    """Yield for each shape and type the difference and milliseconds of the first call, or "not supported".

    Raises UserError for a wrong number.
    """
    for title, (shape, form) in ATTENTION.items():
        for dtype, tolerance in ATTENTION_TOLERANCES.items():
            name = f"{title} {str(dtype).removeprefix('torch.')}"
            drawn, mask = _draw_attention(shape, form)
            tensors = [x.to(case.device, dtype).requires_grad_() for x in drawn]
            mask = None if mask is None else mask.to(case.device, dtype)
            began = time.perf_counter()
            try:
                with sdpa_kernel(backend):
                    outputs = _attend(tensors, mask, form == "causal")
            except RuntimeError as error:
                if "No available kernel" not in str(error) and "No viable backend" not in str(error):
                    raise
                yield name, "not supported"
                continue
            yield f"{name}: first call, ms", round(1e3 * (time.perf_counter() - began), 2)
            with sdpa_kernel(SDPBackend.MATH):
                exact = [x.detach().float().requires_grad_() for x in tensors]
                expected = _attend(exact, None if mask is None else mask.float(), form == "causal")
            what = f"{backend.name.lower()}: {name}"
            yield name, require_close({what: largest_difference(outputs, expected)}, tolerance)[what]


def _attend(tensors: list[Tensor], mask: Tensor | None, causal: bool) -> dict[str, Tensor]:
    """Compute attention and its gradients, in float32 on the CPU."""
    queries, keys, values = tensors
    mixed = F.scaled_dot_product_attention(queries, keys, values, mask, is_causal=causal)
    weight = torch.linspace(-1, 1, mixed.numel(), device=mixed.device).view_as(mixed).to(mixed.dtype)
    gradients = torch.autograd.grad(mixed, tensors, weight)
    names = ("values", "gradient of queries", "gradient of keys", "gradient of values")
    return {name: x.detach().float().cpu() for name, x in zip(names, (mixed, *gradients), strict=True)}


def check_deterministic(case: DeviceCase) -> dict[str, Any]:
    """Take the same steps twice, with and without --deterministic; raises UserError if a bit differs with it."""
    # First: torch reads cuBLAS's variable at the first matrix product, and would refuse all later ones.
    set_deterministic()
    first, second = (_train(case) for _ in range(2))
    if not all(torch.equal(second[name], tensor) for name, tensor in first.items()):
        difference = largest_difference(second, first)
        raise UserError(f"two equal trainings differ by {difference:.2g} with --deterministic")
    torch.use_deterministic_algorithms(False)
    without = largest_difference(_train(case), _train(case))
    return {"equal tensors": len(first), "difference without --deterministic": without}


def _train(case: DeviceCase) -> dict[str, Tensor]:
    training, images, labels = make_training(case, "procap", (10, 4), "bf16" if case.on_gpu else "fp32")
    training.engine.set_recipe_rate(1e-3)
    for number in range(STEPS):
        training(training.batch(images, labels, number))
    return learned_of(training.method)
