"""Compare fast mode with the reference on a device: logits, loss, gradients, and captured with eager steps.

Shapes: B images, C classes, S image size.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from benchmarks.runtime.measure import without_fused_kernels
from benchmarks.runtime.settings import Settings, run_config
from benchmarks.runtime.workload import Models, ModeName, Training, make_logits_function
from procap.methods.method import Method
from runner.config import RunConfig
from runner.cuda_graphs import CudaGraphs
from runner.engine import Batch, Engine, autocast
from runner.meters import Meter
from runner.step import TrainStep
from shards.rng import generator
from tools.synthetic import synthetic_case

CLASSES, BATCH = 51, 4
SPREAD = 0.01
"""Standard deviation of the noise added to every learned parameter, so that none of them is at a special value."""

Outputs = dict[str, dict[str, Tensor]]


def compare_modes(models: Models, method: str, precision: str, settings: Settings) -> dict[str, float]:
    """Return the largest differences of fast from reference mode, relative to the largest element of each tensor.

    In other precisions than fp32 both modes are compared with the reference in fp32, because two ways to round differ
    as much from each other as each of them from the truth.
    """
    truth = _compute(models, "reference", method, "fp32", settings)
    fast = _compute(models, "fast", method, precision, settings)
    outputs = {f"fast {kind}": _largest_difference(fast[kind], truth[kind]) for kind in truth}
    if precision != "fp32":
        reference = _compute(models, "reference", method, precision, settings)
        outputs |= {f"reference {kind}": _largest_difference(reference[kind], truth[kind]) for kind in truth}
    return outputs


def compare_captured(models: Models, method: str, precision: str, settings: Settings) -> dict[str, float]:
    """Return the largest differences of a replayed CUDA graph from an eager step: loss terms and updated parameters."""
    eager, captured = (_take_step(models, method, precision, settings, graphs=graphs) for graphs in (False, True))
    return {kind: _largest_difference(captured[kind], eager[kind]) for kind in eager}


def _compute(models: Models, mode: ModeName, name: str, precision: str, settings: Settings) -> Outputs:
    """Compute logits [B, C], the loss, and the gradient of every learned parameter."""
    method, config, images, labels = _make_case(models, mode, name, precision, settings)
    training = Training(method, config, mode, settings.accelerations)
    batch = training.batch(images, labels, 0)
    with without_fused_kernels() if mode == "reference" else nullcontext():
        with torch.no_grad(), autocast(config.precision, method.clip.device):
            logits = make_logits_function(method, mode)(images).float().clone()
        loss = training.engine.terms(batch).sum()
        loss.backward()
    gradients = {each: p.grad.float().clone() for each, p in method.named_parameters() if p.grad is not None}
    return {"logits": {"logits": logits}, "loss": {"loss": loss.detach().float()}, "gradients": gradients}


def _take_step(models: Models, name: str, precision: str, settings: Settings, *, graphs: bool) -> Outputs:
    method, config, images, labels = _make_case(models, "fast", name, precision, settings)
    device = method.clip.device
    batch = Batch(images, labels, tuple(noise.to(device) for noise in method.draw(generator(config.seed, "noise", 0))))
    step = TrainStep(Engine(method, config), Meter(device, 0), CudaGraphs(device) if graphs else None)
    if graphs:
        step.capture(batch)
    terms = step(batch).clone()
    parameters = {each: parameter.detach().clone() for each, parameter in method.named_parameters()}
    return {"loss terms": {"terms": terms}, "parameters": parameters}


def _make_case(
    models: Models, mode: ModeName, name: str, precision: str, settings: Settings
) -> tuple[Method, RunConfig, Tensor, Tensor]:
    """Make a method with parameters around its start, the same ones in every mode, and its first batch."""
    config = run_config(name, precision, settings, batch=BATCH)
    method, images, labels = synthetic_case(models[mode], name, CLASSES, BATCH)
    method.begin_stage(0)
    noise = generator(config.seed, "parity")
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(SPREAD * torch.randn(parameter.shape, generator=noise).to(parameter))
    return method, config, images, labels


def _largest_difference(outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference over the tensors, each relative to its own largest element.

    Gradients that are tiny compared with the others are compared with a thousandth of the largest one.
    """
    if outputs.keys() != expected.keys():
        raise ValueError(f"other tensors: {sorted(outputs.keys() ^ expected.keys())}")
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    return max(
        float((outputs[name] - tensor).abs().max()) / max(float(tensor.abs().max()), 1e-3 * largest, 1e-30)
        for name, tensor in expected.items()
    )
