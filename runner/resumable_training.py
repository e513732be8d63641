"""A training in progress: its engine, its stages, the saved states from which it resumes, and `progress.json`."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from runner.checkpoint import StateFiles, TrainState, check_finite
from runner.engine import Engine, autocast
from runner.epoch_average import EpochAverage
from runner.meters import Meter
from runner.results import Progress, RunStatus, write_json
from runner.session import Run
from runner.setup import Setup
from runner.stop_signals import Interrupted


@dataclass
class ResumableTraining:
    """One training, in memory and on disk; all ranks call its methods, rank 0 reads and writes files."""

    run: Run
    setup: Setup
    meter: Meter
    environment: dict[str, Any]

    def __post_init__(self) -> None:
        card = self.setup.card
        self.config, self.total_steps = card.config, self.setup.total_steps
        self.folder, self.group = self.run.folder, self.run.session.group
        recipe = self.config.recipe
        self.average = EpochAverage(self.setup.method, recipe.epochs, *recipe.average) if recipe.average else None
        identity = {
            "config_hash": self.config.hash,
            "backbone_digest": card.backbone_digest,
            "manifest_digest": card.manifest_digest,
            "engine": self.setup.engine.name if self.setup.engine else "",
            **{f"SHA-256 of {option}": digest for option, digest in self.setup.file_digests.items()},
        }
        if source := self.setup.method_source:
            identity[f"source of {self.config.method}"] = str(source)
        self.state_files = StateFiles(self.folder.state_folder, identity)
        self.state = TrainState()
        self._saved_time = time.monotonic()

    @property
    def engine(self) -> Engine:
        assert self.setup.engine is not None
        return self.setup.engine

    def restore(self) -> TrainState:
        """Load the newest intact state on disk into method and optimizer; without one, the state at the beginning."""
        # The bytes are sent, not the path, because other machines may not have rank 0's folder.
        data = self.group.call_on_first(self.state_files.newest)
        if data:
            self.state, parts = self.state_files.unpack(data)
            # First the stage: it decides what is learned, and so which tensors the optimizer's state is for.
            if self.state.stage:
                self.begin_stage(self.state.stage)
            if self.average:
                for name, total in self.average.sums.items():
                    total.copy_(parts["average"][name])
            self.engine.load(parts)
            self.state.resumed += 1
            self.meter.resume(self.state.meter, repeated="features")
        self.write_progress("running")
        return self.state

    def begin_stage(self, stage: int) -> None:
        """Go on with `stage` of the training, in a new engine for what it learns."""
        self.engine.close()
        with self.meter.phase("compile", in_step=False):
            with autocast(self.config.precision, self.meter.device):
                self.setup.method.begin_stage(stage)
            self.setup = replace(self.setup, engine=self.setup.make_engine())
        self.state.stage = stage

    def is_due(self, seconds: float) -> bool:
        """Whether the last state is older than `seconds`."""
        return time.monotonic() - self._saved_time >= seconds

    def save(self, status: RunStatus = "running") -> None:
        """Write the state, then the progress."""
        with self.meter.phase("state", in_step=False):
            self.meter.settle()
            self.state.meter = self.meter.state()
            # On all ranks, because DeepSpeed gathers the parts of its optimizer here.
            parts = self.engine.state()
            if self.average:
                parts["average"] = self.average.sums
            # Before the write: a run must not resume from weights that are not finite.
            check_finite(parts["method"], f"after step {self.state.step}")
            if self.group.ranks.is_first:
                self.state_files.save(self.state, parts)
        self.write_progress(status)
        if self.group.ranks.is_first:
            with self.meter.phase("tracking", in_step=False):
                self.run.session.remote.try_push(self.config.path)
        self._saved_time = time.monotonic()

    def stop(self, signum: int) -> NoReturn:
        """Save the state and raise `Interrupted`, because all ranks have agreed on a stop signal."""
        self.save("interrupted")
        # A launcher may kill all ranks as soon as one exits, so wait until rank 0 has written the state.
        self.group.barrier()
        position = f"step {self.state.step} of {self.total_steps}"
        raise Interrupted(signum, f"stopped {self.config.path} at {position}; repeat the command to resume")

    def finish(self, status: RunStatus) -> Progress:
        """Save the state, and return the progress."""
        self.save(status)
        return self.group.broadcast_object(self._progress(status))

    def write_progress(self, status: RunStatus) -> None:
        if self.group.ranks.is_first:
            write_json(self.folder.progress_file, self._progress(status))

    def _progress(self, status: RunStatus) -> Progress:
        return Progress(
            config_hash=self.config.hash,
            status=status,
            step=self.state.step,
            steps=self.total_steps,
            epochs=self.state.epochs,
            seconds=self.meter.seconds,
            resumed=self.state.resumed,
            environment=self.environment,
        )
