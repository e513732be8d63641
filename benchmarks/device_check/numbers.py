"""Check the plain path: numbers of each precision, attention, and repeated trainings.

Shapes: N sequences, H heads, Q queries, L keys, D width of a head.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.device_check.case import (
    DeviceCase,
    Skipped,
    compute,
    largest_difference,
    make_training,
    require_close,
)
from procap.errors import UserError
from runner.devices import set_deterministic
from shards.rng import generator

METHODS = ("coop", "maple", "procap")
TOLERANCES = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.03}
"""Largest relative difference of a gradient from float32 on a CPU; most of them are ten times as close."""
FP16_SCALE = 128.0
ATTENTION_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
STEPS = 20


def check_plain(case: DeviceCase) -> dict[str, Any]:
    """Compare losses, logits and gradients in every precision with float32 on the CPU."""
    cpu = torch.device("cpu")
    measured: dict[str, Any] = {}
    model = case.load(cpu)
    for name in METHODS:
        training, images, labels = make_training(case, name, (10, 4), clip=model)
        exact = compute(training, training.batch(images, labels, 0))
        for precision, tolerance in TOLERANCES.items():
            if precision == "fp32" and not case.on_gpu:
                continue
            training, images, labels = make_training(case, name, (10, 4), precision)
            scale = FP16_SCALE if precision == "fp16" else 1.0
            outputs = compute(training, training.batch(images, labels, 0), scale)
            measured |= require_close({f"{name} {precision}": largest_difference(outputs, exact)}, tolerance)
    return measured


@dataclass(frozen=True)
class AttentionCase:
    """Shapes of one attention. mask: every query sees the first of each pair of keys. low: scores far below zero."""

    name: str
    shape: tuple[int, int, int, int]
    mask: bool = False
    causal: bool = False
    low: bool = False

    def inputs(self, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None]:
        """Draw queries [N, H, Q, 64], keys and values [N, H, L, 64], and the additive mask [1, 1, Q, L]."""
        items, heads, queries, keys = self.shape
        draw = generator(0, "attention", sum(self.shape))
        q, k, v = (torch.randn(items, heads, rows, 64, generator=draw) for rows in (queries, keys, keys))
        if self.low:
            direction = torch.randn(64, generator=draw)
            q, k = q * 0.1 + 5 * direction, k * 0.1 - 5 * direction
        mask = torch.zeros(1, 1, queries, keys)
        mask[..., 1::2] = -torch.inf
        tensors = [x.to(device, dtype).requires_grad_() for x in (q, k, v)]
        return tensors, mask.to(device, dtype) if self.mask else None


ATTENTION = (
    AttentionCase("image rows", (4, 12, 205, 205)),
    AttentionCase("end row of images", (32, 12, 1, 205)),
    AttentionCase("text", (20, 8, 77, 77), causal=True),
    AttentionCase("groups of prompts", (20, 8, 56, 60), mask=True),
    AttentionCase("64 masked keys", (20, 8, 60, 64), mask=True),
    AttentionCase("192 masked keys, low scores", (8, 8, 60, 192), mask=True, low=True),
)


def check_attention(case: DeviceCase) -> dict[str, Any]:
    """Compare every backend of fused attention but cuDNN's with plain float32 arithmetic."""
    backends = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    return {backend.name.lower(): dict(_compare_attention(case, backend)) for backend in backends}


def check_cudnn(case: DeviceCase) -> dict[str, Any]:
    """Compare cuDNN's attention with plain float32 arithmetic."""
    if not case.on_gpu:
        raise Skipped("needs a CUDA device")
    torch.backends.cuda.enable_cudnn_sdp(True)
    compared = dict(_compare_attention(case, SDPBackend.CUDNN_ATTENTION))
    if set(compared.values()) == {"not supported"}:
        raise Skipped("not supported on this device")
    return compared


def _compare_attention(case: DeviceCase, backend: SDPBackend) -> Iterator[tuple[str, Any]]:
    """Yield for each shape and type the difference and the milliseconds of the first call. Raises UserError."""
    for attention in ATTENTION:
        for dtype, tolerance in ATTENTION_TOLERANCES.items():
            name = f"{attention.name} {str(dtype).removeprefix('torch.')}"
            tensors, mask = attention.inputs(case.device, dtype)
            began = time.perf_counter()
            try:
                with sdpa_kernel(backend):
                    outputs = _attend(tensors, mask, attention.causal)
            except RuntimeError as error:
                if "No available kernel" not in str(error) and "No viable backend" not in str(error):
                    raise
                yield name, "not supported"
                continue
            if case.on_gpu:
                torch.cuda.synchronize()
            milliseconds = round(1e3 * (time.perf_counter() - began), 1)
            with sdpa_kernel(SDPBackend.MATH):
                exact = [x.detach().float().requires_grad_() for x in tensors]
                expected = _attend(exact, None if mask is None else mask.float(), attention.causal)
            difference = largest_difference(outputs, expected)
            require_close({f"{backend.name.lower()}: {name}": difference}, tolerance)
            yield name, {"difference": float(f"{difference:.3g}"), "first call ms": milliseconds}


def _attend(tensors: list[Tensor], mask: Tensor | None, causal: bool) -> dict[str, Tensor]:
    """Compute attention and its gradients, in float32 on the CPU."""
    queries, keys, values = tensors
    mixed = F.scaled_dot_product_attention(queries, keys, values, mask, is_causal=causal)
    weight = torch.linspace(-1, 1, mixed.numel(), device=mixed.device).view_as(mixed).to(mixed.dtype)
    gradients = torch.autograd.grad(mixed, tensors, weight)
    outputs = (mixed, *gradients)
    names = ("values", "gradient of queries", "gradient of keys", "gradient of values")
    return {name: x.detach().float().cpu() for name, x in zip(names, outputs, strict=True)}


def check_repeatability(case: DeviceCase) -> dict[str, Any]:
    """Take the same steps twice and compare the learned tensors; they may differ without --deterministic."""
    first, second = (_train(case) for _ in range(2))
    difference = largest_difference(second, first)
    return {"equal bits": all(torch.equal(second[name], x) for name, x in first.items()), "difference": difference}


def check_deterministic(case: DeviceCase) -> dict[str, Any]:
    """Take the same steps twice with --deterministic; raises UserError if a bit differs."""
    set_deterministic()
    compared = check_repeatability(case)
    if not compared["equal bits"]:
        raise UserError(f"two equal trainings differ by {compared['difference']:.2g} with --deterministic")
    return compared


def _train(case: DeviceCase) -> dict[str, Tensor]:
    training, images, labels = make_training(case, "procap", (10, 4), "bf16" if case.on_gpu else "fp32")
    training.engine.scale_rates(1e-3)
    for number in range(STEPS):
        training(training.batch(images, labels, number))
    return {name: p.detach().float().cpu() for name, p in training.method.named_parameters() if p.requires_grad}
