"""Say what exists of a run, in one set of words, and its score."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

from procap.errors import UserError
from runner.config import FrozenModel, RunConfig, Target
from runner.results import EvalResult, harmonic_mean
from runner.run_folders import OtherContent
from runner.session import Run, Session


class RunSpec(FrozenModel):
    """A training and the targets to evaluate it on, `dataset:classes:split` each."""

    config: RunConfig
    targets: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The run's folder below the results."""
        return self.config.path


class RunState(NamedTuple):
    """What exists of a run. open: the targets without a current result."""

    status: Literal["finished", "unfinished", "new", "repeat", "other data", "other code"]
    open: tuple[str, ...] = ()

    @property
    def is_done(self) -> bool:
        return self.status == "finished" and not self.open


def read_states(session: Session, runs: Iterable[RunSpec], *, force: bool = False) -> dict[str, RunState]:
    """Map the path of each run to what exists of it; files that cannot be read count as missing."""
    states: dict[str, RunState] = {}
    for run in runs:
        try:
            states[run.path] = read_state(session.run(run.config), run.targets, force=force)
        except OtherContent:
            states[run.path] = RunState("other data")
        except UserError:
            states[run.path] = RunState("new", run.targets)
    return states


def read_state(run: Run, targets: tuple[str, ...], *, force: bool = False, any_code: bool = False) -> RunState:
    """Read what exists of a run, with `force` to be repeated. any_code: also if other code than is installed made it.

    Raises UserError for a file that cannot be read, and OtherContent.
    """
    config, folder, session = run.config, run.folder, run.session
    training = run.read_training()
    is_started = training is not None or folder.state.is_dir()
    if force or training is None:
        return RunState("repeat" if force and is_started else "unfinished" if is_started else "new", targets)
    session.check_content(config, config.dataset, training.manifest_digest)
    if not any_code and training.changed_code(config):
        return RunState("other code", targets)
    current = set[str]()
    for name in targets:
        result = read_result(run, name)
        if result and result.is_current(training, session.runtime.limit):
            # An evaluation of other images than are packed now is refused, or repeated with --force, never reused.
            session.check_content(config, Target.parse_unchecked(name).dataset, result.manifest_digest)
            current.add(name)
    if training.files:
        # This imports torch.
        from runner.setup import changed_file

        current = set() if changed_file(config, training.files) else current
    return RunState("finished", tuple(name for name in targets if name not in current))


def read_result(run: Run, target: str) -> EvalResult | None:
    """Read the result of a target under the session's settings of the evaluation."""
    settings = run.session.runtime.evaluation.for_run(run.config)
    return run.folder.read_evaluation(Target.parse_unchecked(target), settings)


def score(accuracies: Sequence[float]) -> float:
    """Compute the score of a run: its accuracy, for two targets their harmonic mean, for more the mean."""
    return harmonic_mean(*accuracies) if len(accuracies) == 2 else fmean(accuracies)


def final_score(run: Run, targets: tuple[str, ...], *, any_code: bool = False) -> float | None:
    """Compute the score of a finished run, None while its training or an evaluation is missing.

    Without `any_code`, runs of other code than is installed count as missing: their training is refused. Raises
    UserError for a file that cannot be read and for a run on other content of the data set.
    """
    if not read_state(run, targets, any_code=any_code).is_done:
        return None
    return score([result.accuracy for target in targets if (result := read_result(run, target))])


def score_at(run: Run, targets: Sequence[str], epoch: int) -> float | None:
    """Compute the score of a run after `epoch` (0-based) from its validation counts, None without validation."""
    by_target = {count.target: count.accuracy for count in run.folder.read_validation() if count.epoch == epoch}
    accuracies = [by_target[target] for target in targets if target in by_target]
    return score(accuracies) if accuracies and len(accuracies) == len(targets) else None
