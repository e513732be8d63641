"""Measure the plain path and each faster one that has passed: training steps, evaluated batches, resized images."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.device_check.case import DeviceCase, make_training
from benchmarks.device_check.paths import smooth_noise
from benchmarks.runtime.measure import REPEATS, time_interleaved, timed
from benchmarks.runtime.workload import Evaluation
from procap.clip import OPENAI_MEAN, OPENAI_STD
from runner.acceleration import Acceleration
from runner.devices import num_decoders
from shards.device.resize import DeviceResize
from shards.images import decode_pixels
from shards.transfer import upload, upload_all
from shards.transforms import EvalTransform

METHODS = ("procap", "maple")
CHANGED = {"fused": ("procap train",), "graphs": ("procap train", "maple train")}
"""How the names of the works begin that a path changes; others change all."""
SIZES = {"cuda": ((51, 4), (102, 32)), "cpu": ((5, 4),)}
EVALUATED = {"cuda": (51, 100), "cpu": (5, 4)}
"""Classes and images of a batch, by the type of the device."""
ROUNDS = 5
JPEGS, DECODERS, UPLOADED = 96, (1, 4, 12), 2**28


def measure_speed(case: DeviceCase) -> dict[str, Any]:
    """Measure milliseconds of steps and batches by path, and images per second; `gains` are what `auto` reads.

    A gain is the time of the plain path over the works that a path changes divided by that of the path. A GPU is
    measured at ViT-B/16 with random weights.
    """
    if case.on_gpu:
        case = replace(case, backbone="ViT-B/16", pretrained="random")
    paths = [path for path in ("graphs", "fused", "compile", "cudnn") if path in case.passed]
    steps = {path: _measure_steps(case, path) for path in ("plain", *paths)}
    gains: dict[str, float] = {}
    for path in paths:
        works = [work for work in steps[path] if work.startswith(CHANGED.get(path, ("",)))]
        gains[path] = sum(steps["plain"][work] for work in works) / sum(steps[path][work] for work in works)
    images = _measure_images(case)
    if "images" in case.passed and case.on_gpu:
        gains["images"] = images["resized on the device"] / images["resized by Pillow"]
    measured: dict[str, Any] = {"ms": steps, "images per second": images}
    if case.on_gpu:
        measured["upload GB/s"] = _measure_upload(case)
    return {"gains": {path: round(gain, 3) for path, gain in gains.items()}} | measured


def _measure_upload(case: DeviceCase) -> float:
    """Measure uploads of page-locked memory, in GB per second."""
    pinned = torch.empty(UPLOADED, dtype=torch.uint8).pin_memory()
    [seconds] = time_interleaved([partial(pinned.to, case.device, non_blocking=True)], ROUNDS, case.device, 1)
    return round(UPLOADED / 1e9 / statistics.median(seconds), 2)


def _measure_steps(case: DeviceCase, path: str) -> dict[str, float]:
    """Measure training steps and evaluated batches, in milliseconds by work."""
    precision = "bf16" if case.on_gpu else "fp32"
    on = Acceleration(**({} if path == "plain" else {path: True}))  # type: ignore[arg-type]
    clip = case.load(case.device) if path == "compile" else case.clip
    works: dict[str, Callable[[], object]] = {}
    for name in METHODS:
        for size in SIZES[case.device.type]:
            training, images, labels = make_training(case, name, size, precision, on=on, clip=clip)
            # With a learning rate of zero the optimizer still does all its work.
            training.engine.set_recipe_rate(0.0)
            training.prepare(images, labels)
            works[f"{name} train {size[0]} x {size[1]}"] = partial(training, training.batch(images, labels, 0))
    size = EVALUATED[case.device.type]
    training, images, _ = make_training(case, "maple", size, precision, on=on, clip=clip)
    evaluation = Evaluation(training.method, training.config, "fast", on)
    evaluation.prepare(images)
    works[f"maple eval {size[1]}"] = partial(evaluation, images)
    seconds = time_interleaved([*works.values()], ROUNDS, case.device, REPEATS[case.device.type])
    return {work: round(1e3 * statistics.median(s), 3) for work, s in zip(works, seconds, strict=True)}


def _measure_images(case: DeviceCase) -> dict[str, float]:
    """Measure images of 500 x 375 pixels per second: decoded by threads, then resized by Pillow or on the device."""
    draw, data = np.random.default_rng(0), []
    for _ in range(JPEGS):
        buffer = io.BytesIO()
        smooth_noise(draw, 375, 500).save(buffer, "JPEG", quality=90)
        data.append(buffer.getvalue())
    transform = EvalTransform(224, OPENAI_MEAN, OPENAI_STD)
    resize = DeviceResize(transform, case.device)

    def rate(work: Callable[[], object]) -> float:
        work()
        with timed(case.device) as whole:
            work()
        return round(JPEGS / whole.seconds, 1)

    rates = {}
    for threads in DECODERS:
        with ThreadPoolExecutor(threads) as pool:
            rates[f"decoded by {threads}"] = rate(lambda pool=pool: [*pool.map(decode_pixels, data)])  # type: ignore[misc]
    with ThreadPoolExecutor(num_decoders(None, torch.device("cuda"))) as pool:

        def resize_by_pillow() -> object:
            images = pool.map(lambda image: transform(Image.fromarray(decode_pixels(image))), data)
            return [upload(pixels, case.device) for pixels in images]

        def resize_on_device() -> object:
            pixels = [*map(torch.from_numpy, pool.map(decode_pixels, data))]
            return resize.make_centres(upload_all(pixels, case.device))

        return rates | {"resized by Pillow": rate(resize_by_pillow), "resized on the device": rate(resize_on_device)}
