"""Measure durations: by the clock of the host on a CPU, by events in the current stream on a GPU."""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


def now(device: torch.device) -> Mark:
    """Return the time, or an event recorded in the current stream of a GPU; the host does not wait for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Compute the seconds between two marks of one device; those of a GPU must be synchronized."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float)
        return end - start
    return start.elapsed_time(end) / 1000
