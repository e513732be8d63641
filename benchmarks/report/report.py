"""Write the report of a results folder: every suite on one HTML page, computed from the result files alone."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from benchmarks.console.output import note, plural
from benchmarks.report.describe import describe_state, describe_suite, list_caveats, list_facts
from benchmarks.report.folder import check_replaceable, replace_folder
from benchmarks.report.found import STATES, FoundSuite, find_suites, merge_unfinished
from benchmarks.report.links import find_links
from benchmarks.report.model import Block, Gap, Picture, Problem, Report, Section
from benchmarks.report.page import GENERATOR, write_page
from benchmarks.report.pictures import draw_plots, load_pictures
from benchmarks.report.work import describe_cost, list_versions, machines_table, read_work, suites_table
from benchmarks.tables.table import Table
from procap.errors import UserError
from shards.errors import DataError

T = TypeVar("T")
MAIN_SUITE, MAIN_PLOT = "base-to-novel", "radar"
"""What the page begins with: the first table of this suite and its plot of that name; else those of the first suite."""
STATUS = {
    "running": "Its command is running, or was killed.",
    "failed": "Its last command ended with failures.",
    "interrupted": "Its last command was interrupted.",
}


@dataclass(frozen=True)
class ReportOptions:
    """shown: the results folder as commands in the page name it. The rest: flags of `procap report`."""

    results: Path
    shown: str
    data: Path | None = None
    tracking: str = ""
    price: float | None = None


@dataclass
class Attempts:
    """Makes the parts of the page, and collects those that fail: one broken part must not cost the whole page."""

    problems: list[Problem] = field(default_factory=list)

    def make(self, where: str, what: str, make: Callable[[], list[T]]) -> list[T]:
        """The result of `make`, or an empty list and a problem."""
        try:
            return make()
        except Exception as error:
            self.add(where, what, error)
            return []

    def add(self, where: str, what: str, error: Exception) -> None:
        is_expected = isinstance(error, UserError | DataError | OSError)
        text = str(error) if is_expected else f"internal error: {type(error).__name__}: {error}"
        self.problems.append(Problem(where, f"{what}: {text}"))


def write_report(
    results: Path,
    out: Path | None = None,
    *,
    data: Path | None = None,
    tracking: str = "",
    price: float | None = None,
    wanted: Sequence[str] = (),
    shown: str = "",
) -> Path:
    """Write the report of `results` to the folder `out` (default: `report` in `results`); returns the path of its page.

    An old report there is replaced as a whole. wanted: suites, all by default. shown: the results folder or URL as
    commands in the page name it. The rest: flags of `procap report`.
    Raises UserError if there is no suite to show or nothing can be written, UsageError if `out` holds something else
    than a report.
    """
    target = out or results / "report"
    check_replaceable(target, mark=f'content="{GENERATOR}"')
    report = build_report(ReportOptions(results, shown or str(results), data, tracking, price), wanted)
    replace_folder(target, lambda folder: write_page(report, folder))
    for problem in report.problems:
        note(f"{problem.where}: {problem.what}")
    if report.gaps:
        note(report.state)
    return target / "index.html"


def build_report(options: ReportOptions, wanted: Sequence[str] = ()) -> Report:
    """The contents of the page. Raises UserError if no suite was started below the results."""
    suites, problems = find_suites(options.results, options.data, wanted)
    if not suites and not problems:
        raise UserError(
            f"no suite was started in {options.shown}; run them all: procap bench all --results {options.shown}"
        )
    state = _describe_runs(suites, all_read=not problems)
    attempts = Attempts(problems)
    sections = [_make_section(one, options, attempts) for one in suites]
    headline, sections = split_headline(sections)
    work = read_work(suites)
    return Report(
        title="ProCAP Bench: report",
        lead=_describe_dates(suites),
        state=state,
        headline=headline,
        sections=sections,
        problems=attempts.problems,
        gaps=[_make_gap(one, options) for one in suites if one.unfinished or one.collection.status != "finished"],
        caveats=list_caveats(suites),
        cost=describe_cost(work, options.price),
        work=[suites_table(suites, work), machines_table(work)]
        if any(one.paths for one in suites) or len(work)
        else [],
        versions=list_versions(work),
        footer=f"Made by {GENERATOR} from the result files in {options.shown}; the same files give the same page.",
    )


def split_headline(sections: Sequence[Section]) -> tuple[Block | None, list[Section]]:
    """The main table and plot, and the sections without them."""
    shown = [one for one in sections if one.blocks and one.blocks[0].tables]
    main = next((one for one in shown if one.name == MAIN_SUITE), shown[0] if shown else None)
    if main is None:
        return None, list(sections)
    table, *tables = main.blocks[0].tables
    pictures = [picture for block in main.blocks for picture in block.pictures]
    plot = next((one for one in pictures if MAIN_PLOT in one.name), pictures[0] if pictures else None)
    blocks = [replace(main.blocks[0], tables=tables), *main.blocks[1:]]
    blocks = [replace(block, pictures=[one for one in block.pictures if one is not plot]) for block in blocks]
    rest = replace(main, blocks=[block for block in blocks if block.tables or block.pictures], leads=True)
    headline = Block(main.name, [table], [plot] if plot else [])
    return headline, [rest if one is main else one for one in sections]


def _describe_dates(suites: Sequence[FoundSuite]) -> str:
    """Number of suites and runs, and the days between which they ran, in UTC."""
    runs = len({path for one in suites for path in one.paths})
    moments = [moment for one in suites for moment in (one.collection.started, one.collection.ended) if moment]
    days = sorted({datetime.fromtimestamp(moment / 1000, UTC).strftime("%Y-%m-%d") for moment in moments})
    between = f", {days[0]} to {days[-1]}" if len(days) > 1 else f", {days[0]}" if days else ""
    return f"{plural(len(suites), 'suite')}, {plural(runs, 'run')}{between}."


def _describe_runs(suites: Sequence[FoundSuite], *, all_read: bool) -> str:
    """How many runs are finished. all_read: whether all suites could be read; the plans of others are unknown."""
    if not suites:
        return "No suite could be read."
    runs = plural(len({path for one in suites for path in one.paths}), "run")
    if unfinished := merge_unfinished(suites):
        counts = Counter(run.state for run in unfinished)
        listed = "; ".join(f"{counts[state]} {STATES[state]}" for state in STATES if counts[state])
        return f"{len(unfinished)} of {runs} unfinished: {listed}."
    evaluations = len({job for one in suites for job in one.results.planned})
    where = "" if all_read else " in the suites that could be read"
    return f"All {runs} and {plural(evaluations, 'evaluation')} that were planned{where} are finished."


def _make_gap(one: FoundSuite, options: ReportOptions) -> Gap:
    runs = [(run.path, run.description) for run in one.unfinished]
    status = STATUS.get(one.collection.status, "")
    return Gap(one.name, describe_state(one), status, _continue_command(one, options), runs)


def _continue_command(one: FoundSuite, options: ReportOptions) -> str:
    """The command that continues the suite with its recorded options."""
    return one.suite.command(replace(one.options, data=options.data), options.shown)


def _make_section(one: FoundSuite, options: ReportOptions, attempts: Attempts) -> Section:
    every = attempts.make(one.name, "its tables", lambda: list(one.suite.tables(one.results)))
    tables = [table for table in every if not table.compares]
    has_published = any(row.source == "published" for table in tables for row in table.rows)
    published = [] if has_published else attempts.make(one.name, "its published table", lambda: _published_tables(one))
    pictures = attempts.make(one.name, "its plots", lambda: _make_pictures(one, attempts))
    text = "On the paper's own data sets: not comparable with the results above."
    blocks = [
        Block("Results", tables, leads=True),
        Block("Plots", pictures=pictures),
        Block("Better, or luck?", [table for table in every if table.compares], leads=True),
        Block("What the paper reports", published, text=text),
    ]
    text, paper = describe_suite(one)
    ui = shlex.join(["procap", "ui", "--results", options.shown, "--suite", one.name])
    return Section(
        name=one.name,
        text=text,
        paper=paper,
        command=_continue_command(one, options),
        ui=ui if one.paths else "",
        short=f"{len(one.unfinished)} open" if one.unfinished else "",
        facts=attempts.make(one.name, "how it was run", lambda: list_facts(one)),
        links=attempts.make(
            one.name, "its links", lambda: find_links(one.collection, options.results, options.tracking)
        ),
        blocks=[block for block in blocks if block.tables or block.pictures],
    )


def _make_pictures(one: FoundSuite, attempts: Attempts) -> list[Picture]:
    def on_error(name: str, error: Exception) -> None:
        attempts.add(one.name, f"the picture {name}", error)

    plots = one.suite.plots(one.results) if one.suite.plots and len(one.results.frame) else {}
    return draw_plots(plots, on_error) + load_pictures(one.results, on_error)


def _published_tables(one: FoundSuite) -> list[Table]:
    """The paper's table of the suite."""
    from benchmarks.tables.published import published_tables

    return [table for table in published_tables() if table.name == f"published-{one.name}"]
