"""How the runtime benchmark measures: synchronised clocks, medians with their spread, memory, energy, a matrix peak."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from runner.meters import Machine

PEAK_SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192, 16384)}
PEAK_SECONDS = 0.4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one thing."""

    median: float
    lowest: float
    highest: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        return cls(statistics.median(values), min(values), max(values), len(values))

    def rate(self, of: float) -> Spread:
        """`of` things per each of these durations."""
        return Spread(of / self.median, of / self.highest, of / self.lowest, self.count)


@dataclass
class Stretch:
    """A timed piece of work: wall seconds, and joules where the GPU reports them."""

    seconds: float = 0.0
    joules: float | None = None


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def stretch(device: torch.device, *, energy: bool = False) -> Iterator[Stretch]:
    """Time a block on an idle device, to its very end."""
    synchronize(device)
    timed = Stretch()
    machine = Machine(device) if energy and device.type == "cuda" else None
    began = time.perf_counter()
    yield timed
    synchronize(device)
    timed.seconds = time.perf_counter() - began
    if machine is not None and (watts := machine.use().gpu_watts) is not None:
        timed.joules = watts * timed.seconds


def interleaved(
    work: Sequence[Callable[[], object]], rounds: int, device: torch.device, times: int = 1
) -> list[list[float]]:
    """Seconds of every piece of `work` in each round: a round runs all of them `times` times, starting one further on.

    times: as many as hide that a GPU's launches take long after it was idle.
    """
    seconds: list[list[float]] = [[] for _ in work]
    for number in range(rounds):
        for place in range(len(work)):
            turn = (place + number) % len(work)
            with stretch(device) as timed:
                for _ in range(times):
                    work[turn]()
            seconds[turn].append(timed.seconds / times)
    return seconds


def times_on(device: torch.device) -> int:
    """Pieces of work between two looks at the clock."""
    return 10 if device.type == "cuda" else 1


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Most bytes of tensors alive at once while `work` runs, beyond those before it.

    On a GPU the allocator's own count. On a CPU the sum of allocations that torch's profiler saw: unlike the size of
    the process it does not depend on what the process did before; scratch memory inside libraries is not in it.
    """
    if device.type == "cuda":
        synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    kineto = profiled.profiler
    assert kineto is not None and kineto.kineto_results is not None
    changes = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def quiet_profiler() -> None:
    """Keep the profiler's library from printing; it reads this when torch is imported."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def matmul_peak(device: torch.device, precision: str) -> float:
    """The highest rate of square matrix products on this device, in floating-point operations per second."""
    best = 0.0
    for size in PEAK_SIZES[device.type]:
        a, b = (torch.randn(size, size, device=device, dtype=DTYPES[precision]) for _ in range(2))
        out = torch.empty_like(a)
        torch.mm(a, b, out=out)
        spent, fastest = 0.0, float("inf")
        while spent < PEAK_SECONDS:
            with stretch(device) as timed:
                torch.mm(a, b, out=out)
            spent, fastest = spent + timed.seconds, min(fastest, timed.seconds)
        best = max(best, 2 * size**3 / fastest)
    return best
