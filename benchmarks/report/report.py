"""Write the report of a results folder as one HTML page, computed from the result files."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.console.output import note, plural
from benchmarks.plots.style import Plots
from benchmarks.report.mistakes import Mistakes, list_mistakes
from benchmarks.report.page import GENERATOR, Picture, draw_picture, load_picture, write_page
from benchmarks.report.sections import Problem, Section, count_states, read_runs, read_suites, read_sweeps
from benchmarks.results.frame import FEW_STEPS, run_folders
from benchmarks.suites import load_suite
from benchmarks.tables.notes import note_code, note_other_content
from benchmarks.tables.table import Table
from procap.errors import UsageError, UserError
from runner.config import RunConfig
from runner.failures import describe_failure
from runner.run_collection import find_collections

MAIN_SUITE = "base-to-novel"
"""The suite whose classes and mistakes are shown; if it has no results, those of the first suite."""


def write_report(
    results: Path,
    out: Path | None = None,
    *,
    wanted: Sequence[str] = (),
    selected: Callable[[RunConfig], bool] | None = None,
    shown: str = "",
    data: Path | None = None,
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
    report = build_report(results, wanted, selected, shown=shown or str(results), data=data)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{folder.name}."
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as temporary:
            fresh = Path(temporary) / "new"
            fresh.mkdir()
            write_page(report, fresh)
            if folder.exists():
                os.replace(folder, Path(temporary) / "old")
            os.replace(fresh, folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}; name another --out") from error
    for name, what in report["problems"]:
        note(f"{name}: {what}")
    if not report["complete"]:
        note(report["state"])
    return page


def build_report(
    results: Path,
    wanted: Sequence[str] = (),
    selected: Callable[[RunConfig], bool] | None = None,
    *,
    shown: str,
    data: Path | None = None,
) -> dict[str, Any]:
    """Collect what the template of the page shows, see `write_report`.

    sections: one for each suite, sweep, and the other runs. problems: what could not be read or made. caveats: what a
    reader has to know before any number.
    """
    sections, problems = _read_sections(results, data, wanted, selected)
    if not sections and not problems:
        hint = f"procap ls runs --results {shlex.quote(shown)}"
        raise UserError(f"no run below {shown}{' fits' if selected else ''}; see `{hint}`, train with `procap train`")
    finished = not any(section.unfinished or section.status for section in sections)
    leads = [section for section in sections if section.suite and len(section.frame)]
    lead = min(leads, key=lambda section: section.name != MAIN_SUITE, default=None)
    parts = []
    for section in sections:
        is_sweep = section.suite is None and section.name != "runs"
        detailed = not is_sweep and (bool(wanted) or section is lead or section.suite is None)
        parts.append(_make_part(section, shown, data, problems, detailed=detailed))
    return {
        "state": _describe_state(sections),
        "shown": shown,
        "sections": parts,
        "problems": problems,
        "complete": finished and not problems,
        "caveats": list_caveats(sections, data),
    }


def _read_sections(
    results: Path, data: Path | None, wanted: Sequence[str], selected: Callable[[RunConfig], bool] | None
) -> tuple[list[Section], list[Problem]]:
    """Read suites, sweeps and other runs below `results`, or the part of them that was chosen."""
    if selected:
        runs = read_runs(results, selected, "Selected runs")
        return ([runs] if runs else []), []
    names = {folder.name for folder in find_collections(results) if folder.parent.name == "sweep"}
    suite_words = [word for word in wanted if word not in names]
    for word in suite_words:
        # An unknown name is an error before anything is read.
        load_suite(word)
    sections: list[Section] = []
    problems: list[Problem] = []
    if suite_words or not wanted:
        sections, problems = read_suites(results, data, suite_words)
    if not wanted or names & set(wanted):
        sweeps, unreadable = read_sweeps(results, [word for word in wanted if word in names])
        sections, problems = sections + sweeps, problems + unreadable
    if wanted:
        return sections, problems
    members = {path for section in sections for path in section.paths}
    other_sets = {config.dataset for _, config in run_folders(results) if config.path not in members}

    def is_shown(config: RunConfig) -> bool:
        # What needs no training is compared with everything on the same data set, as in `procap table`.
        return config.path not in members or (config.dataset in other_sets and not config.recipe.epochs)

    runs = _attempt(problems, "runs", "the other runs", partial(read_runs, results, is_shown, "Other runs"), None)
    return sections + ([runs] if runs else []), problems


def _describe_state(sections: Sequence[Section]) -> str:
    """Describe how many runs are finished; a run that is unfinished in several suites counts once."""
    runs = plural(len({path for section in sections for path in section.paths}), "run")
    unfinished = {run.path: run for section in reversed(sections) for run in section.unfinished}
    if unfinished:
        return f"{len(unfinished)} of {runs} unfinished: {count_states(unfinished.values())}."
    return f"All {runs} are finished."


def list_caveats(sections: Sequence[Section], data: Path | None) -> list[str]:
    """List what a reader has to know before any number, each sentence once."""
    import pandas as pd

    suites = [section.suite for section in sections if section.suite]
    caveats = []
    if any(suite.options.quick for suite in suites):
        caveats.append("Quick schedules: the order of methods may differ after full training.")
    caveats += [f"Not comparable with published numbers: {suite.why_incomparable}." for suite in suites]
    frames = [section.frame for section in sections if len(section.frame)]
    if frames:
        frame = pd.concat(frames).drop_duplicates(["path", "target", "evaluation"])
        caveats += [*note_code(frame), *note_other_content(frame, data)]
        if limited := int(frame.limited.sum()):
            caveats.append(f"{plural(limited, 'evaluation')} used the first images of a test set only, marked †.")
        few = frame[(frame.steps > 0) & (frame.steps < FEW_STEPS)].path.nunique()
        if few:
            caveats.append(f"{plural(few, 'run')} made fewer than {FEW_STEPS} steps, near the initial weights.")
    return [caveat for caveat in dict.fromkeys(caveats) if not caveat.endswith(": .")]


def _attempt(problems: list[Problem], name: str, what: str, make: Callable[[], Any], otherwise: Any) -> Any:
    """Make a part of the page; an error becomes a problem, so that the others are still shown."""
    try:
        return make()
    except Exception as error:
        problems.append((name, f"{what}: {describe_failure(error)}"))
        return otherwise


def _make_part(
    section: Section, shown: str, data: Path | None, problems: list[Problem], *, detailed: bool
) -> dict[str, Any]:
    """Make what the page shows of a section. detailed: with classes and mistakes."""
    attempt = partial(_attempt, problems, section.name)
    tables: Sequence[Table] = attempt("its tables", section.make_tables, [])
    mistakes: tuple[list[Mistakes], str] = ([], "")
    if detailed and len(section.frame):
        mistakes = attempt("where it is wrong", partial(list_mistakes, section.frame, data), mistakes)
    ui = ["procap", "ui", "--results", shown, *(["--suite", section.name] if section.suite else [])]
    return {
        "name": section.name,
        "heading": section.heading,
        "text": section.text,
        "ui": shlex.join(ui) if section.paths else "",
        "facts": section.facts,
        "tables": [table for table in tables if not table.compares],
        "pictures": _make_pictures(section, attempt),
        "comparisons": [table for table in tables if table.compares],
        "state": section.state,
        "status": section.status,
        "unfinished": section.unfinished,
        "mistakes": mistakes[0],
        "mistakes_left": mistakes[1],
    }


def _make_pictures(section: Section, attempt: Callable[..., Any]) -> list[Picture]:
    """Draw the plots of a suite, and load its recorded pictures."""
    suite = section.suite
    if suite is None:
        return []
    plots: Plots = {}
    if suite.suite.plots and len(suite.frame):
        plots = attempt("its plots", partial(suite.suite.plots, suite), {})
    pictures = [attempt(f"the plot {name}", partial(draw_picture, name, draw), None) for name, draw in plots.items()]
    for name in suite.pictures.get("pictures", {}):
        pictures.append(attempt(f"the picture {name}.png", partial(load_picture, suite, name), None))
    return [picture for picture in pictures if picture]
