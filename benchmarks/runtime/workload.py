"""Define the timed work in two modes: training steps and evaluated batches.

Reference mode works as public code does: it encodes all positions of class prompts, computes class features for every
batch, runs eagerly, and uses torch's default optimizer implementation. Fast mode is this program's default, with the
accelerations of `--accelerate`. Both give the same numbers up to rounding.

Shapes: B images, C classes, S image size, T loss terms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from benchmarks.runtime.measure import count_flops, peak_bytes, timed
from procap.clip import CLIP
from procap.methods.method import Method
from runner.acceleration import Acceleration
from runner.config import RunConfig
from runner.engine import Batch, Engine, autocast, fitting_threads
from runner.meters import Meter
from runner.train_step import TrainStep

ModeName = Literal["reference", "fast"]
MODES: tuple[ModeName, ...] = ("reference", "fast")
Work = Literal["train", "eval"]
Models = dict[ModeName, CLIP]
Classify = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Preparation:
    """Measurements of one eager step or batch before the timed ones.

    seconds: of warm-up, measuring, compiling and capture. peak: bytes of tensors. flops: operations.
    """

    seconds: float
    peak: int
    flops: float


def models_by_mode(clip: CLIP, accelerations: Acceleration) -> Models:
    """Return `clip` for each mode; if fast mode compiles it, reference mode gets a copy of the weights."""
    plain = copy.deepcopy(clip) if accelerations.compile else clip
    reference = plain.without_optimizations()
    # A shallow copy: `prepare` switches fused kernels on for `clip` alone.
    reference.fused_kernels = False
    accelerations.prepare(clip)
    return {"reference": reference, "fast": clip}


def make_engine(method: Method, config: RunConfig, mode: ModeName) -> Engine:
    """Make the engine of a training; reference mode uses torch's default implementation of the optimizer."""
    engine = Engine(method, config)
    if mode == "reference":
        # Only fused optimizers skip a step of fp16 themselves; for others the scaler reads the flag on the host.
        engine.optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        for group in engine.optimizer.param_groups:
            group["fused"] = None
    return engine


def make_logits_function(method: Method, mode: ModeName) -> Classify:
    """Make the function from images [B, 3, S, S] to logits [B, C]; `method` uses the towers of that mode."""
    # If the text depends on the image, class features cannot be cached in either mode.
    classifier = method.classifier()
    if mode == "fast" or not classifier.keeps_class_features:
        return classifier
    # Compute prompts and class features again for every batch, as public code does.
    return torch.inference_mode()(lambda images: method.classifier()(images))


class _Workload:
    """Base of training and evaluation: device, mode, accelerations, of which reference mode has none."""

    def __init__(self, method: Method, config: RunConfig, mode: ModeName, accelerations: Acceleration) -> None:
        self.method, self.config, self.mode = method, config, mode
        self.device = method.clip.device
        self.preparation: Preparation | None = None
        on = accelerations if mode == "fast" else Acceleration()
        self._graphs = on.graphs
        # On a CPU without compiling, measuring the peak memory is enough warm-up.
        self._warm_ups = 2 if self.device.type == "cuda" or on.compile else 0

    def _in_mode(self, images: int, work: Work) -> AbstractContextManager[None]:
        return nullcontext() if self.mode == "reference" else fitting_threads(self.method.clip, images, work)


class Training(_Workload):
    """Training steps of `method` as in `procap train`, in one mode."""

    def __init__(
        self, method: Method, config: RunConfig, mode: ModeName, accelerations: Acceleration, meter: Meter | None = None
    ) -> None:
        super().__init__(method, config, mode, accelerations)
        # A method with several stages is measured in its first one.
        method.begin_stage(0)
        self.engine = make_engine(method, config, mode)
        self._step = TrainStep(self.engine, meter or Meter(self.device), graphs=self._graphs)

    @property
    def is_captured(self) -> bool:
        """Whether steps are replays of CUDA graphs."""
        return self._step.is_captured

    def batch(self, images: Tensor, labels: Tensor, number: int) -> Batch:
        """Make a batch of images [B, 3, S, S] and labels [B] on the device, with the noise of step `number`."""
        return Batch.make(self.method, self.config.seed, number, images, labels)

    def prepare(self, images: Tensor, labels: Tensor) -> Preparation:
        """Warm up, measure and capture a step on this batch; weights and optimizer state stay unchanged."""
        batch = self.batch(images, labels, 0)

        def step() -> None:
            self.engine.terms(batch).sum().backward()
            self.method.zero_grad(set_to_none=True)

        with timed(self.device) as whole, self._in_mode(len(images), "train"):
            for _ in range(self._warm_ups):
                step()
            peak = peak_bytes(step, self.device)
            flops = count_flops(step)
            if self._step.needs_capture:
                self._step.capture(batch)
        self.preparation = Preparation(whole.seconds, peak, flops)
        return self.preparation

    def __call__(self, batch: Batch) -> Tensor:
        """Take one step; returns its loss terms, their sum and a flag, [T + 2]."""
        with self._in_mode(len(batch.images), "train"):
            return self._step(batch)


class Evaluation(_Workload):
    """Map images [B, 3, S, S] to logits [B, C] with the current weights of `method`, as in `procap eval`."""

    def __init__(self, method: Method, config: RunConfig, mode: ModeName, accelerations: Acceleration) -> None:
        super().__init__(method, config, mode, accelerations)
        self._classify: Classify | None = None

    def update_classifier(self) -> None:
        """Compute prompts and class features."""
        with autocast(self.config.precision, self.device):
            self._classify = make_logits_function(self.method, self.mode)

    def prepare(self, images: Tensor, rest: int = 0) -> Preparation:
        """Warm up and measure batches like `images`, and a last one of `rest` images."""
        with timed(self.device) as whole:
            self.update_classifier()
            for _ in range(self._warm_ups):
                self(images)
            peak = peak_bytes(lambda: self(images), self.device)
            flops = count_flops(lambda: self(images), self.method)
            # Kernels for the smaller last batch would otherwise be chosen while it is timed.
            if rest and self.device.type == "cuda":
                self(images[:rest])
        self.preparation = Preparation(whole.seconds, peak, flops)
        return self.preparation

    def __call__(self, images: Tensor) -> Tensor:
        assert self._classify is not None
        with self._in_mode(len(images), "eval"), autocast(self.config.precision, self.device):
            return self._classify(images)
