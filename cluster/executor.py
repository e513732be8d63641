"""Execute the runs of a trial on one machine, in one process or a process group, in a worker of Ray or without Ray."""

from __future__ import annotations

import platform
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from cluster.ray_cluster import Capacity, Resources
from cluster.trial import Halving, StoragePaths, TrialReport
from runner.config import RuntimeConfig
from runner.evaluate import evaluate_run
from runner.results import EXPECTED, describe_failure
from runner.run_state import RunSpec, score, score_at
from runner.session import Session
from runner.stop_signals import Interrupted
from runner.train import train_run
from runner.validate import Callbacks
from shards.pack import pack_missing

REPORT_SECONDS = 5.0
"""Shortest time between two progress reports of a trial; mean scores of epochs are reported at once."""

ReportTo = Callable[[TrialReport], object]
RunsOf = Callable[[Mapping[str, Any], RuntimeConfig], Sequence[RunSpec]]
"""The runs of a trial's configuration, called on the machine that executes them."""


@dataclass(frozen=True)
class TrialWork:
    """How the trials of a command are executed. halving: train the runs of a trial in step."""

    runs_of: RunsOf
    paths: StoragePaths
    resources: Resources
    halving: Halving | None = None

    @classmethod
    def on(cls, capacity: Capacity, paths: StoragePaths, runs_of: RunsOf, halving: Halving | None = None) -> TrialWork:
        """Return the work with the resources and the device of `capacity`."""
        device = capacity.device(paths.runtime.device)
        return cls(runs_of, replace(paths, runtime=replace(paths.runtime, device=device)), capacity.resources, halving)


class RunExecutor:
    """Train and evaluate the runs of a trial; every rank of a process group has one, and only rank 0 reports."""

    def __init__(
        self, session: Session, runs: Sequence[RunSpec], report_to: ReportTo, halving: Halving | None = None
    ) -> None:
        """report_to: may raise to stop the work. halving: train all runs in step and report their mean per epoch."""
        self.session, self.group = session, session.group
        self.runs, self.halving = runs, halving
        self._report_to = report_to
        self._began = time.monotonic()
        # In the past, so that the first report is sent at once.
        self._reported = -REPORT_SECONDS

    def execute(self) -> TrialReport:
        """Execute what is not finished yet; returns the final report without sending it."""
        targets = [target for run in self.runs for target in run.parse_targets()]
        # One rank of each node: nodes may have separate folders of generated data.
        if self.group.ranks.local_rank == 0:
            names = [run.config.dataset for run in self.runs]
            pack_missing([*names, *(target.dataset for target in targets)], self.session.runtime.data)
        self.group.barrier()
        # Check for missing test images before the training, not after it.
        for target in targets:
            self.session.dataset(target.dataset).check_sizes(target.split)
        epochs = max(run.config.recipe.epochs for run in self.runs)
        if self.halving:
            self._train_in_step(self.halving.rungs(epochs), epochs)
        else:
            for run in self.runs:
                self._train(run)
        scores = []
        for spec in self.runs:
            evaluated = self.session.get_run(spec.config)
            if accuracies := [evaluate_run(evaluated, target).accuracy for target in spec.parse_targets()]:
                scores.append(score(accuracies))
        return self._report(state="finished", epoch=epochs, score=fmean(scores) if scores else None)

    def _train_in_step(self, rungs: Sequence[int], epochs: int) -> None:
        """Train all runs to one rung, then to the next; only the final report, after evaluation, has the last epoch."""
        reported = 0
        for end in [*rungs, epochs]:
            for run in self.runs:
                self._train(run, Callbacks(run.parse_targets()), until=end)
            if self.group.ranks.is_first:
                # All runs have reached `end`: only now has every epoch since the last rung a mean over all of them.
                for epoch in range(reported, min(end, epochs - 1)):
                    means = (score_at(self.session.get_run(run.config), run.targets, epoch) for run in self.runs)
                    scores = [mean for mean in means if mean is not None]
                    # A run that was finished before the sweep may have no validation.
                    if len(scores) == len(self.runs):
                        self._report_to(self._report(epoch=epoch + 1, score=fmean(scores)))
            reported = end

    def _train(self, spec: RunSpec, callbacks: Callbacks | None = None, until: int | None = None) -> None:
        """Train as soon as no other process holds the run's lock; a run finished by another process is not repeated."""
        send = partial(self._send, run=spec.path)
        callbacks = callbacks or Callbacks(on_epoch_end=lambda log: send(epoch=log.epoch + 1))
        run, on_held = self.session.get_run(spec.config), lambda held: send(state="waiting", why=held)
        train_run(run, until=until, callbacks=callbacks, on_held=on_held)

    def _send(self, **fields: object) -> None:
        """Report at most once in `REPORT_SECONDS`, as the driver receives reports of many trials."""
        if self.group.ranks.is_first and time.monotonic() - self._reported >= REPORT_SECONDS:
            self._reported = time.monotonic()
            self._report_to(self._report(**fields))

    def _report(self, **fields: object) -> TrialReport:
        return TrialReport.model_validate(
            {"seconds": time.monotonic() - self._began, "host": platform.node(), **fields}
        )


def attempt(execute: Callable[[], TrialReport]) -> TrialReport:
    """Call `execute`; an exception becomes a failed report, as it would occur again after a restart."""
    began = time.monotonic()
    try:
        return execute()
    except Interrupted:
        raise
    except Exception as error:
        # Errors of the user or the environment are reported in one line, all others with a traceback.
        trace = "" if isinstance(error, EXPECTED) else traceback.format_exc()
        seconds = time.monotonic() - began
        return TrialReport(
            state="failed", why=describe_failure(error), trace=trace, seconds=seconds, host=platform.node()
        )
