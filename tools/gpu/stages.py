"""Define the stages of the GPU study: each yields its parts, as names and functions that measure them.

A function gets the seconds that are left and returns plain JSON.
"""

from __future__ import annotations

import re
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
from benchmarks.runtime.measure import timed
from benchmarks.runtime.settings import Settings, make_settings, run_config
from benchmarks.runtime.workload import Models, Training, models_by_mode
from procap.methods import METHODS
from procap.weights.loading import load_clip
from runner.acceleration import NAMES, Acceleration
from runner.config import RunConfig, RuntimeConfig, Target
from runner.evaluate import evaluate
from runner.planning import plan_run
from runner.results import TrainResult
from runner.train import train
from shards.default_paths import data_root
from tools.gpu.parity import compare_captured, compare_modes
from tools.gpu.refinement import measure_bandwidth, measure_refinement
from tools.peak import DTYPES, matmul_peak
from tools.sizes import Size, measure_sizes
from tools.synthetic import pack_photographs, synthetic_case

Part = tuple[str, Callable[[float], dict[str, Any]]]
COMPARED = ("zeroshot", "coop", "maple", "procap")
"""The methods measured at every size; the others at two."""
CLASSES, BATCHES = (51, 102, 500, 1000), (4, 32, 100)
PRECISIONS = ("fp32", "bf16")
ROW_SEEDS, ROW_EPOCHS = 3, 50


class StudySetup:
    """The device, the folder of the results, and loaded models. quick: mini, few methods and sizes."""

    def __init__(self, device: torch.device, out: Path, *, quick: bool = False) -> None:
        self.device, self.out, self.quick = device, out, quick
        self.backbone, self.weights = ("mini", "") if quick else ("ViT-B/16", "random")
        self.methods = ("maple", "procap") if quick else tuple(METHODS)
        self._models: dict[Acceleration, Models] = {}
        if device.type == "cuda":
            # Public code leaves torch's defaults; here --precision alone decides.
            torch.backends.cudnn.allow_tf32 = False

    def runtime(self) -> RuntimeConfig:
        return RuntimeConfig(self.out / "results", data_root(""), device=str(self.device), tracking_uri="off")

    def find_data(self, name: str) -> Path:
        """Return the folder of a packed data set; photographs are packed into that of the results."""
        return pack_photographs(name, self.out / "data") if name.startswith("photographs") else data_root("")

    def settings(self, accelerate: str = "auto", **more: Any) -> Settings:
        settings = make_settings(self.runtime(), self.device, backbone=self.backbone, pretrained=self.weights, **more)
        return replace(settings, accelerations=Acceleration.parse(accelerate, self.device))

    def models(self, accelerations: Acceleration) -> Models:
        """Return the CLIP of both modes, loaded once for each set of accelerations that changes it."""
        key = Acceleration(compile=accelerations.compile)
        if key not in self._models:
            clip = load_clip(self.backbone, self.weights or None).to(self.device)
            self._models[key] = models_by_mode(clip, key)
        return self._models[key]


def list_tests(setup: StudySetup) -> Iterator[Part]:
    """The tests marked `gpu`, one part for each file."""
    if setup.device.type != "cuda":
        return
    for file in sorted(Path("tests").glob("test_*.py")):
        if "mark.gpu" in file.read_text(encoding="utf-8"):
            yield file.stem, partial(_run_tests, file)


