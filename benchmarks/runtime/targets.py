"""Check the ratios that fast mode must reach: met, not met, or not measured and with which command it can be.

The ratios at full size come from single settings with random weights, which `--check` measures beside the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.console.output import columns, note

if TYPE_CHECKING:
    import torch

    from benchmarks.runtime.settings import Settings

FULL = "ViT-B-16"
SAME_FPS, STEP_LIMIT, COUNTED_SHARE, BF16_GAIN = 0.97, 1.10, 0.85, 2.0
# kind, classes, batch, least ratio of reference over fast.
CPU_RATIOS = (
    ("train", 51, 4, 2.5),
    ("train", 500, 4, 6.0),
    ("train", 102, 32, 1.3),
    ("eval", 51, 100, 1.06),
    ("eval", 1000, 100, 2.5),
)
MINI_SIZES = [(kind, classes, batch) for batch in (4, 32) for classes in (10, 50, 200) for kind in ("train", "eval")]
H200_FPS, H200_SECONDS, H200_SET = 9000.0, 4.0, "photographs-102"


@dataclass(frozen=True)
class Target:
    """One target. wanted: the lowest allowed value if `least`, else the highest. found: the measured value, if any."""

    what: str
    wanted: float
    least: bool
    found: float | None
    remark: str

    @property
    def state(self) -> str:
        if self.found is None:
            return "not measured"
        good = self.found >= self.wanted if self.least else self.found <= self.wanted
        return "met" if good else "NOT MET"


def list_targets(report: dict[str, Any]) -> list[Target]:
    """List every target with its measured value in `report`."""
    return [
        *_methods(report),
        *_full_size(report),
        *_mini(report),
        *_h200(report),
        *_memory(report),
        *_attention(report),
    ]


def format_targets(listed: list[dict[str, Any]]) -> str:
    """Format the targets as a plain table."""
    rows = []
    for one in listed:
        target = Target(**one)
        found = "-" if target.found is None else f"{target.found:.2f}"
        sign = "at least" if target.least else "at most"
        rows.append((target.state, target.what, f"{sign} {target.wanted:g}", found, target.remark))
    return columns(("state", "target", "wanted", "found", "remark"), rows)


def measure_full_size(report: dict[str, Any], settings: Settings, device: torch.device) -> None:
    """Measure single sizes at ViT-B/16 and add them to `report`, if this kind of device has targets for them."""
    from benchmarks.runtime.measure import matmul_peak
    from benchmarks.runtime.sizes import Point, measure_points
    from benchmarks.runtime.workload import models_by_mode
    from procap.weights.loading import load_clip

    if device.type != "cpu":
        return
    points = [Point(kind, classes, batch) for kind, classes, batch, _ in CPU_RATIOS]  # type: ignore[arg-type]
    if report["device"]["bf16"] and Point("train", 51, 4) in points:
        points.insert(1, Point("train", 51, 4, "bf16"))
    peaks = {precision: matmul_peak(device, precision) for precision in ("fp32", "bf16")}
    note(f"single sizes of {FULL} with random weights: some minutes")
    rounds = max(1, settings.repeats // 2)
    models = models_by_mode(load_clip(FULL, "random"), settings.accelerations)
    report["scaling"] += measure_points(
        models, "procap", points, settings, rounds, None, lambda line: note(f"  {line}")
    )
    report["matmul_peak"] = {**peaks, **report["matmul_peak"]}


def _methods(report: dict[str, Any]) -> Iterator[Target]:
    rows = report["rows"]
    places = dict.fromkeys((row["dataset"], row["mode"], row["precision"]) for row in rows)
    for place in places:
        here = {row["method"]: row for row in rows if (row["dataset"], row["mode"], row["precision"]) == place}
        where = " ".join(place)
        own = here.get("procap")
        for other, name in (("zeroshot", "zero-shot"), ("maple", "MaPLe-style")):
            if own and other in here:
                ratio = own["encoder_fps"]["median"] / here[other]["encoder_fps"]["median"]
                share = here[other]["flops"]["image"] / own["flops"]["image"]
                what = f"FPS, ProCAP over {name}, {where}"
                yield Target(what, SAME_FPS, True, ratio, f"encoder only, counted {share:.2f}")
        if own and "maple" in here and own["step_seconds"] and here["maple"]["step_seconds"]:
            ratio = own["step_seconds"]["median"] / here["maple"]["step_seconds"]["median"]
            share = own["flops"]["step"] / here["maple"]["flops"]["step"]
            yield Target(f"step, ProCAP over MaPLe-style, {where}", STEP_LIMIT, False, ratio, f"counted {share:.2f}")


def _full_size(report: dict[str, Any]) -> Iterator[Target]:
    command = "CPU only: procap bench runtime --check"
    for kind, classes, batch, least in CPU_RATIOS:
        one = _point(report, FULL, kind, classes, batch, "fp32") if report["device"]["type"] == "cpu" else None
        remark = f"counted {one['counted']:.2f}" if one else command
        work = "training step" if kind == "train" else "evaluation"
        what = f"CPU, ViT-B/16, fp32: {work}, {classes} classes, batch {batch}, reference over fast"
        yield Target(what, least, True, one["ratio"] if one else None, remark)
    pair = [_point(report, FULL, "train", 51, 4, precision) for precision in ("fp32", "bf16")]
    gain, remark = None, command if report["device"]["bf16"] else "this processor has no bf16"
    if pair[0] and pair[1] and report["device"]["type"] == "cpu":
        gain = pair[0]["seconds"]["fast"]["median"] / pair[1]["seconds"]["fast"]["median"]
        peaks = report["matmul_peak"]
        remark = f"51 classes, batch 4; matrix products here {peaks['bf16'] / peaks['fp32']:.2f}x"
    yield Target("CPU, ViT-B/16: training step, fp32 over bf16", BF16_GAIN, True, gain, remark)


def _mini(report: dict[str, Any]) -> Iterator[Target]:
    for kind, classes, batch in MINI_SIZES:
        one = _point(report, "mini", kind, classes, batch, "fp32") if report["device"]["type"] == "cpu" else None
        work = "training step" if kind == "train" else "evaluation"
        remark = f"{one['ratio']:.2f}x of {one['counted']:.2f}x" if one else "CPU only: procap bench runtime"
        what = f"mini: {work}, {classes} classes, batch {batch}, measured over counted ratio"
        yield Target(what, COUNTED_SHARE, True, one["reached"] if one else None, remark)


def _h200(report: dict[str, Any]) -> Iterator[Target]:
    here = "H200" in report["device"]["name"]
    fitting = [
        row
        for row in report["rows"]
        if here
        and report["backbone"]["name"] == FULL
        and (row["dataset"], row["method"], row["mode"], row["precision"]) == (H200_SET, "procap", "fast", "bf16")
    ]
    row = fitting[0] if fitting else None
    no_gpu = "" if here else "no H200 here; there: procap bench runtime --check"
    fps = row and row["encoder_fps"]["median"]
    remark = _share_and_start(report, row, "eval") if row else no_gpu
    yield Target("H200, ViT-B/16, bf16: images/s, encoder only", H200_FPS, True, fps, remark)
    whole = row if row and not row["extrapolated"] and (row["epochs"], row["batch"]) == (10, 32) else None
    seconds = whole and whole["train_seconds"]
    remark = _share_and_start(report, whole, "train") if whole else no_gpu or "not trained to the end"
    yield Target("H200: ten epochs, 102 classes, 1,632 images, batch 32, seconds", H200_SECONDS, False, seconds, remark)


def _share_and_start(report: dict[str, Any], row: dict[str, Any], kind: str) -> str:
    """Check the share of the peak rate that is reached, and the seconds of the start."""
    cache = report["compile_cache"]
    compiled = f", cache of compiled programs {cache['state']}" if cache else ""
    share, start = 100 * row["share_of_peak"][kind], row["start_seconds"][kind]
    return f"{share:.0f} % of the measured peak; start apart: {start:.1f} s{compiled}"


def _memory(report: dict[str, Any]) -> Iterator[Target]:
    """Check the peak memory at the worst size of each backbone."""
    found: dict[str, list[tuple[float, str]]] = {}
    for one in report["scaling"]:
        if one["point"]["kind"] == "train" and one["peaks"]:
            ratio = one["peaks"]["fast"] / one["peaks"]["reference"]
            size = f"worst at {one['point']['classes']} classes, batch {one['point']['batch']}"
            found.setdefault(one["backbone"], []).append((ratio, size))
    for row in report["rows"]:
        other = _other_mode(report, row)
        if row["mode"] == "fast" and other and row["peak_bytes"]["train"] and other["peak_bytes"]["train"]:
            ratio = row["peak_bytes"]["train"] / other["peak_bytes"]["train"]
            found.setdefault(report["backbone"]["name"], []).append((ratio, f"worst on {row['dataset']}"))
    for backbone, sizes in found.items():
        ratio, size = max(sizes)
        yield Target(f"{backbone}: peak memory of the step, fast over reference", 0.999, False, ratio, size)


def _attention(report: dict[str, Any]) -> Iterator[Target]:
    """Check that no attention in the towers runs without a fused kernel."""
    from benchmarks.runtime.sizes import UNFUSED

    for one in report["acceleration_ablation"]:
        if one["accelerations"] == "off":
            calls = ", ".join(f"{name} {count}" for name, count in one["attention"].items())
            work = "training step" if one["kind"] == "train" else "evaluated batch"
            what = f"{work} in {one['precision']}: calls of attention without a fused kernel in the towers"
            yield Target(what, 0, False, one["attention"].get(UNFUSED, 0), calls)


def _other_mode(report: dict[str, Any], row: dict[str, Any]) -> dict[str, Any] | None:
    same = ("dataset", "method", "precision")
    pairs = (r for r in report["rows"] if r["mode"] != row["mode"] and all(r[key] == row[key] for key in same))
    return next(pairs, None)


def _point(
    report: dict[str, Any], backbone: str, kind: str, classes: int, batch: int, precision: str
) -> dict[str, Any] | None:
    size = {"kind": kind, "classes": classes, "batch": batch, "precision": precision}
    return next((s for s in report["scaling"] if s["backbone"] == backbone and s["point"] == size), None)
