"""`procap bench runtime`: the paper's runtime table, each method in reference and in fast mode side by side in one run.

    procap bench runtime                                      mini on a CPU, under three minutes
    procap bench runtime --backbone ViT-B/16 --random         full size, random weights
    procap bench runtime --check                              what is to be reached, met or not; on a GPU at full size

Contestants of one data set see the same images in the same order, take turns round by round, and start every timed
stretch on an idle device. Shapes: B images, C classes.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cli.flags import OutputFlags, RuntimeFlags
from benchmarks.console.output import note, show, show_json
from benchmarks.runtime.file import SCHEMA, contests
from benchmarks.runtime.settings import Flags, Settings, flags_of_choice, settings_of
from procap.errors import UserError
from runner.environment import environment, library_defaults, resolve_device

if TYPE_CHECKING:
    import torch

    from benchmarks.results.suite import SuiteResults
    from benchmarks.runtime.modes import Models
    from benchmarks.runtime.rounds import Clock
    from runner.config import RuntimeConfig

__all__ = ["Flags", "Settings", "bench_runtime"]

# Where time is limited: the share of the table, the rest is for sizes; and of each data set's part that of training.
TABLE_SHARE, TRAIN_SHARE = 0.8, 0.75


def bench_runtime(flags: Flags, place: RuntimeFlags, output: OutputFlags) -> int:
    """See `procap bench runtime --help`. Exit code 1 where a part of the report failed."""
    from benchmarks.runtime.measure import quiet_profiler

    library_defaults()
    quiet_profiler()
    device = resolve_device(place.device)
    settings = settings_of(flags, place, device)
    report = measure(settings, place, device, check=flags.check, verbose=output.verbose)
    return publish(report, settings, flags, place, output)


def contest_of_suite(done: SuiteResults, at: RuntimeConfig, *, budget: float | None, anew: bool) -> None:
    """What the suite `runtime` asks for, measured and written below the results, unless it is there and not `anew`.

    budget: seconds, None for what `settings_of` takes. Raises UserError where a part failed.
    """
    from benchmarks.runtime.measure import quiet_profiler

    place = RuntimeFlags(
        data=str(at.data),
        results=at.store or str(at.results),
        device=at.device,
        workers=at.workers,
        accelerate=at.accelerate,
        tracking=at.tracking_uri or "",
    )
    quiet_profiler()
    device = resolve_device(at.device)
    settings = settings_of(flags_of_choice(done.options, budget), place, device)
    if not anew and (known := _measured(settings, at.results, device)):
        note(f"runtime: measured already, see {known}")
        return
    report = measure(settings, place, device)
    write(report, settings, place)
    if report["failed"]:
        raise UserError("; ".join(f"{part}: {why}" for part, why in report["failed"].items()))


def _measured(settings: Settings, results: Path, device: torch.device) -> Path | None:
    """The folder of a contest of the same settings on such a machine, in which nothing failed."""
    wanted = json.loads(json.dumps(asdict(settings)))
    machine = _device(device), environment(device)["cpu"]
    for file, report in contests(results):
        there = report.get("device"), report.get("environment", {}).get("cpu")
        if report.get("settings") == wanted and there == machine and not report.get("failed"):
            return file.parent
    return None


def measure(
    settings: Settings, place: RuntimeFlags, device: torch.device, *, check: bool = False, verbose: bool = False
) -> dict[str, Any]:
    """Everything that `settings` asks for, and with `check` what the targets need besides, as plain JSON."""
    import torch

    from benchmarks.runtime.measure import matmul_peak
    from benchmarks.runtime.modes import compile_cache, models
    from benchmarks.runtime.rounds import Clock, contest_rows
    from procap.weights.loading import load_clip

    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
    load = os.getloadavg()[0]
    roots = _prepared(settings, place)
    clock = Clock(settings.budget, settings.limit)
    peaks = {precision: matmul_peak(device, precision) for precision in settings.precisions}
    note(", ".join(f"matrix products at {rate / 1e9:,.0f} GFLOP/s in {name}" for name, rate in peaks.items()))
    loading = time.perf_counter()
    clip = load_clip(settings.backbone, settings.pretrained).to(device)
    loading = time.perf_counter() - loading
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "command": f"procap {' '.join(sys.argv[1:])}",
        "settings": asdict(settings),
        "backbone": {"name": clip.name, "weights": clip.pretrained, "load_seconds": loading},
        "device": _device(device),
        "environment": environment(device),
        "compile_cache": compile_cache(settings.ways),
        "matmul_peak": peaks,
        "rows": [],
        "ways": [],
        "cross_attention": [],
        "scaling": [],
        "failed": {},
    }
    both = models(clip, settings.ways)
    for number, (name, root) in enumerate(roots.items()):
        part = TABLE_SHARE / len(roots)
        ends = ((number + TRAIN_SHARE) * part, (number + 1) * part)
        report["rows"] += contest_rows(name, root, settings, both, peaks, loading, clock, ends)
    if check:
        with _part(report, "what makes it fast", verbose):
            from benchmarks.runtime.acceleration_ablation import measure_ways

            report["ways"] = measure_ways(both, settings, peaks, clock.left(), lambda line: note(f"  {line}"))
    with _part(report, "scaling", verbose):
        report["scaling"] += _scaling(settings, both, clock)
    if check:
        with _part(report, "full size", verbose):
            from benchmarks.runtime.targets import measure_full_size

            measure_full_size(report, settings, device, note)
    with _part(report, "cross-attention", verbose):
        from benchmarks.runtime.acceleration_ablation import cross_attention

        report["cross_attention"] = cross_attention()
    report["seconds"] = time.perf_counter() - clock.began
    report["load_average"] = [round(load, 2), round(os.getloadavg()[0], 2)]
    return report


def publish(report: dict[str, Any], settings: Settings, flags: Flags, place: RuntimeFlags, output: OutputFlags) -> int:
    """Write, print, draw and track what was measured."""
    from benchmarks.runtime.targets import targets_table

    show(write(report, settings, place))
    if flags.check:
        show("\n" + targets_table(report["targets"]))
    if output.json:
        show_json(report)
    return 1 if report["failed"] else 0


def write(report: dict[str, Any], settings: Settings, place: RuntimeFlags) -> str:
    """Write, draw and track what was measured; gives it as text."""
    from benchmarks.runtime.report import write_report
    from benchmarks.runtime.targets import targets
    from benchmarks.runtime.track import track
    from runner.remote_results import RemoteResults

    report["targets"] = [asdict(target) for target in targets(report)]
    results, store = place.results_root()
    folder = results / "runtime" / f"{settings.slug}-{report['device']['slug']}-{settings.hash}"
    report["folder"] = str(folder)
    text = write_report(report, folder)
    note(f"written to {folder}: {', '.join(path.name for path in sorted(folder.glob('runtime.*')))}")
    for figure in _figures(report, folder):
        note(f"figure: {figure}")
    track(report, folder, results, place.tracking)
    RemoteResults(store, results).push_all("runtime")
    return text


def _figures(report: dict[str, Any], folder: Path) -> list[Path]:
    from benchmarks.runtime.plots import draw_figures

    try:
        importlib.import_module("matplotlib")
    except ImportError:
        note("figures are left out: matplotlib is not installed")
        return []
    return draw_figures(report, folder)


@contextmanager
def _part(report: dict[str, Any], name: str, verbose: bool) -> Iterator[None]:
    """A part that breaks is named in the report; it must not take the figures of the others with it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if verbose:
            traceback.print_exc()
        reason = str(error).partition("\n")[0]
        report["failed"][name] = f"{type(error).__name__}: {reason}"
        note(f"procap: error: {name}: {report['failed'][name]}")


