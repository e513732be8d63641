"""Time synthetic steps and batches over numbers of classes and images, and with every combination of accelerations.

Only the number of images and class names counts here. Shapes: B images, C classes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.runtime.measure import Spread, repeats_on, time_in_turns
from benchmarks.runtime.settings import Settings, run_config
from benchmarks.runtime.workload import MODES, Kind, Models, Workload, accelerations_of, make_workload
from runner.acceleration import Acceleration

ABLATION_METHOD, ABLATION_CLASSES = "procap", 102
LADDER = (
    Acceleration(),
    Acceleration(graphs=True),
    Acceleration(compile=True),
    Acceleration(compile=True, graphs=True),
)
KINDS: tuple[Kind, ...] = ("train", "eval")
ATTENTION = "aten::_scaled_dot_product_"
UNFUSED, NO_BATCH = "attention_math", " without a batch"
"""Torch's attention without a fused kernel; the suffix marks ProCAP's cross-attention, which no fused kernel takes."""


@dataclass(frozen=True)
class Point:
    """One training step or evaluated batch of a given size."""

    kind: Kind
    classes: int
    batch: int
    precision: str = "fp32"


def measure_points(
    models: Models,
    method: str,
    points: Sequence[Point],
    settings: Settings,
    rounds: int,
    seconds: float | None,
    log: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Measure `points` in both modes, in their order; stops once `seconds` have passed.

    ratio: seconds of reference over fast mode, median over the rounds; counted: the same of counted operations;
    reached: ratio / counted.
    """
    found: list[dict[str, Any]] = []
    began = time.perf_counter()
    for point in points:
        left = None if seconds is None else seconds - (time.perf_counter() - began)
        if left is not None and left <= 0:
            log(f"{len(points) - len(found)} of {len(points)} sizes left out: the time is used up")
            break
        one = _measure_point(models, method, point, settings, rounds, left)
        found.append(one)
        size = f"{point.kind} {point.classes} classes, batch {point.batch}, {point.precision}"
        log(f"{size}: {one['ratio']:.2f}x, counted {one['counted']:.2f}x")
    return found


def _measure_point(
    models: Models, method: str, point: Point, settings: Settings, rounds: int, left: float | None
) -> dict[str, Any]:
    config = run_config(method, point.precision, settings, batch=point.batch)
    loads: dict[str, Workload] = {
        mode: make_workload(
            point.kind,
            models[mode],
            config,
            mode,
            accelerations_of(mode, settings.accelerations),
            point.classes,
            point.batch,
        )
        for mode in MODES
    }
    seconds = dict(zip(MODES, _time(list(loads.values()), models, rounds, left), strict=True))
    ratio = statistics.median(slow / quick for slow, quick in zip(*seconds.values(), strict=True))
    counted = loads["reference"].start.flops / loads["fast"].start.flops
    return {
        "point": asdict(point),
        "method": method,
        "backbone": models["fast"].name,
        "seconds": {mode: asdict(Spread.of(values)) for mode, values in seconds.items()},
        "flops": {mode: load.start.flops for mode, load in loads.items()},
        "peaks": {mode: load.start.peak for mode, load in loads.items()},
        "starts": {mode: load.start.seconds for mode, load in loads.items()},
        "recorded": loads["fast"].recorded,
        "ratio": ratio,
        "counted": counted,
        "reached": ratio / counted,
    }


def measure_accelerations(
    models: Models, settings: Settings, peaks: dict[str, float], seconds: float | None, log: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure ProCAP's training step and evaluated batch with every combination of allowed accelerations.

    peaks: operations per second of this device's matrix products, by precision. seconds: time limit, which
    reduces the number of rounds, at least one.
    """
    found: list[dict[str, Any]] = []
    share = None if seconds is None else seconds / len(settings.precisions) / len(KINDS)
    for precision in settings.precisions:
        for kind in KINDS:
            found += _measure_ladder(kind, precision, models, settings, peaks[precision], share)
            log(f"{kind} {precision}, {found[-1]['accelerations']}: {found[-1]['gain']:.2f}x of off")
    return found


def _measure_ladder(
    kind: Kind, precision: str, models: Models, settings: Settings, peak: float, left: float | None
) -> list[dict[str, Any]]:
    batch = settings.batch if kind == "train" else settings.test_batch
    config = run_config(ABLATION_METHOD, precision, settings, batch=batch)
    # Reference mode's model is never compiled; with the exact optimizations it equals fast mode without compiling.
    plain = models["reference"].with_optimizations(models["fast"].optimizations)
    allowed = settings.accelerations
    rungs = [rung for rung in LADDER if rung.compile <= allowed.compile and rung.graphs <= allowed.graphs]
    loads = [
        make_workload(kind, models["fast"] if rung.compile else plain, config, "fast", rung, ABLATION_CLASSES, batch)
        for rung in rungs
    ]
    rounds = _time(loads, models, settings.repeats, left)
    calls = count_attention_calls(loads[0].run)
    rows = []
    for rung, load, seconds in zip(rungs, loads, rounds, strict=True):
        spread = Spread.of(seconds)
        rows.append(
            {
                "kind": kind,
                "precision": precision,
                "classes": ABLATION_CLASSES,
                "batch": batch,
                "accelerations": " + ".join(name for name, on in asdict(rung).items() if on) or "off",
                "recorded": load.recorded,
                "start_seconds": load.start.seconds,
                "seconds": asdict(spread),
                "gain": statistics.median(off / own for off, own in zip(rounds[0], seconds, strict=True)),
                "images_per_second": batch / spread.median,
                "share_of_peak": load.start.flops / spread.median / peak,
                "attention": calls,
            }
        )
    return rows


def _time(loads: Sequence[Workload], models: Models, rounds: int, left: float | None) -> list[list[float]]:
    """Return seconds by workload and round; runs fewer rounds if they would take more than half of `left`."""
    device = models["fast"].device
    repeats = repeats_on(device)
    if left is not None:
        once = repeats * sum(load.start.once for load in loads)
        rounds = max(1, min(rounds, int(left / 2 / once)))
    return time_in_turns([load.run for load in loads], rounds, device, repeats)


def count_attention_calls(work: Callable[[], object]) -> dict[str, int]:
    """Count how often `work` calls each of torch's attention kernels, by their names in torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        work()
    calls: dict[str, int] = {}
    for event in profiled.key_averages(group_by_input_shape=True):
        name = event.key.removeprefix(ATTENTION)
        if name != event.key and not name.endswith("_backward"):
            name += NO_BATCH if len(event.input_shapes[0]) < 4 else ""
            calls[name] = calls.get(name, 0) + event.count
    return calls


def cross_attention_timings() -> list[dict[str, Any]]:
    """Return the timings of eager and fused cross-attention in this process; empty without a GPU."""
    from procap.kernels.refinement import get_timings

    found = []
    for key, timings in get_timings().items():
        _, dtype, tokens, vision_width, text_width, *_, autocast = key
        # A variant that did not run has infinite time, which JSON cannot store.
        milliseconds = {name: ms if ms < float("inf") else None for name, ms in timings._asdict().items()}
        found.append(
            {
                "tokens": tokens,
                "widths": [vision_width, text_width],
                "dtype": str(dtype).removeprefix("torch."),
                "autocast": None if autocast is None else str(autocast).removeprefix("torch."),
                "milliseconds": milliseconds,
                "fused": timings.fused < timings.eager,
                "fused_in_graphs": timings.fused_graph < timings.eager_graph,
            }
        )
    return found
