"""Read single runs and sweeps below a results folder as groups of runs, which the report shows like suites."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report.started_suites import Problem, StartedSuite, read_unfinished
from benchmarks.results.frame import dataset_order, make_frame, make_records, run_folders
from benchmarks.results.metrics import Metric
from benchmarks.results.profiles import Profile
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import SuiteOptions, SuiteRun, Variant
from benchmarks.suites.suite import Suite
from benchmarks.sweeps.plot import plot_sweep
from benchmarks.sweeps.table import sweep_table
from benchmarks.tables.runs import calibration_of_runs, run_tables
from benchmarks.tables.table import Column, Row, Table
from cluster.configuration import SWEEPS, Configuration, SweepFolder, SweepSettings, is_possible
from cluster.run import RunSpec
from procap.errors import UserError
from runner.config import RunConfig
from runner.results import read_document
from runner.run_collection import Collection, find_collections, read_collection
from runner.run_folders import RunFolder

NO_PROFILE = Profile("", (), backbone="", general="", shifts=())
"""The profile of runs that no suite has planned."""


def read_runs(results: Path, wanted: Callable[[RunConfig], bool], title: str) -> StartedSuite | None:
    """Read the runs below `results` that are `wanted`; None if there are none."""
    runs = [one for one in run_folders(results) if wanted(one[1])]
    # Single runs have no moments of their own.
    collection = Collection(kind="suite", name="runs", status="finished", started=0)
    return _read_group(Suite("runs", title, (), _list_tables), results, runs, collection) if runs else None


def _list_tables(done: SuiteResults) -> list[Table]:
    evaluated = [*run_tables(done.frame), *calibration_of_runs(done.frame)[:1]] if len(done.frame) else []
    return [*evaluated, _runs_table(done)]


def _runs_table(done: SuiteResults) -> Table:
    """Make a row for each run, trained or not."""
    rows = []
    for run in done.runs:
        config, folder, training, state = run.spec.config, RunFolder(done.results / run.path), None, "broken"
        # Unreadable files are listed as problems of their run.
        with suppress(UserError):
            state, training = folder.status(), folder.train()
        epochs = training.epochs if training else []
        losses = [epoch.terms["ce"] for epoch in epochs if "ce" in epoch.terms]
        numbers = [config.shots, *([len(epochs), training.seconds] if training else [None, None]), *losses[-1:], None]
        cells = [None if number is None else Metric(number) for number in numbers[:4]]
        rows.append(Row((run.path,), (state, *cells, ", ".join(run.spec.targets) or None)))
    digits = {"Shots": 0, "Epochs": 0, "Training, s": 1, "Cross-entropy": 4}
    columns = (
        Column("State", ""),
        *(Column(name, "", number) for name, number in digits.items()),
        Column("Tested on", ""),
    )
    note = "Cross-entropy: on training images, the mean over the last epoch. Shots: images per class, 0 for all."
    return Table("runs", "Runs", ("Run",), columns, tuple(rows), (note,), wide=True)


def find_sweeps(results: Path) -> tuple[list[StartedSuite], list[Problem]]:
    """Read the sweeps below `results`, and list what of them cannot be read."""
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
        suite = _as_suite(settings, configurations)
        # Runs that a scheduler has stopped early are not unfinished.
        ended = {path for one in configurations if one.state in ("finished", "stopped") for path in one.runs}
        own = [runs[path] for path in collection.runs if path in runs]
        found.append(_read_group(suite, results, own, collection, ended))
    return found, problems


def _as_suite(settings: SweepSettings, configurations: Sequence[Configuration]) -> Suite:
    return Suite(
        settings.name,
        f"sweep {settings.name}",
        settings.methods,
        lambda done: [sweep_table(settings, configurations)],
        plots=lambda done: {"sweep": partial(plot_sweep, settings, configurations)},
    )


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
        if config.path in unreadable or not (training or config.path in ended):
            unfinished.append(read_unfinished(results, config.path, unreadable, collection))
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
