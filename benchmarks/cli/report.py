"""`procap report`: every suite on one page."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.flags import Data, OpenBrowser, OutputFlags, Price, Results, flag, flat
from benchmarks.console.help import PLAIN, examples
from benchmarks.console.output import note, show, show_json
from benchmarks.report.report import write_report
from benchmarks.results.frame import find_results
from procap.errors import UsageError
from runner.environment import library_defaults
from shards.default_paths import data_root
from shards.urls import is_url

app = typer.Typer(**PLAIN)


@app.command(
    **examples(
        "procap report",
        "procap report --results /shared/results --out page --open",
        "procap report base-to-novel ablation",
        "procap report --tracking http://127.0.0.1:5000 --price 2.5",
    )
)
@flat
def report(
    output: OutputFlags,
    suites: Annotated[list[str] | None, typer.Argument(metavar="SUITE", help="names or files [default: all]")] = None,
    results: Results = "results",
    out: Annotated[Path | None, flag("FOLDER", "an old report there is replaced [default: RESULTS/report]")] = None,
    data: Data = "",
    tracking: Annotated[str, flag("URI", "link the runs in this MLflow server, http://HOST:PORT")] = "",
    price: Price = None,
    open_browser: OpenBrowser = False,
) -> int:
    """Write one HTML page of every suite: tables, figures, comparisons, published figures, and what is missing.

    It is made of result files alone and needs no network. The tables (md, csv, tex, json) and figures (pdf, png, svg)
    lie in folders beside it.
    """
    library_defaults()
    if tracking and not tracking.startswith(("http://", "https://")):
        raise UsageError(f"--tracking {tracking} has no pages to link: name a server, http://HOST:PORT")
    root = find_results(results)
    # The local folder of a URL is a cache, in which users would not find the page.
    out = out or (Path("report") if is_url(results) else None)
    page = write_report(
        root, out, data=data_root(data), tracking=tracking, price=price, wanted=suites or (), shown=results
    )
    show(str(page))
    if open_browser and not webbrowser.open(page.resolve().as_uri()):
        note("no browser to open; open the file above")
    if output.json:
        show_json({"page": str(page)})
    return 0
