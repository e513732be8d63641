"""Check each faster path against the plain one: images, CUDA graphs, fused kernels, compiled blocks.

Shapes: B images, H and W pixels of an image.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.device_check.case import (
    METHODS,
    DeviceCase,
    Skipped,
    compute,
    largest_difference,
    learned_of,
    make_training,
    require_close,
)
from benchmarks.runtime.workload import Training
from procap.clip import OPENAI_MEAN, OPENAI_STD
from procap.compiled import compiled_level
from procap.cross_attention import CrossAttention, refine_level
from procap.errors import UserError
from procap.initialisation import linear, normal
from runner.acceleration import Acceleration, missing_tool
from shards.device.resize import DeviceResize
from shards.rng import generator
from shards.transfer import upload_all
from shards.transforms import EvalTransform

BATCHES, IMAGES, SIZE = 10, 8, 224
REPLAYS = 10
MEMORY_STEPS = 50
TOKENS = (1, 4, 16)
WIDTHS = (768, 512)
"""Widths of vision and text in ViT-B/16."""


def check_images(case: DeviceCase) -> dict[str, Any]:
    """Compare resized images of the device bit for bit with Pillow's, while another stream keeps it busy."""
    transform = EvalTransform(SIZE, OPENAI_MEAN, OPENAI_STD)
    draw = np.random.default_rng(0)
    resize = DeviceResize(transform, case.device)
    if case.on_gpu:
        with torch.cuda.stream(torch.cuda.Stream(case.device)):
            busy = torch.randn(4096, 4096, device=case.device)
            for _ in range(200):
                busy = torch.tanh(busy @ busy)
    for number in range(BATCHES):
        images = [smooth_noise(draw, *draw.integers(SIZE, 2 * SIZE, 2)) for _ in range(IMAGES)]
        pixels = upload_all([torch.from_numpy(np.array(image)) for image in images], case.device)
        resized = resize.make_centres(pixels)
        if not torch.equal(resized.cpu(), torch.stack([transform(image) for image in images])):
            raise UserError(f"resized images of batch {number} are not Pillow's")
    return {"equal images": BATCHES * IMAGES}


def smooth_noise(draw: np.random.Generator, height: int, width: int) -> Image.Image:
    """Draw an image of noise as smooth as a photo."""
    coarse = Image.fromarray(draw.integers(0, 256, (height // 6, width // 6, 3), dtype=np.uint8))
    return coarse.resize((int(width), int(height)), Image.Resampling.BICUBIC)


def check_graphs(case: DeviceCase) -> dict[str, Any]:
    """Compare replayed with eager steps at new rates, with a short batch between, and look for growing memory."""
    case.require_gpu()
    differences = {}
    for name in METHODS:
        ends = []
        for on in (Acceleration(), Acceleration(graphs=True)):
            training, images, labels = make_training(case, name, (10, 4), on=on)
            training.prepare(images, labels)
            if on.graphs and not training.is_captured:
                raise UserError(f"steps of {name} are not captured: the host waits for the device in them")
            for number in range(REPLAYS):
                training.engine.set_recipe_rate(1e-3 / (number + 1))
                count = 3 if number == REPLAYS // 2 else 4
                terms = training(training.batch(images[:count], labels[:count], number))
            ends.append({"loss terms": terms.cpu()} | learned_of(training.method))
        differences[name] = largest_difference(ends[1], ends[0])
        _check_memory(training, images, labels)
    return require_close(differences, 1e-3)


def _check_memory(training: Training, images: Tensor, labels: Tensor) -> None:
    """Raise UserError if steps allocate memory that they do not release."""
    before = torch.cuda.memory_allocated()
    for number in range(MEMORY_STEPS):
        training(training.batch(images, labels, number))
    grown = torch.cuda.memory_allocated() - before
    if grown > 2**20:
        raise UserError(f"{MEMORY_STEPS} replayed steps keep {grown / 1e6:.0f} MB")


def check_fused(case: DeviceCase) -> dict[str, Any]:
    """Compare values and gradients of the compiled cross-attention with eager arithmetic in float64."""
    case.require_gpu()
    _require_compiler(case)
    differences = {}
    for tokens in TOKENS:
        draw = generator(0, "fused", tokens)
        options: dict[str, Any] = {"heads": 8, "head_width": 64, "norm": "pre", "zero_output": False}
        modules = [linear(*WIDTHS, draw), *(CrossAttention(width, WIDTHS[1], draw, **options) for width in WIDTHS)]
        rows = [normal((tokens, width), draw) for width in WIDTHS]
        ends = []
        for level, dtype in ((refine_level, torch.float64), (compiled_level(), torch.float32)):
            built = [module.to(case.device, dtype) for module in modules]
            v, t = (x.to(case.device, dtype).requires_grad_() for x in rows)
            parameters = [p for module in built for p in module.parameters()]
            outputs = level(v, t, *built)
            loss = sum((x * torch.linspace(-1, 1, x.numel(), device=x.device).view_as(x)).sum() for x in outputs)
            gradients = torch.autograd.grad(loss, [v, t, *parameters])  # type: ignore[arg-type]
            named = {f"gradient {i}": x.cpu() for i, x in enumerate(gradients)}
            ends.append({name: x.detach().cpu() for name, x in zip("vt", outputs, strict=True)} | named)
        differences[f"{tokens} tokens"] = largest_difference(ends[1], ends[0])
    return require_close(differences, 1e-4)


def check_compile(case: DeviceCase) -> dict[str, Any]:
    """Compare compiled with plain steps; compiling takes a minute."""
    if not case.full:
        raise Skipped("only with --full")
    _require_compiler(case)
    differences = {}
    for name in ("maple", "procap"):
        ends = []
        for on in (Acceleration(), Acceleration(compile=True)):
            # Compiled blocks stay compiled: each path has a model.
            training, images, labels = make_training(case, name, (10, 4), on=on, clip=case.load(case.device))
            ends.append(compute(training, training.batch(images, labels, 0)))
        differences[name] = largest_difference(ends[1], ends[0])
    return require_close(differences, 1e-3)


def _require_compiler(case: DeviceCase) -> None:
    """Raise Skipped where torch.compile cannot run."""
    if missing := missing_tool(case.device):
        raise Skipped(f"needs {missing}")
