"""Measure whole runs of ProCAP and MaPLe on a GPU; `procap check device` measures single steps.

    python -m tools.gpu --out gpu      about twelve minutes; `--parts row,memory` selects
    python -m tools.gpu --out gpu --quick --device cpu      rehearsal with mini

Each part is written to `OUT/runs.json` when it is measured, and a repeated command goes on after it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.console.output import note, show
from benchmarks.runtime.benchmark import measure
from benchmarks.runtime.settings import Settings, make_settings
from benchmarks.runtime.workload import models_by_mode
from procap.weights.loading import load_clip
from runner.config import RuntimeConfig
from runner.devices import resolve_device
from runner.results import write_json
from runner.session import Session
from tools.gpu.runs import compare_repeated, run_at_once, run_whole
from tools.record import describe_run
from tools.speed import Size, prepare_size
from tools.synthetic import pack_photographs

TARGETS = {
    "step of ProCAP / MaPLe": "at most 1.05",
    "encoder images/s": "at least 11,250",
    "end to end images/s": "at least 9,000",
    "ten epochs of 102 classes, s": "at most 4",
    "reserved GB": "at most 8",
}
"""What this program wants to reach on an H100 or H200."""


@dataclass(frozen=True)
class Study:
    """The device and a folder for data and runs. quick: mini and few images."""

    device: torch.device
    work: Path
    quick: bool

    @property
    def choices(self) -> dict[str, str]:
        names = ("mini", "", "fp32") if self.quick else ("ViT-B/16", "random", "bf16")
        return dict(zip(("backbone", "pretrained", "precision"), names, strict=True))

    @property
    def dataset(self) -> str:
        return "photographs-5" if self.quick else "photographs-102"

    def runtime(self) -> RuntimeConfig:
        """Return where runs lie and what they read; the photographs are packed at the first call."""
        data = pack_photographs(self.dataset, self.work / "data")
        return RuntimeConfig(data, self.work / "results", device=str(self.device), tracking_uri="off", quiet=True)

    def parts(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """List the parts, the most valuable first."""
        parts: dict[str, Callable[[], dict[str, Any]]] = {"row": self.measure_row, "memory": self.measure_memory}
        runs = (self.runtime(), self.dataset, self.choices)
        parts["one run"] = partial(run_whole, *runs, epochs=2 if self.quick else 50)
        for count in (1, 2) if self.quick else (1, 2, 4):
            parts[f"{count} at once"] = partial(run_at_once, *runs, count, epochs=2 if self.quick else 10)
        return parts | {"repeated and killed": partial(compare_repeated, *runs, epochs=40 if self.quick else 20)}

    def _settings(self, **more: Any) -> Settings:
        backbone, pretrained = self.choices["backbone"], self.choices["pretrained"]
        return make_settings(Session(self.runtime()), backbone=backbone, pretrained=pretrained, **more)

    def measure_row(self) -> dict[str, Any]:
        """Train ten epochs at 16 shots on 102 classes and evaluate, the methods alternately, so that they compare."""
        epochs, precisions = 1 if self.quick else 10, (self.choices["precision"],)
        settings = self._settings(datasets=(self.dataset,), precisions=precisions, epochs=epochs, classes="all")
        report = measure(settings, Session(self.runtime()))
        rows = {row["method"]: row for row in report["rows"] if row["mode"] == "fast"}
        procap, maple = rows["procap"], rows["maple"]
        return {
            "step of ProCAP / MaPLe": procap["step_seconds"]["median"] / maple["step_seconds"]["median"],
            "encoder images/s": procap["encoder_fps"]["median"],
            "end to end images/s": procap["end_to_end_fps"]["median"],
            "ten epochs of 102 classes, s": procap["train_seconds"],
            "rows": report["rows"],
        }

    def measure_memory(self) -> dict[str, Any]:
        """Measure what the largest training step takes from the device, with the weights of one model."""
        classes, batch = (10, 4) if self.quick else (1000, 32)
        settings = self._settings()
        clip = load_clip(settings.backbone, settings.pretrained).to(self.device)
        size = Size("train", classes, batch, self.choices["precision"])
        prepared, step = prepare_size(models_by_mode(clip, settings.accelerations), "procap", size, settings, "fast")
        step()
        reserved = torch.cuda.max_memory_reserved(self.device) / 1e9 if self.device.type == "cuda" else None
        return {"classes": classes, "tensors GB": prepared.peak / 1e9, "reserved GB": reserved}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what has no result yet; the exit code is 3 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder of the results [default: gpu]")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "procap-gpu"), help="data and runs")
    parser.add_argument("--parts", default="", help="comma-separated; all by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="the CLIP mini, few images")
    flags = parser.parse_args(arguments)
    device, file = resolve_device(flags.device), flags.out / "runs.json"
    record = json.loads(file.read_text("utf-8")) if file.exists() else describe_run("gpu", arguments, device)
    results, failed = record.setdefault("parts", {}), 0
    for name, run in Study(device, flags.work, flags.quick).parts().items():
        if name in results or (flags.parts and name not in flags.parts.split(",")):
            continue
        began = time.monotonic()
        try:
            results[name] = run() | {"wall_seconds": round(time.monotonic() - began, 2)}
        except Exception:
            traceback.print_exc()
            failed += 1
            continue
        write_json(file, record)
        note(f"{name}: {results[name]['wall_seconds']} s")
    for name, measured in results.items():
        for what, value in measured.items():
            if isinstance(value, int | float):
                show(f"{name}: {what} {value:.4g}{f' ({TARGETS[what]})' if what in TARGETS else ''}")
    return 3 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
