"""`procap bench SUITE`: plan, skip what is done, do the rest here or on a cluster, print the table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.commands_data import ensure_packed
from benchmarks.commands_run import show_plan
from benchmarks.flags import Doing, Many, Output, Parallel, Place, Suited
from benchmarks.output import note, plural, show, show_json
from benchmarks.scores import read_scores
from benchmarks.selection import dataset_names, method_names, names, numbers, workplace
from benchmarks.suites import MINI, Choice, Suite, World, suite_named, world_named
from benchmarks.table_formats import FORMATS, as_json, render
from benchmarks.tables import Table, build_table
from cluster.fleet import Fleet, Room, do_all, gathered
from cluster.job import Job, Piece
from cluster.ledger import Ledger, Outcome
from cluster.places import Places
from cluster.preflight import Wants, check_nodes
from procap.errors import UserError
from runner.collection import Collection, status_after
from runner.config import RunConfig, Target, Workplace
from runner.environment import library_defaults
from runner.results import RunFolder, write_bytes
from runner.results_store import ResultsStore
from runner.track_collection import CollectionTracker

SOME_FAILED = 3


def suite(
    name: str,
    suited: Suited,
    many: Many,
    place: Place,
    parallel: Parallel,
    doing: Doing,
    output: Output,
    limit: int | None,
) -> int:
    """Exit code 3 when some runs failed and 1 when all did; see `procap bench SUITE --help`."""
    library_defaults()
    fleet = Fleet(**vars(many))
    at = workplace(place, limit, parallel=parallel)
    chosen = suite_named(name)
    choice = choose(chosen, suited, place, at.data)
    pieces = list(chosen.pieces(choice))
    targets = {piece.config: [Target.recorded(target) for target in piece.targets] for piece in pieces}
    if doing.dry_run:
        code = show_plan(list(targets), at, targets.__getitem__, output, force=doing.force)
        _show_outlook(pieces, at, fleet)
        return code
    store = ResultsStore.of(at)
    store.pull_all()
    collection = Collection(kind="suite", name=name, runs=tuple(config.path for config in targets))
    left = [piece for piece in pieces if doing.force or not is_done(piece, at)]
    note(f"{chosen.title}: {plural(len(pieces), 'run')}, {len(pieces) - len(left)} done already")
    tracker = CollectionTracker(at, collection)
    outcome, jobs = Outcome(), [Job(pieces=(piece,)) for piece in left]
    try:
        if jobs:
            outcome, jobs = _carry_out(jobs, at, place, fleet, tracker, output, force=doing.force)
        store.pull_all()
        table = _table(at, targets)
    except BaseException as error:
        tracker.close(status_after(error))
        raise
    figures = _figures(table) | {"runs_failed": float(len(outcome.failed))}
    # Also those that were finished when an earlier attempt was killed before it sent them, or by others.
    tracker.update(collection.runs)
    tracker.close("failed" if outcome.failed else "finished", figures)
    failed = {jobs[number].name: why for number, why in outcome.failed.items()}
    _write_tables(table, at.results / collection.path)
    # Also what was noted of each run that MLflow has got.
    store.push_all()
    show(render(table, "md"))
    if failed:
        note(f"procap: {len(pieces) - len(failed)} done, {len(failed)} failed:")
        for run, why in failed.items():
            note(f"  {run}: {why}")
    else:
        note(f"next: procap table --results {place.results}; procap ui --results {place.results} --suite {name}")
    if output.json:
        done = [piece.config.path for piece in pieces if piece.config.path not in failed]
        show_json({"suite": name, "results": str(at.results), "done": done, "failed": failed, "table": as_json(table)})
    return 0 if not failed else SOME_FAILED if len(failed) < len(pieces) else 1


def choose(chosen: Suite, suited: Suited, place: Place, data: Path) -> Choice:
    """What the flags choose of `chosen`; without a data root it is done in the generated world."""
    world: World = world_named(suited.world or ("paper" if place.data else "mini"))
    datasets = dataset_names(suited.datasets, data) if names(suited.datasets) else list(world.datasets)
    return Choice(
        world,
        tuple(datasets),
        tuple(method_names(suited.methods)) if names(suited.methods) else chosen.methods,
        tuple(numbers(suited.seeds, "--seeds")) or chosen.seeds,
        recipe=suited.recipe,
        quick=suited.quick,
        backbone=suited.backbone,
        pretrained=suited.pretrained or None,
        precision=suited.precision,
        overrides={} if suited.epochs is None else {"epochs": suited.epochs},
        data=data,
    )


def is_done(piece: Piece, at: Workplace) -> bool:
    """Whether the run and all its evaluations are there. What is broken is not: whoever does the run says why."""
    folder = RunFolder(at.results / piece.config.path)
    try:
        training = folder.train()
        found = [folder.evaluation(Target.recorded(target)) for target in piece.targets]
    except UserError:
        return False
    return training is not None and all(
        known is not None and known.limit in (None, at.limit) and known.checkpoint_sha256 == training.checkpoint_sha256
        for known in found
    )


def _carry_out(
    jobs: list[Job],
    at: Workplace,
    place: Place,
    fleet: Fleet,
    tracker: CollectionTracker,
    output: Output,
    *,
    force: bool,
) -> tuple[Outcome, list[Job]]:
    """Long ones first; gives what became of them, by their number in the list that is given back."""
    from benchmarks.forecast import forecast
    from cluster.site import nodes

    # Workers are silent, and the driver alone sends to MLflow: one writer, however many runs.
    places = Places.shared(place.data, place.results, replace(at, quiet=True, tracking_uri="off"))
    with gathered(fleet, places) as room:
        there = nodes() if room.ray else []
        ensure_packed(dict.fromkeys(_datasets(jobs)), at.data)
        if fleet.on == "ray":
            check_nodes(_wants(jobs, places), growing=fleet.autoscale)
        costs = forecast(there, at.results, at.data, device=at.device, processes=fleet.processes, limit=at.limit)
        jobs = costs.longest_first(jobs)
        note(_where(fleet, room, len(there)))
        if force:
            _forget(jobs, at)
        with Ledger(jobs, costs, room.at_once, tracker, trace=note if output.verbose else None) as ledger:
            do_all(jobs, places, room, ledger)
    return ledger.outcome, jobs


def _forget(jobs: Sequence[Job], at: Workplace) -> None:
    """Once, when all is ready, and not by the runs: one that is started again goes on, also with `--force`."""
    store = ResultsStore.of(at)
    for job in jobs:
        for piece in job.pieces:
            folder = RunFolder(at.results / piece.config.path)
            with folder.locked():
                store.clear(piece.config.path)
                folder.clear()


def _wants(jobs: Sequence[Job], places: Places) -> Wants:
    """What every node has to have."""
    configs = [piece.config for job in jobs for piece in job.pieces]
    return Wants(
        data=places.data,
        results=places.results,
        datasets=tuple(dict.fromkeys(_datasets(jobs))),
        backbones=tuple(dict.fromkeys((config.backbone, config.pretrained) for config in configs)),
        device=places.rest.device,
    )


def _datasets(jobs: Sequence[Job]) -> Iterator[str]:
    for job in jobs:
        for piece in job.pieces:
            yield piece.config.dataset
            yield from (Target.recorded(target).dataset for target in piece.targets)


def _where(fleet: Fleet, room: Room, nodes: int) -> str:
    if not room.ray:
        return "one run at a time, in this process (--at-once N for more)"
    where = f"on {plural(nodes, 'node')}" if fleet.on == "ray" else "on this machine"
    return f"{plural(room.at_once, 'run')} at once {where}, {room.share} each"


def _show_outlook(pieces: Sequence[Piece], at: Workplace, fleet: Fleet) -> None:
    """How long clusters of several sizes would take over what is left, of machines that suit the backbone."""
    from benchmarks.cluster_simulation import outlook
    from benchmarks.cost import Machine, here
    from benchmarks.forecast import forecast_on

    jobs = [Job(pieces=(piece,)) for piece in pieces if not is_done(piece, at)]
    if not jobs:
        return
    machine = here(device=at.device)
    if machine.device == "cpu" and jobs[0].pieces[0].config.backbone != MINI.backbone:
        machine = Machine("H200", "cuda")
    costs = forecast_on(machine, at.results, at.data, processes=fleet.processes, limit=at.limit)
    show(f"\nOn {machine.name} ({costs.basis(jobs[0])}), simulated without failures:")
    for line in outlook(map(costs.seconds, jobs), what="GPU" if machine.device == "cuda" else "machine"):
        show(line)


def _table(at: Workplace, wanted: dict[RunConfig, list[Target]]) -> Table:
    """Of this suite's own runs and targets: a folder may hold those of others too."""
    paths = {config.path for config in wanted}
    scores = [
        score
        for score in read_scores(at.results, lambda config: config.path in paths)
        if score.target in wanted[score.config]
    ]
    if not scores:
        raise UserError(f"no run of the suite could be finished below {at.results}; see what failed above")
    return build_table(scores)


def _figures(table: Table) -> dict[str, float]:
    """What the suite comes to, as `hm/maple`: the average row of each method that has only one, or its only row."""
    rows = table.averages or table.rows
    methods = [row.method for row in rows]
    return {
        f"{kind}/{row.method}": cell.mean
        for row in rows
        if methods.count(row.method) == 1
        for kind, cell in zip(("base", "novel", "hm"), row.cells(), strict=True)
        if cell is not None
    }


def _write_tables(table: Table, folder: Path) -> None:
    for form in FORMATS:
        text = json.dumps(as_json(table), indent=1, ensure_ascii=False) if form == "json" else render(table, form)
        write_bytes(folder / f"table.{'tex' if form == 'latex' else form}", (text + "\n").encode())
