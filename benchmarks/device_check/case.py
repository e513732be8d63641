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
from procap.weights.loading import load_clip
from runner.acceleration import Acceleration
from runner.config import RunConfig
from runner.engine import Batch, autocast
from shards.rng import generator

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

    @cached_property
    def clip(self) -> CLIP:
        return self.load(self.device)

    def load(self, device: torch.device) -> CLIP:
        """Load a further copy of the backbone on `device`, on the plain path."""
        if device.type == "cuda":
            # As in `runner.workbench`: --precision alone chooses TF32.
            torch.backends.cudnn.allow_tf32 = False
            torch.cuda.set_device(device if device.index is not None else 0)
        clip = load_clip(self.backbone, self.pretrained).to(device)
        Acceleration().prepare(clip)
        return clip

    def config(self, name: str, precision: str, batch: int) -> RunConfig:
        settings = Settings(self.backbone, self.pretrained, 0, Acceleration())
        return run_config(name, precision, settings, batch=batch)


def make_training(
    case: DeviceCase, name: str, size: tuple[int, int], precision: str = "fp32", *,
    on: Acceleration | None = None, clip: CLIP | None = None,
) -> tuple[Training, Tensor, Tensor]:  # fmt: skip
    """Make the training of a method near its start, images [B, 3, S, S] and labels [B]. size: classes and images.

    on: the accelerations to use. clip: of another device.
    """
    classes, batch = size
    on = on or Acceleration()
    model = models_by_mode(clip or case.clip, on)["fast"]
    method, images, labels = synthetic_case(model, name, classes, batch)
    training = Training(method, case.config(name, precision, batch), "fast", on)
    noise = generator(SEED, "parity")
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(SPREAD * torch.randn(parameter.shape, generator=noise).to(parameter))
    return training, images, labels


def compute(training: Training, batch: Batch, scale: float = 1.0) -> dict[str, Tensor]:
    """Compute loss terms, logits [B, C] and gradients by name, on the CPU. scale: of the loss, against underflow."""
    method, engine = training.method, training.engine
    with torch.no_grad(), autocast(training.config.precision, training.device):
        logits = method.classifier()(batch.images).float()
    terms = engine.terms(batch)
    method.zero_grad(set_to_none=True)
    (scale * terms.sum()).backward()
    named = method.named_parameters()
    gradients = {f"gradient of {name}": p.grad.float() / scale for name, p in named if p.grad is not None}
    outputs = {"loss terms": terms.detach().float(), "logits": logits, **gradients}
    return {name: tensor.detach().cpu() for name, tensor in outputs.items()}


def largest_difference(outputs: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference over the tensors, each relative to its own largest element.

    Gradients that are tiny compared with others are compared with a hundredth of the largest one. Raises UserError for
    a number that is not finite, and for other names.
    """
    if outputs.keys() != expected.keys():
        raise UserError(f"other tensors: {', '.join(sorted(outputs.keys() ^ expected.keys()))}")
    if wrong := [name for name, tensor in outputs.items() if not tensor.isfinite().all()]:
        raise UserError(f"not finite: {', '.join(wrong[:3])}")
    gradients = [float(tensor.abs().max()) for name, tensor in expected.items() if name.startswith("gradient")]
    least = max(1e-2 * max(gradients, default=0.0), 1e-30)
    return max(
        float((outputs[name].double() - tensor.double()).abs().max()) / max(float(tensor.abs().max()), least)
        for name, tensor in expected.items()
    )


def require_close(differences: Mapping[str, float], tolerance: float) -> dict[str, Any]:
    """Return the differences rounded; raises UserError that names the first one beyond `tolerance`."""
    for what, difference in differences.items():
        if not difference <= tolerance:
            raise UserError(f"{what} differs by {difference:.2g}, at most {tolerance:g} is rounding")
    return {what: float(f"{difference:.3g}") for what, difference in differences.items()}
