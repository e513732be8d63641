"""What is sent to a machine: runs to train and where to evaluate them, and what comes back. All of it is JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from runner.config import RunConfig


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RunSpec(_Message):
    """One run and its targets, `dataset:classes:split` each."""

    config: RunConfig
    targets: tuple[str, ...] = ()


class Job(_Message):
    """Runs that one trial of Ray Tune carries out, nearly always one.

    Several are the same configuration with other seeds or data sets, of which only the mean is looked at: they are
    trained in turn from one of `rungs` to the next, so that the mean is known at every epoch when the scheduler decides
    at a rung whether to go on.
    """

    pieces: tuple[RunSpec, ...] = Field(min_length=1)
    rungs: tuple[int, ...] = Field(default=(), description="epochs at which the runs pause; empty: never")
    watched: tuple[tuple[str, ...], ...] = Field(
        default=(), description="for each piece the targets that are validated in every epoch, with rungs only"
    )

    @property
    def name(self) -> str:
        """For people."""
        first, *others = (piece.config.path for piece in self.pieces)
        return f"{first} and {len(others)} more" if others else first


class Report(_Message):
    """What a job says on its way and, with `state` "done" or "failed", at its end."""

    state: Literal["running", "waiting", "done", "failed"] = "running"
    epoch: int = Field(default=0, description="of the runs in turn, 1-based; 0 before the first has ended")
    of: int = 0
    run: str = Field(default="", description="the run that is spoken of")
    why: str = Field(default="", description="what failed, or what is waited for")
    trace: str = Field(default="", description="of a failure that is nobody's fault but the program's")
    seconds: float = Field(default=0.0, description="that this attempt has taken so far")
    figures: dict[str, float] = Field(default_factory=dict, description="means over the runs")
    host: str = ""

    def flat(self) -> dict[str, Any]:
        """As Ray Tune takes a result: the figures that it may be told to look at beside the rest."""
        return {REPORT: self.model_dump(mode="json"), "epoch": self.epoch, **self.figures}

    @classmethod
    def of_flat(cls, result: Mapping[str, Any]) -> Report:
        """What `flat` gave, among what Ray Tune adds."""
        return cls.model_validate(result[REPORT]) if REPORT in result else cls()


REPORT = "report"
