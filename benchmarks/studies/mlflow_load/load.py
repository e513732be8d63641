"""Many runs in one MLflow store, measured: `python -m benchmarks.studies.mlflow_load.load --runs 10000`.

Made-up results are sent by the program's own sender; then everything that people and programs do with them is timed.
Started again with the same folder it sends only what is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cli.ui import Chosen, Wanted, charts_page, choose, compare_page, find_collection, save, server
from benchmarks.console.output import columns, note, show
from benchmarks.studies.mlflow_load.browser import page
from benchmarks.studies.mlflow_load.made_results import make, suite
from procap.errors import UserError
from runner.collection import write_collection
from runner.environment import library_defaults
from runner.results import RunFolder, write_bytes, write_json
from runner.tracking.outbox import sync
from runner.tracking.store import Destination, open_store
from runner.tracking.tracker import deliveries, pending, sync_all

COMPARED = 30
# What a page shows when it is there.
RUNS_THERE = "/matching runs/.test(document.body.innerText)"
CHARTS_THERE = "document.querySelectorAll('.js-plotly-plot').length > 1"
PLOT_THERE = "document.querySelectorAll('.js-plotly-plot').length > 0"


def measure(results: Path, runs: int, port: int) -> dict[str, Any]:
    """Seconds of each action in a store of `runs` runs, which are made first as far as they are missing."""
    seconds: dict[str, float] = {}

    def timed(what: str, action: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        value = action()
        seconds[what] = time.perf_counter() - began
        note(f"{what}: {seconds[what]:.2f} s")
        return value

    paths = make(results, runs)
    write_collection(results, suite(paths))
    destination = Destination.choose(results, f"sqlite:///{results / 'mlflow.db'}")
    uri = destination.uri
    first = timed("send what is missing", lambda: sync_all(results, uri))
    timed("procap track status, nothing to send", lambda: pending(results, uri))
    timed("procap track sync, nothing to send", lambda: sync_all(results, uri))
    store = timed("open the store", lambda: open_store(destination))
    added = make(results, runs + 1)[-1]
    timed("add one run", lambda: sync(RunFolder(results / added), destination, store))
    search = store.client.search_runs
    timed("find a run by its key", lambda: search([store.experiment_id], "tags.`procap.key` = 'x'"))
    timed(
        "the 100 best of a method",
        lambda: search([store.experiment_id], "tags.method = 'procap'", max_results=100, order_by=["metrics.hm DESC"]),
    )
    wanted = Wanted(suite="made-up", methods=("maple", "procap"))
    sent = deliveries(results, uri)
    chosen = choose(sent, wanted, find_collection(results, wanted))
    view = timed("procap ui: choose runs and save the view", lambda: save(destination, wanted, chosen))
    with server(destination, port):
        address = f"http://127.0.0.1:{port}"
        asyncio.run(_pages(address, chosen, view, seconds))
    return {
        "runs": runs,
        "sent_now": len(first.sent),
        "seconds": seconds,
        "database_megabytes": (results / "mlflow.db").stat().st_size / 1e6,
        "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "load_average": os.getloadavg()[0],
    }


async def _pages(address: str, chosen: Chosen, view: str | None, seconds: dict[str, float]) -> None:
    experiment = f"{address}/#/experiments/{chosen.deliveries[0].experiment_id}/runs"
    some = Chosen(chosen.deliveries[:COMPARED], chosen.where)
    pages = {
        "page: the experiment's runs": (experiment, RUNS_THERE),
        "page: the same again": (experiment, RUNS_THERE),
        "page: charts of a suite's two methods": (charts_page(address, chosen, view), CHARTS_THERE),
        f"page: {COMPARED} runs side by side": (compare_page(address, some) or "", PLOT_THERE),
    }
    try:
        async with page() as tab:
            for what, (url, ready) in pages.items():
                seconds[what] = await tab.open(url, ready)
                note(f"{what}: {seconds[what]:.2f} s")
    except UserError as error:
        note(f"pages not measured: {error}")


def table(report: dict[str, Any]) -> str:
    rows = [(what, f"{value:.2f}") for what, value in report["seconds"].items() if what != "send what is missing"]
    sent, sending = report["sent_now"], report["seconds"]["send what is missing"]
    if sent > report["runs"] // 2:
        rows.insert(0, (f"send {sent:,} runs, one process", f"{sending:.0f} ({1000 * sending / sent:.0f} ms each)"))
    machine = f"{report['machine']['cores']} virtual cores, load average {report['load_average']:.1f} at the end"
    store = f"the default store, SQLite beside the results: {report['database_megabytes']:.0f} MB"
    return (
        f"# MLflow with {report['runs']:,} runs\n\n"
        f"`python -m benchmarks.studies.mlflow_load.load --runs {report['runs']}` on {machine}; "
        f"{store}.\nPages in headless Chromium, until their runs or charts are there.\n\n"
        f"```\n{columns(('what', 'seconds'), rows)}\n```\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("mlflow-load"), help="folder for made-up results")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--port", type=int, default=5055)
    parser.add_argument("--out", type=Path, default=Path("docs/results/mlflow"), help="load.md and load.json")
    given = parser.parse_args()
    library_defaults()
    report = measure(given.results.resolve(), given.runs, given.port)
    write_json(given.out / "load.json", report)
    write_bytes(given.out / "load.md", table(report).encode())
    show(table(report))


if __name__ == "__main__":
    main()
