"""`procap sweep`: say what will be searched, search it here or on a cluster, show what was found."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.cli.data_few_shot import store_file
from benchmarks.cli.flags import OutputFlags
from benchmarks.cli.selection import workplace
from benchmarks.console.output import SOME_FAILED, columns, note, plural, show, show_json
from benchmarks.console.packing import ensure_packed
from benchmarks.suites.checks import check_engine, check_weights
from benchmarks.sweeps.file import Asked
from benchmarks.sweeps.progress import SweepProgress, tell_failures
from benchmarks.sweeps.settings import settings_of
from benchmarks.sweeps.table import commands, summary, table, winners
from cluster.configuration import METRICS, Configuration, check_values, configure
from cluster.job import Job
from cluster.launcher import Capacity, Launcher, gathered
from cluster.paths import StoragePaths
from cluster.preflight import TRAINING_SPLITS, Wants, check_nodes
from cluster.space import Values
from cluster.sweep import Sweep, carry_out, figure_of, is_over, total_of
from cluster.sweep_record import SweepFolder, SweepSettings, TrialRecord, best_of_each, held_on_cluster
from procap.errors import UserError
from runner.collection import Collection, status_after
from runner.config import RunConfig, RuntimeConfig
from runner.environment import library_defaults, resolve_device
from runner.progress import duration
from runner.remote_results import RemoteResults
from runner.results import write_json
from runner.tracking.background import CollectionTracker
from shards.errors import DataError

if TYPE_CHECKING:
    from benchmarks.suites.cost import CostModel

LISTED = 20
"""Configurations that a plan prints and estimates."""


def sweep(asked: Asked, dry_run: bool, output: OutputFlags) -> int:
    """Exit code 3 when some configurations failed and 1 when all did; see `procap sweep --help`."""
    library_defaults()
    fleet = asked.many.checked()
    at = workplace(asked.place, parallel=asked.parallel)
    settings = settings_of(asked, at.data)
    folder = SweepFolder.of(at.results, settings.name)
    RemoteResults.of(at).pull_all()
    folder.check(settings)
    check_values(settings, at.data)
    check_engine(_some_runs(settings, at), at, fleet.processes)
    if dry_run:
        return _plan(settings, folder, at, fleet, output)
    if fleet.on == "local":
        # At once, as else every run would say that it is not here.
        resolve_device(at.device)
    ensure_packed(settings.datasets, at.data)
    if asked.training.few_shot_samples:
        store_file(asked.training.few_shot_samples, settings.datasets[0], at.data)
    with folder.locked():
        folder.check(settings)
        return _search(settings, folder, at, fleet, asked, output)


def _some_runs(settings: SweepSettings, at: RuntimeConfig) -> Iterator[RunConfig]:
    """Those of the first configurations that are drawn, but for values that no run accepts."""
    for values in itertools.islice(settings.searched().draws(settings.search_seed), LISTED):
        with suppress(UserError, DataError):
            pieces = configure(settings, values, at.data).pieces
            yield from (piece.config for piece in pieces)


def _search(
    settings: SweepSettings, folder: SweepFolder, at: RuntimeConfig, fleet: Launcher, asked: Asked, output: OutputFlags
) -> int:
    shown = {name: str(value) for name, value in settings.model_dump(mode="json").items()}
    tracker = CollectionTracker(at, Collection(kind="sweep", name=settings.name, settings=shown))
    progress = SweepProgress(settings, tracker, note if output.verbose else None)
    searched = Sweep(settings, at, folder, progress)
    progress.follow(searched, None, 1)
    note(f"{_title(settings)}; {_known(settings, searched.records)}")
    # Workers are silent, and the driver alone sends to MLflow: one writer, however many runs.
    places = StoragePaths.shared(asked.place.data, asked.place.results, replace(at, quiet=True, tracking_uri="off"))
    with ExitStack() as stack:
        room = None if searched.complete else stack.enter_context(_room(settings, fleet, places))
        # Not before, as a sweep that finds no room must not keep its name from one that would.
        folder.write(settings)
        rooms = stack.pop_all()
    try:
        with rooms, progress:
            if room is not None:
                progress.follow(searched, _forecast(fleet, at), room.at_once)
                carry_out(searched, places, room)
    except BaseException as error:
        progress.close(status_after(error), searched.records)
        RemoteResults.of(at).try_push_all()
        raise
    failed = {digest: record for digest, record in searched.records.items() if record.state == "failed"}
    # When the time is up, some are left for the next attempt.
    left = any(record.state == "running" for record in searched.records.values())
    progress.close("failed" if failed else "interrupted" if left else "finished", searched.records)
    return _end(searched, failed, asked, output)


def _end(searched: Sweep, failed: Mapping[str, TrialRecord], asked: Asked, output: OutputFlags) -> int:
    from benchmarks.sweeps.figure import draw_sweep

    settings, records = searched.settings, searched.records
    chosen = [record.values for _, record in winners(settings, records)]
    ready = [line for values in chosen for line in commands(settings, values, asked.place, asked.parallel)]
    document = summary(settings, records, ready)
    write_json(searched.folder.path / "summary.json", document)
    drawn = draw_sweep(settings, records, searched.folder.path)
    # Also what was noted of each run that MLflow has got.
    RemoteResults.of(searched.place).push_all()
    if records:
        show(table(settings, records))
    if len(each := best_of_each(settings, records)) > 1:
        for name, (_, record) in each.items():
            show(f"best {'on' if settings.varies_data else 'of'} {name}: {record.figure:.2f} with {_values(record)}")
    if left := [record for record in records.values() if record.state == "running"]:
        note(f"{plural(len(left), 'configuration')} unfinished, with their states kept: type the same again to go on")
    if drawn:
        note(f"figure: {drawn[0]}")
    if ready:
        show("\nthe best, trained with all seeds and tested:\n" + " && \\\n".join(f"  {one}" for one in ready))
    if failed:
        tell_failures(failed, len(records) - len(failed))
    if output.json:
        show_json(document)
    return 0 if not failed else SOME_FAILED if len(failed) < len(records) else 1


@contextmanager
def _room(settings: SweepSettings, fleet: Launcher, places: StoragePaths) -> Iterator[Capacity]:
    """Be connected to the fleet, alone with this sweep on it, and sure of its nodes."""
    on_ray = settings.stop == "asha" or settings.hours is not None
    with ExitStack() as stack:
        room = stack.enter_context(gathered(fleet, places, always_ray=on_ray))
        wants = _wants(settings, places)
        if fleet.on == "ray":
            stack.enter_context(held_on_cluster(settings.name, places.results))
            check_nodes(wants, growing=fleet.autoscale)
        else:
            check_weights(wants.backbones)
        where = "on the cluster" if fleet.on == "ray" else "on this machine"
        each = " each" if room.share.processes == 1 else ""
        note(f"{room.at_once} at once {where}, {room.share}{each}" if room.ray else "one at a time, in this process")
        yield room


def _wants(settings: SweepSettings, places: StoragePaths) -> Wants:
    """What every node has to have."""
    from procap.weights.loading import canonical

    # As runs have them: a name with a slash is no file, and that of a file is absolute.
    backbones = settings.space.get("backbone", [settings.backbone])
    weights = settings.space.get("pretrained", [settings.pretrained])
    return Wants(
        data=places.data,
        results=places.results,
        datasets=dict.fromkeys(settings.datasets, TRAINING_SPLITS),
        backbones=tuple(dict.fromkeys(canonical(str(backbone), one) for backbone in backbones for one in weights)),
        device=places.rest.device,
    )


def _forecast(fleet: Launcher, at: RuntimeConfig) -> CostModel:
    from benchmarks.suites.cost import cost_model
    from cluster.ray_cluster import nodes

    there = nodes() if fleet.on == "ray" else []
    return cost_model(there, at, processes=fleet.processes)


def _plan(settings: SweepSettings, folder: SweepFolder, at: RuntimeConfig, fleet: Launcher, output: OutputFlags) -> int:
    """Print what would be searched and what is known of it; write nothing."""
    records = folder.trials()
    space = settings.searched()
    total = total_of(settings)
    listed = [configure(settings, values, at.data) for values in _listed(settings)]
    rows = [(field, _spoken(values)) for field, values in settings.space.items()]
    show(columns(("field", "values"), rows or [("-", "nothing is varied: seeds and data sets are compared")]))
    if listed:
        fields = [one.field for one in space.dimensions]
        shown = [(*(one.values[field] for field in fields), _state(one, records, at)) for one in listed]
        show("\n" + columns((*(field.rpartition(".")[2] for field in fields), "state"), shown))
        if total is None or total > len(listed):
            show(f"... and {'more, until the time is up' if total is None else f'{total - len(listed):,} more'}")
    # What a searcher will choose is not known: an example stands for all.
    examples = listed or [configure(settings, next(space.draws(settings.search_seed)), at.data)]
    each = len(examples[0].runs)
    words = [_title(settings), _known(settings, records)]
    if total is not None:
        words.append(f"{plural(total * each, 'run')} in all")
    left = [piece for one in examples for piece in one.pieces if figure_of(piece, at) is None]
    if left and total is not None:
        costs = _forecast(replace(fleet, on="local", address="", autoscale=False), at)
        mean = sum(costs.seconds(Job(pieces=(piece,))) for piece in left) / len(left)
        over = sum(is_over(settings, record) for record in records.values())
        runs = len(left) if len(listed) == total else (total - over) * each
        words.append(f"{plural(runs, 'run')} to do, about {duration(runs * mean)} on this machine, one at a time")
    show("\n" + "; ".join(words) + ". Nothing was written.")
    if output.json:
        found = [{"values": one.values, "runs": one.runs, "state": _state(one, records, at)} for one in listed]
        show_json({"sweep": settings.model_dump(mode="json"), "configurations": found, "total": total})
    return 0


def _listed(settings: SweepSettings) -> list[Values]:
    """The first configurations, where they are known before the search."""
    if settings.search == "tpe":
        return []
    space = settings.searched()
    chosen = space.grid() if settings.search == "grid" else space.draws(settings.search_seed)
    total = total_of(settings)
    return list(itertools.islice(chosen, LISTED if total is None else min(LISTED, total)))


def _state(one: Configuration, records: Mapping[str, TrialRecord], at: RuntimeConfig) -> str:
    if (record := records.get(one.digest)) is not None:
        return "unfinished" if record.state == "running" else record.state
    done = sum(figure_of(piece, at) is not None for piece in one.pieces)
    return "new" if not done else f"{done} of {plural(len(one.pieces), 'run')} done"


def _title(settings: SweepSettings) -> str:
    seeds = plural(len(settings.seeds), "seed")
    averaged = 1 if settings.varies_data else len(settings.datasets)
    sets = f", {plural(averaged, 'data set')}" if averaged > 1 else ""
    limits = [f"{settings.trials} configurations"] if settings.trials is not None else []
    limits += [f"{settings.hours:g} h"] if settings.hours is not None else []
    most = f", at most {' and '.join(limits)}" if limits else ""
    return f"sweep {settings.name}: {settings.search} search{most}, {seeds}{sets} each; {METRICS[settings.metric]}"


def _known(settings: SweepSettings, records: Mapping[str, TrialRecord]) -> str:
    over = sum(is_over(settings, record) for record in records.values())
    open_ = len(records) - over
    return f"{over} done already" + (f", {open_} to be taken up again" if open_ else "")


def _spoken(values: Any) -> str:
    if isinstance(values, Mapping):
        ((kind, numbers),) = values.items()
        return f"{kind}({', '.join(f'{number:g}' for number in numbers)})"
    return ", ".join(value if isinstance(value, str) else json.dumps(value) for value in values)


def _values(record: TrialRecord) -> str:
    return ", ".join(f"{field.rpartition('.')[2]} {value}" for field, value in record.values.items())
