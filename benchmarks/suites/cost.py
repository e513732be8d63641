"""Estimate how long runs take: for `--dry-run`, for the order of runs, and for the time left in progress bars.

An estimate is the work of a run (operations of the two towers over an assumed pace, plus decoding) times the median
ratio of measured to estimated seconds of finished runs with the same backbone and device, if possible of the same
method. It is infinite for a data set that is not known.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from benchmarks.console.output import plural
from benchmarks.results.profiles import MINI
from benchmarks.suites.planning import count_images, read_state
from cluster.launcher import Launcher
from cluster.ray_cluster import Node
from cluster.run import RunSpec
from procap.errors import UserError
from procap.weights.architectures import geometry_from_config, model_configs
from runner.config import RunConfig, RuntimeConfig, Target
from runner.progress import format_duration
from runner.run_folders import RunFolder, find_runs

MINI_OPERATIONS = 1.9e8, 7.2e6
"""As `tower_operations` counts them; the sizes of `mini` are stored only in its weight file."""
PROMPT_TOKENS = 6
"""Of a class prompt without padding."""

# Assumptions, used until runs have finished on the device.
CPU_PACE = 5e10
GPU_PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bfloat16 operations per second, by the data sheets."""
GPU_SHARE = 0.4
"""Share of the peak rate that a training reaches."""
FP32_SHARE = 1 / 15
"""Share of the bfloat16 peak that float32 reaches without TF32."""
GPU_STEP_SECONDS = 2e-3
"""Lower limit of a step with CUDA graphs: about a thousand kernels of 2 us each."""
START_SECONDS = {"cpu": 1.0, "cuda": 20.0}
"""Seconds until the first step: loading weights, and on a GPU compiling and capturing graphs."""
LAUNCH_SECONDS = 15.0
"""Seconds in which Ray starts and ends, and tables are made; 13 to 17 with small suites on two cores."""
SHORT_SECONDS = 45.0
"""Runs that take less in all are executed one after the other: Ray needs as long to start and to load the program."""
LONG_SECONDS = 600.0
"""Runs that take less in all are estimated for one machine alone."""
STARTING = ("load", "compile")
"""Phases of a training that belong to its start."""
DECODE_SECONDS = {True: 4.5e-3, False: 2.5e-4}
"""Seconds of one core per photograph and per generated image (docs/results/loader.md); later epochs take a third."""
DECODE_THREADS = 12
"""Number of threads that decode images for a GPU."""
MAX_FINISHED_RUNS = 400
CLUSTER_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Machine:
    """The device that executes runs."""

    name: str
    device: Literal["cpu", "cuda"]

    def pace(self, precision: str) -> float:
        """Return assumed operations per second; an unlisted GPU counts as the slowest one listed."""
        if self.device == "cpu":
            return CPU_PACE
        peak = next((peak for gpu, peak in GPU_PEAKS.items() if gpu in self.name), min(GPU_PEAKS.values()))
        return peak * GPU_SHARE * (FP32_SHARE if precision == "fp32" else 1.0)


def find_machine(device: str = "auto", nodes: Sequence[Node] = ()) -> Machine:
    """Find the first GPU of `nodes` or of this machine, or else its processor, without importing torch."""

    for node in nodes:
        if node.gpus:
            return Machine(node.accelerator, "cuda")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() not in ("", "-1")
    if visible and not device.startswith("cpu"):
        # An error means that the driver or the library is missing; then there is no usable GPU.
        with suppress(Exception):
            import pynvml

            pynvml.nvmlInit()
            return Machine(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)), "cuda")
    return Machine(platform.machine(), "cpu")


