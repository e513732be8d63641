"""`procap report`: what there is of every suite, on one page, from result files alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from benchmarks.console.output import note, plural
from benchmarks.report.figures import Picture, drawn, left_in
from benchmarks.report.folder import check_replaceable, replace_folder
from benchmarks.report.links import Link, links
from benchmarks.report.links import command as ui_command
from benchmarks.report.page import GENERATOR, write_page
from benchmarks.report.read import STATES, Found, Run, Trouble, read_suites
from benchmarks.report.suite import caveats, command, description, facts, state
from benchmarks.report.work import all_extras, all_runs, cost_lines, day, machines_table, suites_table, versions
from benchmarks.tables.table import Table
from procap.errors import UserError
from shards.errors import DataError

Made = TypeVar("Made")


@dataclass(frozen=True)
class Block:
    """Tables and figures under one heading. leads: its first table is never folded."""

    title: str
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    text: str = ""
    leads: bool = False


@dataclass(frozen=True)
class Part:
    """What the page has of one suite."""

    name: str
    title: str
    text: str
    paper: str
    command: str
    ui: str
    short: str
    state: str
    facts: Sequence[tuple[str, str]]
    links: Sequence[Link]
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Gap:
    """What of a suite failed or is missing, and what goes on with it."""

    name: str
    state: str
    status: str
    command: str
    summary: str
    runs: Sequence[dict[str, str]]


@dataclass(frozen=True)
class Report:
    """All that goes into the page, in its order. bad: something failed, is missing or could not be made."""

    title: str
    lead: str
    bad: bool
    state_title: str
    state_lines: Sequence[str]
    troubles: Sequence[Trouble]
    gaps: Sequence[Gap]
    caveats: Sequence[str]
    cost: Sequence[str]
    work: Sequence[Table]
    made_with: Sequence[tuple[str, str]]
    parts: Sequence[Part]
    footer: str


@dataclass(frozen=True)
class Place:
    """Where the results are, and how a person calls that place and its data on the command line."""

    results: Path
    shown: str
    data: Path | None = None
    tracking: str = ""
    price: float | None = None


@dataclass
class Maker:
    """Makes what can be made, and keeps what could not be."""

    troubles: list[Trouble] = field(default_factory=list)

    def attempt(self, where: str, what: str, make: Callable[[], list[Made]]) -> list[Made]:
        """What `make` gives; nothing, and a line at the top of the page, where it fails."""
        try:
            return make()
        except Exception as error:
            self.failed(where, what, error)
            return []

    def failed(self, where: str, what: str, error: Exception) -> None:
        # One broken part, or a suite of somebody else, must not take the page with it; it is named at its top.
        plain = isinstance(error, UserError | DataError | OSError)
        said = str(error) if plain else f"internal error: {type(error).__name__}: {error}"
        self.troubles.append(Trouble(where, f"{what}: {said}"))


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
    """Write the report of `results` to the folder `out` (default: report in `results`) and give its page.

    An old report there is replaced whole; what is missing in the new one is told to people. wanted: suites, default
    every one; shown: what people call `results`; the rest as the flags of `procap report`.
    Raises UserError where there is no suite to show or nothing can be written, UsageError where `out` is something else
    than a report.
    """
    place = Place(results, shown or str(results), data, tracking, price)
    target = out or results / "report"
    check_replaceable(target, mark=f'content="{GENERATOR}"')
    report = build_report(place, wanted)
    replace_folder(target, lambda folder: write_page(report, folder))
    for trouble in report.troubles:
        note(f"{trouble.where}: {trouble.what}")
    if report.gaps:
        note(" ".join(report.state_lines))
    return target / "index.html"


def build_report(place: Place, wanted: Sequence[str] = ()) -> Report:
    """What goes into the page. Raises UserError where no suite was begun below the results."""
    found, troubles = read_suites(place.results, place.data, wanted)
    if not found and not troubles:
        raise UserError(
            f"no suite was begun in {place.shown}; `procap bench all --results {place.shown}` does them all"
        )
    whole = not troubles
    maker = Maker(troubles)
    parts = [_part(one, place, maker) for one in found]
    gaps = [_gap(one, place) for one in found if one.unfinished or one.collection.status != "finished"]
    runs, extras = all_runs(found), all_extras(found)
    return Report(
        title="ProCAP Bench: report",
        lead=_lead(found, runs),
        bad=bool(gaps or maker.troubles),
        state_title="What failed or is missing" if gaps or maker.troubles else "Nothing failed, nothing is missing",
        state_lines=[_state_line(runs, whole=whole)] if found else [],
        troubles=maker.troubles,
        gaps=gaps,
        caveats=caveats(found),
        cost=cost_lines(runs, extras, place.price),
        work=[suites_table(found), machines_table(runs, extras)] if runs or extras else [],
        made_with=versions(runs, extras),
        parts=parts,
        footer=f"Made by {GENERATOR} from the result files in {place.shown}; the same files give the same page.",
    )


def _lead(found: Sequence[Found], runs: Sequence[Run]) -> str:
    days = [day(moment) for one in found for moment in (one.collection.started, one.collection.ended) if moment]
    between = f", {min(days)} to {max(days)}" if days and min(days) != max(days) else f", {days[0]}" if days else ""
    return f"{plural(len(found), 'suite')}, {plural(len(runs), 'run')}{between}."


def _state_line(runs: Sequence[Run], *, whole: bool) -> str:
    """How far the runs are. whole: every suite could be read; of the others nobody knows what was planned."""
    counts = {name: sum(run.state == name for run in runs) for name in STATES}
    unfinished = sum(counts.values())
    if not unfinished:
        counted = f"{plural(len(runs), 'run')} and {plural(sum(len(run.evaluations) for run in runs), 'evaluation')}"
        return f"All {counted} that were planned{'' if whole else ' in the suites that could be read'} are here."
    said = "; ".join(f"{count} {STATES[name]}" for name, count in counts.items() if count)
    return f"{unfinished} of {plural(len(runs), 'run')}: {said}."


def _gap(found: Found, place: Place) -> Gap:
    status = {
        "running": "Its command goes on, or was killed.",
        "failed": "Its last command ended with failures.",
        "interrupted": "Its last command was stopped.",
    }.get(found.collection.status, "")
    runs = [{"path": run.path, "words": _words(run)} for run in found.unfinished]
    return Gap(
        found.suite.name,
        state(found),
        status,
        command(found, place.shown, place.data),
        f"{plural(len(runs), 'run')}, by name",
        runs,
    )


def _words(run: Run) -> str:
    """What is wrong with a run."""
    text = STATES[run.state] + (f" ({', '.join(run.absent)})" if run.state == "not evaluated" else "")
    return f"{text}: {run.why}" if run.why else text


def _part(found: Found, place: Place, maker: Maker) -> Part:
    name = found.suite.name
    tables = maker.attempt(name, "its tables", lambda: list(found.suite.tables(found.done)))
    tables = [table for table in tables if not table.compares]
    comparisons = [table for table in tables if table.compares]
    pictures = maker.attempt(name, "its figures", lambda: _pictures(found, maker))
    beside = any(line.source == "published" for table in tables for line in table.rows)
    published = [] if beside else maker.attempt(name, "its published table", lambda: _published(found))
    blocks = [
        Block("Results", tables, leads=True),
        Block("Figures", pictures=pictures),
        Block("Is it better, or is it luck?", comparisons, leads=True),
        Block(
            "What the paper prints",
            published,
            text="Of the paper's own data sets: these figures are there to be read, not to be compared with ours.",
        ),
    ]
    text, paper = description(found)
    unfinished = len(found.unfinished)
    return Part(
        name=name,
        title=name,
        text=text,
        paper=paper,
        command=command(found, place.shown, place.data),
        ui=ui_command(found, place.shown) if found.done.runs else "",
        short=f"{plural(unfinished, 'run')} open" if unfinished else "",
        state=state(found),
        facts=maker.attempt(name, "how it was run", lambda: facts(found)),
        links=maker.attempt(name, "its links", lambda: links(found, place.results, place.tracking)),
        blocks=[block for block in blocks if block.tables or block.pictures],
    )


def _pictures(found: Found, maker: Maker) -> list[Picture]:
    def failed(name: str, error: Exception) -> None:
        maker.failed(found.suite.name, f"the figure {name}", error)

    made: list[Picture] = []
    if found.suite.plots and len(found.done.frame):
        made = drawn(found.suite.plots(found.done), failed)
    return made + left_in(found, failed)


def _published(found: Found) -> list[Table]:
    """The paper's table of the suite, where it does not stand in the same table as ours."""
    from benchmarks.tables.published import published_tables

    return [table for table in published_tables() if table.name == f"published-{found.suite.name}"]
