"""`procap sweep`: hyperparameter search with Ray Tune."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.cli.flags import (
    EngineFlags,
    LaunchFlags,
    OutputFlags,
    RecipeFlags,
    RuntimeFlags,
    SelectionFlags,
    SweepFlags,
    flat,
    typed_names,
)
from benchmarks.console.help import PLAIN, examples

if TYPE_CHECKING:
    from cluster.configuration import SweepFolder, SweepSettings
    from cluster.launcher import Launcher
    from cluster.paths import StoragePaths
    from cluster.ray_cluster import Capacity
    from cluster.sweep import Sweep
    from runner.config import RuntimeConfig

LISTED = 20
"""How many configurations a plan prints."""


app = typer.Typer(**PLAIN)


@dataclass(frozen=True)
class SweepSelection(SelectionFlags):
    """The selection flags with help texts for sweeps, as the metric decides about held-out classes."""

    classes: Annotated[
        str,
        typer.Option(metavar="base|all", help="the classes to train on; --metric held-out takes a half of base"),
    ] = ""


@app.command(
    **examples(
        "procap sweep lr.yaml",
        "procap sweep --methods procap --datasets digits --param lr=1e-4,1e-3 --param depth=3,9 --seeds 1,2,3",
        "procap sweep --methods coop --datasets shapes --param 'lr=loguniform(1e-4,1)' --search tpe --trials 9 "
        "--scheduler asha",
        "procap sweep lr.yaml --launcher ray --address cluster:6379 --hours 4",
        "procap sweep lr.yaml --dry-run",
    )
)
@flat
def sweep(
    context: typer.Context,
    searched: SweepFlags,
    selection: SweepSelection,
    recipe: RecipeFlags,
    launch: LaunchFlags,
    runtime: RuntimeFlags,
    engine: EngineFlags,
    output: OutputFlags,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="YAML with the flags below as keys; a flag on the command line wins"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan, write nothing")] = False,
) -> int:
    """Search fields of a run for the best score on validation images, averaged over seeds and data sets.

    Test images are never read. Finished runs are never trained again. Repeat the command to resume a sweep.
    """
    if file is not None:
        from benchmarks.sweeps.file import merge_file

        return sweep(context=context, **merge_file(context, file, typed_names(context)) | {"file": None})
    from benchmarks.cli.data_few_shot import store_file
    from benchmarks.cli.selection import runtime_config
    from benchmarks.cli.sweep_settings import make_settings
    from benchmarks.console.packing import ensure_packed
    from benchmarks.suites.checks import check_engine
    from cluster.configuration import SweepFolder, check_values, draw, make_runs
    from procap.errors import UsageError
    from runner.environment import library_defaults, resolve_device
    from runner.remote_results import RemoteResults

    library_defaults()
    launcher = launch.checked()
    at = runtime_config(runtime, engine)
    settings = make_settings(searched, selection, recipe, at.data)
    folder = SweepFolder.of(at.results, settings.name)
    RemoteResults.of(at).pull_all()
    folder.check(settings)
    check_values(settings, at.data)
    drawn = []
    for values in draw(settings, LISTED):
        try:
            drawn += make_runs(settings, values, at.data)
        except UsageError:
            # A drawn value may be invalid while others of its distribution are valid, as `check_values` has verified.
            continue
    check_engine((run.config for run in drawn), at, launcher.processes)
    if dry_run:
        return _show_plan(settings, folder, at, output)
    if launcher.kind == "local":
        # Report a missing device once, before any run starts.
        resolve_device(at.device)
    ensure_packed(settings.datasets, at.data)
    if recipe.few_shot_samples:
        store_file(recipe.few_shot_samples, settings.datasets[0], at.data)
    with folder.locked():
        folder.check(settings)
        return _execute(settings, folder, at, launcher, runtime, engine, output)


def _execute(
    settings: SweepSettings,
    folder: SweepFolder,
    at: RuntimeConfig,
    launcher: Launcher,
    runtime: RuntimeFlags,
    engine: EngineFlags,
    output: OutputFlags,
) -> int:
    """Execute the sweep; returns exit code 3 if some configurations failed and 1 if all did."""
    from benchmarks.console.output import SOME_FAILED, note
    from benchmarks.sweeps.progress import SweepProgress
    from cluster.paths import StoragePaths
    from cluster.sweep import Sweep
    from runner.collection import Collection, status_after
    from runner.remote_results import RemoteResults
    from runner.results import write_json
    from runner.tracking.background import CollectionTracker

    shown = {name: str(value) for name, value in settings.model_dump(mode="json").items()}
    tracker = CollectionTracker(at, Collection(kind="sweep", name=settings.name, settings=shown))
    progress = SweepProgress(tracker, note if output.verbose else None)
    searched = progress.sweep = Sweep(settings, at, folder, progress.on_event)
    note(f"{_format_title(settings)}; {searched.count('finished', 'stopped')} done already")
    # Workers print nothing and do not send to MLflow: the driver does both for all runs.
    paths = StoragePaths.shared(runtime.data, runtime.results, replace(at, quiet=True, tracking_uri="off"))
    try:
        if not searched.is_complete:
            with _connected(settings, launcher, paths) as capacity, progress:
                # Write the settings only now: a sweep that failed the checks must not occupy its name.
                write_json(folder.path / "sweep.json", settings)
                searched.run(paths, capacity)
    except BaseException as error:
        if searched.configurations:
            progress.close(status_after(error))
            RemoteResults.of(at).try_push_all()
        raise
    failed = searched.count("failed")
    progress.close("failed" if failed else "interrupted" if searched.count("running") else "finished")
    _show_outcome(searched, runtime, engine, output)
    return 0 if not failed else SOME_FAILED if failed < len(searched.configurations) else 1


@contextmanager
def _connected(settings: SweepSettings, launcher: Launcher, paths: StoragePaths) -> Iterator[Capacity]:
    """Connect to the launcher's machines and check that they have data and weights."""
    from benchmarks.console.output import note
    from benchmarks.suites.checks import check_weights
    from cluster.launcher import connect
    from cluster.preflight import check_nodes

    needed = _requirements(settings, paths)
    with connect(launcher, paths, always_ray=True) as capacity:
        if launcher.kind == "ray":
            check_nodes(needed, growing=launcher.autoscale)
        else:
            check_weights(needed.backbones)
        where = "on the cluster" if launcher.kind == "ray" else "on this machine"
        note(f"{capacity.max_concurrent} at once {where}, {capacity.resources} each")
        yield capacity


