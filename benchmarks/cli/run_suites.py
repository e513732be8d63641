"""Run suites by the flags of `procap bench`: plan, execute what is missing, print the first table of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.cli import flags
from benchmarks.cli.selection import (
    default_methods,
    refuse_unread,
    runtime_config,
    suite_changes,
    trainable_methods,
)
from benchmarks.cli.several_runs import show_plan
from benchmarks.console.output import note, note_failures, plural, quote, show, show_json
from benchmarks.console.parse import parse_options
from benchmarks.console.preconditions import note_warmup
from benchmarks.experiment.profiles import MINI, PAPER, find_profile
from benchmarks.report.report import ReportChoices, write_report
from benchmarks.suites import ALL, PAPER_SUITES, load_suite
from benchmarks.suites.outputs import SuiteOutputs, make_outputs
from benchmarks.suites.plans import SuitePlan, count_images_left, find_obstacle, merge_runs
from benchmarks.tables.render import render, to_dict
from cluster.trial import StoragePaths
from procap.errors import UsageError, UserError, check_names
from procap.methods import method_paths
from runner.config import RuntimeConfig
from runner.run_collection import Status, status_after
from runner.run_state import read_states
from runner.session import Session
from runner.tracking.exporter import CollectionTracker
from shards.default_paths import data_root
from shards.resolve import is_packed


def bench(
    name: str,
    suite_flags: flags.SuiteFlags,
    launch: flags.LaunchFlags,
    runtime_flags: flags.EngineFlags,
    mode: flags.ModeFlags,
) -> int:
    """Run the suite of that name, or all; returns 3 when some runs failed and 1 when all did."""
    launcher = launch.to_launcher()
    runtime = runtime_config(runtime_flags, suite_flags)
    plans = plan_suites(list(PAPER_SUITES) if name == ALL else [name], suite_flags, runtime)
    if name != ALL:
        refuse_unread(plans[0].suite, suite_flags, launch, runtime_flags)
    runs = merge_runs(plans)
    # Raises for runs that cannot be evaluated under these settings.
    for run in runs:
        runtime.evaluation.for_run(run.config)
    note_warmup((run.config for run in runs), runtime.data)
    session = Session(runtime)
    session.remote.pull()
    states = read_states(session, runs, force=mode.force)
    if mode.dry_run:
        return show_plan(runs, states, runtime.data)
    open_runs = [run for run in runs if not states[run.path].is_finished]
    for state in states.values():
        # Before anything is written.
        if state.status in ("other data", "other code"):
            raise UserError(state.reason)
    title = plural(len(plans), "suite") if len(plans) > 1 else plans[0].suite.title
    note(f"{title}: {plural(len(runs), 'run')}, {len(runs) - len(open_runs)} finished already")
    trackers = [CollectionTracker(session.exporter, plan.collection) for plan in plans]
    failed: dict[str, str] = {}
    try:
        if open_runs:
            # This imports torch, which a wrong flag need not wait for.
            from benchmarks.suites.execute import execute

            paths = StoragePaths.for_workers(runtime_flags.data, runtime_flags.results, runtime)
            images_left = {run: count_images_left(run, states[run.path], runtime) for run in open_runs}
            failed = execute(images_left, paths, session, launcher, trackers, force=mode.force)
        session.remote.pull()
        note("making tables and plots")
        finishing = zip(plans, trackers, strict=True)
        outputs = [_finish(plan, tracker, failed, session, mode) for plan, tracker in finishing]
    except BaseException as error:
        # A command that was refused leaves the collections as they were.
        if begun := [tracker for tracker in trackers if tracker.is_written]:
            for tracker in begun:
                tracker.close(status_after(error))
            session.remote.try_push()
        raise
    session.exporter.flush()
    session.remote.push()
    # The error of a run says more than that its result is missing.
    failed = {path: why for made in outputs for path, why in made.failed_runs.items()} | failed
    finished = [run.path for run in runs if run.path not in failed]
    return _show_outputs(name, outputs, finished, failed, session, runtime_flags)


def _finish(
    plan: SuitePlan,
    tracker: CollectionTracker,
    failed: Mapping[str, str],
    session: Session,
    mode: flags.ModeFlags,
) -> SuiteOutputs:
    """Write the tables and plots of a suite whose runs have ended, and record its end. failed: errors by run."""
    tracker.update(tracker.collection.runs)
    made = make_outputs(plan.suite, plan.options, session, force=mode.force)
    reasons = {**made.failed_runs, **failed}
    failed_runs = {run: reasons[run] for run in tracker.collection.runs if run in reasons}
    status: Status = "failed" if failed_runs or made.failed else "finished"
    ended = failed_runs | ({plan.suite.name: made.failed} if made.failed else {})
    tracker.close(status, metrics={**made.metrics, "runs_failed": float(len(failed_runs))}, failed=ended)
    return made


def plan_suites(names: Sequence[str], suite_flags: flags.SuiteFlags, runtime: RuntimeConfig) -> list[SuitePlan]:
    """Plan suites with the options given by the flags; of several, those that cannot run on the data are left out.

    On a user's own data under `mini` they compare methods that read images alone, unless --methods names others.
    """
    suites, several = [load_suite(name) for name in names], len(names) > 1
    changes = suite_changes(suite_flags, runtime.data)
    named = {*changes.get("datasets", ())}
    # Without a name, the paper's if one of its data sets is named, or packed where none is named.
    is_paper = named & {*PAPER.datasets} if named else any(is_packed(runtime.data, name) for name in PAPER.datasets)
    profile = find_profile(suite_flags.profile) if suite_flags.profile else PAPER if is_paper else MINI
    if "methods" not in changes and any(suite.has_default_methods for suite in suites):
        backbone = suite_flags.backbone or profile.backbone
        if image_methods := default_methods(changes.get("datasets", ()), backbone, runtime.data):
            suites = [suite.with_image_methods(image_methods) for suite in suites]
    methods = changes.get("methods") or dict.fromkeys(method for suite in suites for method in suite.methods)
    parsed = parse_options(flags.given_options(suite_flags.option, suite_flags.unlabelled), methods)
    if "methods" in changes:
        of_profile = {method: profile.options(method) for method in changes["methods"]}
        changes["methods"] = trainable_methods(suite_flags.methods, changes["methods"], of_profile, parsed)
    plans, left_out = [], dict[str, list[str]]()
    for suite in suites:
        # An option of a method that only some of the suites compare does not apply to the others.
        compared = changes.get("methods", suite.methods)
        options = suite.options(
            profile,
            quick=suite_flags.quick,
            recipe=suite_flags.recipe,
            overrides={} if suite_flags.epochs is None else {"epochs": suite_flags.epochs},
            options={method: values for method, values in parsed.items() if values and method in compared},
            evaluation=runtime.evaluation.changes,
            reference=suite_flags.reference,
            data=runtime.data,
            **changes,
        )
        check_names("method", filter(None, [suite_flags.reference]), method_paths() if several else options.methods)
        if not (why := find_obstacle(suite, options, several=several)):
            plans.append(SuitePlan(suite, options, suite.plan(options)))
        elif several:
            left_out.setdefault(why, []).append(suite.name)
        else:
            raise UsageError(f"{suite.name} cannot run: {why}")
    if not plans:
        raise UsageError("no suite can run: " + "; ".join(f"{', '.join(left_out[why])}: {why}" for why in left_out))
    for why, names in left_out.items():
        note(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} left out: {why}")
    if not (suite_flags.profile or named or is_paper):
        if runtime.data != data_root() and not runtime.data.exists():
            # The name of the paper's data may be misspelled, or its disk not mounted.
            raise UsageError(f"there is no folder {runtime.data}; --profile mini makes generated data there")
        note("profile mini, generated data: --data has no data set of the paper")
    return plans


def _show_outputs(
    name: str,
    outputs: Sequence[SuiteOutputs],
    finished: Sequence[str],
    failed: Mapping[str, str],
    session: Session,
    runtime_flags: flags.RuntimeFlags,
) -> int:
    for made in outputs:
        if made.tables:
            show(render(made.tables[0], "md") + "\n")
    runtime, folder = session.runtime, outputs[0].folder if len(outputs) == 1 else outputs[0].folder.parent
    note(f"tables and plots: {runtime.shown_results}/{folder.relative_to(runtime.results).as_posix()}")
    failed = {**failed, **{made.suite.name: made.failed for made in outputs if made.failed}}
    if name == ALL:
        try:
            # The local folder of a URL is a cache, in which users would not find the report.
            out = Path("report") if runtime.results_url else None
            page = write_report(runtime.results, out, ReportChoices(data=runtime.data, shown=runtime_flags.results))
            note(f"report: {page}")
        except UserError as error:
            failed["procap report"] = str(error)
    code = note_failures(len(finished), failed)
    if not failed:
        results = f"--results {quote(runtime_flags.results)}"
        folders = f"--data {quote(runtime_flags.data)} {results}" if runtime_flags.data else results
        suite = "SUITE" if name == ALL else name
        # It knows a suite of the user by its name, not by its file.
        ui = f"procap ui --suite {suite if name == ALL else outputs[0].suite.name} {results}"
        note(f"next: procap table {suite} {folders}; {ui}; procap report {suite} {folders}")
    tables = [to_dict(table) for made in outputs for table in made.tables]
    listed = {"finished": finished, "failed": failed, "tables": tables}
    show_json({"suite": name, "results": runtime.shown_results, **listed})
    return code
