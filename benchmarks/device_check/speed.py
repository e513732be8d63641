"""Measure the plain path and each faster one that has passed: steps, evaluation, decoding, uploads."""

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
from benchmarks.runtime.measure import REPEATS, time_interleaved, timed
from benchmarks.runtime.workload import Evaluation
from procap.clip import CLIP, OPENAI_MEAN, OPENAI_STD
from runner.acceleration import Acceleration
from runner.devices import available_cores, num_decoders
from shards.device.evaluation import DeviceResize
from shards.images import decode_pixels
from shards.transfer import upload, upload_all
from shards.transforms import eval_transform

METHODS = ("procap", "maple")
SIZES = {"cuda": ((51, 4), (102, 32)), "cpu": ((5, 4),)}
ROUNDS = 5
EVALUATED = 100
THREADS = (1, 4, 12)
JPEGS = 96
UPLOAD_BYTES = 2**28


def measure_speed(case: DeviceCase) -> dict[str, Any]:
    """Measure milliseconds of steps and batches by path, and what feeds them; `gains` are what `auto` reads.

    A gain is the time of the plain path over all measured works divided by that of the path; ProCAP's alone for
    `fused`. A GPU is measured at ViT-B/16 with random weights.
    """
    if case.on_gpu:
        case = replace(case, backbone="ViT-B/16", pretrained="random")
    steps = {path: _measure_steps(case, path) for path in ("plain", *_step_paths(case))}
    gains = {}
    for path, milliseconds in steps.items():
        works = [work for work in milliseconds if path != "fused" or work.startswith("procap train")]
        if path != "plain":
            gains[path] = sum(steps["plain"][work] for work in works) / sum(milliseconds[work] for work in works)
    images = _measure_images(case)
    if "images" in case.passed and case.on_gpu:
        gains["images"] = images["resized on the device"] / images["resized by Pillow"]
    return {
        "gains": {path: round(gain, 3) for path, gain in gains.items()},
        "ms": steps,
        "images per second": images,
        "host to device GB/s": _measure_upload(case),
    }


def _step_paths(case: DeviceCase) -> list[str]:
    return [path for path in ("graphs", "fused", "compile", "cudnn") if path in case.passed]


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
            training.engine.scale_rates(0.0)
            training.prepare(images, labels)
            works[f"{name} train {size[0]} x {size[1]}"] = partial(training, training.batch(images, labels, 0))
    works[f"maple eval {EVALUATED}"] = _prepare_evaluation(case, on, clip, precision)
    seconds = time_interleaved([*works.values()], ROUNDS, case.device, REPEATS[case.device.type])
    return {work: round(1e3 * statistics.median(s), 3) for work, s in zip(works, seconds, strict=True)}


def _prepare_evaluation(case: DeviceCase, on: Acceleration, clip: CLIP, precision: str) -> Callable[[], object]:
    count = EVALUATED if case.on_gpu else 4
    training, images, _ = make_training(case, "maple", (51 if case.on_gpu else 5, count), precision, on=on, clip=clip)
    evaluation = Evaluation(training.method, training.config, "fast", on)
    evaluation.prepare(images)
    return partial(evaluation, images)


def _measure_images(case: DeviceCase) -> dict[str, float]:
    """Measure images per second of 500 x 375 pixels: decoded by threads, then resized by Pillow or on the device."""
    draw = np.random.default_rng(0)
    data = []
    for _ in range(JPEGS):
        coarse = Image.fromarray(draw.integers(0, 256, (60, 80, 3), dtype=np.uint8))
        buffer = io.BytesIO()
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        data.append(buffer.getvalue())
    transform = eval_transform(224, OPENAI_MEAN, OPENAI_STD)
    resize = DeviceResize(transform, case.device)

    def rate(work: Callable[[], object]) -> float:
        work()
        with timed(case.device) as whole:
            work()
        return round(JPEGS / whole.seconds, 1)

    rates = {}
    for threads in sorted({min(count, available_cores()) for count in THREADS}):
        with ThreadPoolExecutor(threads) as pool:
            rates[f"decoded by {threads} threads"] = rate(lambda: list(pool.map(decode_pixels, data)))
    with ThreadPoolExecutor(num_decoders(None, torch.device("cuda"))) as pool:
        rates["resized by Pillow"] = rate(
            lambda: [
                upload(pixels, case.device)
                for pixels in pool.map(lambda image: transform(Image.fromarray(decode_pixels(image))), data)
            ]
        )
        rates["resized on the device"] = rate(
            lambda: resize(upload_all([*map(torch.from_numpy, pool.map(decode_pixels, data))], case.device))
        )
    return rates


def _measure_upload(case: DeviceCase) -> float | None:
    if not case.on_gpu:
        return None
    pinned = torch.empty(UPLOAD_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(pinned, device=case.device)
    [seconds] = time_interleaved([lambda: target.copy_(pinned, non_blocking=True)], ROUNDS, case.device)
    return round(UPLOAD_BYTES / statistics.median(seconds) / 1e9, 1)
