"""Train and evaluate the cases of the runtime benchmark: methods in a mode at a precision.

The cases of a data set take turns, round by round, until they are done or the time is used up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from benchmarks.console.output import note
from benchmarks.experiment.titles import title_method
from benchmarks.results.runtime import METHOD_TITLES
from benchmarks.runtime.data import CaseData
from benchmarks.runtime.measure import REPEATS, Summary, time_in_turns, timed
from benchmarks.runtime.settings import Settings, list_cases
from benchmarks.runtime.workload import MODES, Evaluation, Models, ModeName, Training
from runner.config import RunConfig
from runner.meters import Meter
from runner.schedule import Schedule
from runner.setup import clip_transform, make_method, train_augment, train_stream
from runner.step import AsyncLosses
from shards.device.stream import DeviceTrainStream
from shards.loader import TrainStream, evaluation_batches
from shards.transfer import to_device

MODEL = ("forward", "backward", "optimizer")
MIN_ROUNDS = 3
SAFE_SHARE = 0.9
"""Share of the remaining seconds to plan for, as the cost of a step is only known from the first rounds."""


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


@dataclass(frozen=True)
class TimeBudget:
    """A limit of `seconds`; None: no limit."""

    seconds: float | None
    began: float = field(default_factory=time.perf_counter)

    def left(self, share: float = 1.0) -> float | None:
        """Return the seconds until `share` of them is used up."""
        return None if self.seconds is None else max(0.0, share * self.seconds - (time.perf_counter() - self.began))


def run_cases(
    data: CaseData,
    settings: Settings,
    models: Models,
    peaks: dict[str, float],
    load_seconds: float,
    budget: TimeBudget,
    ends: tuple[float, float],
) -> list[dict[str, Any]]:
    """Train and evaluate all cases of a data set; returns rows. ends: shares of the budget for both parts."""
    cases = [
        Case(name, config, data, models, mode, settings)
        for precision in settings.precisions
        for name, config in list_cases(precision, settings, dataset=data.name, data=data.root, classes=data.classes)
        for mode in MODES
    ]
    _train([case for case in cases if case.trains], settings, budget, ends[0])
    encoder = _evaluate(cases, settings, budget, ends[1])
    return [
        case.row(seconds, peaks[case.config.precision], load_seconds)
        for case, seconds in zip(cases, encoder, strict=True)
    ]


def _train(cases: Sequence[Case], settings: Settings, budget: TimeBudget, end: float) -> None:
    """Run training rounds in turns, until all steps are done or as many of each training as the time allows."""
    if not cases:
        return
    images, labels = (tensor.to(cases[0].device) for tensor in _first_batch(cases[0]))
    for case in cases:
        assert case.training is not None
        case.training.prepare(images, labels)
    # Take one step of each training to measure its cost; every row then has a number even if time runs out.
    for case in cases:
        case.train_round(1)
    left = budget.left(end)
    goal = total = cases[0].steps
    if left is not None:
        goal = max(1, min(goal, int(SAFE_SHARE * left / sum(case.rounds[-1].seconds for case in cases))))
    rounds = max(MIN_ROUNDS, -(-goal // cases[0].stream.steps_per_epoch))
    for number in range(rounds):
        done = -(-goal * (number + 1) // rounds)
        for position in range(len(cases)):
            case = cases[(position + number) % len(cases)]
            case.train_round(max(0, done - case.steps_done))
        note(f"  {cases[0].data.name}: {done} of {total} steps of {len(cases)} trainings")
        if budget.left(end) == 0.0:
            break
    for case in cases:
        case.release()


def _first_batch(case: Case) -> tuple[Tensor, Tensor]:
    recipe = case.config.recipe
    # Use a separate stream, so that no case has decoded images before it is timed.
    augment = train_augment(recipe, case.method.clip, case.method.views)
    stream = TrainStream(case.data.fewshot.train, recipe.batch_size, augment, case.config.seed)
    with closing(stream.epoch(0)) as batches:
        return next(batches)


def _evaluate(cases: Sequence[Case], settings: Settings, budget: TimeBudget, end: float) -> list[list[float]]:
    """Run passes over the test images, and repeated batches of the encoder alone, both in turns."""
    device, test = cases[0].device, cases[0].data.test.images
    batch = min(settings.test_batch, len(test))
    clip = cases[0].method.clip
    transform = clip_transform(clip)
    images = next(evaluation_batches(test, transform, batch, limit=batch))[0].to(device)
    repeats, rounds, once = REPEATS[device.type], settings.repeats, 0.0
    for case in cases:
        once += case.evaluation.prepare(images, len(test) % batch).once
    if (left := budget.left(end)) is not None:
        rounds = max(1, min(rounds, int(left / 3 / max(once * repeats, 1e-9))))
    work: list[Callable[[], object]] = [partial(case.evaluation, images) for case in cases]
    encoder = time_in_turns(work, rounds, device, repeats)
    # If time is short, make the passes over fewer images.
    per_image, wanted = sum(min(seconds) for seconds in encoder) / batch, len(test)
    if (left := budget.left(end)) is not None and left < per_image * wanted:
        wanted = min(wanted, max(batch, int(left / per_image) // batch * batch))
    for number in range(settings.repeats):
        for position in range(len(cases)):
            cases[(position + number) % len(cases)].evaluate_pass(wanted)
        if budget.left(end) == 0.0:
            break
    return encoder
