"""Write the report of a results folder: every suite on one HTML page, computed from the result files alone."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.console.output import note, plural
from benchmarks.plots.style import Plots
from benchmarks.report.describe import describe_state, list_caveats, list_facts
from benchmarks.report.mistakes import Mistakes, list_mistakes
from benchmarks.report.page import GENERATOR, draw_picture, load_picture, write_page
from benchmarks.report.started_suites import (
    Problem,
    StartedSuite,
    count_states,
    find_started_suites,
    find_sweeps,
    merge_unfinished,
    read_runs,
)
from benchmarks.report.time_and_cost import describe_cost, describe_versions, read_jobs, work_table
from benchmarks.results.frame import run_folders
from benchmarks.suites import suite_help
from benchmarks.suites.planning import find_suite
from benchmarks.tables.runs import title_runs
from benchmarks.tables.table import Table
from procap.errors import UsageError, UserError
from runner.config import RunConfig
from runner.failures import describe_failure
from runner.run_collection import find_collections

MAIN_SUITE, MAIN_PLOT = "base-to-novel", "hm-radar"
"""What the page begins with: the first table of this suite and its plot of that name; else those of the first suite."""


def write_report(
    results: Path,
    out: Path | None = None,
    *,
    wanted: Sequence[str] = (),
    selected: Callable[[RunConfig], bool] | None = None,
    shown: str = "",
    data: Path | None = None,
    price: float | None = None,
) -> Path:
    """Write the report of `results` to the folder `out` (default: `report` in `results`); returns the path of its page.

    An old report there is replaced as a whole, anything else is a UsageError. wanted: suites and sweeps, by default all
    and the runs that belong to none. selected: shows only these runs instead, whatever they belong to. shown: the
    results folder or URL as commands in the page name it. The rest: flags of `procap report`.
    """
    folder = out or results / "report"
    page = folder / "index.html"
    if folder.is_dir() and any(folder.iterdir()):
        head = page.read_text(encoding="utf-8", errors="replace")[:2000] if page.is_file() else ""
        if f'content="{GENERATOR}"' not in head:
            raise UsageError(f"{folder} is not empty and no report: name another folder with --out")
    elif folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: name a folder with --out")
    report = build_report(results, wanted, selected, shown=shown or str(results), data=data, price=price)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{folder.name}."
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as place:
            fresh = Path(place) / "new"
            fresh.mkdir()
            write_page(report, fresh)
            if folder.exists():
                os.replace(folder, Path(place) / "old")
            os.replace(fresh, folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}; name another --out") from error
    for name, what in report["problems"]:
        note(f"{name}: {what}")
    if not all(section["is_finished"] for section in report["sections"]):
        note(report["state"])
    return page


def build_report(
    results: Path,
    wanted: Sequence[str] = (),
    selected: Callable[[RunConfig], bool] | None = None,
    *,
    shown: str,
    data: Path | None = None,
    price: float | None = None,
) -> dict[str, Any]:
    """Collect what the template of the page shows, see `write_report`.

    sections: one for each suite, sweep, and the single runs. headline: the main table and plot, moved from the section
    that `leads`. problems: what could not
    be read or made. caveats: what a reader has to know before any number.
    """
    groups, problems = _find_groups(results, data, wanted, selected)
    if not groups and not problems:
        hint = f"procap ls runs --results {shlex.quote(shown)}"
        raise UserError(f"no run below {shown}{' fits' if selected else ''}; see `{hint}`, train with `procap train`")
    suites = [one for one in groups if one.is_suite]
    state = _describe_runs(groups, all_read=not problems)
    leads = [one for one in suites if len(one.results.frame)]
    lead = min(leads, key=lambda one: one.name != MAIN_SUITE, default=None)
    sections, headline = [], None
    for one in groups:
        detailed = one.collection.kind == "suite" and (bool(wanted) or one is lead or not one.is_suite)
        section = _make_section(one, shown, data, problems, detailed=detailed)
        if one is lead and section["tables"]:
            plots = sorted(section["pictures"], key=lambda one: one.name != MAIN_PLOT)[:1]
            headline = section["tables"].pop(0), plots
            section["pictures"] = [one for one in section["pictures"] if one not in plots]
            section["leads"] = True
        sections.append(section)
    jobs = read_jobs(groups)
    return {
        "state": state,
        "shown": shown,
        "sections": sections,
        "headline": headline,
        "problems": problems,
        "caveats": list_caveats(groups, jobs, data),
        "cost": describe_cost(jobs, price),
        "work": work_table(jobs) if len(jobs) else None,
        "versions": describe_versions(jobs),
    }


def _find_groups(
    results: Path, data: Path | None, wanted: Sequence[str], selected: Callable[[RunConfig], bool] | None
) -> tuple[list[StartedSuite], list[Problem]]:
    """Find suites, sweeps and the runs without either below `results`, or the part of them that was chosen."""
    if selected:
        runs = read_runs(results, selected, "selected runs")
        return ([runs] if runs else []), []
    names = {folder.name for folder in find_collections(results) if folder.parent.name == "sweep"}
    others = [word for word in wanted if word not in names]
    for word in others:
        # An unknown name is an error before anything is read.
        find_suite(word, results)
    sweeps, problems = find_sweeps(results)
    suites: list[StartedSuite] = []
    if not wanted or others:
        suites, unread = find_started_suites(results, data, others)
        problems = unread + problems
    if wanted:
        chosen = [name for name, _ in problems if name in wanted or name not in names]
        return suites + [one for one in sweeps if one.name in wanted], [one for one in problems if one[0] in chosen]
    members = {path for one in suites + sweeps for path in one.collection.runs}
    single = {config.dataset for _, config in run_folders(results) if config.path not in members}

    def is_shown(config: RunConfig) -> bool:
        # What needs no training is compared with everything on the same data set, as in `procap table`.
        return config.path not in members or (config.dataset in single and not config.recipe.epochs)

    runs = read_runs(results, is_shown, "single runs")
    return suites + sweeps + ([runs] if runs else []), problems


def _describe_runs(suites: Sequence[StartedSuite], *, all_read: bool) -> str:
    """Describe how many runs are finished. all_read: whether all suites could be read; other plans are unknown."""
    if not suites:
        return "No suite could be read."
    runs = plural(len({path for one in suites for path in one.results.paths}), "run")
    if unfinished := merge_unfinished(suites):
        return f"{len(unfinished)} of {runs} unfinished: {count_states(unfinished)}."
    evaluations = plural(len({job for one in suites for job in one.results.planned}), "evaluation")
    where = "" if all_read else " in the suites that could be read"
    return f"All {runs} and {evaluations} that were planned{where} are finished."


def _attempt(problems: list[Problem], name: str, what: str, make: Callable[[], Any], otherwise: Any) -> Any:
    """Make a part of the page; an error becomes a problem, so that the others are still shown."""
    try:
        return make()
    except Exception as error:
        problems.append((name, f"{what}: {describe_failure(error)}"))
        return otherwise


def _make_section(
    started: StartedSuite, shown: str, data: Path | None, problems: list[Problem], *, detailed: bool
) -> dict[str, Any]:
    """Make the section of a suite, sweep or single runs. detailed: with classes and mistakes."""
    attempt = partial(_attempt, problems, started.name)
    suite, results = started.suite, started.results
    tables: list[Table] = attempt("its tables", partial(suite.tables, results), [])
    plots: Plots = {}
    if suite.plots and len(results.frame):
        plots = attempt("its plots", partial(suite.plots, results), {})
    pictures = [attempt(f"the plot {name}", partial(draw_picture, name, draw), None) for name, draw in plots.items()]
    for name in results.pictures.get("pictures", {}):
        pictures.append(attempt(f"the picture {name}.png", partial(load_picture, results, name), None))
    mistakes: tuple[list[Mistakes], str] = ([], "")
    if detailed and len(results.frame):
        mistakes = attempt("where it is wrong", partial(_find_mistakes, started, data), mistakes)
    ui = ["procap", "ui", "--results", shown, *(["--suite", started.name] if started.is_suite else [])]
    ended = started.collection.status
    status = "" if ended == "finished" else f"Its last command is recorded as {ended}."
    return {
        "name": started.name,
        "heading": started.name if started.is_suite else suite.heading,
        "text": suite_help(suite.typed or suite.name).partition("\n\n")[0] if started.is_suite else "",
        "command": suite.command(replace(started.options, data=data), shown) if started.is_suite else "",
        "ui": shlex.join(ui) if results.paths else "",
        "facts": attempt("how it was run", lambda: list_facts(started), []),
        "tables": [table for table in tables if not table.compares],
        "pictures": [picture for picture in pictures if picture],
        "comparisons": [table for table in tables if table.compares],
        "state": describe_state(started),
        "status": status,
        "unfinished": started.unfinished,
        "is_finished": not (started.unfinished or status),
        "mistakes": mistakes[0],
        "mistakes_left": mistakes[1],
        "leads": False,
    }


def _find_mistakes(started: StartedSuite, data: Path | None) -> tuple[list[Mistakes], str]:
    """List the mistakes of a suite, with its titles of variants, or of other runs."""
    results = started.results
    if not started.is_suite:
        return list_mistakes(title_runs(results.frame), data)
    titles = {results.variants.index(variant): title for title, variant in results.by_title.items()}
    return list_mistakes(results.frame.assign(title=results.frame.number.map(titles)), data)
