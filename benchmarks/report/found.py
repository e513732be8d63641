"""Find the suites below a results folder, with the state of their runs, even if some of it is missing or broken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results.frame import order_in
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import SuiteOptions
from benchmarks.suites import SUITES, suite_named
from benchmarks.suites.planning import recorded_options
from benchmarks.suites.suite import Suite
from procap.errors import UserError
from runner.results import RunFolder
from runner.run_collection import Collection, find_collections, read_collection
from shards.errors import DataError

STATES: Mapping[str, str] = {
    "failed": "failed",
    "broken": "with a file that cannot be read",
    "interrupted": "stopped while training",
    "paused": "trained for some of the epochs",
    "running": "running, or killed",
    "not evaluated": "trained, with evaluations missing",
    "missing": "not started",
}
"""States of an unfinished run, the worst first, and their descriptions."""


@dataclass(frozen=True)
class Problem:
    """Something that could not be read or made. where: the suite it belongs to."""

    where: str
    what: str


@dataclass(frozen=True)
class UnfinishedRun:
    """A planned run with missing results. state: a key of STATES. description: the state, with the reason if known."""

    path: str
    state: str
    description: str


@dataclass(frozen=True)
class FoundSuite:
    """A suite that was started, and what exists of it.

    unfinished: its unfinished runs, the worst first. further: finished runs of its collection that its options do not
    plan, made with other flags. guessed: its options were not recorded, see `recorded_options`.
    """

    suite: Suite
    collection: Collection
    results: SuiteResults
    unfinished: tuple[UnfinishedRun, ...] = ()
    further: tuple[str, ...] = ()
    guessed: bool = False

    @property
    def name(self) -> str:
        return self.suite.name

    @property
    def options(self) -> SuiteOptions:
        return self.results.options


def find_suites(
    results: Path, data: Path | None = None, wanted: Sequence[str] = ()
) -> tuple[list[FoundSuite], list[Problem]]:
    """Find every suite that was started below `results`, in the order of the paper, then users' own by name.

    wanted: names of suites, or files with one; empty: all. What cannot be read becomes a Problem.
    Raises UsageError for an unknown name.
    """
    chosen = {suite_named(word).name: word for word in wanted}
    found, problems = [], []
    for folder in sorted(find_collections(results), key=lambda one: order_in(one.name, SUITES)):
        name = folder.name
        if folder.parent.name != "suite" or (chosen and name not in chosen):
            continue
        try:
            found.append(_read_suite(folder, chosen.get(name, name), results, data))
        except (UserError, DataError) as error:
            problems.append(Problem(name, str(error)))
    started = {one.collection.name for one in found} | {one.where for one in problems}
    problems += [Problem(name, "was not started here") for name in chosen if name not in started]
    return found, problems


def _read_suite(folder: Path, word: str, root: Path, data: Path | None) -> FoundSuite:
    collection = read_collection(folder)
    assert collection is not None
    try:
        suite = suite_named(word)
    except UserError as error:
        raise UserError(f"no suite '{word}' is installed; if it is in a file: procap report FILE.py") from error
    options, guessed = recorded_options(suite, collection, root, data)
    results = SuiteResults.read(suite, options, root)
    # A command that was stopped or refused has left its plan in the collection, but no runs.
    further = tuple(collection.finished(root, but=set(results.paths)))
    return FoundSuite(suite, collection, results, _find_unfinished(results, collection.failed), further, guessed)


def _find_unfinished(results: SuiteResults, failures: Mapping[str, str]) -> tuple[UnfinishedRun, ...]:
    """List the planned runs with missing results. failures: reasons of the last attempt, by run."""
    targets: dict[str, list[str]] = {}
    for path, target in results.missing:
        targets.setdefault(path, []).append(target)
    found = []
    for path, missing in targets.items():
        state, reason = _read_state(results.results / path, results.unreadable.get(path, ""), failures.get(path, ""))
        text = STATES[state] + (f" ({', '.join(missing)})" if state == "not evaluated" else "")
        found.append(UnfinishedRun(path, state, f"{text}: {reason}" if reason else text))
    return tuple(sorted(found, key=lambda run: list(STATES).index(run.state)))


def _read_state(folder: Path, unreadable: str, failure: str) -> tuple[str, str]:
    """Return state and reason of an unfinished run."""
    if unreadable:
        return "broken", unreadable
    try:
        if RunFolder(folder).train():
            return "not evaluated", failure
        progress = RunFolder(folder).progress()
    except UserError as error:
        return "broken", str(error)
    state = progress.status if progress and progress.status in STATES else "missing"
    # A run that was killed in its last attempt still has the status "running".
    if failure and state in ("running", "missing"):
        state = "failed"
    return state, failure if state == "failed" else ""


def merge_unfinished(suites: Sequence[FoundSuite]) -> list[UnfinishedRun]:
    """List the unfinished runs of all suites, each once and in the worst state it has in any of them."""
    worst: dict[str, UnfinishedRun] = {}
    for run in sorted((run for one in suites for run in one.unfinished), key=lambda run: list(STATES).index(run.state)):
        worst.setdefault(run.path, run)
    return list(worst.values())
