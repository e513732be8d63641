"""The diary of a training: what it needs to go on after a kill, and what people see of it meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from procap.errors import UserError
from runner.assemble import Setup, make_optimizer
from runner.checkpoint import StateKeeper, TrainState
from runner.config import RunConfig
from runner.meters import Meter
from runner.results import Progress, RunFolder, write_json

EPOCH_SAVE_SECONDS = 1.0


class Journal:
    """Writes down where a training stands: the state it can go on from, and `progress.json` for whoever looks."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, setup: Setup, meter: Meter, steps: int, where: dict[str, Any]
    ) -> None:
        self.config = config
        self.folder = folder
        self.setup = setup
        self.meter = meter
        self.steps = steps
        self.where = where
        self.optimizer = make_optimizer(setup.method, config.recipe)
        card = setup.card
        identity = {
            "config_hash": config.hash,
            "backbone_digest": card.backbone_digest,
            "manifest_digest": card.manifest_digest,
        }
        self.keeper = StateKeeper(folder.state, identity)
        self.state = TrainState()
        self._saved_step: int | None = None
        self._saved = time.monotonic()
        self._cost = 0.0

    def restore(self) -> TrainState:
        """The newest sound state on disk, filled into method and optimizer; else the beginning."""
        found = self.keeper.restore(self.setup.method, self.optimizer)
        if found is not None:
            self.state = found
            self.state.resumed += 1
            self._saved_step = found.step
            self.meter.go_on(found.meter)
        self._report("running")
        return self.state

    def due(self, seconds: float, *, epoch_end: bool = False) -> bool:
        """Whether a state should be written: after `seconds`, and at the end of an epoch as soon as it is cheap."""
        if epoch_end:
            # Short epochs and large states: never more than about a twentieth of the time goes to the disk.
            seconds = min(seconds, max(EPOCH_SAVE_SECONDS, 20 * self._cost))
        return time.monotonic() - self._saved >= seconds

    def save(self, status: Literal["running", "interrupted"] = "running") -> None:
        """Write the state, then the progress."""
        began = time.monotonic()
        with self.meter.phase("checkpoint", rated=False):
            self.meter.settle()
            self.state.meter = self.meter.state()
            self.keeper.save(self.state, self.setup.method, self.optimizer)
        self._report(status)
        self._saved, self._saved_step = time.monotonic(), self.state.step
        self._cost = self._saved - began

    def finite(self, terms: Mapping[str, Tensor], loss: Tensor) -> dict[str, float]:
        """The terms as numbers. Raises UserError, before any weight is changed, when their sum is not finite."""
        values = dict(zip((*terms, "sum"), torch.stack([*terms.values(), loss]).tolist(), strict=True))
        if not math.isfinite(values.pop("sum")):
            self._report("failed")
            shown = ", ".join(f"{name} = {value:g}" for name, value in values.items())
            kept = "no state is saved" if self._saved_step is None else f"kept: the state after step {self._saved_step}"
            raise UserError(
                f"{self.config.path}: the loss of step {self.state.step + 1} of {self.steps} "
                f"(epoch {self.state.epoch + 1}) is not finite: {shown}; {kept}; try a lower lr or --precision fp32"
            )
        return values

    def _report(self, status: Literal["running", "interrupted", "failed"]) -> None:
        progress = Progress(
            config_hash=self.config.hash,
            status=status,
            step=self.state.step,
            steps=self.steps,
            epochs=self.state.epochs,
            seconds=self.meter.seconds,
            resumed=self.state.resumed,
            environment=self.where,
        )
        write_json(self.folder.progress_file, progress)
