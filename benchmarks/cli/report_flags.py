"""`procap report`: every suite on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.flags import OutputFlags, flat
from benchmarks.console.help import examples


def add(app: typer.Typer) -> None:
    """Add the command of this file to `app`."""
    app.command(
        **examples(
            "procap report",
            "procap report --results /shared/results --out page --open",
            "procap report base-to-novel ablation",
            "procap report --tracking http://127.0.0.1:5000 --price 2.5",
        )
    )(report)


@flat
def report(
    output: OutputFlags,
    suites: Annotated[
        list[str] | None, typer.Argument(metavar="SUITE", help="names, or files with a SUITE [default: all there]")
    ] = None,
    results: Annotated[str, typer.Option(metavar="FOLDER|URL", help="runs and their results")] = "results",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="an old report there is replaced [default: report, in results that are a folder]"
        ),
    ] = None,
    data: Annotated[str, typer.Option(metavar="FOLDER|URL", help="where sets of your own are packed")] = "",
    tracking: Annotated[
        str, typer.Option(metavar="URI", help="link the runs in this MLflow server, http://HOST:PORT")
    ] = "",
    price: Annotated[
        float | None, typer.Option(metavar="PER_HOUR", min=0, help="what an hour of a GPU or machine costs")
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="open the page in a browser")] = False,
) -> int:
    """Write one HTML page of every suite: tables, figures, comparisons, published figures, and what is missing.

    It is made of result files alone and needs no network. The tables (md, csv, tex, json) and figures (pdf, png, svg)
    lie in folders beside it.
    """
    from benchmarks.cli.report import report as run

    return run(suites or [], results, out, data, tracking, price, open_browser, output)
