"""Take pictures of MLflow's pages as `procap ui` opens them.

    python -m benchmarks.studies.mlflow_load.pages --results demo/results

Without `--results` the runs are made up, and so are their figures.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cli.ui import Chosen, Wanted, charts_page, choose, compare_page, find_collection, save, server
from benchmarks.console.output import note, show
from benchmarks.console.parse import split_names
from benchmarks.studies.mlflow_load.browser import Page, page
from benchmarks.studies.mlflow_load.made_results import make, suite
from runner.collection import write_collection
from runner.environment import library_defaults
from runner.tracking.store import Destination
from runner.tracking.tracker import deliveries, sync_all

WIDTH, HEIGHT = 1600, 900
# Left open, MLflow's assistant takes the right quarter of every page.
QUIET = """
localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false');
localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true');
"""
PLOTS = "[...document.querySelectorAll('.js-plotly-plot')].filter(plot => plot.querySelector('.main-svg')).length"
ROWS = "document.querySelectorAll('.ag-row').length"
OPENER = "document.querySelector('.ag-row [role=button], .ag-row button')"
"""Shows the runs below the first parent."""
DRAWN_SECONDS = 3.0


async def take(address: str, chosen: Chosen, view: str | None, out: Path) -> list[Path]:
    """Write charts.png, side-by-side.png and runs.png into `out`."""
    files = []

    async def picture(tab: Page, name: str) -> None:
        # Charts move into their places after they are there.
        await asyncio.sleep(DRAWN_SECONDS)
        files.append(out / name)
        await tab.picture(files[-1])
        note(f"written: {files[-1]}")

    async with page(WIDTH, HEIGHT) as tab:
        await tab.command("Page.addScriptToEvaluateOnNewDocument", source=QUIET)
        await tab.open(charts_page(address, chosen, view), f"{PLOTS} > 0")
        await tab.read("document.querySelector('[aria-label=\"Hide banner\"]')?.click()")
        await picture(tab, "charts.png")
        if side_by_side := compare_page(address, Chosen(chosen.deliveries[:40], chosen.where)):
            await tab.open(side_by_side, f"{PLOTS} > 0")
            await picture(tab, "side-by-side.png")
        experiment = f"{address}/#/experiments/{chosen.deliveries[0].experiment_id}/runs"
        await tab.open(experiment, f"!!{OPENER}")
        await asyncio.sleep(DRAWN_SECONDS)
        rows = await tab.read(ROWS)
        await tab.read(f"{OPENER}.click()")
        await tab.wait(f"{ROWS} > {rows}")
        await picture(tab, "runs.png")
    return files


def pages(results: Path, wanted: Wanted, out: Path, port: int, uri: str | None = None) -> list[Path]:
    """Send what is missing of `results`, serve the store on 127.0.0.1 and take pictures of the `wanted` runs."""
    destination = Destination.choose(results, uri)
    sync_all(results, uri)
    chosen = choose(deliveries(results, uri), wanted, find_collection(results, wanted))
    view = save(destination, wanted, chosen)
    out.mkdir(parents=True, exist_ok=True)
    with server(destination, port):
        return asyncio.run(take(f"http://127.0.0.1:{port}", chosen, view, out))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="runs to show [default: made-up ones]")
    parser.add_argument("--suite", default="")
    parser.add_argument("--sweep", default="")
    parser.add_argument("--methods", default="", metavar="A,B")
    parser.add_argument("--datasets", default="", metavar="A,B")
    parser.add_argument("--port", type=int, default=5056)
    parser.add_argument("--out", type=Path, default=Path("docs/results/mlflow"))
    given = parser.parse_args(arguments)
    library_defaults()
    wanted = Wanted((), given.suite, given.sweep, split_names(given.methods), split_names(given.datasets))
    with tempfile.TemporaryDirectory() as made:
        results = given.results
        if results is None:
            results, wanted = Path(made), Wanted(suite="made-up")
            write_collection(results, suite(make(results, 60)))
        for file in pages(results.resolve(), wanted, given.out, given.port):
            show(str(file))


if __name__ == "__main__":
    main()
