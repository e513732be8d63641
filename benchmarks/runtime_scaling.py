"""How a training step and an evaluated batch scale with classes and images, in both modes side by side.

Images and class names are made up: only their number counts here. Shapes: B images, C classes, S image size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.flops import evaluation, training_step
from benchmarks.runtime_data import class_names
from benchmarks.runtime_measure import Spread, interleaved, peak_bytes, stretch
from benchmarks.runtime_modes import MODES, ModeName, classifier_of, optimizer_of, towers
from procap.clip import CLIP
from procap.methods import build_method
from procap.methods.method import Method
from procap.methods.procap import PROCAP_RECIPE
from procap.text import LabelSpace
from shards.streams import generator

Kind = Literal["train", "eval"]


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
    alive at once, where they were looked at.
    """

    point: Point
    method: str
    backbone: str
    seconds: dict[str, Spread]
    flops: dict[str, float]
    peaks: dict[str, int]
    ratio: float
    counted: float

    @property
    def reached(self) -> float:
        """The measured ratio as a share of the counted one."""
        return self.ratio / self.counted


def measure_points(
    clip: CLIP,
    method: str,
    options: dict[str, Any],
    points: Sequence[Point],
    rounds: int,
    seed: int,
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
        found.append(_measure(clip, method, options, point, rounds, seed, left))
        one = found[-1]
        tell(
            f"{point.kind} {point.classes} classes, batch {point.batch}, {point.precision}: "
            f"{one.ratio:.2f}x, counted {one.counted:.2f}x"
        )
    return found


def _measure(
    clip: CLIP, name: str, options: dict[str, Any], point: Point, rounds: int, seed: int, left: float | None
) -> Measured:
    device, size = clip.device, clip.geometry.image_size
    space = LabelSpace(class_names(point.classes))
    images = torch.randn(point.batch, 3, size, size, generator=generator(seed, "images")).to(device)
    labels = (torch.arange(point.batch) % point.classes).to(device)
    work: list[Callable[[], object]] = []
    flops: dict[str, float] = {}
    for mode in MODES:
        method = build_method(name, towers(clip, mode), space, options, generator(seed, "init"))
        work.append(_work(method, mode, point, images, labels, seed))
        if point.kind == "train":
            flops[mode] = training_step(method, point.batch).total
        else:
            flops[mode] = evaluation(method, point.batch, every_batch=mode == "reference").total
    # The look at the memory is the warm-up.
    with stretch(device) as warm:
        peaks: dict[str, int] = {mode: peak_bytes(run, device) for mode, run in zip(MODES, work, strict=True)}
    if left is not None:
        rounds = max(1, min(rounds, int(left / 2 / warm.seconds)))
    reference, fast = interleaved(work, rounds, device)
    return Measured(
        point=point,
        method=name,
        backbone=clip.name,
        seconds={"reference": _spread(reference), "fast": _spread(fast)},
        flops=flops,
        peaks=peaks,
        ratio=statistics.median(slow / quick for slow, quick in zip(reference, fast, strict=True)),
        counted=flops["reference"] / flops["fast"],
    )


def _work(
    method: Method, mode: ModeName, point: Point, images: Tensor, labels: Tensor, seed: int
) -> Callable[[], object]:
    if point.kind == "eval":
        with _autocast(point, images):
            classify = classifier_of(method, mode)

        def evaluate() -> object:
            with _autocast(point, images):
                return classify(images)

        return evaluate

    optimizer = optimizer_of(method, PROCAP_RECIPE, mode)
    # At a rate of zero the optimizer does all its work and every round starts from the same weights.
    for group in optimizer.param_groups:
        group["lr"] = 0.0

    def step() -> None:
        with _autocast(point, images):
            noise = tuple(t.to(images.device) for t in method.draw(generator(seed, "noise")))
            terms = method.loss(images, labels, noise)
            loss = torch.stack(list(terms.values())).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def _autocast(point: Point, images: Tensor) -> AbstractContextManager[object]:
    if point.precision == "bf16":
        return torch.autocast(images.device.type, dtype=torch.bfloat16)
    return nullcontext()


def _spread(seconds: Sequence[float]) -> Spread:
    spread = Spread.of(seconds)
    assert spread is not None
    return spread
