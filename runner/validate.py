"""Figures to choose by while a run trains: the images of a val or train target counted at the ends of epochs.

Nothing random is drawn and nothing changes, so a run that is watched ends with the same bits as one that is not.

Shapes: B images, C classes, S image size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from procap.errors import UsageError, UserError
from procap.text import LabelSpace
from runner.checkpointer import Checkpointer
from runner.config import RuntimeConfig, Target
from runner.distributed.flag_sync import Flags, FlagSync
from runner.environment import decoders
from runner.results import EpochLog, ValidationCount, ValidationHistory, write_json
from runner.setup import autocast, label_space
from runner.stop_signals import StopRequest
from shards.fewshot import evaluation_split
from shards.loader import evaluation_batches
from shards.reader import Split, open_dataset
from shards.transfer import to_device
from shards.transforms import eval_transform

SPLITS = ("val", "train")
"""What may be chosen by; whoever chooses on test images reports a figure that is too good."""


@dataclass(frozen=True)
class Validation:
    """What is counted at the end of every so many epochs, and of the last one whichever it is.

    limit: so many images of each target, spread evenly over its list, whose classes mostly follow each other; None for
        all. Raises UsageError for a test split.
    """

    targets: tuple[Target, ...]
    every: int = 1
    limit: int | None = None

    def __post_init__(self) -> None:
        for target in self.targets:
            if target.split not in SPLITS:
                raise UsageError(f"{target} is no target to choose by: name its {' or '.join(SPLITS)} split")
        if self.every < 1 or (self.limit is not None and self.limit < 1):
            raise UsageError(f"every = {self.every}, limit = {self.limit}: both must be at least 1")

    def due(self, epoch: int, last: int) -> bool:
        """Whether epoch `epoch` is one to count at, if `last` is the last one."""
        return (epoch + 1) % self.every == 0 or epoch == last

    def missing(self, epoch: int, last: int, counts: Iterable[ValidationCount]) -> bool:
        """Whether `counts` lack a target of `epoch` that is due."""
        there = {(count.epoch, count.target, count.limit) for count in counts}
        wanted = self.targets if self.due(epoch, last) else ()
        return any((epoch, str(target), self.limit) not in there for target in wanted)


def spread(images: int, limit: int | None) -> range | list[int]:
    """`limit` of the positions 0 .. `images` - 1 at even distances, all of them where that is not fewer."""
    if limit is None or limit >= images:
        return range(images)
    return [i * images // limit for i in range(limit)]


@dataclass(frozen=True)
class EpochRecord:
    """An epoch that has ended. counts: one of each validated target, nothing where none was due."""

    log: EpochLog
    counts: tuple[ValidationCount, ...] = ()


@dataclass(frozen=True)
class Watch:
    """Whoever looks on while a run trains; of a group every process is given one, with the same `validation`.

    on_epoch: called by the first process at the end of every epoch that ends here, when its counts are on the disk; for
        the run's last epoch when the run is a finished one. A run that goes on from an earlier state tells again what
        it trains again. What it raises ends the training, after the state of that epoch was saved.
    """

    validation: Validation | None = None
    on_epoch: Callable[[EpochRecord], None] | None = None


@dataclass(frozen=True)
class _Opened:
    target: Target
    space: LabelSpace
    images: Split


class Watcher:
    """Does what a `Watch` asks of one training; every process of a group has one and calls each method."""

    def __init__(
        self, watch: Watch | None, checkpointer: Checkpointer, runtime: RuntimeConfig, stop: StopRequest, last: int
    ) -> None:
        """last: the epoch that the training is to end with. Opens all targets, and raises the user's errors of that."""
        self.watched = watch is not None
        self.watch = watch or Watch()
        self.checkpointer = checkpointer
        self.runtime = runtime
        self.stop = stop
        self.last = last
        self._counts: list[ValidationCount] = []
        validation = self.watch.validation
        self._opened: list[_Opened] = []
        if validation:
            with checkpointer.meter.phase("validation", rated=False):
                self._opened = [self._open(target, validation.limit) for target in validation.targets]

    def _open(self, target: Target, limit: int | None) -> _Opened:
        shards = open_dataset(self.runtime.data, target.dataset)
        self.checkpointer.group.check_same(f"the content of {target.dataset}", shards.manifest.digest)
        selection = evaluation_split(shards, target.classes, target.split)
        images = selection.images.subset(spread(len(selection.images), limit))
        return _Opened(target, label_space(shards.manifest, selection.classnames), images)

    def go_on(self) -> None:
        """Take up the counts of the epochs before the state that a run goes on from.

        Those of later epochs are of weights that are lost; they are counted again. What is missing of the epoch that
        has just ended is counted now.
        """
        validation, state, group = self.watch.validation, self.checkpointer.state, self.checkpointer.group
        if validation is None:
            return
        known = self.checkpointer.folder.validation() if group.ranks.first else []
        shared = group.broadcast_object([count.model_dump() for count in known if count.epoch < state.epoch])
        self._counts = [ValidationCount.model_validate(count) for count in shared]
        if state.epoch and not state.step_in_epoch and validation.missing(state.epoch - 1, self.last, self._counts):
            self.count()
            # Of the last epoch the finished run is told.
            if state.epoch < self.checkpointer.config.recipe.epochs:
                self.tell()

    def count(self) -> None:
        """Count the targets of the epoch that has just ended where they are due, and put that on the disk.

        Raises UserError for logits that are not finite, DataError for an image that cannot be read, and `Interrupted`,
        after the state was saved, when a signal asks to stop.
        """
        validation, checkpointer = self.watch.validation, self.checkpointer
        epoch = checkpointer.state.epoch - 1
        if validation is None or not validation.due(epoch, self.last):
            return
        with checkpointer.meter.phase("validation", rated=False), checkpointer.group.uncounted():
            found, signum = self._look()
        if signum:
            checkpointer.stop(signum)
        counts = [
            ValidationCount(
                epoch=epoch,
                target=str(opened.target),
                correct=correct,
                total=len(opened.images),
                limit=validation.limit,
            )
            for opened, correct in zip(self._opened, found, strict=True)
        ]
        named = {(count.epoch, count.target) for count in counts}
        kept = [count for count in self._counts if (count.epoch, count.target) not in named]
        self._counts = sorted([*kept, *counts], key=lambda count: count.epoch)
        if checkpointer.group.ranks.first:
            with checkpointer.meter.phase("validation", rated=False):
                history = ValidationHistory(config_hash=checkpointer.config.hash, counts=self._counts)
                write_json(checkpointer.folder.validation_file, history)

    def _look(self) -> tuple[list[int], int]:
        """How many images of each target were right; and the signal that stopped this, else 0."""
        group, found = self.checkpointer.group, []
        for opened in self._opened:
            flag_sync = FlagSync(group)
            correct, signum = self._correct(opened, flag_sync)
            if signum := flag_sync.wait().signum or signum:
                return [], signum
            shares = group.all_gather_object(correct)
            counts = [share for share in shares if share is not None]
            if len(counts) < len(shares):
                raise UserError(
                    f"{self.checkpointer.config.path} gives logits on {opened.target} that are not finite after epoch "
                    f"{self.checkpointer.state.epoch}: try {self.checkpointer.config.calmer}"
                )
            found.append(sum(counts))
        return found, 0

    def _correct(self, opened: _Opened, flag_sync: FlagSync) -> tuple[int | None, int]:
        """Of this process's share of the images those that were right, None where a logit is not finite; the signal."""
        config, group, method = self.checkpointer.config, self.checkpointer.group, self.checkpointer.setup.method
        clip, device = method.clip, method.clip.device
        with autocast(config, device):
            classifier = method.classifier(opened.space)
        right: list[Tensor] = []
        finite: list[Tensor] = []
        batches = evaluation_batches(
            opened.images,
            eval_transform(clip.geometry.image_size, clip.image_mean, clip.image_std),
            config.recipe.test_batch_size,
            decoders(self.runtime.workers, device),
            rank=group.ranks.rank,
            world_size=group.ranks.size,
        )
        for images, labels, _ in to_device(batches, device, moved=(0, 1)):
            with autocast(config, device):
                logits = classifier(images)
            # An image that fills the last batch of a process has label -1, which no prediction is.
            right.append((logits.argmax(dim=1) == labels).sum())
            finite.append(torch.isfinite(logits).all())
            if signum := flag_sync.exchange(Flags(signum=self.stop.signum or 0)).signum:
                return 0, signum
        return (int(torch.stack(right).sum()) if torch.stack(finite).all() else None), 0

    def tell(self, *, finished: bool = False) -> None:
        """Call `on_epoch` with the epoch that has just ended; what it raises, all processes raise.

        finished: the run is, so that no state is needed.
        """
        checkpointer, group = self.checkpointer, self.checkpointer.group
        if not self.watched:
            return
        if group.ranks.first and self.watch.on_epoch is not None:
            epoch = checkpointer.state.epochs[-1]
            counts = tuple(count for count in self._counts if count.epoch == epoch.epoch)
            try:
                with checkpointer.meter.phase("tracking", rated=False):
                    self.watch.on_epoch(EpochRecord(epoch, counts))
            except BaseException as error:
                group.broadcast_object(f"{type(error).__name__}: {error}")
                if not finished:
                    checkpointer.leave("interrupted")
                raise
        if said := group.broadcast_object(None):
            if not finished:
                checkpointer.leave("interrupted")
            raise UserError(f"rank 0 of {group.size} stopped {checkpointer.config.path}: {said}")
