"""Measure a run: time by phase, images per second, and peak memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field

from runner.config import Amount, Count

Item = TypeVar("Item")
Mark = Any
"""The time in seconds, or an event of a GPU."""


@dataclass
class Rate:
    """Images, and the seconds in steps over them by phase."""

    images: Count = 0
    seconds: dict[str, Amount] = field(default_factory=dict)


@dataclass
class MeterState:
    """Measurements in seconds up to a saved state. rate: of timed steps. stored_seconds: what `add` has added."""

    phases: dict[str, Amount] = field(default_factory=dict)
    # Wall time, and the time in phases of steps.
    seconds: Amount = 0.0
    step_seconds: Amount = 0.0
    rate: Rate = field(default_factory=Rate)
    untimed_steps: Annotated[Count, Field(alias="warmup_steps")] = 0
    stored_seconds: Amount = 0.0


class Meter(MeterState):
    """Time by named phase, and rates over steps; on CUDA by events in the stream, so that the host does not wait."""

    def __init__(self, device: torch.device, untimed_steps: int = 0, phases: Sequence[str] = ()) -> None:
        """untimed_steps: the first ones of this process, left out of rates; phases: names reported even at zero."""
        super().__init__(phases=dict.fromkeys(phases, 0.0))
        self.device = device
        self._untimed_left, self._untimed_rate = untimed_steps, Rate()
        self._spans: list[tuple[str, Rate | None, Mark, Mark]] = []
        self._last = time.perf_counter()

    def _mark(self) -> Mark:
        """Return the time, or an event recorded in the current stream of a GPU; the host does not wait for it."""
        if self.device.type != "cuda":
            return time.perf_counter()
        return torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(enable_timing=True))

    @property
    def _current_rate(self) -> Rate:
        return self._untimed_rate if self._untimed_left else self.rate

    @contextmanager
    def phase(self, name: str, *, in_step: bool = True) -> Iterator[None]:
        """Time the block under `name`. in_step: whether it is part of the current step."""
        start = self._mark()
        try:
            yield
        finally:
            # The rate of now: `step` may end the untimed steps before `settle` reads the span.
            self._spans.append((name, self._current_rate if in_step else None, start, self._mark()))

    def iterate(self, name: str, items: Iterable[Item]) -> Iterator[Item]:
        """Iterate over `items`, timing the wait for each one as phase `name`."""
        waiting = iter(items)
        while True:
            with self.phase(name):
                try:
                    item = next(waiting)
                except StopIteration:
                    return
            yield item

    def step(self, images: int) -> None:
        """Count a finished step over `images` images."""
        self._current_rate.images += images
        if self._untimed_left:
            self._untimed_left -= 1
            self.untimed_steps += 1

    def add(self, seconds: Mapping[str, float], *, in_step: bool = True) -> None:
        """Add seconds by phase of earlier work whose result is read now, so that times are those of the whole work."""
        for name, value in seconds.items():
            self.phases[name] = self.phases.get(name, 0.0) + value
            self.seconds += value
            self.stored_seconds += value
            if in_step:
                self.rate.seconds[name] = self.rate.seconds.get(name, 0.0) + value
                self.step_seconds += value

    def settle(self) -> None:
        """Read all pending times, for which a GPU is waited for, and add the time since the last call to `seconds`."""
        # Events have no times until the stream has passed them.
        torch.get_device_module(self.device).synchronize(self.device)
        for name, rate, start, end in self._spans:
            # The distance of events is in milliseconds.
            seconds = end - start if isinstance(start, float) else start.elapsed_time(end) / 1000
            self.phases[name] = self.phases.get(name, 0.0) + seconds
            if rate is not None:
                rate.seconds[name] = rate.seconds.get(name, 0.0) + seconds
                self.step_seconds += seconds
        self._spans.clear()
        last, self._last = self._last, time.perf_counter()
        self.seconds += self._last - last

    def state(self) -> MeterState:
        """Return the measurements that a later process resumes from; call `settle` first."""
        return deepcopy(MeterState(**{measured.name: getattr(self, measured.name) for measured in fields(MeterState)}))

    def resume(self, state: MeterState, *, repeated: str = "") -> None:
        """Add the measurements of an earlier process; repeated: a phase that both have had, and that counts once."""
        self.settle()
        self.seconds += state.seconds - self.phases.pop(repeated, 0.0)
        self.phases |= {name: self.phases.get(name, 0.0) + seconds for name, seconds in state.phases.items()}
        self.step_seconds += state.step_seconds
        # A copy, because this process adds to its rate, and `state` stays as it was saved.
        self.rate = deepcopy(state.rate)
        self.untimed_steps += state.untimed_steps
        self.stored_seconds = state.stored_seconds

    def images_per_second(self, *phases: str) -> float | None:
        """Compute the rate over `phases` (default: whole steps), without the untimed steps if any follow them."""
        rate = self.rate if self.rate.images else self._untimed_rate
        seconds = sum(value for name, value in rate.seconds.items() if not phases or name in phases)
        return rate.images / seconds if rate.images and seconds > 0 else None

    def phases_with_other(self) -> dict[str, float]:
        """Return all phases, and the rest of `seconds` as "other"."""
        return {**self.phases, "other": max(0.0, self.seconds - sum(self.phases.values()))}


def start_memory_peak(device: torch.device) -> None:
    """Begin to measure the peak memory of a GPU, so that a run does not report that of an earlier one."""
    if device.type == "cuda":
        # Resetting the statistics fails before CUDA is initialized.
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory of a GPU since `start_memory_peak` in bytes; None on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
