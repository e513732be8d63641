"""Read the suites, sweeps and other runs of a results folder, even if some of it is missing or broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.console.output import plural
from benchmarks.experiment.titles import order_in
from benchmarks.results.frame import Selected, list_selected_runs, make_frame, read_records
from benchmarks.results.suite_results import SuiteResults
from benchmarks.suites import SUITES, load_suite
from benchmarks.suites.plans import last_options
from benchmarks.sweeps.outcome import sweep_table
from benchmarks.tables.runs import calibration_of_runs, run_tables, title_runs, unknown_of_runs
from benchmarks.tables.table import Table
from cluster.sweep_record import SWEEPS, SweepFolder, read_scores
from procap.errors import UserError, check_names
from runner.config import RunConfig, RuntimeConfig
from runner.run_collection import find_collections, read_collection
from runner.run_folders import RunFolder
from runner.run_state import RunState, State, read_stored_state
from runner.session import Session
from shards.default_paths import data_root

if TYPE_CHECKING:
    import pandas as pd

STATES: tuple[State, ...] = ("failed", "broken", "not evaluated", "unfinished", "new")
"""The states of runs without all of their results, the worst first."""
Problem = tuple[str, str]
"""A part of the report, and what could not be read or made."""
Folders = Sequence[tuple[RunFolder, RunConfig]]


@dataclass(frozen=True)
class Section:
    """A part of the report: a suite, a sweep, or runs of neither.

    frame: its results, with a column `title`. unfinished: runs with missing results. suite_results: of a suite.
    """

    name: str
    heading: str
    frame: pd.DataFrame
    paths: Sequence[str]
    make_tables: Callable[[], Sequence[Table]]
    unfinished: Mapping[str, RunState]
    suite_results: SuiteResults | None = None

    @property
    def state(self) -> str:
        """How many runs are finished, as `count_finished`."""
        return count_finished(self.paths, self.unfinished)


def count_finished(paths: Collection[str], unfinished: Mapping[str, RunState]) -> str:
    """Describe how many runs are finished: "33 of 35 runs finished: 1 failed, 1 not started"."""
    if not paths:
        return "Measured without runs"
    counts = Counter(state.status for state in unfinished.values())
    states = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    finished = f"{len(paths) - len(unfinished)} of {plural(len(paths), 'run')} finished"
    return f"{finished}: {states}" if states else finished


def read_sections(
    results: Path, data: Path | None = None, names: Sequence[str] = (), reference: str = ""
) -> tuple[list[Section], list[Problem]]:
    """Read the suites, in the order of the paper, and sweeps below `results`, and list what cannot be read.

    names: suites (names or files) and sweeps to read; empty: all.
    """
    folders = find_collections(results)
    sweeps = {folder.name for folder in folders if folder.parent.name == "sweep"}
    # The folder of a suite is called as the suite is, not as the file that defines it.
    words = {name if name in sweeps else load_suite(name).name: name for name in names}
    problems = [(name, "was not started here") for name in words if name not in {folder.name for folder in folders}]
    sections: list[Section] = []
    for folder in sorted(folders, key=lambda folder: (folder.parent.name == "sweep", order_in(folder.name, SUITES))):
        if words and folder.name not in words:
            continue
        try:
            if folder.parent.name == "sweep":
                sections.append(_read_sweep(folder, Session(RuntimeConfig(data or data_root(), results))))
            else:
                sections.append(_read_suite(folder, words.get(folder.name), results, data, reference))
            recorded = read_collection(folder)
            if recorded and folder.name in recorded.failed:
                problems.append((folder.name, recorded.failed[folder.name]))
        except UserError as error:
            problems.append((folder.name, str(error)))
    return sections, problems


def _read_suite(folder: Path, word: str | None, results: Path, data: Path | None, reference: str) -> Section:
    collection = read_collection(folder)
    assert collection is not None
    try:
        # Without a word, the name comes from the results, whose code is never run.
        check_names("suite", [] if word else [folder.name], SUITES)
        suite = load_suite(word or folder.name)
    except UserError as error:
        raise UserError(f"{error}; if it is in a file: procap report FILE.py") from error
    options = last_options(suite, results, data)
    done = SuiteResults.read(suite, replace(options, reference=reference or options.reference), results)
    open_targets: dict[str, list[str]] = {}
    for path, target in done.missing:
        open_targets.setdefault(path, []).append(target)
    failed, unreadable = collection.failed, done.unreadable
    unfinished = {
        path: _read_unfinished(RunFolder(results / path), targets, failed.get(path, ""), unreadable.get(path, ""))
        for path, targets in open_targets.items()
    }
    # `number` in the frame is the index of a variant.
    titles = {done.variants.index(variant): title for title, variant in done.by_title.items()}
    return Section(
        suite.name,
        suite.heading,
        done.frame.assign(title=done.frame.number.map(titles)),
        done.paths,
        lambda: [*done.make_tables(), *unknown_of_runs(done.frame, reference)],
        unfinished,
        done,
    )


def _read_unfinished(folder: RunFolder, targets: Sequence[str] = (), failure: str = "", why: str = "") -> RunState:
    """Read the state of an unfinished run. targets: without a result. failure: last error. why: it is unreadable."""
    state = read_stored_state(folder, tuple(targets))
    if state.status == "broken" or why:
        return RunState("broken", reason=state.reason or why)
    if state.is_trained:
        return RunState("not evaluated", reason=", ".join(filter(None, [*targets, failure])))
    return RunState("failed" if failure else state.status, reason=failure or state.reason)


def read_runs(folders: Folders, heading: str, selected: Selected, reference: str = "") -> Section:
    """Read the selected results of runs."""
    frame, unfinished = _read_results(folders, selected)

    def make_tables() -> list[Table]:
        kinds = (run_tables, calibration_of_runs, unknown_of_runs)
        return [table for make in kinds for table in make(frame, reference)] if len(frame) else []

    titled = title_runs(frame, reference) if len(frame) else frame
    return Section("runs", heading, titled, [config.path for _, config in folders], make_tables, unfinished)


def _read_results(folders: Folders, selected: Selected = lambda *_: True) -> tuple[pd.DataFrame, dict[str, RunState]]:
    broken: dict[str, UserError] = {}
    frame = make_frame(read_records(folders, broken.__setitem__, selected))
    return frame, {
        config.path: _read_unfinished(folder, why=str(broken.get(config.path, "")))
        for folder, config in folders
        if config.path in broken or not (folder.train_file.exists() and folder.result_files())
    }


def _read_sweep(folder: Path, session: Session) -> Section:
    results = session.runtime.results
    collection, record = read_collection(folder), SweepFolder(results / SWEEPS / folder.name).load()
    if collection is None or record is None:
        raise UserError("its sweep.json is missing")
    settings, configurations = record.settings, [read_scores(stored, session) for stored in record.configurations]
    broken: dict[str, UserError] = {}
    started = [path for path in collection.runs if RunFolder(results / path).config_file.exists()]
    folders = list_selected_runs(results, broken.__setitem__, lambda path, *_: path in started)
    frame, unfinished = _read_results(folders)
    unfinished = {path: RunState("broken", reason=str(error)) for path, error in broken.items()} | unfinished
    # Runs that a scheduler has stopped early are not unfinished.
    ended = {path for entry in configurations if entry.state in ("finished", "stopped") for path in entry.runs}
    return Section(
        settings.name,
        f"Sweep {settings.name}",
        frame.assign(title=frame.variant),
        started,
        lambda: [sweep_table(settings, configurations, results)],
        {path: state for path, state in unfinished.items() if path not in ended or state.status == "broken"},
    )
