"""Addresses of MLflow's pages for the runs of a suite."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from benchmarks.report.read import Found
from runner.tracking.export import search_runs
from runner.tracking.store import Destination, TrackingError, open_store

COMPARED = 40
"""MLflow's comparison draws one line and one column per run: it cannot be read with more."""


@dataclass(frozen=True)
class Link:
    title: str
    address: str


def charts_page(server: str, experiment_id: str, where: str, view: str | None = None) -> str:
    """The address of the charts of the runs that match the search `where`, or of the saved `view`."""
    page = f"{server}/#/experiments/{experiment_id}/runs?compareRunsMode=CHART"
    # With a search in the address the page ignores the view.
    return f"{page}&viewStateShareKey={view}" if view else f"{page}&searchFilter={quote(where)}"


def compare_page(server: str, experiment_id: str, run_ids: Sequence[str]) -> str | None:
    """The address that shows runs side by side; None for one run or too many."""
    if not 2 <= len(run_ids) <= COMPARED:
        return None
    runs, experiments = quote(json.dumps([*run_ids])), quote(json.dumps([experiment_id]))
    return f"{server}/#/compare-runs?runs={runs}&experiments={experiments}"


def command(found: Found, results: str) -> str:
    """The command that shows the suite's runs in MLflow on this machine."""
    return shlex.join(["procap", "ui", "--results", results, "--suite", found.suite.name])


def links(found: Found, results: Path, tracking: str) -> list[Link]:
    """Pages of the MLflow server at `tracking` with the suite and its runs, as far as it has them.

    tracking: an http address, default that of the environment; any other store has no pages.
    Raises TrackingError when the server that `tracking` names cannot be reached.
    """
    destination = Destination.choose(results, tracking or None)
    if not destination.is_server:
        return []
    try:
        store = open_store(destination)
    except TrackingError:
        if tracking:
            raise
        return []
    server, experiment = destination.address.rstrip("/"), store.experiment_id
    tag = found.collection.tag
    pages = [
        Link("the suite", f"{server}/#/experiments/{experiment}/runs/{run.info.run_id}")
        for run in search_runs(store, f"tags.`procap.collection` = '{tag}'")
    ]
    where = f"tags.`{tag}` = 'yes'"
    run_ids = [run.info.run_id for run in search_runs(store, where)]
    if run_ids:
        pages.append(Link(f"charts of {len(run_ids)} runs", charts_page(server, experiment, where)))
    if side_by_side := compare_page(server, experiment, run_ids):
        pages.append(Link(f"{len(run_ids)} runs side by side", side_by_side))
    return pages
