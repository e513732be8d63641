"""Write the report of a results folder as one HTML page, computed from the result files."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.console.output import note
from benchmarks.plots.runs import cost_plots, score_histograms
from benchmarks.plots.style import Plots
from benchmarks.report.mistakes import Mistakes, list_mistakes
from benchmarks.report.page import GENERATOR, Picture, draw_picture, load_picture, write_page
from benchmarks.report.sections import STATES, Problem, Section, count_finished, read_runs, read_sections
from benchmarks.results.frame import Selected, list_selected_runs
from benchmarks.tables.summary import describe_best
from procap.errors import UsageError, UserError
from runner.config import RunConfig
from runner.results import describe_failure
from shards.files import check_writable, explain_writing, file_lock

LOCK = ".report.lock"
FOLDERS = ("tables", "figures", LOCK)
"""What a report that was interrupted has left."""


@dataclass(frozen=True)
class ReportChoices:
    """What a report shows.

    names: suites and sweeps, by default all and the runs that belong to none. selected: shows only these runs instead,
        whatever they belong to. shown: the results folder or URL as commands in the page name it, by default the path.
    data, reference: flags of `procap report`.
    """

    names: Sequence[str] = ()
    selected: Selected | None = None
    shown: str = ""
    data: Path | None = None
    reference: str = ""


def write_report(results: Path, out: Path | None = None, choices: ReportChoices = ReportChoices()) -> Path:
    """Write the report of `results` to the folder `out` (default: `report` in `results`); returns the path of its page.

    An old report there is replaced, files that it does not link stay; any other folder with files is a UsageError.
    """
    folder = out or results / "report"
    page = folder / "index.html"
    check_writable(folder)
    if folder.exists() and any(path.name not in FOLDERS for path in folder.iterdir()):
        # A report names its generator in the first lines.
        head = page.read_text(encoding="utf-8", errors="replace")[:2000] if page.is_file() else ""
        if f'content="{GENERATOR}"' not in head:
            raise UsageError(f"{folder} is not empty and no report: name another folder with --out")
    # The old report stays until the new one is made.
    report = build_report(results, replace(choices, shown=choices.shown or str(results)))
    # Two commands would delete each other's files.
    with explain_writing(folder), file_lock(folder / LOCK, remove=True):
        old = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else ""
        written = write_page(report, folder)
        for path in (*folder.glob("tables/*"), *folder.glob("figures/*")):
            if path not in written and path.relative_to(folder).as_posix() in old:
                path.unlink()
    for name, what in report["problems"]:
        note(f"{name}: {what}")
    for section in report["sections"]:
        if section["unfinished"]:
            note(f"{section['name']}: {section['state']}")
    return page


def build_report(results: Path, choices: ReportChoices) -> dict[str, Any]:
    """Collect what the page shows: sections of suites, sweeps and other runs, and problems of making them."""
    shown = choices.shown
    sections, problems = _read_sections(results, choices)
    if not sections and not problems:
        hint = f"procap ls runs --results {shlex.quote(shown)}"
        raise UserError(
            f"no run below {shown}{' fits' if choices.selected else ''}; see `{hint}`, train with `procap train`"
        )
    # A run that is unfinished in several suites counts once.
    paths = {path for section in sections for path in section.paths}
    unfinished = {path: state for section in reversed(sections) for path, state in section.unfinished.items()}
    # Without names, classes and mistakes are shown of the first suite, and of the runs that belong to none.
    lead = next((section for section in sections if section.suite_results and len(section.frame)), None)
    parts = []
    for section in sections:
        is_detailed = section is lead or section.name == "runs" or bool(section.suite_results and choices.names)
        parts.append(_make_part(section, choices, problems, detailed=is_detailed))

    # What failed when a suite ended may fail here again, with more words.
    def is_repeated(name: str, why: str) -> bool:
        others = " ".join(text for other, text in problems if other == name and text != why)
        return bool(others) and all(part in others for part in why.split("; "))

    problems = [*dict.fromkeys(problem for problem in problems if not is_repeated(*problem))]
    state = count_finished(paths, unfinished) if sections else "No run could be read"
    complete = not (unfinished or problems)
    return {"shown": shown, "sections": parts, "problems": problems, "complete": complete, "state": state}


def _read_sections(results: Path, choices: ReportChoices) -> tuple[list[Section], list[Problem]]:
    sections: list[Section] = []
    problems: list[Problem] = []
    if not choices.selected:
        sections, problems = read_sections(results, choices.data, choices.names, choices.reference)
    if choices.names:
        return sections, problems
    members = {path for section in sections for path in section.paths}

    def on_error(path: str, error: UserError) -> None:
        # Sections have the state of their own runs.
        if path not in members:
            problems.append((path, str(error)))

    selected = choices.selected or (lambda *_: True)
    folders = list_selected_runs(results, on_error, selected)
    other_sets = {config.dataset for _, config in folders if config.path not in members}

    def is_other(config: RunConfig) -> bool:
        # What needs no training is compared with everything on the same data set, as in `procap table`.
        return config.path not in members or (config.dataset in other_sets and not config.recipe.epochs)

    if shown := [(folder, config) for folder, config in folders if choices.selected or is_other(config)]:
        heading = "Selected runs" if choices.selected else "Other runs"
        read = partial(read_runs, shown, heading, selected, choices.reference)
        runs = read() if choices.selected else _attempt(problems, "runs", "the other runs", read, None)
        sections += [runs] if runs else []
    return sections, problems


def _attempt(problems: list[Problem], name: str, what: str, make: Callable[[], Any], otherwise: Any) -> Any:
    """Make a part of the page; an error becomes a problem, so that the others are still shown."""
    try:
        return make()
    except Exception as error:
        problems.append((name, f"{what}: {describe_failure(error)}"))
        return otherwise


def _make_part(section: Section, choices: ReportChoices, problems: list[Problem], *, detailed: bool) -> dict[str, Any]:
    """Make what the page shows of a section. detailed: with classes and mistakes."""
    attempt = partial(_attempt, problems, section.name)
    tables = attempt("its tables", section.make_tables, [])
    mistakes: list[Mistakes] = []
    if detailed and len(section.frame):
        find = partial(list_mistakes, section.frame, choices.data, choices.reference)
        mistakes = attempt("where it is wrong", find, mistakes)
    ui = ["procap", "ui", "--results", choices.shown, *(["--suite", section.name] if section.name != "runs" else [])]
    return {
        **vars(section),
        "ui": shlex.join(ui),
        "state": section.state,
        "unfinished": dict(sorted(section.unfinished.items(), key=lambda item: STATES.index(item[1].status))),
        "best": describe_best(tables[0]) if tables and len(section.frame) else "",
        "tables": tables,
        "pictures": _make_pictures(section, attempt),
        "mistakes": mistakes,
    }


def _make_pictures(section: Section, attempt: Callable[..., Any]) -> list[Picture]:
    results = section.suite_results
    if results:
        draw_all = results.suite.plots if len(results.frame) else None
        plots: Plots = attempt("its plots", partial(draw_all, results), {}) if draw_all else {}
    else:
        plots = attempt("its plots", partial(cost_plots, section.frame), {})
    plots = {**plots, "unknown-scores": partial(score_histograms, section.frame)}
    pictures = [attempt(f"the plot {name}", partial(draw_picture, name, draw), None) for name, draw in plots.items()]
    if results:
        for name in results.pictures.get("pictures", {}):
            pictures.append(attempt(f"the picture {name}.png", partial(load_picture, results, name), None))
    return [picture for picture in pictures if picture]
