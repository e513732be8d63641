"""Train and evaluate one case of the runtime benchmark: a method in a mode at a precision, in measured rounds.

Shapes: B images, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from benchmarks.results.runtime import METHOD_TITLES
from benchmarks.runtime.data import CaseData
from benchmarks.runtime.measure import Spread, timed
from benchmarks.runtime.settings import Settings
from benchmarks.runtime.workload import Evaluation, Models, ModeName, Start, Training, accelerations_of
from procap.recipe import learning_rate
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
    """Passes over the test images: seconds of each, of the class features, and the correct answers of one."""

    images: int
    seconds: list[float] = field(default_factory=list)
    class_seconds: float = 0.0
    correct: int = 0


class Case:
    """A method at its seeded start; all cases of one data set use the same images in the same order."""

    def __init__(self, config: RunConfig, data: CaseData, models: Models, mode: ModeName, settings: Settings) -> None:
        self.config, self.data, self.mode, self.workers = config, data, mode, settings.workers
        self.accelerations = accelerations_of(mode, settings.accelerations)
        self.method = make_method(config, models[mode], data.space)
        self.device = self.method.clip.device
        self.trains = config.recipe.epochs > 0
        self.meter = Meter(self.device, 0, ("data", *MODEL))
        self.rounds: list[Round] = []
        self.last_loss: float | None = None
        self.train_start: Start | None = None
        self.eval_start: Start | None = None
        self.evaluation = Evaluation(self.method, config, mode, self.accelerations)
        self.steps = self.steps_done = 0
        if self.trains:
            self.training = Training(self.method, config, mode, self.accelerations, self.meter)
            self.stream = self._stream()
            self.steps = config.recipe.epochs * self.stream.steps_per_epoch
            self._losses = AsyncLosses(self.device)
            self._batches = self.meter.each("data", self._epochs())

    @property
    def name(self) -> str:
        return f"{self.config.method} {self.mode} {self.config.precision}"

    def start_training(self, images: Tensor, labels: Tensor) -> Start:
        """Prepare the training for batches like `images` and `labels`, which are on the device."""
        self.train_start = self.training.start(self.training.batch(images, labels, 0))
        return self.train_start

    def train_round(self, steps: int) -> None:
        """Take the next `steps` training steps, or fewer at the end of the training."""
        before = {name: self.meter.phases[name] for name in MODEL}
        done, losses = self.steps_done, []
        with timed(self.device, energy=True) as timing:
            for images, labels in islice(self._batches, min(steps, self.steps - done)):
                self._losses.send(self.training(self.training.batch(images, labels, self.steps_done)))
                self.meter.step(len(images))
                self.steps_done += 1
                losses += [terms[-1] for terms in self._losses.take()]
            losses += [terms[-1] for terms in self._losses.take(everything=True)]
        self.meter.settle()
        self.last_loss = losses[-1] if losses else self.last_loss
        model = sum(self.meter.phases[name] - before[name] for name in MODEL)
        self.rounds.append(Round(self.steps_done - done, timing.seconds, model, timing.joules))

    def start_evaluation(self, images: Tensor, rest: int) -> Start:
        """Prepare batches like `images`, which are on the device, and a last one of `rest`; training is over."""
        self.eval_start = self.evaluation.start(images, rest)
        return self.eval_start

    def evaluate_pass(self, passes: Passes) -> None:
        """Classify all test images once, from packed bytes to predictions, class features included."""
        clip, correct = self.method.clip, []
        transform = eval_transform(clip.geometry.image_size, clip.image_mean, clip.image_std)
        batch = self.config.recipe.test_batch_size
        with timed(self.device) as whole:
            with timed(self.device) as classes:
                self.evaluation.renew()
            batches = evaluation_batches(self.data.test.images, transform, batch, self.workers, passes.images)
            for images, labels, _ in self._moved(batches):
                correct.append((self.evaluation(images).argmax(dim=1) == labels).sum())
        passes.seconds.append(whole.seconds)
        passes.class_seconds = classes.seconds
        passes.correct = int(torch.stack(correct).sum())

    def expected_step_seconds(self) -> float:
        """Return the wall seconds of one training step in the last round."""
        return self.rounds[-1].seconds / self.rounds[-1].steps

    def step_seconds(self) -> Spread | None:
        """Return the seconds of forward, backward and optimizer of one step, over the rounds."""
        seconds = [one.model_seconds / one.steps for one in self.rounds if one.steps]
        return Spread.of(seconds) if seconds else None

    def train_seconds(self) -> float | None:
        """Return the wall seconds of the whole training; steps that were not run count as the median step."""
        seconds = [one.seconds / one.steps for one in self.rounds if one.steps]
        if not seconds:
            return None
        return sum(one.seconds for one in self.rounds) + (self.steps - self.steps_done) * Spread.of(seconds).median

    def release(self) -> None:
        """Stop the stream of images and its threads."""
        if self.trains:
            self._batches.close()  # type: ignore[attr-defined]

    def row(
        self, settings: Settings, passes: Passes, encoder: Sequence[float], peak: float, load_seconds: float
    ) -> dict[str, Any]:
        """Return all measurements as plain JSON, with null for unknown ones.

        encoder: seconds of one test batch already on the device. peak: operations per second of matrix products.
        """
        step, encoded, end_to_end = self.step_seconds(), Spread.of(encoder), Spread.of(passes.seconds)
        train, evaluation = self.train_start, self.eval_start
        assert evaluation is not None
        batch = min(settings.test_batch, len(self.data.test.images))
        rates = {
            "train": None if step is None or train is None else train.flops / step.median,
            "eval": evaluation.flops / encoded.median,
        }
        finished = self.steps_done == self.steps
        why = self._accuracy_note(settings, finished)
        measured = [one for one in self.rounds if one.joules is not None]
        joules = sum(one.joules or 0.0 for one in measured)
        return {
            "dataset": self.data.name,
            "method": self.config.method,
            "title": METHOD_TITLES.get(self.config.method, self.config.method),
            "mode": self.mode,
            "precision": self.config.precision,
            "accelerations": asdict(self.accelerations),
            "recorded": {
                "train": self.training.recorded if self.trains else None,
                "eval": self.evaluation.recorded,
            },
            "options": self.config.options,
            "classes": len(self.data.fewshot.classnames),
            "train_images": len(self.data.fewshot.train),
            "batch": settings.batch,
            "test_batch": batch,
            "epochs": self.config.recipe.epochs,
            "steps": self.steps,
            "steps_measured": self.steps_done,
            "extrapolated": not finished,
            "train_seconds": self.train_seconds(),
            "step_seconds": step and asdict(step),
            "encoder_fps": asdict(encoded.rate(batch)),
            "end_to_end_fps": asdict(end_to_end.rate(passes.images)),
            "test_images": passes.images,
            "test_images_all": len(self.data.test.images),
            "correct": passes.correct,
            "accuracy": None if why else 100 * passes.correct / passes.images,
            "accuracy_note": why,
            "first_loss": train and train.loss,
            "last_loss": self.last_loss,
            "start_seconds": {"train": train and train.seconds, "eval": evaluation.seconds},
            "peak_bytes": {"train": train and train.peak, "eval": evaluation.peak},
            "flops": {"step": train and train.flops, "image": evaluation.flops / batch},
            "flops_per_second": rates,
            "share_of_peak": {kind: rate and rate / peak for kind, rate in rates.items()},
            "joules_per_image": joules / sum(one.steps for one in measured) / settings.batch if measured else None,
            "phases": {
                "load": load_seconds + self.data.load_seconds,
                "start": (train.seconds if train else 0.0) + evaluation.seconds,
                **{name: self.meter.phases[name] for name in ("data", *MODEL)},
                "evaluation": end_to_end.median,
                "evaluation_classes": passes.class_seconds,
            },
        }

    def _accuracy_note(self, settings: Settings, finished: bool) -> str | None:
        """Explain why an accuracy would mislead, None if it does not."""
        if settings.pretrained == "random":
            return "the weights are random"
        if self.data.synthetic:
            return "the images show nothing"
        return None if finished else "not trained to the end"

    def _stream(self) -> TrainStream:
        split, batch = self.data.fewshot.train, self.config.recipe.batch_size
        augment = train_augment(self.config.recipe, self.method.clip)
        if self.mode == "fast":
            return train_stream(split, self.config, augment, self.workers, self.device, self.accelerations)
        # Public code reads and decodes every image again in every epoch.
        return TrainStream(split, batch, augment, self.config.seed, self.workers, cache_bytes=0)

    def _epochs(self) -> Iterator[tuple[Tensor, ...]]:
        for epoch in range(self.config.recipe.epochs):
            self.training.engine.set_rate(learning_rate(self.config.recipe, epoch))
            batches = self.stream.epoch(epoch)
            yield from batches if isinstance(self.stream, DeviceTrainStream) else self._moved(batches)

    def _moved(self, batches: Iterator[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
        """Move batches to the device; fast mode does so while the previous batch is computed."""
        if self.mode == "fast":
            yield from to_device(batches, self.device)
        else:
            for batch in batches:
                yield tuple(tensor.to(self.device, non_blocking=True) for tensor in batch)
