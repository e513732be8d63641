"""Read suites, sweeps and single runs below a results folder, even if some of it is missing or broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.results.frame import dataset_order, make_frame, make_records, order_in, run_folders
from benchmarks.results.metrics import Metric
from benchmarks.results.profiles import Profile
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import SuiteOptions, SuiteRun, Variant
from benchmarks.suites import SUITES
from benchmarks.suites.planning import describe_unusable, find_other_runs, find_suite, recorded_options
from benchmarks.suites.suite import Suite
from benchmarks.sweeps.table import sweep_table
from benchmarks.tables.runs import calibration_of_runs, run_tables
from benchmarks.tables.table import Column, Row, Table
from cluster.run import RunSpec
from cluster.sweep_record import SWEEPS, Configuration, SweepFolder, SweepSettings, is_possible
from procap.errors import UserError
from procap.methods import describe_change
from runner.config import RunConfig
from runner.results import read_document
from runner.run_collection import Collection, find_collections, read_collection
from runner.run_folders import RunFolder

STATES = ("failed", "broken", "not evaluated", "unfinished", "not started")
"""States of a planned run without all of its results, the worst first."""

NO_PROFILE = Profile("", (), backbone="", general="", shifts=())
"""The profile of runs that no suite has planned."""
Problem = tuple[str, str]
"""A suite, and what could not be read or made."""


class UnfinishedRun(NamedTuple):
    """A planned run with missing results. state: one of STATES. reason: empty if none is known."""

    path: str
    state: str
    reason: str

    @property
    def severity(self) -> int:
        return STATES.index(self.state)


@dataclass(frozen=True)
class StartedSuite:
    """A suite that was started: its unfinished runs, the worst first; other_runs: finished, of other settings.

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
            if missing := describe_unusable(suites[-1].collection):
                problems.append((name, missing))
        except UserError as error:
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
    unfinished = [read_unfinished(root, path, collection, results.unreadable, own) for path, own in missing.items()]
    unfinished.sort(key=lambda run: run.severity)
    return StartedSuite(suite, collection, results, tuple(unfinished), find_other_runs(collection, root, results.paths))


def read_unfinished(
    root: Path, path: str, collection: Collection, unreadable: Mapping[str, str], targets: Sequence[str] = ()
) -> UnfinishedRun:
    """Read the state of an unfinished run. unreadable: errors by run. targets: those that are not evaluated."""
    folder, failure = RunFolder(root / path), collection.failed.get(path, "")
    try:
        if path in unreadable:
            raise UserError(unreadable[path])
        if folder.train():
            return UnfinishedRun(path, "not evaluated", f"{', '.join(targets)}{failure and f' ({failure})'}")
        progress = folder.progress()
    except UserError as error:
        return UnfinishedRun(path, "broken", str(error))
    if failure or (progress and progress.status == "failed"):
        return UnfinishedRun(path, "failed", failure or (progress.reason if progress else ""))
    return UnfinishedRun(path, "unfinished" if progress else "not started", "")


def merge_unfinished(suites: Sequence[StartedSuite]) -> list[UnfinishedRun]:
    """List the unfinished runs of all suites, each once and in the worst state it has in any of them."""
    worst: dict[str, UnfinishedRun] = {}
    for run in sorted((run for one in suites for run in one.unfinished), key=lambda run: run.severity):
        worst.setdefault(run.path, run)
    return list(worst.values())


def count_states(unfinished: Sequence[UnfinishedRun]) -> str:
    """Count unfinished runs by state: "1 failed, 2 not started"."""
    counts = Counter(run.state for run in unfinished)
    return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])


def read_runs(results: Path, wanted: Callable[[RunConfig], bool], title: str) -> StartedSuite | None:
    """Read the runs below `results` that are `wanted`; None if there are none."""
    runs = [one for one in run_folders(results) if wanted(one[1])]
    # Single runs record no start or end time.
    collection = Collection(kind="suite", name="runs", status="finished", started=0)

    def tables(done: SuiteResults) -> list[Table]:
        evaluated = [*run_tables(done.frame), *calibration_of_runs(done.frame)[:1]] if len(done.frame) else []
        return [*evaluated, _runs_table(done)]

    return _read_group(Suite("runs", title, (), tables), results, runs, collection) if runs else None


