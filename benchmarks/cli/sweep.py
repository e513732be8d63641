"""`procap sweep`: hyperparameter search with Ray Tune."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.cli import flags
from benchmarks.cli.selection import runtime_config
from benchmarks.cli.sweep_settings import make_commands, make_settings
from benchmarks.console.output import columns, note, note_failures, plural, show, show_json
from benchmarks.console.packing_progress import pack_missing_with_progress, require_packable
from benchmarks.console.preconditions import check_training_images, check_weights, note_warmup
from benchmarks.sweeps import outcome
from benchmarks.tables.render import render
from cluster.launcher import Launcher, connect
from cluster.preflight import TRAINING_SPLITS, check_nodes
from cluster.sweep_record import METRICS, SWEEPS, Configuration, SweepFolder, SweepSettings, examples, make_runs
from cluster.trial import StoragePaths
from runner.planning import check_read
from runner.run_collection import status_after
from runner.session import Session
from shards.files import check_writable, file_lock

if TYPE_CHECKING:
    from cluster.sweep import Sweep


@flags.command(
    "procap sweep --methods procap --datasets digits --param lr=1e-4,1e-3 --param depth=3,9 --seeds 1,2,3",
    "procap sweep --methods coop --datasets shapes --param 'lr=loguniform(1e-4,1)' --search tpe --trials 9 "
    "--scheduler asha",
    "procap sweep --methods coop --datasets shapes --param lr=1e-3,1e-2 --launcher ray --address cluster:6379",
)
def sweep(
    search_flags: flags.SweepFlags,
    selection: flags.SelectionFlags,
    recipe_flags: flags.RecipeFlags,
    launch: flags.LaunchFlags,
    runtime_flags: flags.EngineFlags,
    mode: flags.ModeFlags,
) -> int:
    """Search fields of a run for the best score on validation images, averaged over seeds and data sets.

    Test images are never read. Finished runs are never trained again, unless --force deletes the runs that the sweep
    has tried. Repeat the command to resume a sweep.
    """
    launcher = launch.to_launcher()
    session = Session(runtime_config(runtime_flags))
    runtime = session.runtime
    settings = make_settings(search_flags, selection, recipe_flags, runtime.data)
    folder = SweepFolder(runtime.results / SWEEPS / settings.name)
    session.remote.pull()
    tried = folder.load_configurations(settings)
    # Raises for values that runs reject.
    runs = [run for values in examples(settings) for run in make_runs(settings, values, runtime.data)]
    check_read([run.config for run in runs], settings.overrides)
    check_training_images((run.config for run in runs), runtime.data)
    if launcher.kind == "local":
        require_packable(settings.datasets, runtime.data)
        check_weights((run.config.backbone, run.config.pretrained) for run in runs)
    note_warmup((run.config for run in runs), runtime.data)
    if mode.dry_run:
        return _show_plan(settings, tried)
    check_writable(runtime.results)
    pack_missing_with_progress(settings.datasets, runtime.data)
    with file_lock(folder.path / ".lock", timeout=0):
        if mode.force:
            # This imports torch, which a wrong flag need not wait for.
            from benchmarks.suites.execute import delete_runs

            # Read again under the lock: a sweep that has just ended may have added configurations.
            tried = folder.load_configurations(settings)
            delete_runs(sorted({path for configuration in tried for path in configuration.runs}), session)
            folder.save(settings)
        from cluster.sweep import Sweep

        return _execute(Sweep(settings, session, folder), launcher, runtime_flags)


def _execute(sweep: Sweep, launcher: Launcher, runtime_flags: flags.EngineFlags) -> int:
    """Execute the sweep; returns exit code 3 if some configurations failed and 1 if all did."""
    from benchmarks.suites.execute import note_capacity
    from benchmarks.sweeps.progress import SweepProgress

    settings, session = sweep.settings, sweep.session
    progress = SweepProgress(sweep)
    scored = sweep.count("finished", "stopped")
    note(f"{_format_title(settings)}; {scored} with a score already")
    paths = StoragePaths.for_workers(runtime_flags.data, runtime_flags.results, session.runtime)
    try:
        if settings.size is None or scored < settings.size:
            with connect(launcher, paths, always_ray=True) as capacity, progress.display:
                if launcher.kind == "ray":
                    check_nodes(paths, dict.fromkeys(settings.datasets, TRAINING_SPLITS), autoscale=launcher.autoscale)
                note_capacity(capacity)
                # Only now: a sweep that failed the checks must not occupy its name.
                sweep.folder.save(settings, sweep.configurations.values())
                sweep.run(paths, capacity, progress)
    except BaseException as error:
        if sweep.configurations:
            progress.close(status_after(error))
            session.remote.try_push()
        raise
    session.remote.pull()
    progress.close("failed" if sweep.count("failed") else "interrupted" if sweep.count("unfinished") else "finished")
    session.exporter.flush()
    return _show_outcome(sweep, runtime_flags)


def _show_outcome(sweep: Sweep, runtime: flags.EngineFlags) -> int:
    settings, configurations = sweep.settings, list(sweep.configurations.values())
    best = outcome.find_best(configurations)
    commands = make_commands(settings, best.values, runtime) if best else []
    # Includes the records of what was exported to MLflow.
    sweep.session.remote.push()
    if configurations:
        show(render(outcome.sweep_table(settings, configurations, sweep.session.runtime.results), "md"))
    if left := sweep.count("unfinished"):
        note(f"{plural(left, 'configuration')} unfinished, with their states kept: repeat the command to resume")
    if commands:
        show("\nto train the best with all seeds and test it:\n" + " && \\\n".join(f"  {line}" for line in commands))
    failed = {
        outcome.format_values(configuration.values): configuration.error
        for configuration in configurations
        if configuration.state == "failed"
    }
    code = note_failures(len(configurations) - len(failed), failed)
    show_json(outcome.summarize(settings, configurations, commands))
    return code


def _show_plan(settings: SweepSettings, tried: Sequence[Configuration]) -> int:
    fields = [(field, json.dumps(domain)) for field, domain in settings.space.items()]
    show(columns(("field", "values"), fields or [("-", "nothing is varied")]))
    show(f"\n{_format_title(settings)}; {len(tried)} tried already. Nothing was written.")
    show_json({"sweep": settings.model_dump(mode="json"), "total": settings.size})
    return 0


def _format_title(settings: SweepSettings) -> str:
    limits = f", {settings.trials} configurations" if settings.trials is not None else ""
    limits += f", {settings.hours:g} h" if settings.hours is not None else ""
    runs = f"{plural(len(settings.seeds), 'seed')}, {plural(len(settings.datasets), 'data set')} each"
    return f"sweep {settings.name}: {settings.search} search{limits}; {runs}; {METRICS[settings.metric]}"
