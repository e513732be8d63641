"""Validate a run while it trains, without affecting the training: count correct images of val or train targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from procap.errors import UsageError
from procap.text import LabelSpace
from runner.config import Target
from runner.engine import autocast
from runner.inference import Inference, predict_images
from runner.results import EpochLog, ValidationCount, ValidationHistory, write_json
from runner.resumable_training import ResumableTraining
from runner.setup import label_space, make_test_transform
from runner.stop_signals import Interrupted, StopRequest
from shards.eval_views import AnyEvalTransform
from shards.reader import ImageList

SPLITS = ("val", "train")
"""Splits that may be validated: hyper-parameters chosen on test images would make the test accuracy too high."""


@dataclass(frozen=True)
class Callbacks:
    """Actions at the ends of epochs. All ranks of a group get one, with the same targets.

    targets: validated at the end of every epoch. Raises UsageError for a test split.
    on_epoch_end: called by rank 0 at the end of every epoch, when its counts are on disk; for the run's last epoch when
        the run has finished. An exception ends the training; a single process saves the state of that epoch before.
    """

    targets: tuple[Target, ...] = ()
    on_epoch_end: Callable[[EpochLog], None] | None = None

    def __post_init__(self) -> None:
        for target in self.targets:
            if target.split not in SPLITS:
                raise UsageError(f"{target} cannot be used for model selection: name its {' or '.join(SPLITS)} split")


class Validator:
    """Run the callbacks of one training; every rank of a group has a validator and calls each method."""

    def __init__(self, callbacks: Callbacks | None, training: ResumableTraining, stop: StopRequest) -> None:
        self.callbacks = callbacks or Callbacks()
        self.method = training.setup.method
        self.training = training
        self.group = training.group
        self.stop = stop
        session = training.run.session
        self._counts: list[ValidationCount] = []
        self._targets: list[tuple[Target, LabelSpace, ImageList, AnyEvalTransform]] = []
        # Opened before the first step, so that a target that cannot be validated ends the run at once.
        if self.callbacks.targets:
            with training.meter.phase("validation", in_step=False):
                for target in self.callbacks.targets:
                    selection = session.select(target)
                    space = label_space(session.dataset(target.dataset).manifest, selection.classnames)
                    transform = make_test_transform(self.method, target.dataset, training.config.seed)
                    images = session.crops.wrap(selection.images, transform)
                    self._targets.append((target, space, images, transform))

    def resume(self) -> None:
        """Load the counts of the epochs before the restored state, and make those that its last epoch lacks."""
        state = self.training.state
        if not self._targets:
            return
        stored = self.group.call_on_first(self.training.folder.read_validation)
        self._counts = [count for count in stored if count.epoch < state.epoch]
        last = {count.target for count in self._counts if count.epoch == state.epoch - 1}
        # A run that was stopped between the end of an epoch and its validation lacks the counts; the restored weights
        # are those to count with.
        if state.epoch and not state.step_in_epoch and not last.issuperset(map(str, self.callbacks.targets)):
            self.validate()
            if state.epoch < self.training.config.recipe.epochs:
                self.notify()

    def validate(self) -> None:
        """Validate the epoch that has just ended, and write the counts. On a stop signal, save the state and raise."""
        training, epoch = self.training, self.training.state.epoch - 1
        if not self._targets:
            return
        config, clip = training.config, self.method.clip
        counts = [count for count in self._counts if count.epoch != epoch]
        # Crops that the host makes are kept for the next epochs, those of the device are not.
        acceleration = replace(training.setup.acceleration, images=False)
        try:
            with training.meter.phase("validation", in_step=False):
                for target, space, images, transform in self._targets:
                    with autocast(config.precision, clip.device):
                        classifier = self.method.classifier(space)
                    inference = Inference(clip, classifier, config.precision, acceleration)
                    predictions = predict_images(training.run, inference, images, transform, self.stop)
                    correct = int(predictions.is_correct.sum())
                    counts.append(ValidationCount(epoch=epoch, target=str(target), correct=correct, total=len(images)))
        except Interrupted as interrupted:
            training.stop(interrupted.signum)
        # Only now: counts of a validation that a signal has stopped are made again.
        self._counts = counts
        if self.group.ranks.is_first:
            with training.meter.phase("validation", in_step=False):
                history = ValidationHistory(config_hash=training.config.hash, counts=counts)
                write_json(training.folder.validation_file, history)

    def notify(self, *, finished: bool = False) -> None:
        """Call `on_epoch_end` with the epoch that has just ended; after an exception, save the state and raise it."""
        if not self.group.ranks.is_first or self.callbacks.on_epoch_end is None:
            return
        try:
            with self.training.meter.phase("tracking", in_step=False):
                self.callbacks.on_epoch_end(self.training.state.epochs[-1])
        except BaseException:
            # With several ranks the others do not save: they lose the connection to this one.
            if not finished and self.group.size == 1:
                self.training.finish("interrupted")
            raise
