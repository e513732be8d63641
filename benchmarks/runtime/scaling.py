"""How a training step and an evaluated batch scale with classes and images, in both modes side by side.

Images and class names are made up: only their number counts here. Shapes: B images, C classes, S image size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.runtime.data import class_names
from benchmarks.runtime.measure import Spread, interleaved, times_on
from benchmarks.runtime.modes import MODES, Models, ways_of
from benchmarks.runtime.settings import OPTIONS, SEED, Settings, run_config
from benchmarks.runtime.work import Kind, piece_of_work
from procap.clip import CLIP
from procap.methods import build_method
from procap.methods.method import Method
from procap.text import LabelSpace
from shards.rng import generator


@dataclass(frozen=True)
class Point:
    """One size of one kind of work."""

    kind: Kind
    classes: int
    batch: int
    precision: str = "fp32"


@dataclass(frozen=True)
class Measured:
    """A point in both modes.

    ratio: reference over fast, median over the rounds; counted: the same of counted operations. peaks: bytes of tensors
    alive at once. starts: seconds of warm-up, compiling and recording. recorded: whether fast mode replayed recordings.
    """

    point: Point
    method: str
    backbone: str
    seconds: dict[str, Spread]
    flops: dict[str, float]
    peaks: dict[str, int]
    starts: dict[str, float]
    recorded: bool
    ratio: float
    counted: float

    @property
    def reached(self) -> float:
        """The measured ratio as a share of the counted one."""
        return self.ratio / self.counted

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "reached": self.reached}


def measure_points(
    models: Models,
    method: str,
    points: Sequence[Point],
    settings: Settings,
    rounds: int,
    seconds: float | None,
    tell: Callable[[str], None],
) -> list[Measured]:
    """Measure `points` in their order; later ones are left out once `seconds` have gone by."""
    found: list[Measured] = []
    began = time.perf_counter()
    for point in points:
        left = None if seconds is None else seconds - (time.perf_counter() - began)
        if left is not None and left <= 0:
            tell(f"{len(points) - len(found)} of {len(points)} sizes left out: the time is used up")
            break
        found.append(_measure(models, method, point, settings, rounds, left))
        one = found[-1]
        tell(
            f"{point.kind} {point.classes} classes, batch {point.batch}, {point.precision}: "
            f"{one.ratio:.2f}x, counted {one.counted:.2f}x"
        )
    return found


def made_up(clip: CLIP, method: str, classes: int, batch: int) -> tuple[Method, Tensor, Tensor]:
    """A method at its start over made-up class names, with images [B, 3, S, S] and labels [B] on the device."""
    size = clip.geometry.image_size
    space = LabelSpace(class_names(classes))
    built = build_method(method, clip, space, OPTIONS.get(method, {}), generator(SEED, "init"))
    images = torch.randn(batch, 3, size, size, generator=generator(SEED, "images"))
    return built, images.to(clip.device), (torch.arange(batch) % classes).to(clip.device)


def _measure(models: Models, name: str, point: Point, settings: Settings, rounds: int, left: float | None) -> Measured:
    device = models["fast"].device
    config = run_config(name, point.precision, settings, batch=point.batch)
    pieces, flops = {}, {}
    for mode in MODES:
        method, images, labels = made_up(models[mode], name, point.classes, point.batch)
        ways = ways_of(mode, settings.ways)
        pieces[mode] = piece_of_work(point.kind, method, config, mode, ways, images, labels)
        flops[str(mode)] = pieces[mode].start.flops
    times = times_on(device)
    if left is not None:
        once = times * sum(piece.start.once for piece in pieces.values())
        rounds = max(1, min(rounds, int(left / 2 / once)))
    reference, fast = interleaved([pieces[mode].run for mode in MODES], rounds, device, times)
    return Measured(
        point=point,
        method=name,
        backbone=models["fast"].name,
        seconds={"reference": _spread(reference), "fast": _spread(fast)},
        flops=flops,
        peaks={mode: piece.start.peak for mode, piece in pieces.items()},
        starts={mode: piece.start.seconds for mode, piece in pieces.items()},
        recorded=pieces["fast"].recorded,
        ratio=statistics.median(slow / quick for slow, quick in zip(reference, fast, strict=True)),
        counted=flops["reference"] / flops["fast"],
    )


def _spread(seconds: Sequence[float]) -> Spread:
    spread = Spread.of(seconds)
    assert spread is not None
    return spread
