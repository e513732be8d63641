"""One contestant of the runtime benchmark: a method in a mode at a precision, trained and evaluated in measured rounds.

Shapes: B images, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from benchmarks.runtime.data import Contest
from benchmarks.runtime.measure import Spread, stretch
from benchmarks.runtime.modes import Models, ModeName, ways_of
from benchmarks.runtime.work import Evaluation, Start, Training
from procap.recipe import learning_rate
from runner.acceleration import Acceleration
from runner.config import RunConfig
from runner.meters import Meter
from runner.setup import make_method, train_augment, train_stream
from runner.step import AsyncLosses
from shards.device.stream import DeviceTrainStream
from shards.loader import TrainStream, evaluation_batches
from shards.transfer import to_device
from shards.transforms import eval_transform

MODEL = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Round:
    """Consecutive training steps: wall seconds, those of the model, and joules where the GPU reports them."""

    steps: int
    seconds: float
    model_seconds: float
    joules: float | None


@dataclass
class Passes:
    """Passes over the test images: seconds of each, of the class features, and what was right in one of them."""

    images: int
    seconds: list[float] = field(default_factory=list)
    class_seconds: float = 0.0
    correct: int = 0


class Contestant:
    """A method at its seeded start; contestants of one data set see the same images in the same order."""

    def __init__(
        self, config: RunConfig, contest: Contest, models: Models, mode: ModeName, workers: int, ways: Acceleration
    ) -> None:
        self.config, self.contest, self.mode, self.workers = config, contest, mode, workers
        self.ways = ways_of(mode, ways)
        self.method = make_method(config, models[mode], contest.space)
        self.device = self.method.clip.device
        self.trains = config.recipe.epochs > 0
        self.meter = Meter(self.device, 0, ("data", *MODEL))
        self.rounds: list[Round] = []
        self.last_loss: float | None = None
        self.train_start: Start | None = None
        self.eval_start: Start | None = None
        self.evaluation = Evaluation(self.method, config, mode, self.ways)
        self._step = 0
        if self.trains:
            self.training = Training(self.method, config, mode, self.ways, self.meter)
            self.stream = self._stream()
            self._arrivals = AsyncLosses(self.device)
            self._batches = self.meter.each("data", self._epochs())

    @property
    def name(self) -> str:
        return f"{self.config.method} {self.mode} {self.config.precision}"

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        return self.config.recipe.epochs * self.stream.steps_per_epoch if self.trains else 0

    @property
    def steps_done(self) -> int:
        return self._step

    def start_training(self, images: Tensor, labels: Tensor) -> Start:
        """Get ready for batches like this one, which is on the device."""
        self.train_start = self.training.start(self.training.batch(images, labels, 0))
        return self.train_start

    def train_round(self, steps: int) -> None:
        """The next `steps` steps of the training, fewer at its end."""
        before = {name: self.meter.phases[name] for name in MODEL}
        done, losses = self._step, []
        with stretch(self.device, energy=True) as timed:
            for images, labels in islice(self._batches, min(steps, self.steps - done)):
                self._arrivals.send(self.training(self.training.batch(images, labels, self._step)))
                self.meter.step(len(images))
                self._step += 1
                losses += [terms[-1] for terms in self._arrivals.take()]
            losses += [terms[-1] for terms in self._arrivals.take(everything=True)]
        self.meter.settle()
        self.last_loss = losses[-1] if losses else self.last_loss
        model = sum(self.meter.phases[name] - before[name] for name in MODEL)
        self.rounds.append(Round(self._step - done, timed.seconds, model, timed.joules))

    def start_evaluation(self, images: Tensor, rest: int) -> Start:
        """Get ready for batches like `images`, which are on the device, and a last one of `rest`; training is over."""
        self.eval_start = self.evaluation.start(images, rest)
        return self.eval_start

    def evaluate_pass(self, passes: Passes) -> None:
        """All test images once, from packed bytes to predictions; class features are part of it."""
        clip, test = self.method.clip, self.contest.test.images
        transform = eval_transform(clip.geometry.image_size, clip.image_mean, clip.image_std)
        batch, right = self.config.recipe.test_batch_size, []
        with stretch(self.device) as whole:
            with stretch(self.device) as classes:
                self.evaluation.renew()
            for images, labels, _ in self._moved(
                evaluation_batches(test, transform, batch, self.workers, passes.images)
            ):
                right.append((self.evaluation(images).argmax(dim=1) == labels).sum())
        passes.seconds.append(whole.seconds)
        passes.class_seconds = classes.seconds
        passes.correct = int(torch.stack(right).sum())

    def expected_seconds(self) -> float:
        """Of one training step, from the last round; with images as they will come, not as they came first."""
        last = self.rounds[-1]
        again = self.contest.augment + (self.contest.decode if self.mode == "reference" else 0.0)
        return last.model_seconds / last.steps + self.config.recipe.batch_size * again / max(1, self.workers)

    def step_seconds(self) -> Spread | None:
        """Forward, backward and optimizer of one step, over the rounds."""
        return Spread.of([r.model_seconds / r.steps for r in self.rounds if r.steps])

    def train_seconds(self) -> float | None:
        """Wall seconds of the whole training; what was not run is taken at the median of the rounds that were."""
        per_step = Spread.of([r.seconds / r.steps for r in self.rounds if r.steps])
        if per_step is None:
            return None
        return sum(r.seconds for r in self.rounds) + (self.steps - self._step) * per_step.median

    def release(self) -> None:
        """End the stream of images, and its threads."""
        if self.trains:
            self._batches.close()  # type: ignore[attr-defined]

    def _stream(self) -> TrainStream:
        split, batch = self.contest.fewshot.train, self.config.recipe.batch_size
        augment = train_augment(self.config.recipe, self.method.clip)
        if self.mode == "fast":
            return train_stream(split, self.config, augment, self.workers, self.device, self.ways)
        # Public code reads and decodes every image again in every epoch.
        return TrainStream(split, batch, augment, self.config.seed, self.workers, cache_bytes=0)

    def _epochs(self) -> Iterator[tuple[Tensor, ...]]:
        for epoch in range(self.config.recipe.epochs):
            self.training.engine.set_rate(learning_rate(self.config.recipe, epoch))
            batches = self.stream.epoch(epoch)
            yield from batches if isinstance(self.stream, DeviceTrainStream) else self._moved(batches)

    def _moved(self, batches: Iterator[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
        """To the device, in fast mode beside the work on the batch before."""
        if self.mode == "fast":
            yield from to_device(batches, self.device)
        else:
            for batch in batches:
                yield tuple(tensor.to(self.device, non_blocking=True) for tensor in batch)
