"""The two kinds of work that are timed, in a mode and with its accelerations: training steps and evaluated batches.

Both have a start that is timed apart: warming up, compiling, recording, and a look at the memory.
Shapes: B images, C classes, S image size, T loss terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from benchmarks.runtime.flops import count_flops
from benchmarks.runtime.measure import peak_bytes, stretch
from benchmarks.runtime.modes import Classify, ModeName, at_work, classifier_of, engine_of
from procap.methods.method import Method
from runner.acceleration import Acceleration
from runner.config import RunConfig
from runner.cuda_graphs import CudaGraphs, GraphCapture, GraphedFunction, Part
from runner.engine import Batch, autocast
from runner.meters import Meter
from runner.step import PHASES, TrainStep
from runner.threads import fitting_threads
from shards.rng import generator
from shards.transfer import upload

Kind = Literal["train", "eval"]


@dataclass(frozen=True)
class Start:
    """What comes before the first timed piece of work.

    seconds: all of it. once: one piece of work, as it is without a recording. peak: bytes of tensors alive in that.
    flops: operations of it, as executed. loss: of the example batch in training.
    """

    seconds: float
    once: float
    peak: int
    flops: float
    loss: float | None = None


class Counted:
    """A graph capture that counts: what cannot be captured runs eagerly, and the report must say so."""

    def __init__(self, graphs: GraphCapture) -> None:
        self.graphs = graphs
        self.recorded = 0

    def side_stream(self) -> AbstractContextManager[None]:
        return self.graphs.side_stream()

    def capture(self, part: Part) -> Part:
        replay = self.graphs.capture(part)
        self.recorded += 1
        return replay


class Training:
    """Steps of `method`, whose towers are those of `mode`, as `procap train` takes them."""

    def __init__(self, method: Method, config: RunConfig, mode: ModeName, ways: Acceleration, meter: Meter) -> None:
        self.method, self.config, self.mode = method, config, mode
        self.device = method.clip.device
        self._warm_ups = warm_ups(ways, self.device)
        self.engine = engine_of(method, config, mode)
        self._graphs = Counted(CudaGraphs(self.device)) if ways.graphs else None
        self._step = TrainStep(self.engine, meter, self._graphs)

    @property
    def recorded(self) -> bool:
        """Whether steps are replays."""
        return self._graphs is not None and self._graphs.recorded == len(PHASES)

    def batch(self, images: Tensor, labels: Tensor, number: int) -> Batch:
        """Images [B, 3, S, S] and labels [B] on the device, as step `number` reads them."""
        drawn = self.method.draw(generator(self.config.seed, "noise", number))
        return Batch(images, labels, tuple(upload(noise, self.device) for noise in drawn))

    def start(self, batch: Batch) -> Start:
        """Get ready for batches like `batch`; weights and optimizer stay what they were."""
        losses: list[Tensor] = []

        def look() -> None:
            losses.append(self._gradients(batch))

        with stretch(self.device) as whole, self._at_work(batch):
            with nullcontext() if self._graphs is None else self._graphs.side_stream():
                for _ in range(self._warm_ups):
                    look()
                with stretch(self.device) as last:
                    peak = peak_bytes(look, self.device)
                flops = count_flops(look)
            if self._graphs is not None:
                self._step.capture(batch)
        return Start(whole.seconds, last.seconds, peak, flops, float(losses[-1]))

    def __call__(self, batch: Batch) -> Tensor:
        """One step: its terms and their sum, [T + 1], until the next step overwrites them."""
        with self._at_work(batch):
            return self._step(batch)

    @contextmanager
    def _at_work(self, batch: Batch) -> Iterator[None]:
        fitting = fitting_threads(self.method.clip, len(batch.images)) if self.mode == "fast" else nullcontext()
        with at_work(self.mode), fitting:
            yield

    def _gradients(self, batch: Batch) -> Tensor:
        loss = self.engine.terms(batch).sum()
        loss.backward()
        self.method.zero_grad(set_to_none=True)
        return loss.detach()


class Evaluation:
    """Images [B, 3, S, S] to logits [B, C] under the present weights of `method`, as `procap eval` does it."""

    def __init__(self, method: Method, config: RunConfig, mode: ModeName, ways: Acceleration) -> None:
        self.method, self.config, self.mode = method, config, mode
        self.device = method.clip.device
        self._warm_ups = warm_ups(ways, self.device)
        self._graphs = Counted(CudaGraphs(self.device)) if ways.graphs else None
        self._classify: Classify | None = None

    @property
    def recorded(self) -> bool:
        """Whether batches like the first are replays."""
        return self._graphs is not None and self._graphs.recorded > 0

    def renew(self) -> None:
        """Compute prompts and class features; the weights must not change after `start`, a recording holds its own."""
        with self._at_work():
            classify = classifier_of(self.method, self.mode)
        if self._graphs is None or self._classify is None:
            self._classify = classify

    def start(self, images: Tensor, rest: int = 0) -> Start:
        """Get ready for batches like `images`, and for a last one of `rest` images."""
        with stretch(self.device) as whole:
            self.renew()
            for _ in range(self._warm_ups):
                self(images)
            with stretch(self.device) as last:
                peak = peak_bytes(lambda: self(images), self.device)
            flops = count_flops(lambda: self(images), self.method)
            if rest and self.device.type == "cuda":
                self(images[:rest])
            if self._graphs is not None and self._classify is not None:
                self._classify = GraphedFunction(self._classify, self._graphs)
                self(images)
        return Start(whole.seconds, last.seconds, peak, flops)

    def __call__(self, images: Tensor) -> Tensor:
        assert self._classify is not None
        fast = self.mode == "fast"
        fitting = fitting_threads(self.method.clip, len(images), "eval") if fast else nullcontext()
        with self._at_work(), fitting:
            return self._classify(images)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        with at_work(self.mode), autocast(self.config, self.device):
            yield


@dataclass(frozen=True)
class RunSpec:
    """Work that is ready to be timed: call `run`."""

    run: Callable[[], object]
    start: Start
    recorded: bool


def piece_of_work(
    kind: Kind, method: Method, config: RunConfig, mode: ModeName, ways: Acceleration, images: Tensor, labels: Tensor
) -> RunSpec:
    """A training step or an evaluated batch over always the same images [B, 3, S, S] and labels [B]."""
    if kind == "eval":
        evaluation = Evaluation(method, config, mode, ways)
        started = evaluation.start(images)
        return RunSpec(lambda: evaluation(images), started, evaluation.recorded)
    training = Training(method, config, mode, ways, Meter(method.clip.device, 0))
    # At a rate of zero the optimizer does all its work and every round starts from the same weights.
    training.engine.set_rate(0.0)
    started = training.start(training.batch(images, labels, 0))
    return RunSpec(lambda: training(training.batch(images, labels, 0)), started, training.recorded)


def warm_ups(ways: Acceleration, device: torch.device) -> int:
    """Runs before the look at the memory, which by itself is warm-up enough for plain work on a CPU."""
    return 2 if device.type == "cuda" or ways.compile else 0
