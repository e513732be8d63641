"""Compare the measured ratios of a runtime report with the required ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.console.output import columns

FULL = "ViT-B-16"
SAME_FPS, STEP_LIMIT, COUNTED_SHARE, BF16_GAIN = 0.97, 1.10, 0.85, 2.0
CPU_RATIOS = (
    ("train", 51, 4, 2.5),
    ("train", 500, 4, 6.0),
    ("train", 102, 32, 1.3),
    ("eval", 51, 100, 1.06),
    ("eval", 1000, 100, 2.5),
)
"""Kind, classes, batch, and least ratio of reference over fast, at full size with random weights."""
MINI_SIZES = [(kind, classes, batch) for batch in (4, 32) for classes in (10, 50, 200) for kind in ("train", "eval")]
H200_FPS, H200_SECONDS, H200_SET = 9000.0, 4.0, "photographs-102"
WORK = {"train": "training step", "eval": "evaluation"}
MET, NOT_MET, NOT_MEASURED = "met", "NOT MET", "not measured"


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
            return NOT_MEASURED
        good = self.found >= self.wanted if self.least else self.found <= self.wanted
        return MET if good else NOT_MET


def list_targets(report: dict[str, Any]) -> list[Target]:
    """List every target with its measured value in `report`."""
    return [*_between_methods(report), *_sizes(report), *_h200(report), *_memory(report)]


def format_targets(targets: list[Target]) -> str:
    """Format the targets as a plain table."""
    rows = []
    for target in targets:
        found = "-" if target.found is None else f"{target.found:.2f}"
        limit = f"at {'least' if target.least else 'most'} {target.wanted:g}"
        rows.append((target.state, target.what, limit, found, target.remark))
    return columns(("state", "target", "wanted", "found", "remark"), rows)


def _between_methods(report: dict[str, Any]) -> Iterator[Target]:
    """Compare ProCAP with the other methods in the same mode."""
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for row in report["rows"]:
        groups.setdefault(f"{row['dataset']} {row['mode']} {row['precision']}", {})[row["method"]] = row
    for where, rows in groups.items():
        own = rows.get("procap")
        for method, name in (("zeroshot", "zero-shot"), ("maple", "MaPLe-style")):
            if own is None or method not in rows:
                continue
            other = rows[method]
            ratio = own["encoder_fps"]["median"] / other["encoder_fps"]["median"]
            counted = f"counted {other['flops']['image'] / own['flops']['image']:.2f}"
            yield Target(f"FPS, ProCAP over {name}, {where}", SAME_FPS, True, ratio, f"encoder only, {counted}")
            if method == "maple" and own["step_seconds"] and other["step_seconds"]:
                ratio = own["step_seconds"]["median"] / other["step_seconds"]["median"]
                counted = f"counted {own['flops']['step'] / other['flops']['step']:.2f}"
                yield Target(f"step, ProCAP over {name}, {where}", STEP_LIMIT, False, ratio, counted)


def _sizes(report: dict[str, Any]) -> Iterator[Target]:
    """Compare reference with fast mode at single sizes, on a CPU."""
    on_cpu = report["device"]["type"] == "cpu"
    measured = {(one["backbone"], *one["point"].values()): one for one in report["scaling"] if on_cpu}
    command = "CPU only: procap bench runtime --check"
    for kind, classes, batch, least in CPU_RATIOS:
        one = measured.get((FULL, kind, classes, batch, "fp32"))
        remark = f"counted {one['counted']:.2f}" if one else command
        what = f"CPU, ViT-B/16, fp32: {WORK[kind]}, {classes} classes, batch {batch}, reference over fast"
        yield Target(what, least, True, one and one["ratio"], remark)
    fp32, bf16 = (measured.get((FULL, "train", 51, 4, precision)) for precision in ("fp32", "bf16"))
    gain, remark = None, command if report["device"]["bf16"] else "this processor has no bf16"
    if fp32 and bf16:
        gain = fp32["seconds"]["fast"]["median"] / bf16["seconds"]["fast"]["median"]
        peaks = report["matmul_peak"]
        remark = f"51 classes, batch 4; matrix products here {peaks['bf16'] / peaks['fp32']:.2f}x"
    yield Target("CPU, ViT-B/16: training step, fp32 over bf16", BF16_GAIN, True, gain, remark)
    for kind, classes, batch in MINI_SIZES:
        one = measured.get(("mini", kind, classes, batch, "fp32"))
        remark = f"{one['ratio']:.2f}x of {one['counted']:.2f}x" if one else "CPU only: procap bench runtime"
        what = f"mini: {WORK[kind]}, {classes} classes, batch {batch}, measured over counted ratio"
        yield Target(what, COUNTED_SHARE, True, one and one["reached"], remark)


def _h200(report: dict[str, Any]) -> Iterator[Target]:
    wanted = (H200_SET, "procap", "fast", "bf16")
    row: dict[str, Any] | None = None
    if "H200" in report["device"]["name"] and report["backbone"]["name"] == FULL:
        keys = ("dataset", "method", "mode", "precision")
        row = next((one for one in report["rows"] if tuple(one[key] for key in keys) == wanted), None)
    remark = "" if row else "on an H200: procap bench runtime --check"
    fps = row["encoder_fps"]["median"] if row else None
    yield Target("H200, ViT-B/16, bf16: images/s, encoder only", H200_FPS, True, fps, remark)
    finished = row and not row["extrapolated"] and (row["epochs"], row["batch"]) == (10, 32)
    seconds = row["train_seconds"] if row and finished else None
    what = "H200: ten epochs, 102 classes, 1,632 images, batch 32, seconds"
    yield Target(what, H200_SECONDS, False, seconds, remark if finished or not row else "not trained to the end")


def _memory(report: dict[str, Any]) -> Iterator[Target]:
    """Compare the peak memory of the modes, at the worst size of each backbone."""
    ratios: dict[str, list[tuple[float, str]]] = {}
    for one in report["scaling"]:
        point, peaks = one["point"], one["peaks"]
        if point["kind"] == "train":
            size = f"worst at {point['classes']} classes, batch {point['batch']}"
            ratios.setdefault(one["backbone"], []).append((peaks["fast"] / peaks["reference"], size))
    peaks_by_mode: dict[tuple[str, ...], dict[str, int]] = {}
    for row in report["rows"]:
        if row["peak_bytes"]["train"]:
            case = row["dataset"], row["method"], row["precision"]
            peaks_by_mode.setdefault(case, {})[row["mode"]] = row["peak_bytes"]["train"]
    for (dataset, *_), peaks in peaks_by_mode.items():
        if len(peaks) == 2:
            size = f"worst on {dataset}"
            ratios.setdefault(report["backbone"]["name"], []).append((peaks["fast"] / peaks["reference"], size))
    for backbone, found in ratios.items():
        ratio, size = max(found)
        yield Target(f"{backbone}: peak memory of the step, fast over reference", 0.999, False, ratio, size)