def _run_tests(file: Path, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-n", "0", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=max(60.0, seconds), check=False)
    lines = ended.stdout.strip().splitlines()
    # Exit code 5: no test of the file was collected, for example because none runs on this device.
    if ended.returncode not in (0, 5):
        print("\n".join([*lines[-60:], ended.stderr[-2000:]]), file=sys.stderr)
        failed = "; ".join(line for line in lines if line.startswith("FAILED"))
        raise RuntimeError(failed or f"exit code {ended.returncode}")
    return {word: int(count) for count, word in re.findall(r"(\d+) (passed|skipped|deselected)", lines[-1])}


def list_parity(setup: StudySetup) -> Iterator[Part]:
    """Fast against reference mode, eager and compiled, and captured against eager steps, for every method."""
    on_gpu = setup.device.type == "cuda"
    ways = ("off", "compile") if on_gpu else ("off",)
    for method, precision, way in product(setup.methods, PRECISIONS, ways):

        def compare(seconds: float, method: str = method, precision: str = precision, way: str = way) -> dict[str, Any]:
            settings = setup.settings(way)
            models = setup.models(settings.accelerations)
            measured: dict[str, Any] = compare_modes(models, method, precision, settings)
            if on_gpu and method != "zeroshot":
                captured = compare_captured(models, method, precision, settings)
                measured |= {f"captured {kind}": value for kind, value in captured.items()}
            return measured

        if method != "zeroshot" or way == "off":
            yield f"{method} {precision} {way}", compare


def list_sizes(setup: StudySetup) -> Iterator[Part]:
    """Training steps and evaluated batches over methods, classes and images, in fast and in reference mode."""
    classes, batches = ((5,), (4,)) if setup.quick else (CLASSES, BATCHES)
    # The sizes that decide come first, since the time on a device may end.
    order = sorted(product(setup.methods, classes, batches), key=lambda size: size[0] not in COMPARED)
    for method, count, batch in order:
        if method not in COMPARED and not setup.quick and (count, batch) not in ((51, 4), (500, 4)):
            continue
        for precision, kind in product(reversed(PRECISIONS), ("train", "eval")):
            if method != "zeroshot" or kind == "eval":
                size = Size(kind, count, batch, precision)  # type: ignore[arg-type]
                part = f"{method} {kind} {count} x {batch} {precision}"
                yield part, partial(_measure_size, setup, method, size, "auto")


def _measure_size(setup: StudySetup, method: str, size: Size, way: str, seconds: float) -> dict[str, Any]:
    settings = setup.settings(way)
    [measured] = measure_sizes(setup.models(settings.accelerations), method, [size], settings, 5)
    return measured


def list_peaks(setup: StudySetup) -> Iterator[Part]:
    """The peak rate of matrix products of each precision and of copies, the limits of everything else."""
    # Products in fp16 take minutes on a CPU.
    for precision in DTYPES if setup.device.type == "cuda" else PRECISIONS:
        yield precision, partial(_rate, "flops_per_second", partial(matmul_peak, setup.device, precision))
    for name, size in {"memory": 2**23 if setup.quick else 2**30, "cache": 2**23}.items():
        yield name, partial(_rate, "bytes_per_second", partial(measure_bandwidth, setup.device, size))


def _rate(name: str, measure_rate: Callable[[], float], seconds: float) -> dict[str, Any]:
    return {name: measure_rate()}


def list_refinement(setup: StudySetup) -> Iterator[Part]:
    """ProCAP's cross-attention alone, in each form that the device has."""
    widths = (128, 64) if setup.quick else (768, 512)
    for precision in PRECISIONS:

        def measure_forms(seconds: float, precision: str = precision) -> dict[str, Any]:
            return measure_refinement(widths, setup.device, precision == "bf16")

        yield precision, measure_forms


def list_accelerations(setup: StudySetup) -> Iterator[Part]:
    """A training step with each acceleration alone, without any, and with all; start-up seconds apart."""
    ways = ["off", *NAMES, ",".join(NAMES)] if setup.device.type == "cuda" else ["off"]
    for method, way in product(("maple", "procap"), ways):
        for size in (Size("train", 102, 32, "bf16"), Size("eval", 102, 100, "bf16")):
            measured = replace(size, classes=5, batch=4) if setup.quick else size
            yield f"{method} {size.kind} {way}", partial(_measure_size, setup, method, measured, way)


def list_training(setup: StudySetup) -> Iterator[Part]:
    """Ten epochs of 16-shot training on 102 classes and evaluation, the methods alternately, so that they compare."""

    def train(seconds: float) -> dict[str, Any]:
        dataset, precision = ("digits", "fp32") if setup.quick else ("photographs-102", "bf16")
        epochs = 1 if setup.quick else 10
        settings = setup.settings(datasets=(dataset,), precisions=(precision,), classes="all", epochs=epochs)
        runtime = replace(setup.runtime(), data=setup.find_data(dataset))
        return {"rows": measure(settings, runtime, setup.device)["rows"]}

    yield "zeroshot, maple, procap", train


def list_row(setup: StudySetup) -> Iterator[Part]:
    """Whole runs of ProCAP, trained on base classes and evaluated on both halves, as `procap train` does it."""
    for name in ("digits",) if setup.quick else ("photographs-102", "photographs-37"):
        yield name, partial(_run_whole, setup, name)


def _run_whole(setup: StudySetup, name: str, seconds: float) -> dict[str, Any]:
    """Time one run; images and steps are in the result, from which the time of all data sets can be computed."""
    runtime = replace(setup.runtime(), quiet=True, data=setup.find_data(name))
    config: RunConfig = plan_run(
        method="procap", dataset=name, seed=1, backbone=setup.backbone, pretrained=setup.weights or None,
        precision="fp32" if setup.quick else "bf16", data=runtime.data,
        overrides={"epochs": 1 if setup.quick else ROW_EPOCHS},
    )  # fmt: skip
    with timed(setup.device) as training:
        trained = train(config, runtime, force=True)
        assert isinstance(trained, TrainResult)
    with timed(setup.device) as testing:
        results = [evaluate(config, Target(name, half), runtime, force=True) for half in ("base", "novel")]
    return {
        "steps": trained.steps, "train_seconds": training.seconds, "phases": trained.phases,
        "eval_seconds": testing.seconds,
        "test_images": sum(result.total for result in results),
        "eval": [{"target": result.target, "seconds": result.seconds, "phases": result.phases} for result in results],
    }  # fmt: skip


def list_profiles(setup: StudySetup) -> Iterator[Part]:
    """The kernels that take the most time of a training step."""
    for method, classes, batch in (("procap", 102, 32), ("maple", 102, 32), ("procap", 1000, 32)):
        yield f"{method} {classes} x {batch}", partial(_profile, setup, method, classes, batch)


def _profile(setup: StudySetup, name: str, classes: int, batch: int, seconds: float) -> dict[str, Any]:
    if setup.quick:
        classes, batch = 5, 4
    settings = setup.settings()
    device, on_gpu = setup.device, setup.device.type == "cuda"
    method, images, labels = synthetic_case(setup.models(settings.accelerations)["fast"], name, classes, batch)
    training = Training(method, run_config(name, "bf16", settings, batch=batch), "fast", settings.accelerations)
    training.engine.set_rate(0.0)
    prepared = training.prepare(images, labels)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiled, timed(device) as whole:
        for _ in range(10):
            training(training.batch(images, labels, 0))
    kind = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = sorted(profiled.key_averages(), key=lambda event: -float(getattr(event, kind)))
    rows = [[event.key[:120], event.count / 10, float(getattr(event, kind)) / 10_000] for event in events[:25]]
    busy = sum(float(getattr(event, kind)) for event in events) / 10_000
    return {"step_ms": 100 * whole.seconds, "busy_ms": busy, "flops": prepared.flops, "kernels": rows}


STAGES: dict[str, Callable[[StudySetup], Iterator[Part]]] = {
    "tests": list_tests, "peaks": list_peaks, "parity": list_parity, "training": list_training,
    "refinement": list_refinement, "accelerations": list_accelerations, "sizes": list_sizes, "row": list_row,
    "profiles": list_profiles,
}  # fmt: skip
