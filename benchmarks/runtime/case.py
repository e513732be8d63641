"""Train and evaluate one case of the runtime benchmark: a method in a mode at a precision, in measured rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from benchmarks.results.frame import title_method
from benchmarks.results.runtime import METHOD_TITLES
from benchmarks.runtime.data import CaseData
from benchmarks.runtime.measure import Summary, timed
from benchmarks.runtime.settings import Settings
from benchmarks.runtime.workload import Evaluation, Models, ModeName, Training
from runner.config import RunConfig
from runner.meters import Meter
from runner.schedule import Schedule
from runner.setup import clip_transform, make_method, train_augment, train_stream
from runner.step import AsyncLosses
from shards.device.stream import DeviceTrainStream
from shards.loader import TrainStream, evaluation_batches
from shards.transfer import to_device

MODEL = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Round:
    """Consecutive training steps: wall seconds, and those of the model."""

    steps: int
    seconds: float
    model_seconds: float


class Case:
    """A method at its seeded start; all cases of one data set use the same images in the same order."""

    def __init__(
        self, name: str, config: RunConfig, data: CaseData, models: Models, mode: ModeName, settings: Settings
    ) -> None:
        """name: that of the method, or of its variant, in the report."""
        self.name, self.config, self.data, self.mode, self.settings = name, config, data, mode, settings
        self.method = make_method(config, models[mode], data.space)
        self.device = self.method.clip.device
        self.trains = config.recipe.epochs > 0
        self.meter = Meter(self.device, 0, ("data", *MODEL))
        self.rounds: list[Round] = []
        self.pass_seconds: list[float] = []
        self.last_loss: float | None = None
        self.images = self.correct = self.steps = self.steps_done = 0
        self.evaluation = Evaluation(self.method, config, mode, settings.accelerations)
        self.training: Training | None = None
        if self.trains:
            self.training = Training(self.method, config, mode, settings.accelerations, self.meter)
            self.stream = self._stream()
            self.schedule = Schedule(config.recipe, self.stream, self.method)
            self.steps = self.schedule.steps
            self._losses = AsyncLosses(self.device)
            self._batches = self.meter.iterate("data", self._epochs(self.training))

    def train_round(self, steps: int) -> None:
        """Take the next `steps` training steps, or fewer at the end of the training."""
        assert self.training is not None
        before = {name: self.meter.phases[name] for name in MODEL}
        done, losses = self.steps_done, []
        with timed(self.device) as timing:
            for images, labels in islice(self._batches, min(steps, self.steps - done)):
                # The last two numbers of a step are its loss and whether it was skipped.
                self._losses.send(self.training(self.training.batch(images, labels, self.steps_done)))
                self.meter.step(len(images))
                self.steps_done += 1
                losses += [terms[-2] for terms in self._losses.take()]
            losses += [terms[-2] for terms in self._losses.take(everything=True)]
        self.meter.settle()
        self.last_loss = losses[-1] if losses else self.last_loss
        model = sum(self.meter.phases[name] - before[name] for name in MODEL)
        if self.steps_done > done:
            self.rounds.append(Round(self.steps_done - done, timing.seconds, model))

    def evaluate_pass(self, images: int) -> None:
        """Classify the first `images` test images, from packed bytes to predictions, class features included."""
        clip, correct = self.method.clip, []
        transform = clip_transform(clip)
        batch = self.config.recipe.test_batch_size
        with timed(self.device) as timing:
            self.evaluation.update_classifier()
            batches = evaluation_batches(self.data.test.images, transform, batch, self.settings.workers, images)
            for pixels, labels, _ in self._moved(batches):
                correct.append((self.evaluation(pixels).argmax(dim=1) == labels).sum())
        self.pass_seconds.append(timing.seconds)
        self.images, self.correct = images, int(torch.stack(correct).sum())

    def train_seconds(self) -> float | None:
        """Return the wall seconds of the whole training; steps that were not run count as the median step."""
        if not self.rounds:
            return None
        step = Summary.of([one.seconds / one.steps for one in self.rounds]).median
        return sum(one.seconds for one in self.rounds) + (self.steps - self.steps_done) * step

    def release(self) -> None:
        """Stop the stream of images and its threads."""
        if self.trains:
            self._batches.close()  # type: ignore[attr-defined]

    def row(self, encoder: Sequence[float], peak: float, load_seconds: float) -> dict[str, Any]:
        """Return all measurements as plain JSON, with null for unknown ones."""
        train = self.training.preparation if self.training else None
        evaluation = self.evaluation.preparation
        assert evaluation is not None
        step = Summary.of([one.model_seconds / one.steps for one in self.rounds]) if self.rounds else None
        encoded, end_to_end = Summary.of(encoder), Summary.of(self.pass_seconds)
        batch = min(self.settings.test_batch, len(self.data.test.images))
        rates = {
            "train": None if step is None or train is None else train.flops / step.median,
            "eval": evaluation.flops / encoded.median,
        }
        why = self._accuracy_note()
        return {
            "dataset": self.data.name,
            "method": self.name,
            "title": METHOD_TITLES.get(self.name) or title_method(self.name),
            "mode": self.mode,
            "precision": self.config.precision,
            "classes": len(self.data.fewshot.classnames),
            "class_choice": self.data.classes,
            "train_images": len(self.data.fewshot.train),
            "batch": self.settings.batch,
            "test_batch": batch,
            "epochs": self.config.recipe.epochs,
            "steps": self.steps,
            "steps_measured": self.steps_done,
            "extrapolated": self.steps_done < self.steps,
            "train_seconds": self.train_seconds(),
            "step_seconds": step and asdict(step),
            "encoder_fps": asdict(encoded.rate(batch)),
            "end_to_end_fps": asdict(end_to_end.rate(self.images)),
            "test_images": self.images,
            "test_images_all": len(self.data.test.images),
            "correct": self.correct,
            "accuracy": None if why else 100 * self.correct / self.images,
            "accuracy_note": why,
            "first_loss": train and train.loss,
            "last_loss": self.last_loss,
            "start_seconds": {"train": train and train.seconds, "eval": evaluation.seconds},
            "peak_bytes": {"train": train and train.peak, "eval": evaluation.peak},
            "flops": {"step": train and train.flops, "image": evaluation.flops / batch},
            "flops_per_second": rates,
            "share_of_peak": {kind: rate and rate / peak for kind, rate in rates.items()},
            "phases": {
                "load": load_seconds + self.data.load_seconds,
                "start": (train.seconds if train else 0.0) + evaluation.seconds,
                **{name: self.meter.phases[name] for name in ("data", *MODEL)},
                "evaluation": end_to_end.median,
            },
        }

    def _accuracy_note(self) -> str | None:
        """Explain why an accuracy would mislead, None if it does not."""
        if self.settings.pretrained == "random":
            return "the weights are random"
        if self.data.synthetic:
            return "the images show nothing"
        if self.trains and len(self.schedule.stage_starts) > 1:
            return "only the first stage is trained"
        return None if self.steps_done == self.steps else "not trained to the end"

    def _stream(self) -> TrainStream:
        split, recipe, workers = self.data.fewshot.train, self.config.recipe, self.settings.workers
        augment = train_augment(recipe, self.method.clip, self.method.views)
        if self.mode == "fast":
            return train_stream(split, self.config, augment, workers, self.device, self.settings.accelerations)
        # Public code reads and decodes every image again in every epoch.
        return TrainStream(split, recipe.batch_size, augment, self.config.seed, workers, cache_bytes=0)

    def _epochs(self, training: Training) -> Iterator[tuple[Tensor, ...]]:
        for epoch in range(self.config.recipe.epochs):
            training.engine.set_rate(*self.schedule.rates(self.schedule.first_step(epoch), epoch))
            batches = self.schedule.batches(epoch)
            yield from batches if isinstance(self.stream, DeviceTrainStream) else self._moved(batches)

    def _moved(self, batches: Iterator[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
        """Move batches to the device; fast mode does so while the previous batch is computed."""
        if self.mode == "fast":
            yield from to_device(batches, self.device)
        else:
            for batch in batches:
                yield tuple(tensor.to(self.device, non_blocking=True) for tensor in batch)
