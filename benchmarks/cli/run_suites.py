"""Run suites by the flags of `procap bench`: plan, execute what is missing, print the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.cli import flags
from benchmarks.cli.dry_run import show_plan
from benchmarks.cli.selection import eval_settings, runtime_config, suite_changes, trainable_methods
from benchmarks.console.output import note, note_failures, plural, quote, show, show_json
from benchmarks.console.parse import parse_options
from benchmarks.experiment.profiles import MINI, PAPER, find_profile
from benchmarks.experiment.suite import Suite
from benchmarks.report.report import write_report
from benchmarks.suites import ALL, SUITES, load_suite
from benchmarks.suites.checks import note_warmup
from benchmarks.suites.outputs import SuiteOutputs, make_outputs
from benchmarks.suites.planning import SuitePlan, find_obstacle, merge_runs, read_state, read_states
from benchmarks.suites.progress import CollectionTrackers
from benchmarks.tables.render import render, to_dict
from cluster.run import StoragePaths
from procap.errors import UsageError, UserError
from runner.config import RuntimeConfig
from runner.environment import library_defaults
from runner.remote_results import RemoteResults
from runner.run_collection import Status, status_after
from runner.tracking.background import CollectionTracker, exporter_for
from shards.resolve import is_packed, kind_of_name

MISSING = "its results were not found: is --results on storage that all nodes share?"


def bench(
    name: str,
    chosen: flags.SuiteFlags,
    launch: flags.LaunchFlags,
    runtime_flags: flags.RuntimeFlags,
    engine: flags.EngineFlags,
    mode: flags.ModeFlags,
    output: flags.OutputFlags,
) -> int:
    """Run the suite of that name, or all; returns 3 when some runs failed and 1 when all did."""
    library_defaults()
    launcher = launch.to_launcher()
    settings = eval_settings(chosen.eval_precision, chosen.eval_resize, chosen.samples)
    runtime = runtime_config(runtime_flags, engine, limit=chosen.limit, evaluation=settings)
    suites = [load_suite(suite) for suite in (SUITES if name == ALL else [name])]
    plans = plan_suites(suites, chosen, runtime_flags, runtime.data)
    runs = merge_runs(plans)
    for run in runs:
        settings.for_run(run.config)
    note_warmup(run.config for run in runs)
    remote = RemoteResults.from_runtime(runtime)
    remote.pull_all()
    states = read_states(runs, runtime, force=mode.force)
    if mode.dry_run:
        return show_plan(runs, states, output)
    open_runs = [run for run in runs if not states[run.path].is_done]
    for run in open_runs:
        if states[run.path].status == "other data":
            # Raises before anything is written.
            read_state(run, runtime)
    _note_begin(plans, len(runs), len(open_runs))
    trackers = CollectionTrackers([CollectionTracker(runtime, plan.collection) for plan in plans])
    failed: dict[str, str] = {}
    outputs: list[SuiteOutputs] = []
    try:
        if open_runs:
            # This imports torch, which a wrong flag need not wait for.
            from benchmarks.suites.execute import execute

            # Workers print nothing and do not send to MLflow: this process does both for all runs.
            paths = StoragePaths.with_absolute_paths(
                runtime_flags.data, runtime_flags.results, replace(runtime, quiet=True, tracking_uri="off")
            )
            failed = execute(
                open_runs, states, paths, runtime, launcher, trackers, force=mode.force, verbose=output.verbose
            )
        remote.pull_all()
        trackers.started = True
        note("making tables and plots")
        for plan, tracker in zip(plans, trackers.trackers, strict=True):
            outputs.append(_finish(plan, tracker, failed, runtime, mode, output))
    except BaseException as error:
        if trackers.started:
            trackers.close(status_after(error))
            remote.try_push_all()
        raise
    exporter_for(runtime).flush()
    remote.push_all()
    failed = {**{path: MISSING for made in outputs for path in made.missing},
              **{path: why for made in outputs for path, why in made.unreadable.items()}, **failed}  # fmt: skip
    done = [run.path for run in runs if run.path not in failed]
    return _show_outputs(name, outputs, done, failed, runtime, runtime_flags, output)


def _note_begin(plans: Sequence[SuitePlan], runs: int, left: int) -> None:
    title = plural(len(plans), "suite") if len(plans) > 1 else plans[0].suite.title
    kinds = sorted({kind_of_name(name) for plan in plans for name in plan.options.datasets})
    data = f"on {' and '.join(kinds)} data, profile {plans[0].options.profile.name}"
    note(f"{title}, {data}: {plural(runs, 'run')}, {runs - left} done already")


def _finish(
    plan: SuitePlan,
    tracker: CollectionTracker,
    failed: Mapping[str, str],
    runtime: RuntimeConfig,
    mode: flags.ModeFlags,
    output: flags.OutputFlags,
) -> SuiteOutputs:
    """Write the tables and plots of a suite whose runs have ended, and record its end. failed: errors by run."""
    tracker.update(tracker.collection.runs)
    if plan.suite.finish:
        # Exports would disturb its measurements.
        exporter_for(runtime).flush()
    made = make_outputs(plan.suite, plan.options, runtime, force=mode.force, verbose=output.verbose)
    reasons = {**dict.fromkeys(made.missing, MISSING), **made.unreadable, **failed}
    runs_failed = {run: reasons[run] for run in tracker.collection.runs if run in reasons}
    status: Status = "failed" if runs_failed or made.failed else "finished"
    tracker.close(status, {**made.metrics, "runs_failed": float(len(runs_failed))}, runs_failed, wait=False)
    return made


def plan_suites(
    suites: Sequence[Suite], chosen: flags.SuiteFlags, runtime: flags.RuntimeFlags, data: Path
) -> list[SuitePlan]:
    """Plan suites; of several those that cannot run on an own data set are left out with a note.

    Raises UsageError if none is left.
    """
    several = len(suites) > 1
    plans = []
    for suite in suites:
        plan = plan_suite(suite, chosen, runtime, data, several=several)
        if why := find_obstacle(suite, plan.options, several=several):
            if not several:
                raise UsageError(f"{suite.name} cannot run: {why}")
            note(f"{suite.name} is left out: {why}")
        else:
            plans.append(plan)
    if not plans:
        raise UsageError("no suite can run on these data sets")
    return plans


def plan_suite(
    suite: Suite, chosen: flags.SuiteFlags, runtime: flags.RuntimeFlags, data: Path, *, several: bool = False
) -> SuitePlan:
    """Plan `suite` with the options given by the flags.

    The profile is that of the named data sets, else the paper's if one of its data sets is packed, else the generated
    one.
    several: planned together with other suites; --classes then does not apply to a suite without a choice.
    """
    changes = suite_changes(chosen, data)
    if chosen.classes and (suite.class_choices or not several):
        changes["classes"] = chosen.classes
    named = set(changes.get("datasets", ()))
    if chosen.profile:
        profile = find_profile(chosen.profile)
    elif named & {*PAPER.datasets}:
        profile = PAPER
    else:
        is_paper = not named and any(is_packed(data, dataset) for dataset in PAPER.datasets)
        profile = PAPER if is_paper else MINI
    overrides = {} if chosen.epochs is None else {"epochs": chosen.epochs}
    methods = changes.get("methods", suite.methods)
    # An option of a method that only some of the suites compare does not apply to the others.
    suites = SUITES if several and not chosen.methods else ()
    others = [method for name in suites for method in load_suite(name).methods]
    parsed = parse_options(chosen.option or (), dict.fromkeys([*methods, *others]))
    options_by_method = {method: values for method, values in parsed.items() if method in methods}
    if "methods" in changes:
        changes["methods"] = trainable_methods(chosen.methods, changes["methods"], profile.options, options_by_method)
    options = suite.options(
        profile,
        quick=chosen.quick,
        recipe=chosen.recipe,
        overrides=overrides,
        options={method: values for method, values in options_by_method.items() if values},
        evaluation=eval_settings(chosen.eval_precision, chosen.eval_resize, chosen.samples).changes,
        data=data,
        **changes,
    )
    return SuitePlan.make(suite, options)


def _show_outputs(
    name: str,
    outputs: Sequence[SuiteOutputs],
    done: Sequence[str],
    failed: Mapping[str, str],
    runtime: RuntimeConfig,
    place: flags.RuntimeFlags,
    output: flags.OutputFlags,
) -> int:
    """Print the first table of each suite, failures, and the next commands; write the report of all suites."""
    for made in outputs:
        if made.tables:
            show(render(made.tables[0], "md") + "\n")
    note(f"tables and plots: {outputs[0].folder if len(outputs) == 1 else outputs[0].folder.parent}")
    failed = {**failed, **{made.suite.name: made.failed for made in outputs if made.failed}}
    results = f"--results {quote(place.results)}"
    both = f"--data {quote(place.data)} {results}" if place.data else results
    ui = f"procap ui {results} --suite {outputs[0].suite.name}"
    following = f"procap table {name} {both}; {ui}; procap report {name} {both}"
    if name == ALL:
        following = f"procap table SUITE {both}; procap ui {results}"
        try:
            # The local folder of a URL is a cache, in which users would not find the report.
            out = Path("report") if runtime.store else None
            page = write_report(runtime.results, out, data=runtime.data, shown=place.results)
            note(f"report: {page}")
        except UserError as error:
            failed["procap report"] = str(error)
    code = note_failures(len(done), failed)
    if not failed:
        note(f"next: {following}")
    if output.json:
        tables = [to_dict(table) for made in outputs for table in made.tables]
        show_json({"suite": name, "results": str(runtime.results), "done": done, "failed": failed, "tables": tables})
    return code
