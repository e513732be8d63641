"""Train and evaluate the cases of the runtime benchmark: methods in a mode at a precision."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.console.output import note
from benchmarks.console.packing_progress import pack_missing_with_progress
from benchmarks.experiment.titles import title_method
from benchmarks.runtime.measure import REPEATS, rotate, summarize, time_interleaved, timed
from benchmarks.runtime.settings import SEED, Settings, run_config
from benchmarks.runtime.workload import MODES, Evaluation, Models, ModeName, Training
from procap.text import LabelSpace
from runner.config import RunConfig
from runner.meters import Meter
from runner.setup import build_initial_method, label_space, make_eval_transform, train_augment, train_loader
from runner.step_schedule import StepSchedule
from shards.image_selection import TargetImages, TrainingSelection, select_target_images, select_training_images
from shards.loader import LoaderOptions, TrainLoader, evaluation_batches
from shards.reader import open_dataset
from shards.resolve import resolve_dataset
from shards.transfer import to_device

MODEL = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class CaseData:
    """One data set of all cases, in the folder `root`."""

    name: str
    root: Path
    selection: TrainingSelection
    test: TargetImages
    space: LabelSpace


def load_case_data(name: str, root: Path, settings: Settings) -> CaseData:
    """Open the data set `name` in `root`, packed if needed, and draw few-shot samples."""
    name = resolve_dataset(name, root).name
    pack_missing_with_progress([name], root)
    dataset = open_dataset(root, name)
    selection = select_training_images(dataset, settings.shots, SEED, settings.classes)
    space = label_space(dataset.manifest, selection.classnames)
    return CaseData(name, root, selection, select_target_images(dataset, settings.classes), space)


class Case:
    """A method at its seeded start; all cases of one data set use the same images in the same order."""

    def __init__(self, config: RunConfig, data: CaseData, models: Models, mode: ModeName, settings: Settings) -> None:
        self.config, self.data, self.mode, self.settings = config, data, mode, settings
        self.method = build_initial_method(config, models[mode], data.space)
        self.device = self.method.clip.device
        self.trains = config.recipe.epochs > 0
        # No warm-up steps are left out: `prepare` has done them.
        self.meter = Meter(self.device, 0, MODEL)
        self.train_seconds, self.step_seconds, self.pass_seconds = list[float](), list[float](), list[float]()
        self.last_loss: float | None = None
        self.correct = self.total_steps = self.steps_done = 0
        self.evaluation = Evaluation(self.method, config, mode, settings.accelerations)
        self.training: Training | None = None
        if self.trains:
            self.method.prepare_training()
            self.training = Training(self.method, config, mode, settings.accelerations, self.meter)
            images, recipe, clip = data.selection.train, config.recipe, self.method.clip
            if mode == "fast":
                self.loader = train_loader(images, config, clip, settings.workers)
            else:
                # Public code reads and decodes every image again in every epoch.
                augment = train_augment(recipe, clip, self.method.views)
                options = LoaderOptions(settings.workers, cache_bytes=0)
                self.loader = TrainLoader(images, recipe.batch_size, augment, config.seed, options)
            self.method.training_images = self.loader
            self.step_schedule = StepSchedule(config.recipe, self.loader, self.method)
            self.total_steps = self.step_schedule.total
            self._batches = self._epochs(self.training)

    def train_round(self, steps: int) -> None:
        """Take the next `steps` training steps, or fewer at the end of the training."""
        assert self.training is not None
        before = sum(self.meter.phases[name] for name in MODEL)
        done, outcome = self.steps_done, None
        with timed(self.device) as timing:
            for images, labels in islice(self._batches, min(steps, self.total_steps - done)):
                outcome = self.training(self.training.batch(images, labels, self.steps_done))
                self.meter.step(len(images))
                self.steps_done += 1
        self.meter.settle()
        if outcome is not None:
            # The last two numbers of a step are its loss and whether it was skipped.
            self.last_loss = outcome[-2].item()
            self.train_seconds.append(timing.seconds)
            model = sum(self.meter.phases[name] for name in MODEL) - before
            self.step_seconds.append(model / (self.steps_done - done))
        if self.steps_done == self.total_steps:
            # Ends the threads that decode images.
            self._batches.close()

    def evaluate_pass(self) -> None:
        """Classify all test images, from packed bytes to predictions, class features included."""
        correct, batch = [], self.config.recipe.test_batch_size
        transform = make_eval_transform(self.method.clip)
        with timed(self.device) as timing:
            # Class features belong to a pass: the text tower is a large part of it for many classes.
            self.evaluation.update_classifier()
            batches = evaluation_batches(self.data.test.images, transform, batch, self.settings.workers)
            for pixels, labels, _ in self._moved(batches):
                # Stays on the device, so that no batch waits for the previous one.
                correct.append((self.evaluation(pixels).argmax(dim=1) == labels).sum())
        self.pass_seconds.append(timing.seconds)
        self.correct = int(torch.stack(correct).sum())

    def row(self, encoder: Sequence[float]) -> dict[str, Any]:
        """Return all measurements as plain JSON, with null for unknown ones. encoder: seconds of a batch."""
        train = self.training.preparation if self.training else None
        evaluation, images = self.evaluation.preparation, len(self.data.test.images)
        assert evaluation is not None
        batch, why = min(self.settings.test_batch, images), None
        # An accuracy that would mislead is left out.
        if self.settings.pretrained == "random":
            why = "the weights are random"
        elif self.trains and len(self.step_schedule.stage_starts) > 1:
            why = "only the first stage is trained"
        return {
            "dataset": self.data.name,
            "method": self.config.method,
            "title": "MaPLe-style" if self.config.method == "maple" else title_method(self.config.method),
            "mode": self.mode,
            "precision": self.config.precision,
            "classes": len(self.data.selection.classnames),
            "steps": self.total_steps,
            # The sum over epochs; `step_seconds` is over the means of the epochs, without the time that images take.
            "train_seconds": sum(self.train_seconds) if self.trains else None,
            "step_seconds": summarize(self.step_seconds) if self.trains else None,
            "encoder_fps": summarize([batch / seconds for seconds in encoder]),
            "end_to_end_fps": summarize([images / seconds for seconds in self.pass_seconds]),
            "test_images": images,
            "correct": self.correct,
            "accuracy": None if why else 100 * self.correct / images,
            "accuracy_note": why,
            "last_loss": self.last_loss,
            "start_seconds": {"train": train and train.seconds, "eval": evaluation.seconds},
            "peak_bytes": {"train": train and train.peak, "eval": evaluation.peak},
            "flops": {"step": train and train.flops, "image": evaluation.flops / batch},
        }

    def _epochs(self, training: Training) -> Generator[tuple[Tensor, ...], None, None]:
        for epoch in range(self.config.recipe.epochs):
            training.engine.set_rates(self.step_schedule.rates(self.step_schedule.first_step(epoch), epoch))
            yield from self._moved(self.step_schedule.batches(epoch))

    def _moved(self, batches: Iterator[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
        """Move batches to the device; fast mode does so while the previous batch is computed."""
        if self.mode == "fast":
            yield from to_device(batches, self.device)
        else:
            for batch in batches:
                yield tuple(tensor.to(self.device, non_blocking=True) for tensor in batch)


def run_cases(data: CaseData, settings: Settings, models: Models) -> list[dict[str, Any]]:
    """Train and evaluate every method of a data set in both modes at every precision; returns rows."""
    cases = []
    for precision, method, mode in product(settings.precisions, settings.methods, MODES):
        config = run_config(method, precision, settings, dataset=data.name, data=data.root)
        cases.append(Case(config, data, models, mode, settings))
    # All cases are in memory at once: training and then evaluation alternate between them.
    _train([case for case in cases if case.trains])
    encoder = _evaluate(cases, settings)
    return [case.row(seconds) for case, seconds in zip(cases, encoder, strict=True)]


def _train(cases: Sequence[Case]) -> None:
    if not cases:
        return
    first, recipe = cases[0], cases[0].config.recipe
    for case in cases:
        assert case.training is not None
        # A separate loader, so that no case has decoded images before it is timed.
        augment = train_augment(recipe, case.method.clip, case.method.views)
        loader = TrainLoader(case.data.selection.train, recipe.batch_size, augment, case.config.seed)
        with closing(loader.batches(0)) as batches:
            images, labels = (tensor.to(case.device) for tensor in next(batches))
        case.training.prepare(images, labels)
    for number, case in enumerate(rotate(cases, recipe.epochs), 1):
        case.train_round(first.loader.steps_per_pass)
        if number % len(cases) == 0:
            note(f"  {first.data.name}: epoch {number // len(cases)} of {len(cases)} trainings")


def _evaluate(cases: Sequence[Case], settings: Settings) -> list[list[float]]:
    """Run repeated batches of the encoder alone, then passes over the test images, each alternately."""
    device, test = cases[0].device, cases[0].data.test.images
    batch = min(settings.test_batch, len(test))
    transform = make_eval_transform(cases[0].method.clip)
    # One batch for all cases, on the device: this measures towers and not the reading of images.
    images = next(evaluation_batches(test.subset(range(batch)), transform, batch))[0].to(device)
    # The last batch of a pass may be smaller and is warmed up too.
    for case in cases:
        case.evaluation.prepare(images, len(test) % batch)
    work: list[Callable[[], object]] = [partial(case.evaluation, images) for case in cases]
    encoder = time_interleaved(work, settings.repeats, device, REPEATS[device.type])
    for case in rotate(cases, settings.repeats):
        case.evaluate_pass()
    return encoder
