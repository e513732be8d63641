"""`procap bench SUITE`: plan a suite, skip what is done, execute the rest, print the tables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from benchmarks.cli import flags
from benchmarks.cli.dry_run import show_checked_plan
from benchmarks.cli.selection import eval_settings, runtime_config, suite_changes, trainable_methods
from benchmarks.console.output import note, note_failures, plural, quote, show, show_json
from benchmarks.console.parse import parse_options
from benchmarks.report.report import write_report
from benchmarks.results.profiles import MINI, PAPER, find_profile
from benchmarks.suites import ALL, PAPER_SUITES, load_suite, suite_help, suite_paths, suite_titles
from benchmarks.suites.checks import check_runs, check_setup, check_training_images, note_warmup
from benchmarks.suites.cost import forecast_runs
from benchmarks.suites.outputs import SuiteOutputs, make_outputs
from benchmarks.suites.planning import (
    SuitePlan,
    describe_other_runs,
    find_obstacle,
    find_other_runs,
    is_done,
    join_recorded,
    merge_runs,
)
from benchmarks.suites.progress import CollectionTrackers
from benchmarks.suites.suite import Suite
from benchmarks.tables.render import render, to_dict
from cluster.launcher import check_launcher
from procap.errors import UsageError, UserError
from runner.config import RuntimeConfig
from runner.environment import library_defaults
from runner.remote_results import RemoteResults
from runner.run_collection import Status, status_after
from runner.tracking.background import CollectionTracker, exporter_for
from shards.default_paths import cache_home
from shards.resolve import kind_of_name

MISSING = "its results are missing although it is done: were they removed, or is the folder not one for all nodes?"
ALL_TEXT = """Every suite of the paper, in one go, and the report.

A run that several suites share is done once. With --datasets all suites train on the named sets alone; those that
cannot run on a user's own set are left out. `readings`, `readings-training` and `mmlop-ladder` are no experiments of
the paper and are left out too.
"""
RESUME_TEXT = (
    "Finished runs are never repeated and interrupted ones are resumed: stop the command at any time and repeat it."
)


class SuiteGroup(TyperGroup):
    """List the commands of `procap bench`: one for each suite, by name or file, and `all`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [ALL, *suite_paths()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name == "runtime":
            from benchmarks.cli.bench_runtime import bench_runtime

            return typer.main.get_command(bench_runtime.app)  # type: ignore[attr-defined]
        return suite_command(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(ALL, "every suite of the paper, and the report"), *suite_titles().items()])


app = typer.Typer(
    help="Run the experiments of the paper, by name, or a suite of your own, by file.\n\n"
    "`procap bench SUITE --help` lists the options, also with a file as SUITE.",
    cls=SuiteGroup,
    **flags.PLAIN,
)


@app.callback(
    **flags.examples(
        "procap bench all --profile mini --quick", "procap bench base-to-novel --help", "procap bench my_suite.py"
    )
)
def group() -> None:
    pass