def _requirements(settings: SweepSettings, paths: StoragePaths) -> Any:
    from cluster.preflight import TRAINING_SPLITS, Requirements
    from procap.weights.loading import canonical_name

    # Resolve names as runs do: "ViT-B/16" is not a file, and the path of a file becomes absolute.
    backbones = settings.space.get("backbone", [settings.backbone])
    weights = settings.space.get("pretrained", [settings.pretrained])
    return Requirements(
        data=paths.data,
        results=paths.results,
        datasets=dict.fromkeys(settings.datasets, TRAINING_SPLITS),
        backbones=tuple(dict.fromkeys(canonical_name(str(backbone), one) for backbone in backbones for one in weights)),
        device=paths.runtime.device,
    )


def _show_outcome(searched: Sweep, runtime: RuntimeFlags, engine: EngineFlags, output: OutputFlags) -> None:
    """Write summary and plot; print the table, the best configurations and the commands that train and test them."""
    from benchmarks.cli.sweep_settings import make_commands
    from benchmarks.console.output import note, plural, show, show_json
    from benchmarks.sweeps import table
    from benchmarks.sweeps.figure import draw_sweep
    from runner.remote_results import RemoteResults
    from runner.results import write_json

    settings, found = searched.settings, list(searched.configurations.values())
    commands = [
        line
        for one in table.find_winners(settings, found)
        for line in make_commands(settings, one.values, runtime, engine)
    ]
    document = table.summarize(settings, found, commands)
    write_json(searched.folder.path / "summary.json", document)
    plots = draw_sweep(settings, found, searched.folder.path)
    # Includes the records of what was exported to MLflow.
    RemoteResults.of(searched.runtime).push_all()
    if found:
        show(table.format_table(settings, found))
    if len(each := table.find_best_of_each(settings, found)) > 1:
        for name, one in each.items():
            best = f"best {'on' if settings.varies_data else 'of'} {name}"
            show(f"{best}: {one.score:.2f} with {table.format_values(one.values)}")
    if left := searched.count("running"):
        note(f"{plural(left, 'configuration')} unfinished, with their states kept: repeat the command to go on")
    if plots:
        note(f"plot: {plots[0]}")
    if commands:
        show("\nthe best, trained with all seeds and tested:\n" + " && \\\n".join(f"  {one}" for one in commands))
    if failed := [one for one in found if one.state == "failed"]:
        note(f"procap: {len(found) - len(failed)} done, {len(failed)} failed:")
        for one in failed:
            note(f"  {table.format_configuration(one)}")
    if output.json:
        show_json(document)