def _prepared(settings: Settings, place: RuntimeFlags) -> dict[str, Path]:
    """The folder of every data set, packed before any clock runs."""
    from benchmarks.runtime.data import dataset_of, prepare

    data = place.data_root()
    made = place.results_root()[0] / "runtime" / "data"
    return {name: prepare(name, data, made) for name in (dataset_of(name, data) for name in settings.datasets)}


def _scaling(settings: Settings, models: Models, clock: Clock) -> list[dict[str, Any]]:
    """The method that is compared, over classes and batches, in training and evaluation."""
    from benchmarks.runtime.scaling import Point, measure_points

    method = "procap" if "procap" in settings.methods else settings.methods[-1]
    classes, batches = settings.scaling
    points = [
        Point(kind, count, batch, precision)
        for precision in settings.precisions
        for batch in batches
        for count in classes
        for kind in ("train", "eval")
    ]
    if not points or method == "zeroshot":
        return []
    note(f"scaling of {method} with classes and images")
    left = clock.left()
    measured = measure_points(models, method, points, settings, settings.repeats, left, lambda line: note(f"  {line}"))
    return [one.plain() for one in measured]


def _device(device: torch.device) -> dict[str, Any]:
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    flags = ""
    with suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text()
    slug = "".join(c if c.isalnum() else "-" for c in name.lower())
    return {
        "type": device.type,
        "name": name,
        "slug": slug,
        "bf16": device.type == "cuda" or any(word in flags for word in ("avx512_bf16", "amx_bf16", "asimdbf16")),
    }
