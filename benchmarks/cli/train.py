"""`procap train`: train every selected run, on one or several processes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from benchmarks.cli import flags
from benchmarks.cli.completion import complete_runs
from benchmarks.cli.config_file import ConfigFlags
from benchmarks.cli.selection import plan_selected_runs, runtime_config, start_runs
from benchmarks.cli.several_runs import Failures, process_group, show_plan
from benchmarks.console.output import columns, is_first_rank, note, note_failures, show, show_json
from benchmarks.console.packing_progress import pack_missing_with_progress, require_packable
from benchmarks.console.preconditions import check_training_images, check_weights_of, note_warmup
from runner.config import RunConfig
from runner.results import TrainResult
from runner.run_folders import RunFolder
from runner.run_state import RunSpec, read_states
from runner.session import Session


@flags.command(
    "procap train --methods maple --datasets shapes",
    "procap train --methods coop,procap --datasets shapes,digits --seeds 1,2,3 --epochs 10",
    "procap train --methods procap --datasets petals --option infonce=false --dry-run",
    "torchrun --standalone --nproc-per-node 4 --no-python procap train --methods procap --datasets petals",
)
def train(
    file: ConfigFlags,
    selection: flags.SelectionFlags,
    recipe_flags: flags.RecipeFlags,
    runtime_flags: flags.EngineFlags,
    mode: flags.ModeFlags,
    init: Annotated[
        str,
        flags.flag("RUN", "finished run to start from: its folder or hash", complete=complete_runs),
    ] = "",
) -> int:
    """Train methods on data sets. Finished runs are kept, interrupted ones are resumed.

    Under torchrun all processes train each run together; the results equal those of one process.
    """
    file.save(selection, recipe_flags, runtime_flags, init=init)
    runtime = runtime_config(runtime_flags)
    if mode.dry_run:
        if not is_first_rank():
            return 0
        session = Session(runtime)
        session.remote.pull()
        configs = plan_selected_runs(selection, recipe_flags, runtime.data)
        specs = [RunSpec(config=config) for config in (start_runs(configs, init, session) if init else configs)]
        states = read_states(session, specs, force=mode.force)
        return show_plan(specs, states, runtime.data)
    plan = partial(_plan_runs, selection, recipe_flags, force=mode.force, init=init)
    with process_group(runtime, plan, on_first=bool(init)) as (session, runs):
        failures = Failures(len(runs), group=session.group)
        done = _train_all(runs, session, failures, force=mode.force)
        session.exporter.flush(create=False)
    rows = []
    for config, result in done.items():
        loss = f"{sum(result.epochs[-1].terms.values()):.4f}" if result.epochs else "-"
        rate = "-" if result.images_per_second is None else f"{result.images_per_second:.1f}"
        rows.append((config.path, loss, result.steps, f"{result.seconds:.1f}", rate))
    if rows:
        show(columns(("run", "loss (all terms)", "steps", "seconds", "images/s"), rows))
    if rows and not failures.reasons:
        named = " ".join(str(runtime.results / config.path) for config in done) if init else ""
        evaluating = runtime_flags.for_evaluation()
        note(f"next: procap eval {named or flags.command_line(selection, recipe_flags, evaluating)}")
    code = note_failures(len(done), failures.reasons)
    long = {"epochs", "fewshot", "environment"}
    trained = [{"run": config.path, **result.model_dump(exclude=long)} for config, result in done.items()]
    show_json({"results": runtime.shown_results, "trained": trained, "failed": failures.reasons})
    return code


def _plan_runs(
    selection: flags.SelectionFlags, recipe_flags: flags.RecipeFlags, session: Session, *, force: bool, init: str
) -> list[RunConfig]:
    runtime = session.runtime
    runs = plan_selected_runs(selection, recipe_flags, runtime.data)
    runs = start_runs(runs, init, session) if init else runs
    check_weights_of(runs, runtime)
    folders = [(config.dataset, RunFolder(runtime.results / config.path)) for config in runs]
    require_packable((name for name, folder in folders if force or not folder.train_file.exists()), runtime.data)
    note_warmup(runs, runtime.data)
    return runs


def _train_all(
    runs: Sequence[RunConfig], session: Session, failures: Failures, *, force: bool
) -> dict[RunConfig, TrainResult]:
    """Train `runs` in order and pack missing data first; failed runs are left out of the result."""
    from runner.earlier_runs import preliminary_run
    from runner.train import train_run

    done: dict[RunConfig, TrainResult] = {}
    data = session.runtime.data
    for number, config in enumerate(runs, 1):
        position = f"[{number}/{len(runs)}]"
        run = session.get_run(config)
        was_finished = run.folder.train_file.exists() and not force
        with failures.collect(config.path):
            if not was_finished:
                check_training_images([config], data)
                paths = [each.path for each in (preliminary_run(config), config) if each]
                note(f"{position} training {', then '.join(paths)}")
            pack_missing_with_progress([config.dataset], data)
            result = train_run(run, force=force)
            assert isinstance(result, TrainResult)
            done[config] = result
            if was_finished:
                note(f"{position} already finished: {config.path}")
    return done