def suite_command(name: str) -> Any:
    """Make the command of one suite, or of all; its help is the docstring of the suite's file."""
    lines = ["--profile mini --quick", "--data DATA --results RESULTS --launcher ray", "--dry-run"]
    text = ALL_TEXT if name == ALL else suite_help(name)

    @flags.command(*(f"procap bench {name} {line}" for line in lines), help=f"{text.strip()}\n\n{RESUME_TEXT}")
    def run(
        suite: flags.SuiteFlags,
        launch: flags.LaunchFlags,
        runtime: flags.RuntimeFlags,
        engine: flags.EngineFlags,
        mode: flags.ModeFlags,
        output: flags.OutputFlags,
    ) -> int:
        return bench(name, suite, launch, runtime, engine, mode, output)

    return typer.main.get_command(run.app)  # type: ignore[attr-defined]


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
    # A smoke test need not report the speed of every method.
    features = cache_home() / "features" if chosen.quick else None
    runtime = runtime_config(runtime_flags, engine, limit=chosen.limit, features=features, evaluation=settings)
    several = name == ALL
    suites = [load_suite(one) for one in (PAPER_SUITES if several else [name])]
    plans = plan_suites(suites, chosen, runtime_flags, runtime.data)
    runs = merge_runs(plans)
    for run in runs:
        settings.for_run(run.config)
    for plan in plans:
        _note_prescribed(plan, chosen)
    note_warmup(run.config for run in runs)
    remote = RemoteResults.from_runtime(runtime)
    remote.pull_all()
    open_runs = [run for run in runs if mode.force or not is_done(run, runtime)]
    if mode.dry_run:
        check_training_images((run.config for run in runs), runtime.data)
        forecast = forecast_runs(open_runs, runtime, launcher, force=mode.force)

        def check() -> None:
            check_launcher(launcher, runtime.device)
            if launcher.kind == "local":
                check_runs(open_runs, runtime, launcher.processes, force=mode.force)

        tasks = {run.path: plan.suite.task for plan in plans for run in plan.runs}
        show_checked_plan(check, runs, runtime, output, force=mode.force, forecast=forecast, tasks=tasks)
        return 0
    # Before `--force` deletes anything.
    if (chosen.option or mode.force) and launcher.kind == "local":
        check_setup((run.config for run in open_runs), runtime, launcher.processes)
    # This imports torch, which a wrong flag need not wait for.
    from benchmarks.cli.execution import execute

    title = plural(len(plans), "suite") if several else plans[0].suite.title
    kinds = sorted({kind_of_name(name) for plan in plans for name in plan.options.datasets})
    where = f"on {' and '.join(kinds)} data, profile {plans[0].options.profile.name}"
    note(f"{title}, {where}: {plural(len(runs), 'run')}, {len(runs) - len(open_runs)} done already")
    shown = [join_recorded(plan, runtime.results) for plan in plans]
    trackers = CollectionTrackers([CollectionTracker(runtime, plan.collection) for plan in shown])
    failed: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    outputs: list[SuiteOutputs] = []
    try:
        if open_runs:
            failed = execute(open_runs, runtime, runtime_flags, launcher, trackers, output, force=mode.force)
        remote.pull_all()
        planned = {run.path for run in runs}
        missing = {run.path: MISSING for run in runs if run.path not in failed and not is_done(run, runtime)}
        trackers.started = True
        note("making tables and plots")
        for plan, tracker in zip(shown, trackers.trackers, strict=True):
            # Includes runs that an earlier, killed attempt finished without recording them.
            tracker.update(tracker.collection.runs)
            if plan.suite.finish:
                # Exports would disturb its measurements.
                exporter_for(runtime).flush()
            made = make_outputs(plan.suite, plan.options, runtime, force=mode.force, verbose=output.verbose)
            outputs.append(made)
            unreadable |= {path: why for path, why in made.unreadable.items() if path in planned}
            reasons = {**missing, **unreadable, **failed}
            own = {run: reasons[run] for run in tracker.collection.runs if run in reasons}
            status: Status = "failed" if own or made.failed else "finished"
            tracker.close(status, {**made.metrics, "runs_failed": float(len(own))}, own, wait=False)
            if others := find_other_runs(tracker.collection, runtime.results, (run.path for run in plan.runs)):
                note(describe_other_runs(plan, others, runtime_flags.results))
    except BaseException as error:
        if trackers.started:
            trackers.close(status_after(error))
            remote.try_push_all()
        raise
    exporter_for(runtime).flush()
    remote.push_all()
    failed = {**missing, **unreadable, **failed}
    done = [run.path for run in runs if run.path not in failed]
    return _show_outputs(name, outputs, done, failed, runtime, runtime_flags, output)


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

    The profile is that of the named data sets, else the paper's if there is a data root, else the generated one.
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
        generated = named and named <= {*MINI.datasets}
        profile = MINI if generated or not (runtime.data or os.environ.get("PROCAP_DATA")) else PAPER
    overrides = {} if chosen.epochs is None else {"epochs": chosen.epochs}
    methods = changes.get("methods", suite.methods)
    # An option of a method that only some of the suites compare does not apply to the others.
    every = PAPER_SUITES if several and not chosen.methods else ()
    others = [method for name in every for method in load_suite(name).methods]
    parsed = parse_options(chosen.option or (), dict.fromkeys([*methods, *others]))
    given = {method: own for method, own in parsed.items() if method in methods}
    if "methods" in changes:
        changes["methods"] = trainable_methods(chosen.methods, changes["methods"], profile.options, given)
    options = suite.options(
        profile,
        quick=chosen.quick,
        recipe=chosen.recipe,
        overrides=overrides,
        options={method: own for method, own in given.items() if own},
        evaluation=eval_settings(chosen.eval_precision, chosen.eval_resize, chosen.samples).changes,
        data=data,
        **changes,
    )
    return SuitePlan.make(suite, options)


def _note_prescribed(plan: SuitePlan, chosen: flags.SuiteFlags) -> None:
    """Note the flags that variants of the suite overrule because they set the same themselves."""
    options, variants = plan.options.options, {id(run.variant): run.variant for run in plan.runs}.values()
    kept = {
        f"--option {one.method}.{name}"
        for one in variants
        for name in options.get(one.method, {})
        if name in one.options
    }
    if chosen.recipe and any(one.recipe not in ("", chosen.recipe) for one in variants):
        kept.add(f"--recipe {chosen.recipe}")
    trained = [run.variant.shots for run in plan.runs if run.spec.config.recipe.epochs]
    if chosen.shots and any(shots not in (None, *plan.options.shots) for shots in trained):
        kept.add(f"--shots {chosen.shots}")
    if kept:
        note(f"{plan.suite.name} sets {', '.join(sorted(kept))} itself in some or all variants, which keep theirs")


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
