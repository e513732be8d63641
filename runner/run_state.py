"""Say what exists of a run, in one set of words, and its score.

| word | what exists |
| --- | --- |
| new | nothing |
| unfinished | the state of a training that has begun; the same command resumes it |
| failed | the same, of a training whose last attempt ended with an error |
| not evaluated | a finished training, without some of the results that are asked for |
| finished | a finished training, and every result that is asked for |
| repeat | one of these, and `--force` replaces it |
| other data | a run on other content of its data sets than is packed now |
| other code | a run of other code of its method than is installed |
| broken | a file that cannot be read |

A configuration of a sweep has the state of its runs, or is `stopped` by its scheduler. `progress.json` and
`collection.json` have the status of an attempt instead, which MLflow shows: running, paused, interrupted, failed or
finished. `checkpoint` has the states that a training resumes from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

from procap.errors import UserError
from runner.config import FrozenModel, RunConfig, Target
from runner.results import harmonic_mean
from runner.run_folders import OtherContent, RunFolder
from runner.session import Run, Session


class RunSpec(FrozenModel):
    """A training and the targets to evaluate it on, `dataset:classes:split` each."""

    config: RunConfig
    targets: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The run's folder below the results."""
        return self.config.path

    def parse_targets(self) -> tuple[Target, ...]:
        return tuple(map(Target.parse_unchecked, self.targets))


State = Literal[
    "new", "unfinished", "failed", "not evaluated", "finished", "repeat", "other data", "other code", "broken"
]


class RunState(NamedTuple):
    """What exists of a run. open: the targets without a current result. reason: of all that stops it."""

    status: State
    open: tuple[str, ...] = ()
    reason: str = ""

    @property
    def is_finished(self) -> bool:
        return self.status == "finished"

    @property
    def is_trained(self) -> bool:
        return self.status in ("finished", "not evaluated")


def read_states(session: Session, specs: Iterable[RunSpec], *, force: bool = False) -> dict[str, RunState]:
    """Map the path of each run to what exists of it; no file of them raises an error."""
    states: dict[str, RunState] = {}
    for spec in specs:
        try:
            states[spec.path] = read_state(session.get_run(spec.config), spec.targets, force=force)
        except OtherContent as error:
            states[spec.path] = RunState("other data", spec.targets, str(error))
        except UserError as error:
            states[spec.path] = RunState("repeat" if force else "broken", spec.targets, str(error))
    return states


def read_stored_state(folder: RunFolder, targets: tuple[str, ...] = ()) -> RunState:
    """Read what the files of a run say by themselves, without the data and code of now; targets: without a result."""
    try:
        if folder.read_training():
            return RunState("not evaluated" if targets else "finished", targets)
        progress = folder.read_progress()
    except UserError as error:
        return RunState("broken", targets, str(error))
    if progress is None:
        return RunState("unfinished" if folder.state_folder.is_dir() else "new", targets)
    return RunState("failed" if progress.status == "failed" else "unfinished", targets, progress.reason)


def read_state(run: Run, targets: tuple[str, ...], *, force: bool = False, any_code: bool = False) -> RunState:
    """Read what exists of a run, with `force` to be repeated. any_code: also if different code made it.

    Raises UserError for a file that cannot be read, and OtherContent.
    """
    config, session = run.config, run.session
    training = run.read_training()
    if force or training is None:
        state = read_stored_state(run.folder, targets)
        return RunState("repeat", targets) if force and state.status != "new" else state
    session.check_content(config, config.dataset, training.manifest_digest)
    if not any_code and (change := training.changed_code(config)):
        return RunState("other code", targets, change)
    current = set[str]()
    for name in targets:
        target = Target.parse_unchecked(name)
        result = run.folder.read_evaluation(target, run.eval_settings)
        if result and result.is_current(training, session.runtime.limit):
            # An evaluation of other images than are packed now is refused, or repeated with --force, never reused.
            session.check_content(config, target.dataset, result.manifest_digest)
            current.add(name)
    if training.files:
        # This imports torch.
        from runner.setup import changed_file

        current = set() if changed_file(config, training.files) else current
    missing = tuple(name for name in targets if name not in current)
    return RunState("not evaluated" if missing else "finished", missing)


def score(accuracies: Sequence[float]) -> float:
    """Compute the score of a run (not of images, as `ScoreResult`): accuracy, for two targets HM, for more the mean."""
    return harmonic_mean(*accuracies) if len(accuracies) == 2 else fmean(accuracies)


def final_score(run: Run, targets: tuple[str, ...], *, any_code: bool = False) -> float | None:
    """Compute the score of a finished run, None while something is missing, or for other code without `any_code`.

    Raises UserError for a file that cannot be read and for a run on other content of the data set.
    """
    if not read_state(run, targets, any_code=any_code).is_finished:
        return None
    read = (run.folder.read_evaluation(Target.parse_unchecked(target), run.eval_settings) for target in targets)
    return score([result.accuracy for result in read if result])


def score_at(run: Run, targets: Sequence[str], epoch: int) -> float | None:
    """Compute the score of a run after `epoch` (0-based) from its validation counts, None without validation."""
    by_target = {count.target: count.accuracy for count in run.folder.read_validation() if count.epoch == epoch}
    accuracies = [by_target[target] for target in targets if target in by_target]
    return score(accuracies) if accuracies and len(accuracies) == len(targets) else None