def _runs_table(done: SuiteResults) -> Table:
    """Make a row for each run, trained or not."""
    rows = []
    for run in done.runs:
        config, folder, training, state = run.spec.config, RunFolder(done.results / run.path), None, "broken"
        # Unreadable files are listed as problems of their run.
        with suppress(UserError):
            state, training = folder.status(), folder.train()
            state += " (other code)" * bool(training and training.changed_code(config))
        shots = config.shots if config.recipe.epochs else None
        numbers = shots, len(training.epochs) if training else None, training.seconds if training else None
        cells = [None if number is None else Metric(number) for number in numbers]
        rows.append(Row((run.path,), (state, *cells, ", ".join(run.spec.targets) or None)))
    digits = {"Shots": 0, "Epochs": 0, "Training, s": 1}
    columns = (
        Column("State", ""),
        *(Column(name, "", number) for name, number in digits.items()),
        Column("Tested on", ""),
    )
    return Table("runs", "Runs", ("Run",), columns, rows, ("Shots: images per class, 0 for full.",), wide=True)


def find_sweeps(results: Path) -> tuple[list[StartedSuite], list[Problem]]:
    """Read the sweeps below `results`, and list what cannot be read."""
    found, problems = [], []
    folders = [folder for folder in find_collections(results) if folder.parent.name == "sweep"]
    runs = {config.path: (folder, config) for folder, config in run_folders(results)} if folders else {}
    for folder in folders:
        searched = SweepFolder(results / SWEEPS / folder.name)
        try:
            collection = read_collection(folder)
            settings = read_document(searched.path / "sweep.json", SweepSettings)
            if collection is None or settings is None:
                raise UserError(f"{searched.path / 'sweep.json'} is missing")
            configurations = list(searched.load().values())
            if any(not is_possible(settings, one.values) for one in configurations):
                raise UserError(f"{searched.path / 'configurations.json'} has other values than the sweep searches")
        except UserError as error:
            problems.append((folder.name, str(error)))
            continue
        own = [runs[path] for path in collection.runs if path in runs]
        trained = ((config, at.train()) for at, config in own)
        changes = {config.path: describe_change(config.method, one.method_source) for config, one in trained if one}
        other_code = {path: change for path, change in changes.items() if change}
        tables = partial(_sweep_tables, settings, configurations, other_code)
        suite = Suite(settings.name, f"sweep {settings.name}", settings.methods, tables)
        # Runs that a scheduler has stopped early are not unfinished.
        ended = {path for one in configurations if one.state in ("finished", "stopped") for path in one.runs}
        found.append(_read_group(suite, results, own, collection, ended))
    return found, problems


def _sweep_tables(
    settings: SweepSettings, configurations: Sequence[Configuration], other_code: Mapping[str, str], done: SuiteResults
) -> list[Table]:
    return [sweep_table(settings, configurations, other_code)]


def _read_group(
    suite: Suite,
    results: Path,
    runs: Sequence[tuple[RunFolder, RunConfig]],
    collection: Collection,
    ended: Container[str] = (),
) -> StartedSuite:
    """Read the results of runs. ended: those that are not unfinished, even if their training is."""
    records: list[dict[str, Any]] = []
    planned, unreadable, unfinished = [], {}, []
    for folder, config in runs:
        training, targets = None, []
        try:
            if training := folder.train():
                for record in make_records(folder, config, training, folder.evaluations()):
                    records.append(record)
                    targets.append(record["target"])
        except UserError as error:
            unreadable[config.path] = str(error)
        if config.path in unreadable or not (targets or config.path in ended):
            missing = [f"procap eval {results / config.path}"]
            unfinished.append(read_unfinished(results, config.path, collection, unreadable, missing))
        spec = RunSpec(config=config, targets=tuple(dict.fromkeys(targets)))
        planned.append(SuiteRun(Variant(config.method), config.dataset, config.seed, spec))
    configs = [config for _, config in runs]
    options = SuiteOptions(
        NO_PROFILE,
        datasets=tuple(sorted({config.dataset for config in configs}, key=dataset_order)),
        methods=tuple(dict.fromkeys(config.method for config in configs)),
        seeds=tuple(sorted({config.seed for config in configs})),
    )
    frame = make_frame(records)
    done = SuiteResults(suite, options, tuple(planned), frame, results, unreadable=unreadable)
    return StartedSuite(suite, collection, done, tuple(unfinished), is_suite=False)
