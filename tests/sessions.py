"""Train, load and evaluate a configuration in a new session, as one command does."""

from __future__ import annotations

from typing import Any

from runner import evaluate as evaluation
from runner import trained_runs
from runner.backbones import Backbones
from runner.config import RunConfig, RuntimeConfig, Target
from runner.distributed.collectives import ProcessGroup
from runner.results import EvalResult
from runner.run_state import RunSpec, RunState, read_state
from runner.session import Run, Session, TrainedRun
from runner.train import train_run


def make_run(
    config: RunConfig, runtime: RuntimeConfig, group: ProcessGroup | None = None, backbones: Backbones | None = None
) -> Run:
    return Session(runtime, group, backbones).get_run(config)


def train(config: RunConfig, runtime: RuntimeConfig, *, group: ProcessGroup | None = None, **request: Any) -> Any:
    """Train a run. request: of `runner.train.train_run`."""
    return train_run(make_run(config, runtime, group), **request)


def load_trained(
    config: RunConfig, runtime: RuntimeConfig, group: ProcessGroup | None = None, backbones: Backbones | None = None
) -> TrainedRun:
    return trained_runs.load_trained(make_run(config, runtime, group, backbones))


def evaluate(
    config: RunConfig,
    target: Target,
    runtime: RuntimeConfig,
    *,
    force: bool = False,
    group: ProcessGroup | None = None,
    trained: TrainedRun | None = None,
) -> EvalResult:
    """Evaluate a run. trained: the run as it was loaded before."""
    run = make_run(config, runtime, group)
    run.trained = trained
    return evaluation.evaluate_run(run, target, force=force)


def state_of(spec: RunSpec, runtime: RuntimeConfig) -> RunState:
    return read_state(make_run(spec.config, runtime), spec.targets)
