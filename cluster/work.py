"""What one machine does with a job: train its runs, evaluate them, say how it goes. Knows nothing of Ray."""

from __future__ import annotations

import platform
import time
import traceback
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from cluster.job import Job, Report, RunSpec
from procap.errors import UserError
from runner.config import RuntimeConfig, Target
from runner.distributed.collectives import ProcessGroup
from runner.distributed.ranks import ALONE
from runner.results import EvalResult, RunFolder, RunHeld, harmonic_mean
from shards.builtin import make_ready
from shards.errors import DataError
from shards.reader import open_dataset

if TYPE_CHECKING:
    from runner.validate import Callbacks

TELL_SECONDS = 5.0
HELD_SECONDS = 2.0

Tell = Callable[[Report], None]


class Work:
    """A job on this machine; of a group every process makes one, and the first one tells."""

    def __init__(self, job: Job, place: RuntimeConfig, tell: Tell, group: ProcessGroup | None = None) -> None:
        """tell: is called from time to time, and may end the work by raising."""
        self.job = job
        self.place = place
        self.group = group or ProcessGroup(ALONE)
        self._tell = tell
        self._began = time.monotonic()
        self._told = -TELL_SECONDS

    def do(self) -> Report:
        """Everything of the job that is not done yet; gives, and does not tell, the report of its end."""
        self._pack()
        self._look_at_targets()
        self._train()
        return self._report(state="done", figures=self._evaluate())

    def _pack(self) -> None:
        """Draw or unpack the sets that need nobody's files, where this machine has them not."""
        names = [piece.config.dataset for piece in self.job.pieces]
        names += [Target.recorded(target).dataset for piece in self.job.pieces for target in piece.targets]
        if self.group.ranks.local_rank == 0:
            make_ready(names, self.place.data)
        self.group.barrier()

    def _look_at_targets(self) -> None:
        """Test images that are not there are found before a training, not after it."""
        for piece in self.job.pieces:
            for target in map(Target.recorded, piece.targets):
                open_dataset(self.place.data, target.dataset).require(target.split)

    def _train(self) -> None:
        from runner.validate import Callbacks, EpochRecord

        if self.job.rungs:
            self._train_in_step()
            return
        for piece in self.job.pieces:

            def said(record: EpochRecord, piece: RunSpec = piece) -> None:
                epochs = piece.config.recipe.epochs
                self._say(self._report(epoch=record.log.epoch + 1, of=epochs, run=piece.config.path))

            self._train_one(piece, Callbacks(on_epoch_end=said))

    def _train_in_step(self) -> None:
        """All runs to one rung, then all to the next: what is told of an epoch is the mean over all of them."""
        from runner.validate import Callbacks, Validation

        last, told = max(piece.config.recipe.epochs for piece in self.job.pieces), 0
        watched = [tuple(map(Target.recorded, targets)) for targets in self.job.watched]
        for end in [*(rung for rung in self.job.rungs if rung < last), last]:
            for piece, targets in zip(self.job.pieces, watched, strict=True):
                self._train_one(piece, Callbacks(Validation(targets)), until=end)
            if self.group.ranks.first:
                for epoch in range(told, end):
                    if (figure := self._score_at(epoch, watched)) is not None:
                        self._tell(self._report(epoch=epoch + 1, of=last, figures={"score": figure}))
            told = end

    def _score_at(self, epoch: int, watched: Sequence[tuple[Target, ...]]) -> float | None:
        """The mean over the runs; None where one was not watched then, as one that somebody else had finished."""
        scores = []
        for piece, targets in zip(self.job.pieces, watched, strict=True):
            counts = RunFolder(self.place.results / piece.config.path).validation()
            found = {count.target: count.accuracy for count in counts if count.epoch == epoch}
            if not all(str(target) in found for target in targets):
                return None
            scores.append(score([found[str(target)] for target in targets]))
        return fmean(scores)

    def _train_one(self, piece: RunSpec, callbacks: Callbacks, until: int | None = None) -> None:
        """Train as soon as nobody else holds the run: what others finish meanwhile is found finished."""
        from runner.train import train

        while True:
            if self.group.size > 1:
                self._wait_for(piece)
            try:
                train(piece.config, self.place, group=self.group, until=until, callbacks=callbacks)
                return
            except RunHeld as error:
                if self.group.size > 1:
                    raise
                self._say(self._report(state="waiting", run=piece.config.path, why=str(error)))
                time.sleep(HELD_SECONDS)

    def _wait_for(self, piece: RunSpec) -> None:
        """Before a group begins a run that somebody else holds: once begun, only its first process would find out."""
        while why := self.group.broadcast_object(self._held(piece) if self.group.ranks.first else None):
            self._say(self._report(state="waiting", run=piece.config.path, why=why))
            time.sleep(HELD_SECONDS)

    def _held(self, piece: RunSpec) -> str:
        """Who holds the run, nothing where it is free or finished."""
        folder = RunFolder(self.place.results / piece.config.path)
        if folder.train_file.exists():
            return ""
        try:
            with folder.locked():
                return ""
        except RunHeld as error:
            return str(error)

    def _evaluate(self) -> dict[str, float]:
        from runner.evaluate import evaluate, load_trained

        scores = []
        for piece in self.job.pieces:
            results: list[EvalResult] = []
            trained = None
            for text in piece.targets:
                target = Target.recorded(text)
                known = self.group.broadcast_object(self._is_known(piece, target) if self.group.ranks.first else None)
                if not known and trained is None:
                    trained = load_trained(piece.config, self.place, self.group)
                results.append(evaluate(piece.config, target, self.place, trained=trained, group=self.group))
            if results:
                scores.append(score([result.accuracy for result in results]))
        return {"score": fmean(scores)} if scores else {}

    def _is_known(self, piece: RunSpec, target: Target) -> bool:
        folder = RunFolder(self.place.results / piece.config.path)
        training, known = folder.train(), folder.evaluation(target)
        return bool(training and known and known.is_current(training, self.place.limit))

    def _say(self, report: Report) -> None:
        """Tell, unless that was done a moment ago: whoever listens answers for many."""
        if self.group.ranks.first and time.monotonic() - self._told >= TELL_SECONDS:
            self._told = time.monotonic()
            self._tell(report)

    def _report(self, **said: object) -> Report:
        return Report.model_validate({"seconds": time.monotonic() - self._began, "host": platform.node(), **said})


def attempt(work: Callable[[], Report], *, lost: tuple[type[Exception], ...] = ()) -> Report:
    """The report of `work`; an error that repeating would only meet again is one too, those of `lost` are not."""
    began = time.monotonic()
    why = trace = ""
    try:
        return work()
    except lost:
        raise
    except (UserError, DataError, OSError) as error:
        why = " ".join(str(error).split())
    except Exception as error:
        why = f"internal error: {type(error).__name__}: {' '.join(str(error).split())}"
        trace = traceback.format_exc()
    return Report(state="failed", why=why, trace=trace, seconds=time.monotonic() - began, host=platform.node())


def score(accuracies: Sequence[float]) -> float:
    """One figure of merit for a run: the accuracy on its target, of two targets their harmonic mean, else the mean."""
    return harmonic_mean(*accuracies) if len(accuracies) == 2 else fmean(accuracies)
