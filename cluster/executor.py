"""Execute runs on one machine, in one process or a process group. Does not depend on Ray."""

from __future__ import annotations

import platform
import time
import traceback
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from cluster.run import Halving, Report, RunSpec, mean_score_at, score
from procap.errors import UserError
from runner.config import RuntimeConfig, Target
from runner.distributed.collectives import ProcessGroup
from runner.distributed.ranks import ALONE
from runner.results import EvalResult, RunFolder, RunHeld
from shards.errors import DataError
from shards.pack import pack_missing
from shards.reader import open_dataset

if TYPE_CHECKING:
    from runner.validate import Callbacks

REPORT_SECONDS = 5.0
HELD_SECONDS = 2.0

ReportTo = Callable[[Report], None]


class RunExecutor:
    """Train and evaluate the runs of a trial; every rank of a process group has one, and only rank 0 reports."""

    def __init__(
        self,
        runs: Sequence[RunSpec],
        runtime: RuntimeConfig,
        report_to: ReportTo,
        group: ProcessGroup | None = None,
        halving: Halving | None = None,
    ) -> None:
        """Store what to execute.

        report_to: may raise to stop the work. halving: train all runs in step and report the mean score per epoch.
        """
        self.runs, self.runtime, self.halving = runs, runtime, halving
        self.group = group or ProcessGroup(ALONE)
        self._report_to = report_to
        self._began = time.monotonic()
        # In the past, so that the first report is sent at once.
        self._reported = -REPORT_SECONDS

    def execute(self) -> Report:
        """Execute what is not finished yet; returns the final report without sending it."""
        targets = [Target.recorded(target) for run in self.runs for target in run.targets]
        if self.group.ranks.local_rank == 0:
            pack_missing([*(run.config.dataset for run in self.runs), *(target.dataset for target in targets)],
                       self.runtime.data)  # fmt: skip
        self.group.barrier()
        # Check for missing test images before the training, not after it.
        for target in targets:
            open_dataset(self.runtime.data, target.dataset).require(target.split)
        epochs = max(run.config.recipe.epochs for run in self.runs)
        if self.halving:
            self._train_in_step(self.halving.rungs(epochs), epochs)
        else:
            for run in self.runs:
                self._train_reporting(run)
        return self._report(state="done", epoch=epochs, of=epochs, score=self._evaluate())

    def _train_reporting(self, run: RunSpec) -> None:
        from runner.validate import Callbacks, EpochRecord

        def on_epoch(record: EpochRecord) -> None:
            self._send(self._report(epoch=record.log.epoch + 1, of=run.config.recipe.epochs, run=run.path))

        self._train(run, Callbacks(on_epoch_end=on_epoch))

    def _train_in_step(self, rungs: Sequence[int], epochs: int) -> None:
        """Train all runs to one rung, then all to the next, and report the mean score of every epoch.

        The last epoch is only in the final report, so that a scheduler cannot stop the trial before its evaluation.
        """
        from runner.validate import Callbacks, Validation

        targets = [tuple(map(Target.recorded, run.targets)) for run in self.runs]
        reported = 0
        for end in [*rungs, epochs]:
            for run, watched in zip(self.runs, targets, strict=True):
                self._train(run, Callbacks(Validation(watched)), until=end)
            if self.group.ranks.first:
                for epoch in range(reported, min(end, epochs - 1)):
                    if (mean := mean_score_at(self.runs, epoch, self.runtime)) is not None:
                        self._report_to(self._report(epoch=epoch + 1, of=epochs, score=mean))
            reported = end

    def _train(self, run: RunSpec, callbacks: Callbacks, until: int | None = None) -> None:
        """Train as soon as no other process holds the run's lock; a run finished by another process is not repeated."""
        from runner.train import train

        while True:
            if self.group.size > 1:
                self._wait_for_lock(run)
            try:
                train(run.config, self.runtime, group=self.group, until=until, callbacks=callbacks)
                return
            except RunHeld as error:
                if self.group.size > 1:
                    raise
                self._send(self._report(state="waiting", run=run.path, why=str(error)))
                time.sleep(HELD_SECONDS)

    def _wait_for_lock(self, run: RunSpec) -> None:
        """Wait until the run is unlocked.

        In a process group only rank 0 sees the lock, so all ranks wait together before they start.
        """
        while why := self.group.broadcast_object(self._find_holder(run) if self.group.ranks.first else None):
            self._send(self._report(state="waiting", run=run.path, why=why))
            time.sleep(HELD_SECONDS)

    def _find_holder(self, run: RunSpec) -> str:
        folder = RunFolder(self.runtime.results / run.path)
        if folder.train_file.exists():
            return ""
        try:
            with folder.locked():
                return ""
        except RunHeld as error:
            return str(error)

    def _evaluate(self) -> float | None:
        from runner.evaluate import evaluate, load_trained

        scores = []
        for run in self.runs:
            results: list[EvalResult] = []
            trained = None
            for target in map(Target.recorded, run.targets):
                known = self.group.broadcast_object(self._is_evaluated(run, target) if self.group.ranks.first else None)
                if not known and trained is None:
                    trained = load_trained(run.config, self.runtime, self.group)
                results.append(evaluate(run.config, target, self.runtime, trained=trained, group=self.group))
            if results:
                scores.append(score([result.accuracy for result in results]))
        return fmean(scores) if scores else None

    def _is_evaluated(self, run: RunSpec, target: Target) -> bool:
        folder = RunFolder(self.runtime.results / run.path)
        training, known = folder.train(), folder.evaluation(target)
        return bool(training and known and known.is_current(training, self.runtime.limit))

    def _send(self, report: Report) -> None:
        """Report at most once in `REPORT_SECONDS`, as the driver receives reports of many trials."""
        if self.group.ranks.first and time.monotonic() - self._reported >= REPORT_SECONDS:
            self._reported = time.monotonic()
            self._report_to(report)

    def _report(self, **fields: object) -> Report:
        return Report.model_validate({"seconds": time.monotonic() - self._began, "host": platform.node(), **fields})


def attempt(work: Callable[[], Report], *, lost: tuple[type[Exception], ...] = ()) -> Report:
    """Call `work`; exceptions other than `lost` become a failed report, as they would occur again after a restart."""
    began = time.monotonic()
    why = trace = ""
    try:
        return work()
    except lost:
        raise
    # Errors of the user or the environment are reported in one line, all others as internal errors with a traceback.
    except (UserError, DataError, OSError) as error:
        why = " ".join(str(error).split())
    except Exception as error:
        why = f"internal error: {type(error).__name__}: {' '.join(str(error).split())}"
        trace = traceback.format_exc()
    return Report(state="failed", why=why, trace=trace, seconds=time.monotonic() - began, host=platform.node())