def _show_plan(settings: SweepSettings, folder: SweepFolder, at: RuntimeConfig, output: OutputFlags) -> int:
    """Print what would be searched and what is done already; writes nothing."""
    from benchmarks.console.output import columns, plural, show, show_json
    from cluster.configuration import draw, key_of, make_runs
    from cluster.run import final_score

    known = folder.load()
    rows = [(field, _format_domain(domain)) for field, domain in settings.space.items()]
    show(columns(("field", "values"), rows or [("-", "nothing is varied: seeds and data sets are compared")]))
    listed: list[dict[str, Any]] = []
    for values in draw(settings, LISTED) if settings.search == "grid" else []:
        runs = make_runs(settings, values, at.data)
        done = sum(final_score(run, at) is not None for run in runs)
        state: str = f"{done} of {plural(len(runs), 'run')} done" if done else "new"
        if (one := known.get(key_of(values))) is not None:
            state = "unfinished" if one.state == "running" else one.state
        listed.append({"values": values, "runs": [run.path for run in runs], "state": state})
    if listed:
        cells = [(*one["values"].values(), one["state"]) for one in listed]
        show("\n" + columns((*(field.rpartition(".")[2] for field in settings.domains), "state"), cells))
        if settings.size and settings.size > len(listed):
            show(f"... and {settings.size - len(listed):,} more")
    each = len(settings.seeds) * (1 if settings.varies_data else len(settings.datasets))
    runs_in_all = f"; {plural(settings.size * each, 'run')} in all" if settings.size is not None else ""
    show(f"\n{_format_title(settings)}; {len(known)} tried already{runs_in_all}. Nothing was written.")
    if output.json:
        show_json({"sweep": settings.model_dump(mode="json"), "configurations": listed, "total": settings.size})
    return 0


def _format_title(settings: SweepSettings) -> str:
    from benchmarks.console.output import plural
    from cluster.configuration import METRICS

    averaged = 1 if settings.varies_data else len(settings.datasets)
    sets = f", {plural(averaged, 'data set')}" if averaged > 1 else ""
    limits = [f"{settings.trials} configurations"] if settings.trials is not None else []
    limits += [f"{settings.hours:g} h"] if settings.hours is not None else []
    most = f", at most {' and '.join(limits)}" if limits else ""
    seeds = plural(len(settings.seeds), "seed")
    return f"sweep {settings.name}: {settings.search} search{most}, {seeds}{sets} each; {METRICS[settings.metric]}"


def _format_domain(domain: Any) -> str:
    if isinstance(domain, dict):
        ((kind, numbers),) = domain.items()
        return f"{kind}({', '.join(f'{number:g}' for number in numbers)})"
    return ", ".join(value if isinstance(value, str) else json.dumps(value) for value in domain)
