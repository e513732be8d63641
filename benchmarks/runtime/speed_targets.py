"""Compare a runtime report with the targets for its device, backbone and precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.console.output import columns

FULL = "ViT-B-16"
SAME_FPS, STEP_LIMIT = 0.97, 1.10
CPU_RATIOS = (
    ("train", 51, 4, 2.5),
    ("train", 500, 4, 6.0),
    ("train", 102, 32, 1.3),
    ("eval", 51, 100, 1.06),
    ("eval", 1000, 100, 2.5),
)
"""Kind, classes, batch, and least ratio of reference over fast, at full size with random weights."""
H200_FPS, H200_SECONDS, H200_SET = 9000.0, 4.0, "photographs-102"
WORK = {"train": "training step", "eval": "evaluation"}
MET, NOT_MET, NOT_MEASURED = "met", "NOT MET", "not measured"


@dataclass(frozen=True)
class SpeedTarget:
    """One target. wanted: the lowest allowed value if `least`, else the highest. found: the measured value, if any."""

    what: str
    wanted: float
    least: bool
    found: float | None

    @property
    def state(self) -> str:
        if self.found is None:
            return NOT_MEASURED
        good = self.found >= self.wanted if self.least else self.found <= self.wanted
        return MET if good else NOT_MET


def list_targets(report: dict[str, Any]) -> list[SpeedTarget]:
    """List the targets of this device and backbone with their measured values."""
    is_full, device = report["backbone"]["name"] == FULL, report["device"]
    targets = [*_memory(report)]
    targets += _between_methods(report) if is_full else ()
    targets += _sizes(report) if device["type"] == "cpu" else ()
    targets += _h200(report) if is_full and "H200" in device["name"] else ()
    return targets


def format_targets(targets: list[SpeedTarget]) -> str:
    """Format the targets as a plain table."""
    rows = []
    for target in targets:
        limit = f"at {'least' if target.least else 'most'} {target.wanted:g}"
        rows.append((target.state, target.what, limit, "-" if target.found is None else f"{target.found:.2f}"))
    return columns(("state", "target", "wanted", "found"), rows)


def _between_methods(report: dict[str, Any]) -> Iterator[SpeedTarget]:
    """Compare ProCAP with the other methods in fast mode; smaller backbones than ViT-B/16 have fewer other tokens."""
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for row in report["rows"]:
        if row["mode"] == "fast":
            groups.setdefault(f"{row['dataset']} {row['precision']}", {})[row["method"]] = row
    for where, rows in groups.items():
        own = rows.get("procap")
        for method, name in (("zeroshot", "zero-shot"), ("maple", "MaPLe-style")):
            other = rows.get(method)
            if own is None or other is None:
                continue
            ratio = own["encoder_fps"]["median"] / other["encoder_fps"]["median"]
            yield SpeedTarget(f"FPS of the encoder, ProCAP over {name}, {where}", SAME_FPS, True, ratio)
            if method == "maple" and own["step_seconds"] and other["step_seconds"]:
                ratio = own["step_seconds"]["median"] / other["step_seconds"]["median"]
                yield SpeedTarget(f"step, ProCAP over {name}, {where}", STEP_LIMIT, False, ratio)


def _sizes(report: dict[str, Any]) -> Iterator[SpeedTarget]:
    """Compare reference with fast mode at single sizes of ViT-B/16 on a CPU."""
    measured = {(one["backbone"], *one["point"].values()): one for one in report["scaling"]}
    for kind, classes, batch, least in CPU_RATIOS:
        one = measured.get((FULL, kind, classes, batch, "fp32"))
        what = f"CPU, ViT-B/16, fp32: {WORK[kind]}, {classes} classes, batch {batch}, reference over fast"
        yield SpeedTarget(what, least, True, one and one["ratio"])


def _h200(report: dict[str, Any]) -> Iterator[SpeedTarget]:
    wanted = (H200_SET, "procap", "fast", "bf16")
    keys = ("dataset", "method", "mode", "precision")
    row = next((row for row in report["rows"] if tuple(row[key] for key in keys) == wanted), None)
    fps = row["encoder_fps"]["median"] if row else None
    yield SpeedTarget("H200, ViT-B/16, bf16: images/s, encoder only", H200_FPS, True, fps)
    # An extrapolated training does not count as measured.
    seconds = row["train_seconds"] if row and not row["extrapolated"] else None
    yield SpeedTarget("H200: ten epochs, 102 classes, 1,632 images, batch 32, seconds", H200_SECONDS, False, seconds)


def _memory(report: dict[str, Any]) -> Iterator[SpeedTarget]:
    """Compare the peak memory of the modes, at the worst size of each backbone."""
    ratios: dict[str, list[float]] = {}
    for one in report["scaling"]:
        if one["point"]["kind"] == "train":
            ratios.setdefault(one["backbone"], []).append(one["peaks"]["fast"] / one["peaks"]["reference"])
    trained = [(row["mode"], row["peak_bytes"]["train"]) for row in report["rows"] if row["peak_bytes"]["train"]]
    slow, fast = ([peak for mode, peak in trained if mode == wanted] for wanted in ("reference", "fast"))
    # The rows of both modes are in the same order.
    own = [quick / plain for plain, quick in zip(slow, fast, strict=True)]
    ratios.setdefault(report["backbone"]["name"], []).extend(own)
    for backbone, found in ratios.items():
        if found:
            yield SpeedTarget(f"{backbone}: peak memory of the step, fast over reference", 0.999, False, max(found))
