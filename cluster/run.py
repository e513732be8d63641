"""Define a run as it is sent to a machine, with the folders there, the reports about it, and its score."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from pydantic import Field

from runner.config import FrozenModel, RunConfig, RuntimeConfig, Target
from runner.remote_results import results_root
from runner.results import MaskedText, harmonic_mean
from runner.run_folders import RunFolder, check_training_content
from shards.default_paths import cache_home, data_root
from shards.urls import is_url

SCORE = "score"


class RunSpec(FrozenModel):
    """A training and the targets to evaluate it on, `dataset:classes:split` each."""

    config: RunConfig
    targets: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The run's folder below the results."""
        return self.config.path


class TrialReport(FrozenModel):
    """Progress of a trial and, with `state` "done" or "failed", its outcome."""

    state: Literal["running", "waiting", "done", "failed"] = "running"
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
        rungs, rung = [], self.grace_period
        while rung < epochs:
            rungs.append(rung)
            rung *= self.reduction_factor
        return tuple(rungs)


def validation_targets(dataset: str, classes: str) -> tuple[str, ...]:
    """List the validation targets of a run: the classes trained on, with half of the base half both of its halves."""
    parts = ("dev-base", "dev-novel") if classes == "dev-base" else (classes,)
    return tuple(f"{dataset}:{part}:val" for part in parts)


def score(accuracies: Sequence[float]) -> float:
    """Compute the score of a run: its accuracy, for two targets their harmonic mean, for more the mean."""
    return harmonic_mean(*accuracies) if len(accuracies) == 2 else fmean(accuracies)


def final_score(run: RunSpec, runtime: RuntimeConfig, *, any_code: bool = False) -> float | None:
    """Compute the score of a finished run, None while its training or an evaluation is missing.

    Without `any_code`, runs of other code than is installed count as missing: their training is refused. Raises
    UserError for a file that cannot be read and for a run on other content of the data set.
    """
    folder = RunFolder(runtime.results / run.path)
    if (training := folder.read_training()) is None or (not any_code and training.changed_code(run.config)):
        return None
    folder.check_config(run.config)
    check_training_content(run.config, training, runtime.data)
    settings = runtime.evaluation.for_run(run.config)
    results = [folder.read_evaluation(Target.parse_unchecked(target), settings) for target in run.targets]
    # An evaluation of earlier weights, or of another number of images, would be a score of something else.
    current = [result for result in results if result and result.is_current(training, runtime.limit)]
    return score([result.accuracy for result in current]) if len(current) == len(results) else None


def score_at(run: RunSpec, epoch: int, runtime: RuntimeConfig) -> float | None:
    """Compute the score of a run after `epoch` (0-based) from its validation counts, None without validation."""
    counts = RunFolder(runtime.results / run.path).read_validation()
    by_target = {count.target: count.accuracy for count in counts if count.epoch == epoch}
    accuracies = [by_target[target] for target in run.targets if target in by_target]
    return score(accuracies) if accuracies and len(accuracies) == len(run.targets) else None


@dataclass(frozen=True)
class StoragePaths:
    """The values of --data and --results as given, and the rest of a `RuntimeConfig`.

    data: a folder, a URL, or empty for the default of the machine. results: a folder that all machines see, or a URL.
    """

    data: str
    results: str
    runtime: RuntimeConfig

    @classmethod
    def with_absolute_paths(cls, data: str, results: str, runtime: RuntimeConfig) -> StoragePaths:
        """Return paths that mean the same on all machines: relative ones become absolute on the driver.

        $PROCAP_DATA of the driver has the same effect as --data.
        """
        return cls(absolute(data or os.environ.get("PROCAP_DATA", "")), absolute(results), runtime)

    def local_runtime(self) -> RuntimeConfig:
        """Return the runtime for this machine, with its own cache and mirrors."""
        results, url = results_root(self.results, cache_home())
        return replace(self.runtime, data=data_root(self.data), results=results, results_url=url)


def absolute(folder: str) -> str:
    """Make a folder absolute; URLs and the empty string stay as they are."""
    # Links are not resolved: the same name may lead to another mount point on another machine.
    return folder if not folder or is_url(folder) else os.path.abspath(Path(folder).expanduser())
