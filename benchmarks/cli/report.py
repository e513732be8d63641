"""`procap report`: suites, sweeps and runs on one page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.flags import Data, FilterFlags, Reference, Results, command, command_line, flag
from benchmarks.cli.selection import run_filter
from benchmarks.console.output import show, show_json
from benchmarks.report.report import ReportChoices, write_report
from benchmarks.results.frame import open_results
from procap.errors import UsageError, check_names
from procap.methods import method_paths
from shards.default_paths import data_root
from shards.urls import is_url


@command(
    "procap report",
    "procap report --results /shared/results --out page",
    "procap report base-to-novel ablation",
    "procap report --methods coop,procap --datasets petals --data shards",
)
def report(
    selection: FilterFlags,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="suites (names or files) and sweeps [default: all]")
    ] = None,
    results: Results = "results",
    out: Annotated[
        Path | None, flag("FOLDER", "folder; an old report is replaced [default: RESULTS/report, or report-NAME]")
    ] = None,
    data: Data = "",
    reference: Reference = "",
) -> int:
    """Write one HTML page of suites, sweeps and runs: tables, figures, comparisons, mistakes, and what is missing.

    Flags such as --methods select runs, of which the page shows accuracies by class, confusion matrices and
    misclassified images. It is made of result files and packed test images, without a model or the network; tables
    (md, csv, tex, json) and figures (pdf, png, svg) are files next to it.
    """
    selecting = command_line(selection)
    if selecting and names:
        raise UsageError(f"name suites or select runs: {' '.join(names)} or {selecting}")
    check_names("method", filter(None, [reference]), method_paths())
    root = open_results(results)
    # The local folder of a URL is a cache, in which users would not find the page.
    parts = [Path(name).name for name in names or ()] or re.findall(r"\w[\w.-]*", selecting)
    out = out or (Path() if is_url(results) else root) / "-".join(["report", *parts])[:200]
    selected = run_filter(selection) if selecting else None
    page = write_report(root, out, ReportChoices(names or (), selected, results, data_root(data), reference))
    show(str(page))
    show_json({"page": str(page)})
    return 0