@functools.cache
def tower_operations(backbone: str) -> tuple[float, float]:
    """Count floating-point operations of an image and of a class prompt in the towers; a file counts as ViT-B/16."""
    if backbone == "mini":
        return MINI_OPERATIONS
    configs = model_configs()
    sizes = geometry_from_config(configs.get(backbone, configs["ViT-B-16"]))
    tokens = (sizes.image_size // sizes.patch_size) ** 2 + 1
    # A block multiplies each token by 12 * width ** 2 weights: projections of the attention 4, perceptron 8.
    image = 24 * sizes.vision_layers * sizes.vision_width**2 * tokens
    return image, 24 * sizes.text_layers * sizes.text_width**2 * PROMPT_TOKENS


class CostModel:
    """Estimate seconds of runs on one machine, from counted operations and the times of finished runs."""

    def __init__(self, runtime: RuntimeConfig, machine: Machine, *, processes: int = 1, force: bool = False) -> None:
        """Learn from finished runs of such a machine. processes: train one run together. force: repeat all."""
        self.runtime, self.machine, self.processes, self.force = runtime, machine, processes, force
        self._ratios: dict[tuple[str, str], list[float]] = {}
        finished = [folder for folder in find_runs(runtime.results) if folder.train_file.exists()]
        finished.sort(key=lambda folder: folder.train_file.stat().st_mtime, reverse=True)
        for folder in finished[:MAX_FINISHED_RUNS]:
            # Skip unreadable runs here; the command that needs such a run reports the error.
            with suppress(UserError, KeyError, TypeError):
                self._learn_from(folder)

    def seconds(self, run: RunSpec) -> float:
        """Estimate the seconds of what is left of `run`: 0 if everything is done, infinite for an unknown data set."""
        targets, trained = [Target.parse_unchecked(target) for target in run.targets], 0.0
        # An unreadable result counts as missing.
        with suppress(UserError):
            _, trained, targets = read_state(run.config, targets, self.runtime, force=self.force)
            if trained == 1.0 and not targets:
                return 0.0
        try:
            return self.work(run.config, targets, trained=trained) * self.ratio(run.config)[0]
        except UserError:
            return math.inf

    def work(self, config: RunConfig, targets: Iterable[Target], *, trained: float = 0.0) -> float:
        """Estimate seconds of a run and its evaluations without correction; `trained`: share of the training done."""
        image, prompt = tower_operations(config.backbone)
        pace = self.machine.pace(config.precision)
        on_gpu = self.machine.device == "cuda"
        seconds = START_SECONDS[self.machine.device]
        if trained < 1 and config.recipe.epochs:
            dataset, classes, images = count_images(
                config.dataset, config.classes, "train", self.runtime.data, most=config.shots
            )
            decode = DECODE_SECONDS[dataset.source in ("folder", "packed")]
            batch, epochs = config.recipe.batch_size, config.recipe.passes(round(images)) * (1 - trained)
            # Where weights are frozen the backward pass costs as much as the forward pass.
            step = 2 * (image * min(batch, images) + prompt * classes) / pace / self.processes
            steps = epochs * max(1, round(images) // batch)
            # Later epochs read cached images, which a GPU augments itself, so only the first epoch decodes.
            decoding = images * decode / DECODE_THREADS if on_gpu else images * decode * (1 + max(0.0, epochs - 1) / 3)
            seconds += steps * max(step, GPU_STEP_SECONDS if on_gpu else 0.0) + decoding
        for target in targets:
            dataset, classes, images = count_images(target.dataset, target.classes, target.split, self.runtime.data)
            decode = DECODE_SECONDS[dataset.source in ("folder", "packed")]
            images = min(images, self.runtime.limit or images)
            encode = (image * images + prompt * classes) / pace * max(1, self.runtime.evaluation.samples)
            # Decoding overlaps with a GPU's work; on a CPU the times add up.
            both = max(encode, images * decode / DECODE_THREADS) if on_gpu else encode + images * decode
            seconds += both / self.processes
        return seconds

    def ratio(self, config: RunConfig) -> tuple[float, str]:
        """Return the median of measured over estimated seconds of similar runs, and what it rests on."""
        if own := self._ratios.get((config.method, config.backbone)):
            return statistics.median(own), f"median of {len(own)} finished {config.method} runs"
        lists = (ratios for (_, backbone), ratios in self._ratios.items() if backbone == config.backbone)
        if others := list(itertools.chain(*lists)):
            return statistics.median(others), f"median of {len(others)} finished runs of other methods"
        return 1.0, f"assumed: {self.machine.pace(config.precision) / 1e12:.3g} TFLOP/s"

    def _learn_from(self, folder: RunFolder) -> None:
        training, config = folder.train(), folder.config()
        if training is None or config is None or training.processes > 1 or training.imported:
            return
        machine = training.environment
        if (machine["cpu"]["name"] if machine.get("gpu") is None else machine["gpu"]) != self.machine.name:
            return
        # Samples take longer than the operations counted.
        evaluations = [one for one in folder.evaluations() if not one.settings.samples]
        work = self.work(config, [Target.parse_unchecked(one.target) for one in evaluations])
        # Recorded seconds do not include the start, but the estimate does.
        start = max(START_SECONDS[self.machine.device], sum(training.phases.get(name, 0.0) for name in STARTING))
        taken = start + training.seconds + sum(one.seconds for one in evaluations)
        if taken > 0:
            self._ratios.setdefault((config.method, config.backbone), []).append(taken / work)


def forecast_runs(
    runs: Sequence[RunSpec], runtime: RuntimeConfig, launcher: Launcher, *, force: bool = False
) -> list[str]:
    """Describe wall time and GPU-hours of `runs` on one machine, and of long ones on clusters of up to 512 GPUs."""
    if not runs:
        return []
    machine = find_machine(runtime.device)
    if machine.device == "cpu" and runs[0].config.backbone != MINI.backbone:
        machine = Machine("H200", "cuda")
    model = CostModel(runtime, machine, processes=launcher.processes, force=force)
    seconds = sorted((model.seconds(run) for run in runs), reverse=True)
    if not math.isfinite(sum(seconds)):
        return [f"Time on {machine.name}: unknown"]
    unit = "GPU" if machine.device == "cuda" else "machine"
    bases = dict.fromkeys(model.ratio(run.config)[1] for run in runs)
    ray = 0.0 if launcher == Launcher() and sum(seconds) < SHORT_SECONDS else LAUNCH_SECONDS
    lines = [
        f"On {machine.name} ({'; '.join(bases)}), a run starts in {START_SECONDS[machine.device]:g} s"
        f"{f', Ray and tables take {ray:g} s' if ray else ''}:"
    ]
    for size in CLUSTER_SIZES:
        groups = size // launcher.processes
        if groups == 1 or (0 < groups // 2 < len(seconds) and sum(seconds) > LONG_SECONDS):
            wall = ray + makespan(seconds, groups)
            lines.append(f"{plural(size, unit)}: {format_duration(wall)}, {wall * size / 3600:.3g} {unit}-hours")
    return lines


def makespan(seconds: Iterable[float], slots: int) -> float:
    """Compute when the last job ends if each starts in order as soon as one of `slots` is free."""
    free = [0.0] * slots
    for one in seconds:
        heapq.heapreplace(free, free[0] + one)
    return max(free)
