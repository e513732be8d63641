"""Define what a trial is sent and what it reports: folders, progress, rungs, and the targets of its score."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from runner.config import FrozenModel, RuntimeConfig
from runner.remote_results import results_root
from runner.results import MaskedText
from shards.default_paths import cache_home, data_root
from shards.urls import is_url

SCORE = "score"


class TrialReport(FrozenModel):
    """Progress of a trial and, with `state` "finished" or "failed", its outcome."""

    state: Literal["running", "waiting", "finished", "failed"] = "running"
    epoch: int = Field(default=0, description="finished epochs of the current run, or of all runs that train in step")
    run: str = Field(default="", description="path of the current run")
    why: MaskedText = Field(default="", description="the error, or what is waited for")
    trace: MaskedText = Field(default="", description="traceback of an internal error")
    seconds: float = Field(default=0.0, description="since the start of this attempt")
    score: float | None = Field(default=None, description="mean over the runs, in percent")
    host: str = ""

    def to_result(self) -> dict[str, Any]:
        """Convert to a result of Ray Tune, whose searchers and schedulers read "epoch" and "score"."""
        # Ray Tune needs a number in every result.
        score = math.nan if self.score is None else self.score
        return {"report": self.model_dump(mode="json"), "epoch": self.epoch, SCORE: score}

    @classmethod
    def from_result(cls, result: Mapping[str, Any]) -> TrialReport:
        """Convert back from `to_result`; other keys, which Ray Tune adds, are ignored."""
        return cls.model_validate(result["report"]) if "report" in result else cls()


class Halving(NamedTuple):
    """Successive halving's parameters: the first rung in epochs and the ratio of successive rungs."""

    grace_period: int
    reduction_factor: int

    def rungs(self, epochs: int) -> tuple[int, ...]:
        """Return the epochs at which a scheduler decides about trials of `epochs` epochs, without the last one."""
        rungs = (self.grace_period * self.reduction_factor**number for number in count())
        return tuple(takewhile(lambda rung: rung < epochs, rungs))


def validation_targets(dataset: str, classes: str) -> tuple[str, ...]:
    """List the validation targets of a run: the classes trained on, with half of the base half both of its halves."""
    parts = ("dev-base", "dev-novel") if classes == "dev-base" else (classes,)
    return tuple(f"{dataset}:{part}:val" for part in parts)


@dataclass(frozen=True)
class StoragePaths:
    """The values of --data (empty: the machine's default) and --results as given, and the rest of a `RuntimeConfig`."""

    data: str
    results: str
    runtime: RuntimeConfig

    @classmethod
    def for_workers(cls, data: str, results: str, runtime: RuntimeConfig) -> StoragePaths:
        """Return paths that mean the same on all machines; the driver's $PROCAP_DATA is the default of --data.

        Workers print nothing and do not send to MLflow: the driver does both for all runs.
        """
        silent = replace(runtime, quiet=True, tracking_uri="off")
        return cls(absolute(data or os.environ.get("PROCAP_DATA", "")), absolute(results), silent)

    def local_runtime(self) -> RuntimeConfig:
        """Return the runtime for this machine, with its own cache and mirrors."""
        results, url = results_root(self.results, cache_home())
        return replace(self.runtime, data=data_root(self.data), results=results, results_url=url)


def absolute(folder: str) -> str:
    """Make a folder absolute; URLs and the empty string stay as they are."""
    # Links are not resolved: the same name may lead to another mount point on another machine.
    return folder if not folder or is_url(folder) else os.path.abspath(Path(folder).expanduser())
