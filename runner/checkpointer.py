"""The diary of a training: what it needs to go on after a kill, and what people see of it meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from procap.errors import UserError
from runner.checkpoint import StateKeeper, TrainState
from runner.config import RunConfig, RuntimeConfig
from runner.distributed.collectives import ProcessGroup
from runner.engines import make_engine
from runner.meters import Meter
from runner.remote_results import CheckpointUploader, RemoteResults
from runner.results import Progress, RunFolder, RunStatus, write_json
from runner.setup import Setup
from runner.stop_signals import interrupted

EPOCH_SAVE_SECONDS = 1.0


class Checkpointer:
    """Writes down where a training stands: the state it can go on from, and `progress.json` for whoever looks."""

    def __init__(
        self,
        config: RunConfig,
        runtime: RuntimeConfig,
        folder: RunFolder,
        setup: Setup,
        meter: Meter,
        steps: int,
        where: dict[str, Any],
        group: ProcessGroup,
    ) -> None:
        self.config = config
        self.folder = folder
        self.setup = setup
        self.meter = meter
        self.steps = steps
        self.where = where
        self.group = group
        self.engine = make_engine(setup.method, config, runtime, group)
        card = setup.card
        identity = {
            "config_hash": config.hash,
            "backbone_digest": card.backbone_digest,
            "manifest_digest": card.manifest_digest,
        }
        self.keeper = StateKeeper(folder.state, identity)
        self.uploader = CheckpointUploader(RemoteResults.of(runtime), config.path)
        self.state = TrainState()
        self._saved_at: tuple[int, int] | None = None
        self._saved = time.monotonic()
        self._cost = 0.0

    def restore(self) -> TrainState:
        """The newest sound state on disk, filled into method and optimizer; else the beginning."""
        found = self.keeper.newest() if self.group.ranks.first else None
        data = self.group.broadcast_object(found and found[0])
        if data:
            self.state, tensors = self.keeper.unpack(data)
            self.engine.load(tensors, found[1] if found else self.folder.state)
            self.state.resumed += 1
            self._saved_at = self._at
            self.meter.go_on(self.state.meter)
        self._report("running")
        return self.state

    def due(self, seconds: float, *, epoch_end: bool = False) -> bool:
        """Whether a state should be written: after `seconds`, and at the end of an epoch as soon as it is cheap."""
        if epoch_end:
            # Short epochs and large states: never more than about a twentieth of the time goes to the disk.
            seconds = min(seconds, max(EPOCH_SAVE_SECONDS, 20 * self._cost))
        return time.monotonic() - self._saved >= seconds

    def save(self, status: RunStatus = "running") -> None:
        """Write the state, then the progress; of a group every process calls this, and the first one writes."""
        began = time.monotonic()
        with self.meter.phase("checkpoint", rated=False):
            self.meter.settle()
            self.state.meter = self.meter.state()
            tensors = self.engine.tensors()
            if self.group.ranks.first:
                self.keeper.save(self.state, tensors)
        self._report(status)
        self._saved, self._saved_at = time.monotonic(), self._at
        self._cost = self._saved - began
        if self.group.ranks.first:
            with self.meter.phase("checkpoint", rated=False):
                self.uploader.offer()

    @property
    def _at(self) -> tuple[int, int]:
        """Step and epoch: an epoch is closed after its last step, and may be after that step's state was saved."""
        return self.state.step, self.state.epoch

    def stop(self, signum: int) -> NoReturn:
        """Write the state and raise `Interrupted` for a signal that all processes know of; every one calls this."""
        self.save("interrupted")
        # Whoever leaves first may get the others killed; the state has to be written by then.
        self.group.barrier()
        where = f"step {self.state.step} of {self.steps}"
        raise interrupted(signum, f"stopped {self.config.path} at {where}; repeat to go on")

    def leave(self, status: RunStatus) -> Progress:
        """Write the state unless it is on the disk already, and give what people see; every process calls this."""
        if self._saved_at == self._at:
            self._report(status)
        else:
            self.save(status)
        said = self.group.broadcast_object(self._progress(status) if self.group.ranks.first else None)
        assert said is not None
        return said

    def count(self, images: int, names: Sequence[str], terms: Sequence[float]) -> float:
        """Book the next step over `images`: its named terms and behind them their sum, which is given back.

        Raises UserError when the sum is not finite; the states on disk are of steps before, whose sums were.
        """
        *each, loss = terms
        values = dict(zip(names, each, strict=True))
        if not math.isfinite(loss):
            self._report("failed")
            shown = ", ".join(f"{name} = {value:g}" for name, value in values.items())
            kept = f"kept: the state after step {self._saved_at[0]}" if self._saved_at else "no state is saved"
            raise UserError(
                f"{self.config.path}: the loss of step {self.state.step + 1} of {self.steps} "
                f"(epoch {self.state.epoch + 1}) is not finite: {shown}; {kept}; try {self.config.calmer}"
            )
        self.state.count(images, values)
        return loss

    def _report(self, status: RunStatus) -> None:
        if self.group.ranks.first:
            write_json(self.folder.progress_file, self._progress(status))

    def _progress(self, status: RunStatus) -> Progress:
        return Progress(
            config_hash=self.config.hash,
            status=status,
            step=self.state.step,
            steps=self.steps,
            epochs=self.state.epochs,
            seconds=self.meter.seconds,
            resumed=self.state.resumed,
            environment=self.where,
        )
