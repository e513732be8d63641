"""What a report is made of: every suite below a results folder, run by run, however much of it is there or broken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from benchmarks.results.frame import order_in
from benchmarks.results.suite import SuiteResults, frame_of_runs
from benchmarks.results.variant import SuiteOptions
from benchmarks.suites import SUITES, suite_named
from benchmarks.suites.planning import recorded_options
from benchmarks.suites.suite import Suite
from procap.errors import UserError
from runner.collection import Collection, CollectionFolder, find_collections
from runner.config import Target
from runner.results import EvalResult, RunFolder, TrainResult
from shards.errors import DataError

Read = TypeVar("Read")

STATES: Mapping[str, str] = {
    "failed": "failed",
    "broken": "with a file that cannot be read",
    "interrupted": "stopped while training",
    "paused": "trained for some of the epochs",
    "running": "going on, or killed",
    "not evaluated": "trained, with evaluations missing",
    "missing": "never begun",
}
"""What can be wrong with a run of a plan, the worst first, for people."""


@dataclass(frozen=True)
class Run:
    """One run of a suite's plan. state: "finished", or of STATES; why: in words; absent: targets without a result."""

    path: str
    state: str
    why: str = ""
    absent: tuple[str, ...] = ()
    training: TrainResult | None = None
    evaluations: tuple[EvalResult, ...] = ()

    def with_targets_of(self, other: Run) -> Run:
        """The same run with the targets of another suite as well, in the worse of both states."""
        worst = min(self, other, key=lambda run: [*STATES, "finished"].index(run.state))
        known = {result.target for result in self.evaluations}
        more = (result for result in other.evaluations if result.target not in known)
        absent = tuple(dict.fromkeys([*self.absent, *other.absent]))
        return replace(worst, absent=absent, evaluations=(*self.evaluations, *more))


@dataclass(frozen=True)
class Found:
    """A suite that was begun.

    further: trained runs of its collection that its options does not have, made with other flags. guessed: see
    `choice_of`.
    """

    suite: Suite
    collection: Collection
    done: SuiteResults
    runs: tuple[Run, ...]
    further: tuple[str, ...] = ()
    guessed: bool = False

    @property
    def options(self) -> SuiteOptions:
        return self.done.options

    @cached_property
    def unfinished(self) -> list[Run]:
        """The worst first."""
        order = list(STATES)
        return sorted((run for run in self.runs if run.state in STATES), key=lambda run: order.index(run.state))


@dataclass(frozen=True)
class Trouble:
    """Something that could not be read or made. where: the suite it belongs to."""

    where: str
    what: str


def read_suites(
    results: Path, data: Path | None = None, wanted: Sequence[str] = ()
) -> tuple[list[Found], list[Trouble]]:
    """Every suite below `results` in the order of the paper, those of other people behind by name.

    wanted: names of suites, or files with one; the others are left out. Raises UsageError for a name that is none.
    Whatever cannot be read is named, and the rest is still read.
    """
    chosen = {suite_named(word).name: word for word in wanted}
    found, troubles = [], []
    for folder in sorted(find_collections(results), key=lambda one: order_in(one.path.name, SUITES)):
        name = folder.path.name
        if folder.path.parent.name != "suite" or (chosen and name not in chosen):
            continue
        try:
            found.append(_read(folder, chosen.get(name, name), results, data))
        except (UserError, DataError) as error:
            troubles.append(Trouble(name, str(error)))
    there = {one.collection.name for one in found} | {one.where for one in troubles}
    troubles += [Trouble(name, "was never begun here") for name in chosen if name not in there]
    return found, troubles


def _known(name: str) -> Suite:
    try:
        return suite_named(name)
    except UserError as error:
        raise UserError(f"no suite '{name}' is installed; where it is a file: procap report FILE.py") from error


def _read(folder: CollectionFolder, called: str, results: Path, data: Path | None) -> Found:
    collection = folder.collection()
    assert collection is not None
    suite = _known(called)
    options, guessed = recorded_options(suite, collection, results, data)
    entries = suite.plan(options)
    targets: dict[str, dict[str, None]] = {}
    for entry in entries:
        targets.setdefault(entry.path, {}).update(dict.fromkeys(entry.spec.targets))
    runs = {path: read_run(results, path, wanted, collection.failed.get(path, "")) for path, wanted in targets.items()}
    found = {
        (path, result.target): (run.training, result)
        for path, run in runs.items()
        for result in run.evaluations
        if run.training is not None
    }
    frame = frame_of_runs(entries, options.seeds, found)
    done = SuiteResults(suite, options, tuple(entries), frame, results)
    # A command that was stopped or refused has left its plan in the collection, but no runs.
    further = tuple(collection.finished(results, but=runs))
    return Found(suite, collection, done, tuple(runs.values()), further, guessed)


def read_run(results: Path, path: str, targets: Iterable[str], failure: str = "") -> Run:
    """How far a run is; a file that cannot be read makes it a broken one, with what else it has.

    failure: why it failed when it was last tried, which says nothing of one that has been finished since.
    """
    folder = RunFolder(results / path)
    why: list[str] = []

    def readable(read: Callable[[], Read | None]) -> Read | None:
        try:
            return read()
        except UserError as error:
            why.append(str(error))
            return None

    training = readable(folder.train)
    progress = readable(folder.progress) if training is None else None
    evaluations, absent = [], []
    for target in targets:
        result = readable(partial(folder.evaluation, Target.recorded(target)))
        if result is not None and training is not None and result.checkpoint_sha256 != training.checkpoint_sha256:
            why.append(f"{path} was evaluated on {target} with other weights than it holds now; repeat it with --force")
            result = None
        if result is None or training is None:
            absent.append(target)
        else:
            evaluations.append(result)
    if why:
        state = "broken"
    elif training is not None:
        state = "not evaluated" if absent else "finished"
    else:
        state = progress.status if progress else "missing"
        # What was killed too often looks as if it went on.
        state = "failed" if failure and state in ("running", "missing") else state
    if failure and state in ("failed", "not evaluated"):
        why.append(failure)
    return Run(path, state, "; ".join(why), tuple(absent), training, tuple(evaluations))
