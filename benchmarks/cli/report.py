"""`procap report`: suites, sweeps and runs on one page."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.flags import (
    Data,
    OpenBrowser,
    OutputFlags,
    Price,
    Results,
    SelectionFlags,
    command,
    command_line,
    flag,
)
from benchmarks.cli.selection import run_filter
from benchmarks.console.output import note, show, show_json
from benchmarks.report.report import write_report
from benchmarks.results.frame import open_results, run_folders
from procap.errors import UsageError
from runner.environment import library_defaults
from shards.default_paths import data_root
from shards.urls import is_url


@command(
    "procap report",
    "procap report --results /shared/results --out page --open",
    "procap report base-to-novel ablation",
    "procap report --methods coop,procap --datasets pets --data shards",
    "procap report --price 2.5",
)
def report(
    selection: SelectionFlags,
    output: OutputFlags,
    suites: Annotated[
        list[str] | None,
        typer.Argument(metavar="SUITE", help="suites (names or files) and sweeps [default: all, and other runs]"),
    ] = None,
    results: Results = "results",
    out: Annotated[Path | None, flag("FOLDER", "an old report there is replaced [default: RESULTS/report]")] = None,
    data: Data = "",
    price: Price = None,
    open_browser: OpenBrowser = False,
) -> int:
    """Write one HTML page of suites, sweeps and runs: tables, figures, comparisons, mistakes, and what is missing.

    Flags such as --methods select runs, of which the page shows accuracies by class, confusion matrices and
    misclassified images. It is made of result files and packed test images, without a model or the network. The
    tables (md, csv, tex, json) and figures (pdf, png, svg) lie in folders beside it.
    """
    library_defaults()
    given = command_line(selection)
    if given and suites:
        raise UsageError(f"name suites or select runs: {' '.join(suites)} or {given}")
    root = open_results(results)
    selected = run_filter(selection, lambda: (config.dataset for _, config in run_folders(root))) if given else None
    # The local folder of a URL is a cache, in which users would not find the page.
    out = out or (Path("report") if is_url(results) else None)
    page = write_report(
        root,
        out,
        wanted=suites or (),
        selected=selected,
        shown=results,
        data=data_root(data),
        price=price,
    )
    show(str(page))
    if open_browser and not webbrowser.open(page.resolve().as_uri()):
        note("no browser to open; open the file above")
    if output.json:
        show_json({"page": str(page)})
    return 0
