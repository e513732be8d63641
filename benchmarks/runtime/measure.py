"""Measure wall time on an idle device, peak memory and floating-point operations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from procap.methods.method import Method

Item = TypeVar("Item")
REPEATS = {"cpu": 1, "cuda": 10}
"""How often to run a workload between two synchronizations, by the type of device."""
# Fused attention on a CPU, which torch's own table leaves out.
CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *rest, **more: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda gradient, q, k, v, *rest, **more: sdpa_backward_flop_count(gradient, q, k, v)
    ),
}


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Return the median, lowest and highest of repeated measurements.

    From the lowest to the highest of n measurements is a confidence interval of the median, at level 1 - 2^(1 - n):
    94 % for five.
    """
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def rotate(items: Sequence[Item], rounds: int) -> Iterator[Item]:
    """Iterate over all items in every round; each round starts with the next item, so that order has no effect."""
    for number in range(rounds):
        start = number % len(items)
        yield from (*items[start:], *items[:start])


@dataclass
class Timing:
    """Wall seconds of a block, known at its end."""

    seconds: float = 0.0


@contextmanager
def timed(device: torch.device) -> Iterator[Timing]:
    """Time a block from an idle device until the device is idle again."""
    synchronize = torch.get_device_module(device).synchronize
    synchronize(device)
    timing = Timing()
    began = time.perf_counter()
    yield timing
    synchronize(device)
    timing.seconds = time.perf_counter() - began


def time_interleaved(
    workloads: Sequence[Callable[[], object]], rounds: int, device: torch.device, repeats: int = 1
) -> list[list[float]]:
    """Time each workload in each round, in the order of `rotate`.

    repeats: runs between two synchronizations, which hide the slow first launches of an idle GPU.
    """
    seconds: list[list[float]] = [[] for _ in workloads]
    for number in rotate(range(len(workloads)), rounds):
        with timed(device) as timing:
            for _ in range(repeats):
                workloads[number]()
        seconds[number].append(timing.seconds / repeats)
    return seconds


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Measure the peak of tensor bytes while `work` runs, in excess of the bytes allocated before.

    On a GPU by the allocator. On a CPU by the allocations that torch's profiler records: unlike the resident size of
    the process this does not depend on earlier work; scratch memory inside libraries is not included.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    kineto = profiled.profiler
    assert kineto is not None and kineto.kineto_results is not None
    changes = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    # `nbytes` is negative when memory is freed.
    for event in sorted(changes, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def count_flops(work: Callable[[], object], method: Method | None = None) -> float:
    """Count the operations of `work`, which is executed.

    A multiplication and an addition are two operations; element-wise work is left out. The counter sees only plain
    eager operations, as which compiled functions run here.
    method: gradients of its weights are disabled, as the counter cannot look up their graph in inference mode.
    """
    trained = [] if method is None else [weight for weight in method.parameters() if weight.requires_grad]
    for weight in trained:
        weight.requires_grad_(False)
    counter = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
    try:
        with torch.compiler.set_stance("force_eager"), counter:
            work()
    finally:
        for weight in trained:
            weight.requires_grad_(True)
    return float(counter.get_total_flops())
