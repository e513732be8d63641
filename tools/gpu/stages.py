"""List what the three commands measure: each stage yields its parts, a name and a function that returns plain JSON."""

from __future__ import annotations

import gc
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.runtime.benchmark import measure
from benchmarks.runtime.measure import REPEATS, time_interleaved, timed
from benchmarks.runtime.settings import Settings, make_settings
from benchmarks.runtime.workload import Models, models_by_mode
from procap.weights.loading import load_clip
from runner.acceleration import OPTIONAL, Acceleration
from runner.config import RuntimeConfig
from tools.gpu.parity import compare_captured, compare_modes
from tools.gpu.refinement import measure_bandwidth, measure_refinement
from tools.gpu.runs import compare_repeated, run_at_once, run_whole
from tools.peak import matmul_peak
from tools.speed import Size, prepare_size
from tools.synthetic import pack_photographs

Part = tuple[str, Callable[[], dict[str, Any]]]
COMPARED = ("maple", "procap", "coop", "promptsrc", "mmrl", "skipt")
"""The methods whose fast and reference modes are compared; the first two are measured in most stages."""
PRECISIONS = ("bf16", "fp32")


class Study:
    """The device, a folder for data, runs and caches, and loaded models. quick: mini, few methods and sizes."""

    def __init__(self, device: torch.device, work: Path, *, quick: bool = False) -> None:
        self.device, self.work, self.quick = device, work, quick
        self.on_gpu = device.type == "cuda"
        self.backbone, self.weights = ("mini", "") if quick else ("ViT-B/16", "random")
        self.precision = "fp32" if quick else "bf16"
        self.dataset = "photographs-5" if quick else "photographs-102"
        self._models: dict[Acceleration, Models] = {}
        if self.on_gpu:
            # Public code leaves torch's defaults; here --precision alone decides.
            torch.backends.cudnn.allow_tf32 = False

    def runtime(self) -> RuntimeConfig:
        """Return where runs lie and what they read; the photographs are packed at the first call."""
        data = pack_photographs(self.dataset, self.work / "data")
        return RuntimeConfig(data, self.work / "results", device=str(self.device), tracking_uri="off", quiet=True)

    def settings(self, accelerate: str = "auto", **more: Any) -> Settings:
        runtime = RuntimeConfig(Path("data"), Path("results"), device=str(self.device))
        settings = make_settings(runtime, self.device, backbone=self.backbone, pretrained=self.weights, **more)
        return replace(settings, accelerations=Acceleration.parse(accelerate, self.device))

    def models(self, accelerations: Acceleration) -> Models:
        """Return the CLIP of both modes, loaded once for each set of accelerations that changes it."""
        key = replace(accelerations, graphs=False, images=False)
        if key not in self._models:
            self._models[key] = models_by_mode(load_clip(self.backbone, self.weights or None).to(self.device), key)
        return self._models[key]

    def release(self) -> None:
        """Free the memory of all models."""
        self._models.clear()
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()


def list_peaks(study: Study) -> Iterator[Part]:
    """The peak rate of matrix products and of copies, the limits of everything else."""
    # Products in bf16 take minutes on a CPU without units for them.
    for precision in PRECISIONS if study.on_gpu else ("fp32",):
        yield precision, lambda precision=precision: {"flops_per_second": matmul_peak(study.device, precision)}
    for name, size in {"memory": 2**23 if study.quick else 2**30, "cache": 2**23}.items():
        yield name, lambda size=size: {"bytes_per_second": measure_bandwidth(study.device, size)}


def list_refinement(study: Study) -> Iterator[Part]:
    """ProCAP's cross-attention alone, in each form that the device has."""
    widths = (128, 64) if study.quick else (768, 512)
    for precision in PRECISIONS:
        yield precision, partial(measure_refinement, widths, study.device, precision == "bf16")


def list_training(study: Study) -> Iterator[Part]:
    """Ten epochs of 16-shot training on 102 classes and evaluation, the methods alternately, so that they compare."""

    def train() -> dict[str, Any]:
        more = {"datasets": (study.dataset,), "precisions": (study.precision,), "epochs": 1 if study.quick else 10}
        report = measure(study.settings(classes="all", **more), study.runtime(), study.device)
        return {"rows": report["rows"], "backbone": study.backbone}

    yield "zeroshot, maple, procap", train


def list_memory(study: Study) -> Iterator[Part]:
    """Memory that the largest training step takes from the device, with the weights of one model."""
    classes, batch = (10, 4) if study.quick else (1000, 32)

    def reserve() -> dict[str, Any]:
        settings = study.settings()
        study.release()
        models = study.models(settings.accelerations)
        # The copy of the weights for reference mode is no part of a training.
        models["reference"] = models["fast"]
        study.release()
        size = Size("train", classes, batch, study.precision)
        prepared, step = prepare_size(models, "procap", size, settings, "fast")
        step()
        reserved = torch.cuda.max_memory_reserved(study.device) if study.on_gpu else None
        return {"classes": classes, "tensors_gb": prepared.peak / 1e9, "reserved_gb": reserved and reserved / 1e9}

    yield f"procap {classes} x {batch}", reserve


def list_profiles(study: Study) -> Iterator[Part]:
    """The kernels that take the most time of a training step."""
    for classes, batch in ((5, 4),) if study.quick else ((102, 32), (51, 4)):
        yield f"procap {classes} x {batch}", partial(_profile, study, Size("train", classes, batch, study.precision))


