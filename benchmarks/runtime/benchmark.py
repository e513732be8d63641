"""Measure the paper's runtime table: each method in reference and in fast mode, in turns in one process.

Cases of one data set use the same images in the same order, take turns round by round, and every timed block starts on
an idle device.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.console.output import note
from benchmarks.results.runtime import SCHEMA, load_runtime_reports
from benchmarks.runtime.settings import Settings, flags_of_options, make_settings
from procap.errors import UserError
from runner.environment import environment, resolve_device
from shards.credentials import mask

if TYPE_CHECKING:
    import torch

    from benchmarks.results.suite import SuiteResults
    from benchmarks.runtime.workload import Models
    from runner.config import RuntimeConfig

# Where time is limited: the share of the table, the rest is for sizes; and of each data set's part that of training.
TABLE_SHARE, TRAIN_SHARE = 0.8, 0.75


def measure_suite(suite: SuiteResults, runtime: RuntimeConfig, force: bool) -> None:
    """Measure what the suite `runtime` needs and write it below the results, unless it exists and not `force`."""
    device = resolve_device(runtime.device)
    settings = make_settings(runtime, device, **flags_of_options(suite.options))
    if not force and (folder := _find_measured(settings, runtime.results, device)):
        note(f"runtime: measured already, see {folder}")
        return
    report = measure(settings, runtime, device)
    write(report, settings, runtime)
    if report["failed"]:
        raise UserError("; ".join(f"{part}: {why}" for part, why in report["failed"].items()))


def _find_measured(settings: Settings, results: Path, device: torch.device) -> Path | None:
    """Find a complete report with the same settings, measured on the same kind of machine."""
    wanted = json.loads(json.dumps(asdict(settings)))
    machine = _describe_device(device), environment(device)["cpu"]
    for file, report in load_runtime_reports(results):
        measured_on = report.get("device"), report.get("environment", {}).get("cpu")
        if report.get("settings") == wanted and measured_on == machine and not report.get("failed"):
            return file.parent
    return None


def measure(settings: Settings, runtime: RuntimeConfig, device: torch.device, *, check: bool = False) -> dict[str, Any]:
    """Measure everything in `settings`, and with `check` also what the targets need; returns plain JSON."""
    import torch

    from benchmarks.runtime.case import TimeBudget, run_cases
    from benchmarks.runtime.data import load_case_data
    from benchmarks.runtime.measure import matmul_peak
    from benchmarks.runtime.workload import models_by_mode
    from procap.weights.loading import load_clip

    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
    load = os.getloadavg()[0]
    # Pack data sets before the time budget starts.
    made = runtime.results / "runtime" / "data"
    datasets = [load_case_data(name, runtime.data, made, settings.classes) for name in settings.datasets]
    budget = TimeBudget(settings.budget)
    peaks = {precision: matmul_peak(device, precision) for precision in settings.precisions}
    note(", ".join(f"matrix products at {rate / 1e9:,.0f} GFLOP/s in {name}" for name, rate in peaks.items()))
    loading = time.perf_counter()
    clip = load_clip(settings.backbone, settings.pretrained).to(device)
    loading = time.perf_counter() - loading
    models = models_by_mode(clip, settings.accelerations)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "written": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": f"procap {' '.join(sys.argv[1:])}",
        "settings": asdict(settings),
        "backbone": {"name": clip.name, "weights": clip.pretrained, "load_seconds": loading},
        "device": _describe_device(device),
        "environment": environment(device),
        "matmul_peak": peaks,
        "rows": [],
        "scaling": [],
        "failed": {},
    }
    for number, data in enumerate(datasets):
        share = TABLE_SHARE / len(datasets)
        ends = ((number + TRAIN_SHARE) * share, (number + 1) * share)
        report["rows"] += run_cases(data, settings, models, peaks, loading, budget, ends)
    try:
        report["scaling"] += _measure_scaling(settings, models, budget.left())
        if check and device.type == "cpu":
            report["scaling"] += _measure_full_size(settings)
    except UserError:
        raise
    except Exception as error:
        reason = mask(str(error).partition("\n")[0])
        report["failed"]["sizes"] = f"{type(error).__name__}: {reason}"
        note(f"procap: error: sizes: {report['failed']['sizes']}")
    report["seconds"] = time.perf_counter() - budget.began
    report["load_average"] = [round(load, 2), round(os.getloadavg()[0], 2)]
    return report


def _measure_scaling(settings: Settings, models: Models, seconds: float | None) -> list[dict[str, Any]]:
    """Measure one method over classes and batches, in training and evaluation."""
    from benchmarks.runtime.sizes import Size, measure_sizes

    method = "procap" if "procap" in settings.methods else settings.methods[-1]
    classes, batches = settings.scaling
    sizes = [
        Size(kind, count, batch, precision)
        for precision in settings.precisions
        for batch in batches
        for count in classes
        for kind in ("train", "eval")
    ]
    if not sizes or method == "zeroshot":
        return []
    note(f"scaling of {method} with classes and images")
    return measure_sizes(models, method, sizes, settings, settings.repeats, seconds)


def _measure_full_size(settings: Settings) -> list[dict[str, Any]]:
    """Measure the sizes that have targets at ViT-B/16 with random weights on a CPU."""
    from benchmarks.runtime.sizes import Size, measure_sizes
    from benchmarks.runtime.speed_targets import CPU_RATIOS, FULL
    from benchmarks.runtime.workload import models_by_mode
    from procap.weights.loading import load_clip

    sizes = [Size(kind, classes, batch) for kind, classes, batch, _ in CPU_RATIOS]  # type: ignore[arg-type]
    note(f"single sizes of {FULL} with random weights: some minutes")
    models = models_by_mode(load_clip(FULL, "random"), settings.accelerations)
    return measure_sizes(models, "procap", sizes, settings, max(1, settings.repeats // 2), None)


def write(report: dict[str, Any], settings: Settings, runtime: RuntimeConfig) -> str:
    """Write the measurements and log them to MLflow; returns the tables as Markdown."""
    from benchmarks.runtime.speed_targets import list_targets
    from benchmarks.runtime.tracking import log_rows
    from benchmarks.tables.runtime import write_report
    from runner.remote_results import RemoteResults

    report["targets"] = [asdict(target) for target in list_targets(report)]
    # Only the same measurement replaces another in its folder.
    digest = hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode()).hexdigest()[:8]
    weights = [] if settings.pretrained is None else [Path(settings.pretrained).stem]
    words = settings.backbone, *weights, *settings.precisions, report["device"]["name"], digest
    folder = runtime.results / "runtime" / re.sub(r"\W+", "-", "-".join(words).lower(), flags=re.ASCII)
    report["folder"] = str(folder)
    text = write_report(report, folder)
    note(f"written to {folder}: {', '.join(path.name for path in sorted(folder.glob('runtime*.*')))}")
    log_rows(report, runtime)
    RemoteResults.from_runtime(runtime).push_all("runtime")
    return text


def _describe_device(device: torch.device) -> dict[str, str]:
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"type": device.type, "name": name}
