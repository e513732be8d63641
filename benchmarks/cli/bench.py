"""`procap bench SUITE`: plan, skip what is done, do the rest here or on a cluster, print the table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.cli.flags import EngineFlags, LaunchFlags, ModeFlags, OutputFlags, RuntimeFlags, SuiteFlags
from benchmarks.cli.plan import make_plan
from benchmarks.cli.selection import runtime_config
from benchmarks.cli.suite_options import plan_suite
from benchmarks.console.output import SOME_FAILED, note, plural, quoted, show, show_json
from benchmarks.console.packing import ensure_packed
from benchmarks.results.profiles import MINI
from benchmarks.suites import ALL, suite_named, suites_of
from benchmarks.suites.checks import check_engine, check_training_images, check_weights
from benchmarks.suites.outputs import SuiteOutputs, make_outputs
from benchmarks.suites.planning import SuitePlan, is_done, merge_runs
from benchmarks.tables.render import render, to_dict
from cluster.launcher import Launcher, connect, launch
from cluster.paths import StoragePaths
from cluster.preflight import TRAINING_SPLITS, Requirements, check_nodes
from cluster.progress import Outcome, RunProgress
from cluster.ray_cluster import Capacity
from cluster.run import RunSpec
from procap.errors import UsageError, UserError
from runner.collection import Status, status_after
from runner.config import RuntimeConfig, Target
from runner.environment import library_defaults
from runner.remote_results import RemoteResults
from runner.results import RunFolder
from runner.tracking.background import CollectionTracker

GONE = "its results are not there now that all is done: were they removed, or is the folder not one for all nodes?"


def bench(
    name: str,
    suited: SuiteFlags,
    many: LaunchFlags,
    place: RuntimeFlags,
    parallel: EngineFlags,
    doing: ModeFlags,
    output: OutputFlags,
    limit: int | None,
    price: float | None,
) -> int:
    """Exit code 3 when some runs failed and 1 when all did; see `procap bench SUITE --help`."""
    library_defaults()
    if price is not None and not doing.dry_run:
        raise UsageError("--price is for the plan: add --dry-run")
    fleet = many.checked()
    at = runtime_config(place, parallel, limit=limit)
    plans = [plan_suite(suite_named(one), suited, place, at.data, several=name == ALL) for one in suites_of(name)]
    pieces = merge_runs(plans)
    check_engine((piece.config for piece in pieces), at, fleet.processes)
    _note_what_stays(name, plans, suited)
    if doing.dry_run:
        check_training_images((piece.config for piece in pieces), at.data)
        targets = [[Target.recorded(target) for target in piece.targets] for piece in pieces]
        work = [(piece.config, at, tested) for piece, tested in zip(pieces, targets, strict=True)]
        planned = make_plan(work, force=doing.force)
        planned.show(replace(output, json=False))
        left = [piece for piece in pieces if doing.force or not is_done(piece, at)]
        _show_outlook(left, at, fleet, price, force=doing.force)
        if output.json:
            show_json(planned.to_dict())
        return 0
    store = RemoteResults.of(at)
    store.pull_all()
    left = [piece for piece in pieces if doing.force or not is_done(piece, at)]
    title = plans[0].suite.title if name != ALL else plural(len(plans), "suite")
    title += f", {plans[0].options.profile.where}"
    note(f"{title}: {plural(len(pieces), 'run')}, {len(pieces) - len(left)} done already")
    trackers = Trackers([CollectionTracker(at, one.collection) for one in plans])
    outcome = Outcome()
    made: list[SuiteOutputs] = []
    try:
        if left:
            outcome, left = _execute(left, at, place, fleet, trackers, output, force=doing.force)
        store.pull_all()
        failed = {left[number].path: why for number, why in outcome.failed.items()}
        gone = [piece.config.path for piece in pieces if not is_done(piece, at)]
        trackers.begun = True
        # Also those that were finished when an earlier attempt was killed before it sent them, or by others.
        trackers.update(piece.config.path for piece in pieces)
        for one, tracker in zip(plans, trackers.each, strict=True):
            made.append(make_outputs(one.suite, one.options, at, force=doing.force, verbose=output.verbose))
            failed = {**made[-1].unreadable, **failed}
            failed |= {run: GONE for run in tracker.collection.runs if run in gone and run not in failed}
            mine = {run: why for run, why in failed.items() if run in tracker.collection.runs}
            figures = {**made[-1].metrics, "runs_failed": float(len(mine))}
            tracker.close("failed" if mine or made[-1].failed else "finished", figures, mine)
    except BaseException as error:
        if trackers.begun:
            trackers.close(status_after(error))
            store.try_push_all()
        raise
    # Also what was noted of each run that MLflow has got.
    store.push_all()
    done = [piece.config.path for piece in pieces if piece.config.path not in failed]
    return _tell(name, made, done, failed, at, place, output)


def _tell(
    name: str,
    made: Sequence[SuiteOutputs],
    done: Sequence[str],
    failed: Mapping[str, str],
    at: RuntimeConfig,
    place: RuntimeFlags,
    output: OutputFlags,
) -> int:
    """Tables, what failed and why, what to type next, with all suites the report; gives the exit code."""
    _show_tables(made)
    failed = {**failed, **{one.suite.name: why for one in made if (why := one.failed)}}
    report = None
    try:
        report = _report(at, place) if name == ALL else None
    except UserError as error:
        # What was done is told all the same.
        failed["procap report"] = str(error)
    if failed:
        note(f"procap: {len(done)} done, {len(failed)} failed:")
        for run, why in failed.items():
            note(f"  {run}: {why}")
    else:
        _show_next(name, made[0].suite.name, place)
    if report:
        note(f"report: {report}")
    if output.json:
        tables = [to_dict(table) for one in made for table in one.tables]
        show_json({"suite": name, "results": str(at.results), "done": done, "failed": failed, "tables": tables})
    return 0 if not failed else SOME_FAILED if done else 1


def _note_what_stays(name: str, plans: Sequence[SuitePlan], suited: SuiteFlags) -> None:
    """What is chosen changes nothing that a suite prescribes."""
    for one in plans:
        trained = [entry for entry in one.runs if entry.spec.config.recipe.epochs]
        if name == ALL and suited.datasets and one.suite.datasets and one.runs:
            note(f"{one.suite.name} keeps its own data sets: {', '.join(one.options.datasets)}")
        if suited.recipe and any(entry.variant.recipe not in ("", suited.recipe) for entry in one.runs):
            note(f"{one.suite.name} prescribes the recipes of its runs: --recipe {suited.recipe} changes none of them")
        if suited.shots and any(entry.variant.shots not in (None, *one.options.shots) for entry in trained):
            note(f"{one.suite.name} prescribes the shots of some runs: --shots {suited.shots} does not change those")


class Trackers:
    """The trackers of several collections as one: each is told of its own runs.

    begun: whether anything was done; what was refused before leaves everything as it was.
    """

    def __init__(self, each: Sequence[CollectionTracker]) -> None:
        self.each = each
        self.begun = False
        self._runs = [set(tracker.collection.runs) for tracker in each]

    def update(self, runs: Iterable[str], metrics: Mapping[str, float] | None = None) -> None:
        named = list(runs)
        for tracker, own in zip(self.each, self._runs, strict=True):
            if mine := [run for run in named if run in own]:
                tracker.update(mine, metrics)

    def close(self, status: Status) -> None:
        for tracker in self.each:
            tracker.close(status)


def _execute(
    runs: list[RunSpec],
    at: RuntimeConfig,
    place: RuntimeFlags,
    fleet: Launcher,
    tracker: Trackers,
    output: OutputFlags,
    *,
    force: bool,
) -> tuple[Outcome, list[RunSpec]]:
    """Execute runs, long ones first; returns their outcome by index into the reordered list, and that list."""
    from benchmarks.suites.cost import cost_model
    from cluster.ray_cluster import nodes

    # Workers are silent, and the driver alone sends to MLflow: one writer, however many runs.
    places = StoragePaths.shared(place.data, place.results, replace(at, quiet=True, tracking_uri="off"))
    configs = [run.config for run in runs]
    ensure_packed(_datasets(runs), at.data)
    check_training_images(configs, at.data)
    if fleet.kind == "local":
        check_weights((config.backbone, config.pretrained) for config in configs)
    with connect(fleet, places) as room:
        there = nodes() if room.ray else []
        if fleet.kind == "ray":
            check_nodes(_requirements(runs, places), growing=fleet.autoscale)
        costs = cost_model(there, at, processes=fleet.processes)
        note(_where(fleet, room, len(there)))
        if force:
            _forget(runs, at)
        runs = costs.longest_first(runs)
        tracker.begun = True
        trace = note if output.verbose else None
        with RunProgress(runs, costs, room.max_concurrent, tracker, trace=trace) as progress:
            launch(runs, places, room, progress)
    return progress.outcome, runs


def _forget(runs: Sequence[RunSpec], at: RuntimeConfig) -> None:
    """Once, when all is ready, and not by the runs: one that is started again goes on, also with `--force`."""
    store = RemoteResults.of(at)
    for run in runs:
        folder = RunFolder(at.results / run.path)
        with folder.locked():
            store.delete_run(run.path)
            folder.clear()


def _requirements(runs: Sequence[RunSpec], places: StoragePaths) -> Requirements:
    """What every node has to have."""
    configs = [run.config for run in runs]
    return Requirements(
        data=places.data,
        results=places.results,
        datasets=_datasets(runs),
        backbones=tuple(dict.fromkeys((config.backbone, config.pretrained) for config in configs)),
        device=places.runtime.device,
    )


def _datasets(runs: Sequence[RunSpec]) -> dict[str, set[str]]:
    """The data sets that are trained or tested on, each with the splits that are read of it."""
    found: dict[str, set[str]] = {}
    for run in runs:
        found.setdefault(run.config.dataset, set()).update(TRAINING_SPLITS)
        for target in map(Target.recorded, run.targets):
            found.setdefault(target.dataset, set()).add(target.split)
    return found


def _where(fleet: Launcher, room: Capacity, nodes: int) -> str:
    if not room.ray:
        return "one run at a time, in this process (--max-concurrent N for more)"
    where = f"on {plural(nodes, 'node')}" if fleet.kind == "ray" else "on this machine"
    return f"{plural(room.max_concurrent, 'run')} at once {where}, a run has {room.resources}"


def _show_outlook(
    pieces: Sequence[RunSpec], at: RuntimeConfig, fleet: Launcher, price: float | None, *, force: bool
) -> None:
    """Print how long clusters of several sizes would take over `pieces`, of machines that suit the backbone."""
    from benchmarks.suites.cost import CostModel, Machine, describe_forecast, find_machine

    if not pieces:
        return
    machine = find_machine(at.device)
    if machine.device == "cpu" and pieces[0].config.backbone != MINI.backbone:
        machine = Machine("H200", "cuda")
    costs = CostModel(at, machine, processes=fleet.processes, force=force)
    show("\n" + "\n".join(describe_forecast(costs, pieces, price=price)))


def _show_tables(made: Sequence[SuiteOutputs]) -> None:
    """The first table of each suite that has any, and where the others are."""
    for one in made:
        if one.tables:
            show(render(one.tables[0], "md") + "\n")
    folders = [str(one.folder) for one in made]
    note(f"tables and figures: {folders[0] if len(folders) == 1 else made[0].folder.parent}")


def _report(at: RuntimeConfig, place: RuntimeFlags) -> Path:
    from benchmarks.report.report import write_report

    # The folder that stands for a URL on this machine is a cache, where nobody looks for a page.
    out = Path("report") if at.store else None
    return write_report(at.results, out, data=at.data, tracking=place.tracking, shown=place.results)


def _show_next(typed: str, name: str, place: RuntimeFlags) -> None:
    results = f"--results {quoted(place.results)}"
    both = f"--data {quoted(place.data)} {results}" if place.data else results
    if typed == ALL:
        note(f"next: procap table SUITE {both}; procap ui {results}")
    else:
        note(f"next: procap table {typed} {both}; procap ui {results} --suite {name}; procap report {both}")
