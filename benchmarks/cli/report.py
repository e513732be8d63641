"""`procap report`: every suite on one page."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cli.flags import OutputFlags
from benchmarks.cli.selection import results_at
from benchmarks.console.output import note, show, show_json
from benchmarks.report.report import write_report
from procap.errors import UsageError
from runner.environment import library_defaults
from shards.home import data_root
from shards.urls import is_url


def report(
    suites: Sequence[str],
    results: str,
    out: Path | None,
    data: str,
    tracking: str,
    price: float | None,
    open_browser: bool,
    output: OutputFlags,
) -> int:
    """See `procap report --help`."""
    library_defaults()
    if tracking and not tracking.startswith(("http://", "https://")):
        raise UsageError(f"--tracking {tracking} has no pages to link: name a server, http://HOST:PORT")
    root = results_at(results)
    # The folder that stands for a URL on this machine is a cache, where nobody looks for a page.
    out = out or (Path("report") if is_url(results) else None)
    page = write_report(root, out, data=data_root(data), tracking=tracking, price=price, wanted=suites, shown=results)
    show(str(page))
    if open_browser and not webbrowser.open(page.resolve().as_uri()):
        note("no browser to open; open the file above")
    if output.json:
        show_json({"page": str(page)})
    return 0
