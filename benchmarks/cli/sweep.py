"""`procap sweep`: hyperparameter search with Ray Tune."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.cli import flags
from benchmarks.cli.selection import runtime_config
from benchmarks.cli.sweep_settings import make_commands, make_settings
from benchmarks.console.output import columns, note, note_failures, plural, show, show_json
from benchmarks.console.packing import ensure_packed, find_unpacked
from benchmarks.suites.checks import check_code, check_training_images, note_warmup
from benchmarks.sweeps import table
from benchmarks.tables.render import render
from cluster.launcher import Launcher
from cluster.preflight import TRAINING_SPLITS
from cluster.run import StoragePaths
from cluster.space import format_domain
from cluster.sweep_record import (
    METRICS,
    SWEEPS,
    SweepFolder,
    SweepSettings,
    check_values,
    examples,
    make_runs,
)
from runner.config import RuntimeConfig
from runner.environment import library_defaults
from runner.remote_results import RemoteResults
from runner.results import write_json
from runner.run_collection import status_after

if TYPE_CHECKING:
    from cluster.sweep import Sweep


@flags.command(
    "procap sweep --methods procap --datasets digits --param lr=1e-4,1e-3 --param depth=3,9 --seeds 1,2,3",
    "procap sweep --methods coop --datasets shapes --param 'lr=loguniform(1e-4,1)' --search tpe --trials 9 "
    "--scheduler asha",
    "procap sweep --methods coop --datasets shapes --param lr=1e-3,1e-2 --launcher ray --address cluster:6379",
)
def sweep(
    searched: flags.SweepFlags,
    selection: flags.SelectionFlags,
    recipe: flags.RecipeFlags,
    launch: flags.LaunchFlags,
    runtime: flags.RuntimeFlags,
    engine: flags.EngineFlags,
    mode: flags.ModeFlags,
    output: flags.OutputFlags,
) -> int:
    """Search fields of a run for the best score on validation images, averaged over seeds and data sets.

    Test images are never read. Finished runs are never trained again, unless --force deletes the runs that the sweep
    has tried (and all of a grid). Repeat the command to resume a sweep.
    """
    library_defaults()
    launcher = launch.to_launcher()
    at = runtime_config(runtime, engine)
    settings = make_settings(searched, selection, recipe, at.data)
    folder = SweepFolder(at.results / SWEEPS / settings.name)
    RemoteResults.from_runtime(at).pull_all()
    folder.check(settings)
    checked = check_values(settings, at.data)
    runs = make_runs(settings, next(examples(settings)), at.data)
    check_training_images((run.config for run in runs), at.data)
    if not mode.force:
        tried = [path for configuration in folder.load().values() for path in configuration.runs]
        check_code(dict.fromkeys([*tried, *(run.path for run in runs)]), at.results)
    if launcher.kind == "local":
        find_unpacked(settings.datasets, at.data)
    note_warmup(run.config for run in checked)
    if mode.dry_run:
        return _show_plan(settings, folder, output)
    ensure_packed(settings.datasets, at.data)
    with folder.locked():
        folder.check(settings)
        if mode.force:
            _delete(settings, folder, at)
        return _execute(settings, folder, at, launcher, runtime, engine, output)


def _delete(settings: SweepSettings, folder: SweepFolder, at: RuntimeConfig) -> None:
    """Delete the runs of all configurations that were tried, and of a grid all, with the record of their scores."""
    from benchmarks.suites.execute import delete_runs

    paths = {path for configuration in folder.load().values() for path in configuration.runs}
    for values in examples(settings) if settings.search == "grid" else ():
        paths |= {run.path for run in make_runs(settings, values, at.data)}
    delete_runs(sorted(paths), at)
    folder.save(())


def _execute(
    settings: SweepSettings,
    folder: SweepFolder,
    at: RuntimeConfig,
    launcher: Launcher,
    runtime: flags.RuntimeFlags,
    engine: flags.EngineFlags,
    output: flags.OutputFlags,
) -> int:
    """Execute the sweep; returns exit code 3 if some configurations failed and 1 if all did."""
    from benchmarks.suites.execute import connect_checked
    from benchmarks.sweeps.progress import SweepProgress

    progress = SweepProgress(settings, at, folder, note if output.verbose else None)
    searched = progress.sweep
    note(f"{_format_title(settings)}; {searched.count('finished', 'stopped')} with a score already")
    # Workers print nothing and do not send to MLflow: the driver does both for all runs.
    paths = StoragePaths.with_absolute_paths(runtime.data, runtime.results, replace(at, quiet=True, tracking_uri="off"))
    datasets = dict.fromkeys(settings.datasets, TRAINING_SPLITS)
    # The import of MLflow takes longer than everything else here; `procap track sync` repeats a failed export.
    if progress.is_recorded and at.tracking_uri in (None, "off"):
        return _show_outcome(searched, runtime, engine, output)
    try:
        if not searched.is_complete:
            needs = datasets, list_backbones(settings), settings.methods
            with connect_checked(launcher, paths, *needs, always_ray=True) as capacity, progress.display:
                machines = "on the cluster" if launcher.kind == "ray" else "on this machine"
                note(f"{capacity.max_concurrent} at once {machines}, {capacity.resources} each")
                note("loading the program on the workers ...")
                # Write the settings only now: a sweep that failed the checks must not occupy its name.
                write_json(folder.path / "sweep.json", settings)
                searched.run(paths, capacity, progress)
    except BaseException as error:
        if searched.configurations:
            progress.close(status_after(error))
            RemoteResults.from_runtime(at).try_push_all()
        raise
    interrupted = searched.count("running") > 0
    progress.close("failed" if searched.count("failed") else "interrupted" if interrupted else "finished")
    return _show_outcome(searched, runtime, engine, output)


def list_backbones(settings: SweepSettings) -> list[tuple[str, str | None]]:
    """List the backbones of a sweep with their weights as runs resolve them; the path of a file becomes absolute."""
    from procap.weights.architectures import canonical_name

    backbones = settings.space.get("backbone", [settings.backbone])
    weights = settings.space.get("pretrained", [settings.pretrained])
    return [canonical_name(str(backbone), tag) for backbone in backbones for tag in weights]


def _show_outcome(
    searched: Sweep, runtime: flags.RuntimeFlags, engine: flags.EngineFlags, output: flags.OutputFlags
) -> int:
    """Write summary and plot; print the table, the best configurations and the commands that train and test them."""
    settings, configurations = searched.settings, list(searched.configurations.values())
    commands = [
        line
        for best in table.find_best(settings, configurations)
        for line in make_commands(settings, best.values, runtime, engine)
    ]
    document = table.summarize(settings, configurations, commands)
    write_json(searched.folder.path / "summary.json", document)
    # Includes the records of what was exported to MLflow.
    RemoteResults.from_runtime(searched.runtime).push_all()
    if configurations:
        show(render(table.sweep_table(settings, configurations), "md"))
    if left := searched.count("running"):
        note(f"{plural(left, 'configuration')} unfinished, with their states kept: repeat the command to resume")
    if commands:
        show("\nto train the best with all seeds and test it:\n" + " && \\\n".join(f"  {line}" for line in commands))
    failed = {
        table.format_values(configuration.values): table.format_failure(configuration)
        for configuration in configurations
        if configuration.state == "failed"
    }
    code = note_failures(len(configurations) - len(failed), failed)
    if output.json:
        show_json(document)
    return code


def _show_plan(settings: SweepSettings, folder: SweepFolder, output: flags.OutputFlags) -> int:
    """Print what would be searched and the configurations that were tried; writes nothing."""
    tried = list(folder.load().values())
    fields = [(field, format_domain(domain)) for field, domain in settings.space.items()]
    show(columns(("field", "values"), fields or [("-", "nothing is varied: seeds and data sets are compared")]))
    if tried:
        show("\n" + render(table.sweep_table(settings, tried), "md"))
    show(f"\n{_format_title(settings)}; {len(tried)} tried already. Nothing was written.")
    if output.json:
        show_json({"sweep": settings.model_dump(mode="json"), "total": settings.size})
    return 0


def _format_title(settings: SweepSettings) -> str:
    limits = f", {settings.trials} configurations" if settings.trials is not None else ""
    limits += f", {settings.hours:g} h" if settings.hours is not None else ""
    each = plural(len(settings.seeds), "seed")
    each += "" if settings.varies_data else f", {plural(len(settings.datasets), 'data set')}"
    return f"sweep {settings.name}: {settings.search} search{limits}; {each} each; {METRICS[settings.metric]}"
