"""What makes fast mode fast on this device: each acceleration alone and together, and which attention kernels run.

Shapes: B images, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks.runtime.measure import Spread, interleaved, times_on
from benchmarks.runtime.modes import Models
from benchmarks.runtime.scaling import made_up
from benchmarks.runtime.settings import Settings, run_config
from benchmarks.runtime.work import Kind, RunSpec, piece_of_work
from runner.acceleration import Acceleration

METHOD, CLASSES = "procap", 102
LADDER = (
    Acceleration(),
    Acceleration(graphs=True),
    Acceleration(compile=True),
    Acceleration(compile=True, graphs=True),
)
KINDS: tuple[Kind, ...] = ("train", "eval")
ATTENTION = "aten::_scaled_dot_product_"
UNFUSED, NO_BATCH = "attention_math", " without a batch"
"""Torch's attention without a fused kernel; and what is added where it is not the towers' own."""


def measure_ways(
    models: Models, settings: Settings, peaks: dict[str, float], seconds: float | None, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """ProCAP's training step and evaluated batch under every way that `settings` allow, as plain JSON.

    peaks: operations per second of this device's matrix products, by precision. seconds: where there are not enough,
    there are fewer rounds, one at least.
    """
    found = []
    part = None if seconds is None else seconds / len(settings.precisions) / len(KINDS)
    for precision in settings.precisions:
        for kind in KINDS:
            found += _measure(kind, precision, models, settings, peaks[precision], part)
            last = found[-1]
            tell(f"{kind} {precision}, {last['way']}: {last['gain']:.2f}x of off")
    return found


def possible(ways: Acceleration) -> list[Acceleration]:
    """The rungs that `ways` allow."""
    return [rung for rung in LADDER if rung.compile <= ways.compile and rung.graphs <= ways.graphs]


def title(ways: Acceleration) -> str:
    """`compile + graphs`, `off`."""
    return " + ".join(name for name, on in asdict(ways).items() if on) or "off"


def _measure(
    kind: Kind, precision: str, models: Models, settings: Settings, peak: float, left: float | None
) -> list[dict[str, Any]]:
    batch = settings.batch if kind == "train" else settings.test_batch
    config = run_config(METHOD, precision, settings, batch=batch)
    compiled = models["fast"]
    # Reference mode's model is never compiled: with the savings it is fast mode's without the compiler.
    plain = models["reference"].with_savings(compiled.savings)
    rungs = possible(settings.ways)
    pieces: list[RunSpec] = []
    for rung in rungs:
        method, images, labels = made_up(compiled if rung.compile else plain, METHOD, CLASSES, batch)
        pieces.append(piece_of_work(kind, method, config, "fast", rung, images, labels))
    work, times, repeats = [piece.run for piece in pieces], times_on(compiled.device), settings.repeats
    if left is not None:
        repeats = max(1, min(repeats, int(left / 2 / (times * sum(piece.start.once for piece in pieces)))))
    rounds = interleaved(work, repeats, compiled.device, times)
    flops = pieces[0].start.flops
    calls = attention_calls(work[0])
    lines = []
    for rung, piece, seconds in zip(rungs, pieces, rounds, strict=True):
        spread = Spread.of(seconds)
        assert spread is not None
        gains = Spread.of([off / own for off, own in zip(rounds[0], seconds, strict=True)])
        assert gains is not None
        lines.append({
            "kind": kind,
            "precision": precision,
            "classes": CLASSES,
            "batch": batch,
            "way": title(rung),
            "recorded": piece.recorded,
            "start_seconds": piece.start.seconds,
            "seconds": asdict(spread),
            "gain": gains.median,
            "images_per_second": batch / spread.median,
            "share_of_peak": flops / spread.median / peak,
            "attention": calls,
        })  # fmt: skip
    return lines


def attention_calls(work: Callable[[], object]) -> dict[str, int]:
    """How often `work` calls each implementation of torch's attention, by the name that torch's profiler shows.

    ProCAP's cross-attention has no dimension of images or classes, which no fused kernel takes.
    """
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


def cross_attention() -> list[dict[str, Any]]:
    """What was timed in this process of ProCAP's cross-attention, eager against fused kernels; empty without a GPU."""
    from procap.kernels.refinement import measured

    found = []
    for key, timings in measured().items():
        _, dtype, tokens, vision_width, text_width, *_, autocast = key
        # JSON has no infinity, which is what a way that did not run takes.
        milliseconds = {name: ms if ms < float("inf") else None for name, ms in timings._asdict().items()}
        found.append({
            "tokens": tokens,
            "widths": [vision_width, text_width],
            "dtype": str(dtype).removeprefix("torch."),
            "autocast": None if autocast is None else str(autocast).removeprefix("torch."),
            "milliseconds": milliseconds,
            "fused": timings.fused < timings.eager,
            "fused_in_graphs": timings.fused_graph < timings.eager_graph,
        })  # fmt: skip
    return found
