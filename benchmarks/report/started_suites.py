"""Find the suites below a results folder, with the state of their runs, even if some of it is missing or broken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results.frame import order_in
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import SuiteOptions
from benchmarks.suites import SUITES
from benchmarks.suites.planning import describe_uninstalled, find_other_runs, find_suite, recorded_options
from benchmarks.suites.suite import Suite
from procap.errors import UserError
from runner.run_collection import Collection, find_collections, read_collection
from runner.run_folders import RunFolder
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

Problem = tuple[str, str]
"""A suite, and what of it could not be read or made."""


@dataclass(frozen=True)
class UnfinishedRun:
    """A planned run with missing results. state: a key of STATES. description: the state, with the reason if known."""

    path: str
    state: str
    description: str


@dataclass(frozen=True)
class StartedSuite:
    """A suite that was started: its unfinished runs, the worst first; other_runs: finished ones made with other flags.

    is_suite: False for a sweep and for runs without a suite, which no `procap bench` continues.
    """

    suite: Suite
    collection: Collection
    results: SuiteResults
    unfinished: tuple[UnfinishedRun, ...] = ()
    other_runs: tuple[str, ...] = ()
    is_suite: bool = True

    @property
    def name(self) -> str:
        return self.suite.name

    @property
    def options(self) -> SuiteOptions:
        return self.results.options


def find_started_suites(
    results: Path, data: Path | None = None, wanted: Sequence[str] = ()
) -> tuple[list[StartedSuite], list[Problem]]:
    """Find the suites that were started below `results`, or those `wanted`, in order of the paper; and problems."""
    chosen = {find_suite(word, results).name: word for word in wanted}
    suites: list[StartedSuite] = []
    problems: list[Problem] = []
    for folder in sorted(find_collections(results), key=lambda one: order_in(one.name, SUITES)):
        name = folder.name
        if folder.parent.name != "suite" or (chosen and name not in chosen):
            continue
        try:
            suites.append(_read_suite(folder, chosen.get(name, name), results, data))
            if missing := describe_uninstalled(suites[-1].collection):
                problems.append((name, missing))
        except (UserError, DataError) as error:
            problems.append((name, str(error)))
    started = {one.collection.name for one in suites} | {name for name, _ in problems}
    problems += [(name, "was not started here") for name in chosen if name not in started]
    return suites, problems


def _read_suite(folder: Path, word: str, root: Path, data: Path | None) -> StartedSuite:
    collection = read_collection(folder)
    assert collection is not None
    try:
        suite = find_suite(word, root)
    except UserError as error:
        raise UserError(f"{error}; if it is in a file: procap report FILE.py") from error
    results = SuiteResults.read(suite, recorded_options(suite, collection, root, data), root)
    missing: dict[str, list[str]] = {}
    for path, target in results.missing:
        missing.setdefault(path, []).append(target)
    unfinished = [
        read_unfinished(root, path, results.unreadable, collection, targets) for path, targets in missing.items()
    ]
    # A command that was stopped or refused has left its plan in the collection, but no runs.
    other_runs = find_other_runs(collection, root, results.paths)
    return StartedSuite(suite, collection, results, tuple(sorted(unfinished, key=_severity)), other_runs)


def read_unfinished(
    root: Path, path: str, unreadable: Mapping[str, str], collection: Collection, targets: Sequence[str] = ()
) -> UnfinishedRun:
    """Read the state of an unfinished run. unreadable: errors by run. targets: those that are not evaluated."""
    state, reason = "broken", unreadable.get(path, "")
    if not reason:
        state, reason = _read_state(RunFolder(root / path), collection.failed.get(path, ""))
    text = STATES[state] + (f" ({', '.join(targets)})" if state == "not evaluated" else "")
    return UnfinishedRun(path, state, f"{text}: {reason}" if reason else text)


def _read_state(folder: RunFolder, failure: str) -> tuple[str, str]:
    """Return state and reason of an unfinished run. failure: the reason of its last attempt, if that failed."""
    try:
        if folder.train():
            return "not evaluated", failure
        progress = folder.progress()
    except UserError as error:
        return "broken", str(error)
    state = progress.status if progress and progress.status in STATES else "missing"
    # A run that was killed in its last attempt still has the status "running".
    if failure and state in ("running", "missing"):
        state = "failed"
    recorded = progress.reason if progress else ""
    return state, failure or recorded if state == "failed" else ""


def merge_unfinished(suites: Sequence[StartedSuite]) -> list[UnfinishedRun]:
    """List the unfinished runs of all suites, each once and in the worst state it has in any of them."""
    worst: dict[str, UnfinishedRun] = {}
    for run in sorted((run for one in suites for run in one.unfinished), key=_severity):
        worst.setdefault(run.path, run)
    return list(worst.values())


def _severity(run: UnfinishedRun) -> int:
    return list(STATES).index(run.state)
