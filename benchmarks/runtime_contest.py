"""One contestant of the runtime benchmark: a method in a mode at a precision, trained and evaluated in measured rounds.

Shapes: B images, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from benchmarks.flops import evaluation, training_step
from benchmarks.runtime_data import Contest
from benchmarks.runtime_measure import Spread, peak_bytes, stretch
from benchmarks.runtime_modes import Classify, ModeName, classifier_of, optimizer_of, towers
from procap.clip import CLIP
from procap.recipe import learning_rate
from runner.assemble import autocast, make_method, train_augment
from runner.config import RunConfig
from runner.meters import Meter
from shards.stream import CACHE_BYTES, TrainStream, evaluation_batches
from shards.streams import generator
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

    def __init__(self, config: RunConfig, contest: Contest, clip: CLIP, mode: ModeName, workers: int) -> None:
        self.config, self.contest, self.mode, self.workers = config, contest, mode, workers
        self.device = clip.device
        self.method = make_method(config, towers(clip, mode), contest.space)
        self.trains = config.recipe.epochs > 0
        self.meter = Meter(self.device, 0, ("data", *MODEL))
        self.rounds: list[Round] = []
        self.first_loss: float | None = None
        self.train_peak: int | None = None
        self.eval_peak: int | None = None
        self.warmup_seconds = self.startup_seconds = 0.0
        self._step = 0
        if self.trains:
            self.optimizer = optimizer_of(self.method, config.recipe, mode)
            augment = train_augment(config.recipe, clip)
            # Public code reads and decodes every image again in every epoch.
            cache = 0 if mode == "reference" else CACHE_BYTES
            split, batch = contest.fewshot.train, config.recipe.batch_size
            self.stream = TrainStream(split, batch, augment, config.seed, workers, cache_bytes=cache)
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

    def warm_up(self, images: Tensor, labels: Tensor, times: int) -> None:
        """Forward and backward passes that leave the weights as they are; memory and time are those of the last one."""
        if not self.trains:
            return
        for _ in range(times - 1):
            self.first_loss = self._gradients(images, labels)

        def last() -> None:
            self.first_loss = self._gradients(images, labels)

        with stretch(self.device) as timed:
            self.train_peak = peak_bytes(last, self.device)
        self.warmup_seconds = timed.seconds

    def train_round(self, steps: int) -> None:
        """The next `steps` steps of the training, fewer at its end."""
        before = {name: self.meter.phases[name] for name in MODEL}
        done = self._step
        with stretch(self.device, energy=True) as timed:
            for images, labels in islice(self._batches, min(steps, self.steps - done)):
                self._train_step(images, labels)
        self.meter.settle()
        model = sum(self.meter.phases[name] - before[name] for name in MODEL)
        self.rounds.append(Round(self._step - done, timed.seconds, model, timed.joules))

    def classifier(self) -> Classify:
        """Images to logits under the present weights, in the way of the mode and at its precision."""
        with autocast(self.config, self.device):
            classify = classifier_of(self.method, self.mode)

        def classified(images: Tensor) -> Tensor:
            with autocast(self.config, self.device):
                return classify(images)

        return classified

    def evaluate_pass(self, passes: Passes) -> None:
        """All test images once, from packed bytes to predictions; class features are part of it."""
        clip, test = self.method.clip, self.contest.test.images
        transform = eval_transform(clip.geometry.image_size, clip.image_mean, clip.image_std)
        batch, right = self.config.recipe.test_batch_size, []
        with stretch(self.device) as whole:
            with stretch(self.device) as classes:
                classify = self.classifier()
            for images, labels, _ in evaluation_batches(test, transform, batch, self.workers, passes.images):
                logits = classify(images.to(self.device, non_blocking=True))
                right.append((logits.argmax(dim=1) == labels.to(self.device, non_blocking=True)).sum())
        passes.seconds.append(whole.seconds)
        passes.class_seconds = classes.seconds
        passes.correct = int(torch.stack(right).sum())

    def training_flops(self) -> float:
        """Counted operations of one step."""
        return training_step(self.method, self.config.recipe.batch_size).total

    def evaluation_flops(self, batch: int) -> float:
        """Counted operations of the logits of one batch."""
        return evaluation(self.method, batch, every_batch=self.mode == "reference").total

    def step_seconds(self) -> Spread | None:
        """Forward, backward and optimizer of one step, over the rounds."""
        return Spread.of([r.model_seconds / r.steps for r in self.rounds if r.steps])

    def train_seconds(self) -> float | None:
        """Wall seconds of the whole training; what was not run is taken at the median of the rounds that were."""
        if not self.rounds:
            return None
        per_step = Spread.of([r.seconds / r.steps for r in self.rounds if r.steps])
        assert per_step is not None
        return sum(r.seconds for r in self.rounds) + (self.steps - self._step) * per_step.median

    def release(self) -> None:
        """End the stream of images, and its threads."""
        if self.trains:
            self._batches.close()  # type: ignore[attr-defined]

    def _epochs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in range(self.config.recipe.epochs):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.config.recipe, epoch)
            yield from self.stream.epoch(epoch)

    def _train_step(self, images: Tensor, labels: Tensor) -> None:
        meter, recipe = self.meter, self.config.recipe
        with meter.phase("forward"), autocast(self.config, self.device):
            images, labels = (t.to(self.device, non_blocking=True) for t in (images, labels))
            loss = self._loss(images, labels)
        with meter.phase("backward"):
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
        with meter.phase("optimizer"):
            if recipe.grad_clip is not None:
                torch.nn.utils.clip_grad_norm_(self.method.parameters(), recipe.grad_clip)
            self.optimizer.step()
        meter.step(len(images))
        self._step += 1

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        drawn = self.method.draw(generator(self.config.seed, "noise", self._step))
        noise = tuple(t.to(self.device) for t in drawn)
        return torch.stack(list(self.method.loss(images, labels, noise).values())).sum()

    def _gradients(self, images: Tensor, labels: Tensor) -> float:
        with autocast(self.config, self.device):
            loss = self._loss(images, labels)
        loss.backward()
        self.method.zero_grad(set_to_none=True)
        return float(loss.detach())
