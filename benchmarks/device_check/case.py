"""What the parts of a check share: the device, the model, and how numbers are compared.

Shapes: B images, C classes, S image size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from benchmarks.runtime.settings import SEED, Settings, run_config
from benchmarks.runtime.synthetic import synthetic_case
from benchmarks.runtime.workload import Training, models_by_mode
from procap.clip import CLIP
from procap.errors import UserError
from procap.methods.method import Method
from procap.weights.loading import load_clip
from runner.acceleration import Acceleration
from runner.engine import Batch, autocast
from shards.rng import generator

METHODS = ("coop", "maple", "procap")
SPREAD = 0.01
"""Standard deviation of the noise added to every learned parameter, so that none of them is at a special value."""


class Skipped(Exception):
    """A part that this machine cannot run, and why."""


@dataclass(frozen=True)
class DeviceCase:
    """A device and the backbone with which it is checked.

    passed: accelerations whose parts have passed so far, which `speed` measures. full: compiled paths too.
    """

    device: torch.device
    backbone: str = "mini"
    pretrained: str | None = None
    passed: tuple[str, ...] = ()
    full: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def require_gpu(self) -> None:
        """Raise Skipped on a CPU."""
        if not self.on_gpu:
            raise Skipped("needs a CUDA device")

    @cached_property
    def clip(self) -> CLIP:
        return self.load(self.device)

    def load(self, device: torch.device) -> CLIP:
        """Load a further copy of the backbone on `device`, on the plain path."""
        clip = load_clip(self.backbone, self.pretrained).to(device)
        Acceleration().prepare(clip)
        return clip


def make_training(
    case: DeviceCase, name: str, size: tuple[int, int], precision: str = "fp32", *,
    on: Acceleration | None = None, clip: CLIP | None = None,
) -> tuple[Training, Tensor, Tensor]:  # fmt: skip
    """Make the training of a method near its start, images [B, 3, S, S] and labels [B]. size: classes and images.

    on: the accelerations to use. clip: of another device.
    """
    classes, batch = size
    on = on or Acceleration()
    method, images, labels = synthetic_case(models_by_mode(clip or case.clip, on)["fast"], name, classes, batch)
    settings = Settings(case.backbone, case.pretrained, 0, Acceleration(), batch=batch)
    training = Training(method, run_config(name, precision, settings), "fast", on)
    noise = generator(SEED, "parity")
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(SPREAD * torch.randn(parameter.shape, generator=noise).to(parameter))
    return training, images, labels


def compute(training: Training, batch: Batch, scale: float = 1.0) -> dict[str, Tensor]:
    """Compute loss terms, logits [B, C] and gradients by name, on the CPU. scale: of the loss, against underflow."""
    method = training.method
    with torch.no_grad(), autocast(training.config.precision, training.device):
        logits = method.classifier()(batch.images)
    terms = training.engine.terms(batch)
    method.zero_grad(set_to_none=True)
    (scale * terms.sum()).backward()
    outputs = {"loss terms": terms, "logits": logits}
    return {name: x.detach().float().cpu() for name, x in outputs.items()} | gradients_of(method, scale)


def gradients_of(method: Method, scale: float = 1.0) -> dict[str, Tensor]:
    """Copy the gradients of a method to the CPU, divided by the `scale` of the loss."""
    named = method.named_parameters()
    return {f"gradient of {name}": p.grad.float().cpu() / scale for name, p in named if p.grad is not None}


def learned_of(method: Method) -> dict[str, Tensor]:
    """Copy the learned parameters of a method to the CPU."""
    return {name: p.detach().float().cpu() for name, p in method.named_parameters() if p.requires_grad}


def largest_difference(outputs: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference over the tensors, each relative to its own largest element.

    Gradients that are tiny compared with others are compared with a hundredth of the largest one. Raises UserError for
    a number that is not finite, and for other names.
    """
    if outputs.keys() != expected.keys():
        raise UserError(f"other tensors: {', '.join(sorted(outputs.keys() ^ expected.keys()))}")
    if wrong := [name for name, tensor in outputs.items() if not tensor.isfinite().all()]:
        raise UserError(f"not finite: {', '.join(wrong[:3])}")
    largest = {name: float(tensor.abs().max()) for name, tensor in expected.items()}
    gradients = [value for name, value in largest.items() if name.startswith("gradient")]
    least = max(1e-2 * max(gradients, default=0.0), 1e-30)
    return max(
        float((outputs[name].double() - tensor.double()).abs().max()) / max(largest[name], least)
        for name, tensor in expected.items()
    )


def require_close(differences: Mapping[str, float], tolerance: float) -> dict[str, Any]:
    """Return the differences rounded; raises UserError that names the first one beyond `tolerance`."""
    for what, difference in differences.items():
        if not difference <= tolerance:
            raise UserError(f"{what} differs by {difference:.2g}, at most {tolerance:g} is rounding")
    return {what: float(f"{difference:.3g}") for what, difference in differences.items()}