def _profile(study: Study, size: Size) -> dict[str, Any]:
    settings = study.settings()
    _, step = prepare_size(study.models(settings.accelerations), "procap", size, settings, "fast")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if study.on_gpu else [])]
    with profile(activities=activities) as profiled, timed(study.device) as whole:
        for _ in range(10):
            step()
    column = "self_device_time_total" if study.on_gpu else "self_cpu_time_total"
    events = sorted(profiled.key_averages(), key=lambda event: -float(getattr(event, column)))
    rows = [[event.key[:120], event.count / 10, float(getattr(event, column)) / 10_000] for event in events[:25]]
    busy = sum(float(getattr(event, column)) for event in events) / 10_000
    return {"step_ms": 100 * whole.seconds, "busy_ms": busy, "kernels": rows}


def list_tests(study: Study) -> Iterator[Part]:
    """The tests marked `gpu`, in one process."""
    if study.on_gpu:
        yield "gpu", _run_tests


def _run_tests() -> dict[str, Any]:
    files = [str(file) for file in sorted(Path("tests").glob("test_*.py")) if "mark.gpu" in file.read_text("utf-8")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-n", "0", *files]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = ended.stdout.strip().splitlines()
    if ended.returncode:
        print("\n".join([*lines[-100:], ended.stderr[-2000:]]), file=sys.stderr)
        failed = "; ".join(line for line in lines if line.startswith(("FAILED", "ERROR")))
        raise RuntimeError(failed or f"exit code {ended.returncode}")
    return {word: int(count) for count, word in re.findall(r"(\d+) (passed|skipped|deselected)", lines[-1])}


def list_parity(study: Study) -> Iterator[Part]:
    """Fast against reference mode, compiled on a GPU, and captured against eager steps."""
    for method in COMPARED[:2] if study.quick else COMPARED:

        def compare(method: str = method) -> dict[str, Any]:
            settings = study.settings("compile" if study.on_gpu else "off")
            models = study.models(settings.accelerations)
            measured: dict[str, Any] = compare_modes(models, method, study.precision, settings)
            if study.on_gpu:
                captured = compare_captured(models, method, study.precision, settings)
                measured |= {f"captured {name}": value for name, value in captured.items()}
            return measured

        yield f"{method} {study.precision}", compare


def list_runs(study: Study) -> Iterator[Part]:
    """Whole runs of ProCAP: one with its evaluations, several at once, and the same one twice and once killed."""
    choices = {"backbone": study.backbone, "pretrained": study.weights, "precision": study.precision}

    def prepare() -> tuple[RuntimeConfig, str, dict[str, str]]:
        study.release()
        return study.runtime(), study.dataset, choices

    yield f"one run, {study.dataset}", lambda: run_whole(*prepare(), epochs=2 if study.quick else 50)
    for count in (1, 2) if study.quick else (1, 2, 4):
        yield f"{count} at once", lambda count=count: run_at_once(*prepare(), count, epochs=2 if study.quick else 10)
    for flags in ((), ("--deterministic",)):
        name = " ".join(["repeated and killed", *flags])
        yield name, lambda flags=flags: compare_repeated(*prepare(), flags, epochs=40 if study.quick else 20)


def list_accelerations(study: Study) -> Iterator[Part]:
    """A training step with each acceleration alone, without any, and with optional ones on top of all."""
    ways, alone = ["off"], [name for name in OPTIONAL if name != "ranks"]
    if study.on_gpu:
        ways += ["compile", "graphs", "compile,graphs", *(f"compile,graphs,{name}" for name in alone)]
    else:
        ways += alone
    sizes = ((5, 4),) if study.quick else ((51, 4), (102, 32))
    for method, (classes, batch), way in product(("procap", "maple"), sizes, ways):
        size = Size("train", classes, batch, "bf16")
        yield f"{method} {classes} x {batch} {way}", partial(_measure_size, study, method, size, way)


def list_sizes(study: Study) -> Iterator[Part]:
    """Training steps and evaluated batches over methods, classes and images, in fast mode."""
    for method in COMPARED[:3]:
        counts, batches = ((5,), (4,)) if study.quick else ((51, 102, 500, 1000), (4, 32))
        sizes = [Size("train", classes, batch, study.precision) for classes, batch in product(counts, batches)]
        for size in [*sizes, Size("eval", counts[0], 4 if study.quick else 100, study.precision)]:
            name = f"{method} {size.kind} {size.classes} x {size.batch}"
            yield name, partial(_measure_size, study, method, size, "auto")


def _measure_size(study: Study, method: str, size: Size, way: str) -> dict[str, Any]:
    settings = study.settings(way)
    prepared, work = prepare_size(study.models(settings.accelerations), method, size, settings, "fast")
    [seconds] = time_interleaved([work], 5, study.device, REPEATS[study.device.type])
    median = statistics.median(seconds)
    return {
        "ms": 1e3 * median, "images_per_second": size.batch / median, "tflops": prepared.flops / median / 1e12,
        "memory_gb": prepared.peak / 1e9, "start_seconds": prepared.seconds,
    }  # fmt: skip


COMMANDS: dict[str, dict[str, Callable[[Study], Iterator[Part]]]] = {
    "a": {
        "peaks": list_peaks, "refinement": list_refinement, "training": list_training, "memory": list_memory,
        "profiles": list_profiles,
    },
    "b": {"tests": list_tests, "parity": list_parity, "runs": list_runs},
    "c": {"accelerations": list_accelerations, "sizes": list_sizes},
}  # fmt: skip
