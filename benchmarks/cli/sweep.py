"""`procap sweep`: hyperparameter search with Ray Tune."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cli import flags
from benchmarks.cli.selection import recipe_overrides, runtime_config
from benchmarks.console.output import columns, note, note_failures, plural, show, show_json
from benchmarks.console.packing_progress import pack_missing_with_progress, require_packable
from benchmarks.console.parse import parse_datasets, parse_integers, parse_methods, parse_options, parse_shot_count
from benchmarks.console.preconditions import check_training_images, check_weights, note_warmup
from benchmarks.experiment.published import table1_methods
from benchmarks.sweeps import outcome
from benchmarks.tables.render import render
from cluster.launcher import Launcher, connect
from cluster.preflight import TRAINING_SPLITS, check_nodes
from cluster.space import Values, parse_param
from cluster.sweep_record import METRICS, SWEEPS, Configuration, SweepFolder, SweepSettings, examples, make_runs
from cluster.trial import StoragePaths
from procap.errors import UsageError, validate
from runner.planning import check_read
from runner.run_collection import status_after
from runner.session import Session
from shards.files import check_writable, file_lock
from shards.resolve import resolve_dataset
from shards.uneven_samples import BALANCED

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


def make_settings(
    search: flags.SweepFlags, selection: flags.SelectionFlags, recipe_flags: flags.RecipeFlags, data: Path
) -> SweepSettings:
    """Make the settings; varied values replace a single one. Raises UsageError for what cannot be searched."""
    datasets = parse_datasets(selection.datasets, data)
    for name in datasets:
        if "val" not in resolve_dataset(name, data).counts:
            raise UsageError(f"{name} has no validation images, and a sweep never chooses by test images")
    methods = parse_methods(selection.methods, table1_methods())
    space = dict(parse_param(text, methods) for text in search.param or ())
    if isinstance(shots := space.get("shots"), list):
        # As in --shots: 0 stands for all images.
        space["shots"] = list(dict.fromkeys(0 if value in ("full", "all") else value for value in shots))
    is_listed = all(isinstance(domain, list) for domain in space.values())
    names = [methods, datasets, [field.rpartition(".")[2] for field in space]]
    chosen = {**asdict(search), **asdict(selection), "recipe": recipe_flags.recipe}
    fields: dict[str, Any] = {
        **{name: value for name, value in chosen.items() if name != "param" and value not in (None, "")},
        "name": search.name or "-".join("-".join(part) for part in names if part)[:100],
        "space": space,
        "methods": methods,
        "datasets": datasets,
        "seeds": parse_integers(selection.seeds, "--seeds") or [1],
        "search": search.search or ("grid" if is_listed and not search.trials else "random"),
        "shots": parse_shot_count(selection.shots or "16"),
        "overrides": recipe_overrides(recipe_flags),
        "options": parse_options(flags.given_options(recipe_flags.option, recipe_flags.unlabelled), methods),
    }
    settings = validate(SweepSettings, fields, "sweep")
    if settings.search == "grid" and not is_listed:
        raise UsageError("--search grid needs lists of values: use random or tpe")
    of_draws = flags.command_line(flags.SweepFlags(trials=search.trials, search_seed=search.search_seed))
    if settings.search == "grid" and of_draws:
        raise UsageError(f"--search grid trains all combinations: leave out {of_draws}, or use random or tpe")
    of_asha = flags.command_line(
        flags.SweepFlags(grace_period=search.grace_period, reduction_factor=search.reduction_factor)
    )
    if settings.scheduler != "asha" and of_asha:
        raise UsageError(f"without --scheduler asha nothing is stopped early: add it, or leave out {of_asha}")
    if settings.search != "grid" and not (settings.trials or settings.hours):
        raise UsageError(f"--search {settings.search} never ends by itself: give --trials or --hours")
    if settings.scheduler == "asha" and "recipe.epochs" in space:
        raise UsageError("--scheduler asha compares runs at the same epoch: epochs cannot be varied with it")
    return settings


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


def make_commands(settings: SweepSettings, values: Values, runtime_flags: flags.EngineFlags) -> list[str]:
    """Make the commands that train a configuration with all seeds and test it.

    A sweep with --metric held-out trains on half of the base classes; these commands train on all of them.
    """
    method = values.get("method", settings.methods[0])
    overrides, options = dict(settings.overrides), dict(settings.options.get(method, {}))
    for field, value in values.items():
        group, _, name = field.partition(".")
        if name:
            (overrides if group == "recipe" else options)[name] = value
    plain = {name: overrides.pop(name) for name in ("epochs", "batch_size", "lr") if name in overrides}
    chosen = {**settings.model_dump(), **values}
    selection = flags.SelectionFlags(
        methods=method,
        datasets=",".join(settings.datasets),
        seeds=",".join(map(str, settings.seeds)),
        shots=str(chosen["shots"] or "full"),
        classes=settings.classes,
        sampling="" if settings.sampling == BALANCED else settings.sampling,
        backbone=chosen["backbone"],
        pretrained=chosen["pretrained"] or "",
        precision=chosen["precision"],
    )
    training = flags.RecipeFlags(
        recipe=chosen["recipe"], option=flags.assignments(options), recipe_field=flags.assignments(overrides), **plain
    )
    groups = {"train": runtime_flags, "eval": runtime_flags.for_evaluation()}
    return [f"procap {name} {flags.command_line(selection, training, group)}" for name, group in groups.items()]
