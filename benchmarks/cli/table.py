"""`procap table`: the results below a folder as one table, or the tables of a suite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import typer

from benchmarks.cli import flags
from benchmarks.cli.selection import refuse_unread, run_filter, suite_changes
from benchmarks.console.output import note_unreadable, quote, show, show_json, to_json
from benchmarks.console.parse import parse_options
from benchmarks.report.sections import read_sections
from benchmarks.results.frame import open_results, read_frame
from benchmarks.results.suite_results import SuiteResults
from benchmarks.suites import SUITES, load_suite
from benchmarks.suites.plans import last_options
from benchmarks.tables.agreement import check_table
from benchmarks.tables.render import render, show_notes_once, to_dict
from benchmarks.tables.runs import calibration_of_runs, run_tables, unknown_of_runs
from benchmarks.tables.table import Table
from procap.errors import UsageError, UserError, check_names
from procap.methods import method_paths
from runner.run_collection import COLLECTIONS
from shards.default_paths import data_root

NOT_AS_PUBLISHED = 4
"""Exit code of `--check` unless every published number is there and agrees."""
CALIBRATION = "calibration"
"""The name given instead of a suite for how well probabilities fit."""


@dataclass(frozen=True)
class TableFlags:
    """Flags of `procap table` for the tables of a suite."""

    data: flags.Data = ""
    profile: Annotated[str, flags.flag("mini|paper", "profile of the suite [default: the one that was run]")] = ""
    check: Annotated[bool, typer.Option("--check", help="exit code 4 unless all published numbers agree")] = False
    tolerance: Annotated[float, flags.flag("POINTS", "difference that --check allows")] = 1.0
    recipe: flags.RecipeChoice = ""
    reference: flags.Reference = ""
    option: flags.MethodOptions = None
    unlabelled: flags.Unlabelled = ""


@flags.command(
    "procap table --results demo/results",
    "procap table --methods coop,procap --format latex > table.tex",
    "procap table base-to-novel --results /shared/results",
    "procap table base-to-novel --check --data /shared/shards",
    "procap table calibration --datasets shapes",
)
def table(
    selection: flags.FilterFlags,
    suite_flags: TableFlags,
    suite: Annotated[
        str, typer.Argument(metavar="SUITE", help="a suite or sweep, or `calibration` [default: all runs]")
    ] = "",
    results: flags.Results = "results",
    form: Annotated[
        Literal["md", "csv", "latex", "tex", "json"],
        typer.Option("--format", metavar="md|csv|latex|json", help="file format"),
    ] = "md",
) -> int:
    """Print base, novel, harmonic mean and speed from results, or the tables of a suite with the paper's numbers.

    Every accuracy is computed from the integer counts of the result files. `procap table calibration` prints how well
    the probabilities of all runs fit.
    """
    if suite in ("", CALIBRATION):
        _refuse(suite or "of all runs", replace(suite_flags, data="", reference=""))
        tables, code = _tables_of_runs(selection, results, suite_flags.reference, calibration=bool(suite))
    else:
        tables, code = _suite_tables(suite, selection, results, suite_flags)
    document = {"suite": suite or None, "tables": [to_dict(table) for table in tables]}
    shown = (render(table, form) for table in show_notes_once(tables))
    show(to_json(document) if form == "json" else "\n\n".join(shown))
    show_json(document)
    return code


def _refuse(what: str, *groups: object) -> None:
    """Raise UsageError if a flag of `groups` is given, none of which applies to the table."""
    if refused := flags.command_line(*groups):
        raise UsageError(f"procap table {what} takes no {refused}")


def _tables_of_runs(
    selection: flags.SelectionFlags, results: str, reference: str, *, calibration: bool
) -> tuple[Sequence[Table], int]:
    """Make the tables of all runs; returns them with the exit code."""
    check_names("method", filter(None, [reference]), method_paths())
    unreadable: dict[str, object] = {}
    frame = read_frame(open_results(results), unreadable.__setitem__, run_filter(selection))
    code = note_unreadable(unreadable)
    if frame.empty:
        listing = f"procap ls runs --results {quote(results)}"
        raise UserError(f"no evaluated run below {results} fits; see `{listing}`, evaluate with `procap eval`")
    if not calibration:
        return [*run_tables(frame, reference), *unknown_of_runs(frame, reference)], code
    if not (tables := calibration_of_runs(frame, reference)):
        raise UserError(f"no evaluation below {results} has its calibration: procap eval RUN --force repeats it")
    return tables, code


def _suite_tables(
    name: str, selection: flags.SelectionFlags, results: str, suite_flags: TableFlags
) -> tuple[Sequence[Table], int]:
    """Make the tables of a suite or sweep; returns them with the exit code."""
    root, data = open_results(results), data_root(suite_flags.data)
    if name not in SUITES and (root / COLLECTIONS / "sweep" / name).is_dir():
        _refuse(name, selection, suite_flags)
        sections, problems = read_sections(root, names=[name])
        for sweep, reason in problems:
            raise UserError(f"sweep {sweep} cannot be read: {reason}")
        return sections[0].make_tables(), 0
    _refuse(name, flags.SelectionFlags(classes=selection.classes, sampling=selection.sampling))
    if not suite_flags.check:
        _refuse(f"{name} without --check", TableFlags(tolerance=suite_flags.tolerance))
    suite = load_suite(name)
    refuse_unread(suite, selection, suite_flags)
    recorded = last_options(suite, root, data, profile=suite_flags.profile)
    chosen = {"recipe": suite_flags.recipe, "reference": suite_flags.reference}
    changes = suite_changes(selection, data) | {name: value for name, value in chosen.items() if value}
    if typed := flags.given_options(suite_flags.option, suite_flags.unlabelled):
        parsed = parse_options(typed, changes.get("methods", recorded.methods))
        changes["options"] = {method: values for method, values in parsed.items() if values}
    options = replace(recorded, **changes)
    check_names("method", filter(None, [suite_flags.reference]), options.methods)
    done = SuiteResults.read(suite, options, root)
    code = note_unreadable(done.unreadable)
    if suite_flags.check:
        checked, agrees = check_table(done, suite_flags.tolerance)
        return [checked], 0 if agrees else NOT_AS_PUBLISHED
    # A suite without runs, as `runtime`, makes its tables of other results.
    tables = done.make_tables() if len(done.frame) or not done.runs else []
    if not tables:
        raise UserError(f"no result of {name} as it is chosen here below {results}; see `procap bench {name}`")
    return tables, code
