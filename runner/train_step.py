"""Take a training step (loss terms, gradients, update), eagerly or with replays of CUDA graphs.

A step never makes the host wait for the device. Shapes: T loss terms.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from procap.methods.hooks import GradientRule
from runner.cuda_graphs import capture_objective
from runner.engine import Batch, Engine, Objective
from runner.meters import Meter


class TrainStep:
    """Forward, backward and update on an engine; the first two are replays after `capture`."""

    def __init__(self, engine: Engine, meter: Meter, *, graphs: bool = False) -> None:
        """graphs: whether the step is to be captured; one whose method combines gradients of several passes cannot."""
        self.engine, self.meter = engine, meter
        self._wants_graphs = graphs and not isinstance(engine.method, GradientRule)
        self._example: Batch | None = None
        self._graphed: nn.Module | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The loss terms, in order, once a step has run."""
        # A replay runs no Python: the names are those of the warm-up.
        return self._graphed.names if isinstance(self._graphed, Objective) else self.engine.objective.names

    @property
    def needs_capture(self) -> bool:
        """Whether CUDA graphs are used and `capture` has not been called."""
        return self._wants_graphs and self._example is None

    @property
    def is_captured(self) -> bool:
        """Whether `capture` was called and succeeded."""
        return self._graphed is not None

    def capture(self, batch: Batch) -> None:
        """Warm up and capture, with `batch` as an example; weights, buffers and optimizer do not change."""
        # Buffers such as the statistics of a batch norm change in every forward pass.
        buffers = [(buffer, buffer.clone()) for buffer in self.engine.method.buffers()]
        # A copy, whose memory all replays read: that of `batch` is freed and used again.
        self._example = batch.copy()
        # An objective of this step: that of the engine stays eager, for short batches and for measurements.
        objective = Objective(self.engine.method, self.engine.objective.config)
        self._graphed = capture_objective(objective, self._example.tensors)
        for buffer, before in buffers:
            buffer.copy_(before)

    def __call__(self, batch: Batch) -> Tensor:
        """Take a step on `batch`.

        Returns [T + 2]: the weighted terms, their sum, and 1 if the step was skipped because of an overflow at fp16,
        else 0.
        """
        with self.meter.phase("forward"):
            # A last batch of a different size runs eagerly.
            if self._graphed is not None and self._example is not None and self._example.takes(batch):
                terms = self._graphed(*batch.tensors)
            else:
                terms = self.engine.terms(batch)
        with self.meter.phase("backward"):
            self.engine.backward(terms)
        with self.meter.phase("optimizer"):
            self.engine.update()
        terms = terms.detach()
        return torch.cat([terms, terms.sum()[None], self.engine.skipped[None]])
