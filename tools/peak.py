"""Measure the highest rate of matrix products on a device."""

from __future__ import annotations

import torch
from torch.utils.benchmark import Timer

PEAK_SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192, 16384)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def matmul_peak(device: torch.device, precision: str) -> float:
    """Measure the highest rate of square matrix products on this device, in floating-point operations per second."""
    best = 0.0
    for size in PEAK_SIZES[device.type]:
        a, b = (torch.randn(size, size, device=device, dtype=DTYPES[precision]) for _ in range(2))
        names = {"torch": torch, "a": a, "b": b, "out": torch.empty_like(a)}
        timer = Timer("torch.mm(a, b, out=out)", globals=names, num_threads=torch.get_num_threads())
        best = max(best, 2 * size**3 / min(timer.blocked_autorange(min_run_time=0.4).times))
    return best
